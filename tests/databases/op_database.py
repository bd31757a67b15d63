"""Operator database of PyTorch: its samples under random placements are compared with plain torch. A *case* is one sample of one
entry with seeded random placements of all tensor arguments. :func:`run_case` finds whether it passes, is refused (a
``DTensorError``), is wrong, or fails with another error, and which operators gathered.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from typing import Any

import torch

import dtensor as dt
from dtensor.base.tensor_tree import fill_tensors, iter_tree_leaves, map_tensors, tensor_leaves
from dtensor.dispatch import dispatcher as dispatch
from dtensor.errors import DTensorError
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.testing.oracle import TOLERANCE, Outcome, compare
from dtensor.testing.placements import choose_placements, placement_kinds
from dtensor.testing.scatter import can_be_partial

MESHES: tuple[tuple[int, ...], ...] = ((4,), (2, 2))
MOST_SAMPLES = 5000  # of an entry, from which some are chosen
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_")
# Addends differ by integers, so that they add up exactly to values with this many binary digits after the point.
FRACTION_BITS = {torch.float64: 24, torch.complex128: 24, torch.float32: 10, torch.complex64: 10}
LEEWAY = 8
VARIANTS = ("function", "inplace", "out")
# Differences caused by torch, by entry and text of the problem, with the reason.
ACCEPTED: dict[tuple[str, str], str] = {("as_strided_scatter", "INTERNAL ASSERT"): "torch asserts, as a defect of its own"}


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a run: mesh, dtype kind, variant, samples per entry, seed, and the placements to draw from."""

    mesh: tuple[int, ...] = (4,)
    dtype: str = "float64"
    variant: str = "function"
    samples: int = 4
    seed: int = 0
    device: str = "cpu"
    draw: str = "mixed"  # or "shard": every tensor that has a dim sharded along one mesh dim; "replicate"; "partial"


@dataclass(slots=True)
class Case:
    """Case and its result."""

    entry: str
    setting: Setting
    sample: int
    status: str = "pass"  # accepted, refused, wrong, error, or "void": plain torch raises by itself
    problem: str = ""
    placements: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    gathered: tuple[str, ...] = ()


@dataclass(slots=True)
class Sample:
    """Sample call: a function and its arguments with plain tensors."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    writes: bool = False
    values: bool = True
    gradients: bool = True
    # function of results that are defined up to a phase, whose value has a gradient
    invariant: Callable[[Any], Any] | None = None

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments."""
        return self.args, self.kwargs

    def of(self, given: Any) -> Sample:
        """Return a copy of the sample with other arguments."""
        return replace(self, args=given[0], kwargs=given[1])


def entries(pattern: str = "*") -> list[Any]:
    """Return the entries of the database whose names match (importing it takes seconds)."""
    from fnmatch import fnmatch

    from torch.testing._internal.common_methods_invocations import op_db

    patterns = pattern.split(",")
    return [entry for entry in op_db if any(fnmatch(entry.formatted_name, p) for p in patterns)]


# --- samples ------------------------------------------------------------------------------------------------------------
def dtype_of(entry: Any, kind: str) -> torch.dtype | None:
    """Return the entry's dtype of a kind ("float64" falls back to another dtype of the entry), or None."""
    wanted = getattr(torch, kind)
    if wanted in entry.dtypes:
        return wanted
    if kind != "float64":
        return None
    order = (torch.float32, torch.complex128, torch.int64, torch.bool, *sorted(entry.dtypes, key=str))
    return next((dtype for dtype in order if dtype in entry.dtypes), None)


def samples_of(entry: Any, setting: Setting) -> list[tuple[int, Sample]]:
    """Return a seeded choice of the samples of the database, with their positions."""
    dtype = dtype_of(entry, setting.dtype)
    if dtype is None:
        return []
    torch.default_generator.manual_seed(setting.seed)
    random.seed(setting.seed)
    rng = rng_of(entry.formatted_name, setting)
    with quiet():
        made_samples = enumerate(islice(entry.sample_inputs(setting.device, dtype, requires_grad=False), MOST_SAMPLES))
        ranked = ((rng.random(), i, sample) for i, sample in made_samples)  # late ones are as likely as early ones
        given = [(i, sample) for _, i, sample in sorted(nsmallest(setting.samples, ranked, key=itemgetter(0)), key=itemgetter(1))]
    made = ((i, _as_variant(entry, sample, setting)) for i, sample in given)
    return [(i, sample) for i, sample in made if sample is not None]


def _as_variant(entry: Any, sample: Any, setting: Setting) -> Sample | None:
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    values = entry.name not in UNDEFINED
    match setting.variant:
        case "function":
            return Sample(entry.op, args, kwargs, values=values, invariant=sample.output_process_fn_grad)
        case "inplace":
            if entry.inplace_variant is None or sample.broadcasts_input:
                return None
            return Sample(entry.inplace_variant, args, kwargs, writes=True, values=values)
        case "out":
            return _with_out(entry, args, kwargs, values) if entry.supports_out else None
    raise ValueError(f"variant {setting.variant!r} is none of {VARIANTS}")


def _with_out(entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: bool) -> Sample | None:
    try:
        with quiet():
            expected = entry.op(*map_tensors(torch.clone, args), **map_tensors(torch.clone, kwargs))
    except Exception:  # the function variant reports it
        return None
    if not all(isinstance(leaf, torch.Tensor) for leaf in iter_tree_leaves(expected)):
        return None
    out = map_tensors(torch.zeros_like, expected)
    plain_tuple = tuple(out) if isinstance(out, (tuple, list)) else out
    return Sample(entry.op, args, kwargs | {"out": plain_tuple}, writes=True, values=values, gradients=False)


# --- placements ---------------------------------------------------------------------------------------------------------
def rng_of(name: str, setting: Setting, *more: Any) -> random.Random:
    return random.Random(zlib.crc32(repr((name, setting.mesh, setting.seed, setting.draw, *more)).encode()))


def draw_placements(x: torch.Tensor, setting: Setting, rng: random.Random) -> tuple[Placement, ...]:
    """Draw one placement for each mesh dim, some of them with uneven sizes or another shard order."""
    mesh = setting.mesh
    if setting.draw == "shard":
        where = rng.randrange(len(mesh))
        return tuple(Shard(rng.randrange(x.ndim)) if i == where and x.ndim else Replicate() for i in range(len(mesh)))
    terms = [op for op in ("sum", "sum", "avg", "max", "min", "product") if _splits_exactly(x.dtype, op)]
    whole, *others = placement_kinds(x.shape, terms)
    choices = {"replicate": [whole], "partial": others[-1:] if terms else [whole]}.get(
        setting.draw, [whole, *others, *others[:1]]
    )
    return choose_placements(x.shape, mesh, choices, rng, ragged=0.2, reordered=0.3)


def _splits_exactly(dtype: torch.dtype, op: str) -> bool:
    """Return True if values of this dtype (rounded by :func:`exact`) are reductions of addends without rounding errors."""
    floating = dtype.is_floating_point or dtype.is_complex
    return can_be_partial(dtype, op) and (not floating or dtype in FRACTION_BITS or op in ("max", "min"))


def exact(x: torch.Tensor, where: Sequence[Placement]) -> torch.Tensor:
    """Return ``x``, rounded if it is partial so that its addends add up to it exactly."""
    bits = FRACTION_BITS.get(x.dtype)
    if bits is None or not any(isinstance(p, Partial) and p.reduce_op not in ("max", "min") for p in where):
        return x
    if x.is_complex():
        return torch.view_as_complex(exact(torch.view_as_real(x.resolve_conj()), where).contiguous())
    rounded = torch.round(x * 2**bits) / 2**bits
    return torch.where(x.abs() < 2**12, rounded, x) + 0.0  # without -0.0, which no sum gives


# --- running ------------------------------------------------------------------------------------------------------------
def cases_of(
    entry: Any, setting: Setting, run: Callable[[str, Setting, int, Sample], Case | None] | None = None
) -> Iterator[Case]:
    """Yield the cases of an entry, run by :func:`run_case` or by ``run``, which may return None to skip one."""
    try:
        given = samples_of(entry, setting)
    except Exception as error:  # error of the database
        yield Case(entry.formatted_name, setting, -1, "void", f"no samples: {_first_line(error)}")
        return
    for position, sample in given:
        case = (run or run_case)(entry.formatted_name, setting, position, sample)
        if case is not None:
            yield case


Draw = Callable[[torch.Tensor, Setting, random.Random], tuple[Placement, ...] | None]


def run_case(name: str, setting: Setting, position: int, sample: Sample, draw: Draw = draw_placements) -> Case:
    """Run one sample under the placements that ``draw`` gives for the seed (None leaves a tensor plain)."""
    case = Case(name, setting, position)
    given = tensor_leaves(sample.given)
    if any(x.layout is not torch.strided or x.is_quantized for x in given):
        case.status, case.problem = "void", "sparse or quantized arguments"
        return case
    rng = rng_of(name, setting, position)
    placements = [draw(x, setting, rng) for x in given]
    case.placements = tuple("[" + ", ".join(map(str, where or ("plain",))) + "]" for where in placements)
    case.shapes = tuple(tuple(x.shape) for x in given)
    cotangents = tuple(rng.choice((Replicate(), Shard(0), Partial())) for _ in setting.mesh)
    with gathers() as gathered:
        case.status, case.problem = compared(name, setting, sample, placements, cotangents)
    case.gathered = tuple(gathered)
    if "ill-defined" in case.problem and sample.invariant is not None:  # plain torch raises; it does not check subclasses
        fn, invariant = sample.fn, sample.invariant
        fixed = replace(sample, fn=lambda *a, **k: invariant(fn(*a, **k)), invariant=None)
        return run_case(name, setting, position, fixed, draw)
    if (
        case.status == "wrong"
        and min((x.dtype.itemsize for x in given if x.dtype.is_floating_point), default=8) < 8
        # a rounding error, if the values in double are right and the difference is a few times the tolerance
        and compared(name, setting, sample.of(map_tensors(in_double, sample.given)), placements, cotangents)[0] == "pass"
        and compared(name, setting, sample, placements, cotangents, LEEWAY)[0] == "pass"
    ):
        case.status, case.problem = "accepted", f"right in double; {case.problem}"
    return case


def compared(
    name: str, setting: Setting, sample: Sample, placements: Sequence[Any], cotangents: Sequence[Placement], leeway: float = 1
) -> tuple[str, str]:
    """Return (status, problem) of a sample under these placements, with ``leeway`` times the usual tolerance."""
    given = tensor_leaves(sample.given)
    args, kwargs = fill_tensors(sample.given, [exact(x, where or ()) for x, where in zip(given, placements, strict=True)])
    usual = coarsest(given)
    with quiet():
        try:
            outcome = compare(
                sample.fn,
                args,
                dt.init_device_mesh(setting.device, setting.mesh),
                placements,
                kwargs=kwargs,
                gradients=sample.gradients,
                cloned=sample.writes,
                values=sample.values,
                cotangents=cotangents,
                tolerance=usual and (leeway * usual[0], leeway * usual[1]),
                seed=setting.seed,
            )
        except Exception as error:  # in the comparison, after the runs
            return "error", f"{type(error).__name__}: {_first_line(error)}"
    return classify(name, outcome)


def in_double(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def coarsest(xs: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    """Return the tolerance of the least precise argument: a float64 result can come from float32 sums."""
    known = [TOLERANCE[x.dtype] for x in xs if x.dtype in TOLERANCE]
    return max(known) if known else None


def classify(name: str, outcome: Outcome) -> tuple[str, str]:
    """Return (status, problem) of a comparison."""
    if not outcome.problems:
        return ("void", "plain torch raises") if outcome.same_error else ("pass", "")
    if any(entry in (name, "*") and text in outcome.problems[0] for entry, text in ACCEPTED):
        return "accepted", outcome.problems[0]
    if outcome.error is None:
        return "wrong", outcome.problems[0]
    status = "refused" if isinstance(outcome.error, DTensorError) else "error"
    return status, outcome.problems[0]


@contextmanager
def gathers() -> Iterator[dict[str, None]]:
    """Collect the aten operators that use the gather fallback in this context."""
    found: dict[str, None] = {}
    original = dispatch.bind_program

    def recording(plan: Any, operator: Any, *rest: Any, **options: Any) -> Any:
        if plan.how == "gather" and plan.redistributions:
            found[operator.name] = None
        return original(plan, operator, *rest, **options)

    dispatch.clear_plans()
    dispatch.bind_program = recording
    try:
        yield found
    finally:
        dispatch.bind_program = original


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
