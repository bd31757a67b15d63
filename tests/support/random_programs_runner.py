"""Random programs runner: compare small random programs on plain and distributed tensors, forward and gradient, and minimize
failures.

>>> len(make_random_program(2, 3).lines)
3
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from program_lines import LINE_MAKERS, LineMaker, Scope
from program_views import VIEW_LINE_MAKERS, make_shape_change_line

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Placement, Replicate, Shard
from dtensor.testing.oracle import Outcome, compare
from dtensor.testing.placements import choose_placements, get_or_make_mesh, placement_kinds
from dtensor.testing.reproduction import python_source
from dtensor.testing.samples.schema_samples import make_tensor

INPUTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((5, 6), torch.float64),
    "b": ((6, 7), torch.float64),
    "c": ((5, 1, 6), torch.float64),
    "e": ((6,), torch.float64),
    "f": ((), torch.float64),
    "i": ((5,), torch.int64),
}
MEMORY: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((5, 6), torch.float64),
    "m": ((6, 4), torch.int64),
    "s": ((2, 3, 4), torch.float32),
    "z": ((3, 4), torch.complex128),
}  # of programs that write to views; without gradients to the inputs themselves
MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (2, 1, 2))
_LARGEST = 1500  # elements of a value
_BOUND = 1e4  # of their size, so that rounding stays small


@dataclass(frozen=True, slots=True)
class Program:
    """Python statements over named input tensors; results of lines are called ``v0``, ``v1``, ... With ``read``, all values are
    read after each line, so that cached full values exist before a write.
    """

    inputs: tuple[str, ...]
    lines: tuple[str, ...]
    seed: int = 0
    gradients: bool = True
    read: bool = False

    def values(self) -> list[torch.Tensor]:
        """Return new tensors for the inputs, a function of ``seed``."""
        return [make_tensor(*_get_shape_and_dtype(name), seed=self.seed + k) for k, name in enumerate(self.inputs)]

    def __call__(self, *values: Any) -> list[Any]:
        """Run the lines on the given inputs; return all values, computed also if they are lazy views."""
        given = dict(zip(self.inputs, values, strict=True))
        if not self.read:
            made = list(run_lines(self.lines, given).values())
        else:
            for line in self.lines:
                given = run_lines((line,), given)
                seen = [x.sin() for x in given.values() if isinstance(x, torch.Tensor)]
            made = [*given.values(), *seen]
        for x in made:
            getattr(x, "_local", None)  # a view may be computed only now, and raise
        return made

    def __str__(self) -> str:
        given = "; ".join(
            f"{name} = tensor({_get_shape_and_dtype(name)[0]}, {str(_get_shape_and_dtype(name)[1]).removeprefix('torch.')})"
            for name in self.inputs
        )
        return "\n".join([given, *self.lines])


def _get_shape_and_dtype(name: str) -> tuple[tuple[int, ...], torch.dtype]:
    return (INPUTS | MEMORY)[name]


def run_lines(lines: Iterable[str], values: dict[str, Any]) -> dict[str, Any]:
    """Execute the lines in order and return all values by name, the given ones included."""
    space = {"torch": torch, "F": F, **values}
    for line in lines:
        exec(line, space)
    return {name: value for name, value in space.items() if name not in ("torch", "F") and not name.startswith("__")}


def make_random_program(seed: int, length: int = 6) -> Program:
    """Return a program of ``length`` lines that plain torch runs forward and backward, as a function of ``seed``."""
    return _grow_program(Program(tuple(INPUTS), (), seed), LINE_MAKERS, length)


def make_random_view_program(seed: int, length: int = 8) -> Program:
    """Return a program that makes views and writes through them. Every third one has gradients and writes only to results of
    lines.
    """
    if seed % 3:
        return _grow_program(Program(tuple(MEMORY), (), seed, gradients=False), VIEW_LINE_MAKERS, length)
    made = Program(("a", "z"), ("v0 = a * 1", "v1 = z * 1"), seed)
    return _grow_program(
        made, [(weight, make) for weight, make in VIEW_LINE_MAKERS if make is not make_shape_change_line], length
    )


def make_random_read_program(seed: int, length: int = 8) -> Program:
    """Return a program that writes through views and reads all values after each line."""
    return replace(make_random_view_program(seed, length), read=True)


def _grow_program(program: Program, makers: Sequence[tuple[int, LineMaker]], length: int) -> Program:
    """Append random lines of the makers to a program until it has ``length`` lines, keeping only lines that plain torch runs."""
    rng = random.Random(program.seed)
    weights = [weight for weight, _ in makers]
    own = makers is LINE_MAKERS or not program.gradients  # else leaves, which must not be written to
    for _ in range(20 * length):
        if len(program.lines) >= length:
            break
        values = _compute_values(program)
        (make,) = rng.choices([make for _, make in makers], weights)
        text = make(Scope({name: x.detach() for name, x in values.items() if own or name not in program.inputs}, rng))
        if not text:
            continue
        statement = text if _is_statement(text) else f"v{len(program.lines)} = {text}"
        longer = replace(program, lines=(*program.lines, statement))
        if _is_valid_program(longer):
            program = longer
    return program


def _compute_values(program: Program) -> dict[str, torch.Tensor]:
    """Run a program on plain tensors and return its tensors by name, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plain torch's, about the variance of one element and the like
        torch.default_generator.manual_seed(0)
        return {name: x for name, x in run_lines(program.lines, _make_leaves(program)).items() if isinstance(x, torch.Tensor)}


def _is_statement(text: str) -> bool:
    """Return whether a line already assigns or writes in place, so that its result is not assigned to a new name."""
    return (
        " = " in text
        or "+= " in text
        or "*= " in text
        or "-= " in text
        or any(f".{name}_(" in text for name in _WRITERS)
        or text.startswith("torch._foreach")
    )


_WRITERS = ("add", "mul", "neg", "relu", "clamp", "zero", "fill", "masked_fill", "copy", "addcmul", "sub")


def _make_leaves(program: Program) -> dict[str, Any]:
    values = zip(program.inputs, program.values(), strict=True)
    return {name: x.requires_grad_(program.gradients and (x.is_floating_point() or x.is_complex())) for name, x in values}


def _is_valid_program(program: Program) -> bool:
    """Return whether plain torch runs the program forward and backward with finite values of limited size and number."""
    torch.default_generator.manual_seed(0)
    leaves = _make_leaves(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = [x for x in run_lines(program.lines, leaves).values() if isinstance(x, torch.Tensor)]
            if any(
                x.numel() > _LARGEST
                or not bool(torch.isfinite(x).all())
                or (x.numel() and (program.gradients or x.is_floating_point()) and float(x.detach().abs().max()) > _BOUND)
                for x in made
            ):
                return False
            outputs = [x for x in made if x.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    except Exception:  # not a program of plain torch
        return False
    grads = [x.grad for x in leaves.values() if x.grad is not None]
    return all(bool(torch.isfinite(g).all()) and (not g.numel() or float(g.abs().max()) < _BOUND) for g in grads)


def choose_random_placements(program: Program, mesh_shape: Sequence[int], rng: random.Random) -> list[tuple[Placement, ...]]:
    """Return for each input of a program one placement per mesh dim: replicated, sharded (uneven, nested in both orders) or
    partial.
    """
    exact = any(".view(torch." in line for line in program.lines)  # bits, which a mean may round
    return [_choose_input_placements(x, mesh_shape, rng, exact) for x in program.values()]


def _choose_input_placements(
    x: torch.Tensor, mesh_shape: Sequence[int], rng: random.Random, exact: bool
) -> tuple[Placement, ...]:
    terms = ("sum",) if not x.is_floating_point() else ("sum", "max", "min") if exact else ("sum", "avg", "max", "min")
    whole, *others = placement_kinds(x.shape, terms)
    return choose_placements(x.shape, mesh_shape, [whole, *others, others[0]], rng)  # shards, which come first, twice as often


@dataclass(frozen=True, slots=True)
class Failure:
    """A program with different results on plain and on distributed tensors."""

    program: Program
    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.program}\n  " + "\n  ".join(self.problems[:3]) + f"\n{self.reproduction}"

    @property
    def reproduction(self) -> str:
        """Return Python source that runs the failing case again."""
        program = self.program
        made = f"Program({program.inputs!r}, {program.lines!r}, {program.seed}, {program.gradients}, {program.read})"
        return (
            "from dtensor import Partial, Replicate, Shard\n"
            "from random_programs_runner import Program, compare_program\n"
            f"print(compare_program({made},\n    {self.mesh_shape}, {python_source(list(self.placements))}).problems)"
        )


def compare_program(
    program: Program, mesh_shape: Sequence[int], placements: Sequence[Sequence[Placement]], mesh: DeviceMesh | None = None
) -> Outcome:
    """Run a program on plain and on distributed tensors and return the outcome, with the differences of values and gradients."""
    mesh = mesh or get_or_make_mesh(tuple(mesh_shape))
    single = any(".float()" in line for line in program.lines)
    tolerance = (1e-3, 1e-4) if single else None
    return compare(program, program.values(), mesh, list(placements), seed=0, tolerance=tolerance, gradients=program.gradients)


def make_random_case(
    seed: int,
    length: int = 6,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    make: Callable[[int, int], Program] = make_random_program,
) -> tuple[Program, tuple[int, ...], list[tuple[Placement, ...]]]:
    """Return a random program, a mesh shape and placements of its inputs, as a function of ``seed``."""
    rng = random.Random(seed)
    program = make(seed, length)
    mesh_shape = rng.choice(meshes)
    return program, mesh_shape, choose_random_placements(program, mesh_shape, rng)


def find_failures(
    seeds: Iterable[int], length: int = 6, make: Callable[[int, int], Program] = make_random_program
) -> Iterator[Failure]:
    """Yield the minimized failures among the random cases of ``seeds``."""
    for seed in seeds:
        program, mesh_shape, placements = make_random_case(seed, length, make=make)
        if compare_program(program, mesh_shape, placements).problems:
            yield minimize_failure(program, mesh_shape, placements)


def minimize_failure(program: Program, mesh_shape: tuple[int, ...], placements: Sequence[tuple[Placement, ...]]) -> Failure:
    """Remove lines and replicate inputs of a failing program as long as it still fails, and return the result."""
    current = (program, tuple(placements))
    smaller = True
    while smaller:
        smaller = False
        for candidate in _yield_smaller_programs(*current):
            if _is_valid_program(candidate[0]) and compare_program(candidate[0], mesh_shape, candidate[1]).problems:
                current, smaller = candidate, True
                break
    problems = compare_program(current[0], mesh_shape, current[1]).problems
    return Failure(current[0], mesh_shape, current[1], tuple(problems))


def _yield_smaller_programs(
    program: Program, placements: tuple[tuple[Placement, ...], ...]
) -> Iterator[tuple[Program, tuple[tuple[Placement, ...], ...]]]:
    """Yield the program without one of its lines, then with one more mesh dim of an input replicated."""
    for k in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:k] + program.lines[k + 1 :]), placements
    for k, where in enumerate(placements):
        for mesh_dim, placement in enumerate(where):
            if placement != Replicate():
                changed = (*where[:mesh_dim], Replicate(), *where[mesh_dim + 1 :])
                if not any(isinstance(p, Shard) and p.level for p in changed):
                    yield program, (*placements[:k], changed, *placements[k + 1 :])
