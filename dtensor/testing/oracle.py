"""The oracle: a function of plain tensors gives the same on distributed ones, for the placements asked.

Compared are every rank's piece (with the canonical piece of the plain result), dtype, global shape and strides, values, results
that are no tensors, errors, what in-place operations left in the arguments, gradients, and the placements of gradients.
It runs in one process and, with the same arguments on every rank, on process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.generators import default_generator
from ..base.tensor_tree import filled, leaves, tensors
from ..comm import events
from ..errors import PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate
from ..tensor.dtensor import DTensor, grad_placements_of
from .compare import TOLERANCE as TOLERANCE  # for tests that scale it
from .compare import Options, differences, everybodys
from .scatter import can_be_partial, scatter

Placements = Sequence[Placement] | None


class Mismatch(AssertionError):
    """A program on distributed tensors does not give what it gives on plain ones.

    What is compared is gathered; the error says which rank got what.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> from dtensor.testing import check
    >>> check(lambda x: x.to_local() if isinstance(x, dt.DTensor) else x, torch.ones(4), mesh=mesh, placements=[[dt.Shard(0)]])
    Traceback (most recent call last):
    dtensor.testing.oracle.Mismatch: ...
    """


@dataclass(slots=True)
class Outcome:
    """What a comparison found.

    Attributes:
        problems: one line each; empty if all is well.
        layouts: of the tensors that the forward pass gave.
        events: the collectives of the forward pass.
        error: what the distributed run raised.
        same_error: plain torch raised the like.

    A record: no communication.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> from dtensor.testing import compare
    >>> compare(torch.exp, [torch.ones(4)], mesh, [[dt.Shard(0)]]).layouts
    [float32[4] on (0=S(0))]
    """

    problems: list[str] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    events: list[events.Event] = field(default_factory=list)
    error: Exception | None = None
    same_error: bool = False


def check(fn: Callable[..., Any], *args: Any, mesh: DeviceMesh, placements: Sequence[Placements], **options: Any) -> Outcome:
    """``fn(*args)`` gives the same on plain and on distributed tensors.

    Args:
        args: plain tensors (also inside lists, tuples, dicts) and whatever else ``fn`` takes.
        mesh: where the tensors live.
        placements: for each tensor among ``args``, in order, one placement per mesh dim; None leaves it plain.
        options: see :func:`compare`.

    Raises:
        Mismatch: with everything that differs.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (3,))
    >>> check(torch.mm, torch.randn(5, 6), torch.randn(6, 7), mesh=mesh, placements=[[dt.Shard(1)], [dt.Shard(0)]]).layouts
    [float32[5, 7] on (0=P(sum))]

    Costs what ``fn`` does, and gathers of what is compared.
    """
    outcome = compare(fn, args, mesh, placements, **options)
    if outcome.problems:
        shown = "\n  ".join(outcome.problems)
        raise Mismatch(f"under {list(placements)} on {mesh!r}:\n  {shown}") from outcome.error
    return outcome


def compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh,
    placements: Sequence[Placements],
    *,
    kwargs: dict[str, Any] | None = None,
    gradients: bool = True,
    cloned: bool = False,
    values: bool = True,
    strides: bool = True,
    cotangents: Placements = None,
    tolerance: tuple[float, float] | None = None,
    seed: int = 0,
) -> Outcome:
    """What differs between ``fn`` on plain and on distributed tensors.

    Args:
        kwargs: further arguments of ``fn``, with tensors too (``placements`` goes on with them).
        gradients: compare gradients of all floating arguments that are distributed, with random cotangents.
        cloned: give ``fn`` clones of the leaves, so that it may write to them.
        values: compare values, not only shapes, dtypes and strides.
        strides: compare global strides.
        cotangents: placements of the cotangents; None: replicated.
        tolerance: (relative, absolute) for floating results, default by dtype.
        seed: of the partial terms, the cotangents and the random operations of ``fn``.

    Costs what ``fn`` does, and gathers of what is compared. What ``fn`` raises stands in the outcome.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> compare(torch.exp, [torch.ones(4)], mesh, [[dt.Shard(0)]]).problems
    []
    """
    given = (tuple(args), dict(kwargs or {}))
    inputs = [x.detach() for x in tensors(given)]  # leaves are made of them here
    if len(inputs) != len(placements):
        raise ValueError(f"{len(placements)} placements for {len(inputs)} tensors: give one entry per tensor (None: stays plain)")
    wanted = Options(values, strides, tolerance, cotangents, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gathers, and what plain torch warns of too
        plain = _Run(
            fn, given, [_plain_leaf(x, where, gradients) for x, where in zip(inputs, placements, strict=True)], cloned, seed
        )
        outcome = Outcome()
        made = [
            _plain_leaf(x, where, gradients) if where is None else scatter(x, mesh, where, seed=seed + 7 * i)
            for i, (x, where) in enumerate(zip(inputs, placements, strict=True))
        ]
        for leaf, like in zip(made, plain.leaves, strict=True):
            if isinstance(leaf, DTensor):
                leaf.requires_grad_(like.requires_grad)
        with events.listening(outcome.events.append):
            run = _Run(fn, given, made, cloned, seed)
        _compare_runs(outcome, plain, run, mesh, wanted)
    return outcome


class _Run:
    """One forward run, and what it left behind."""

    def __init__(self, fn: Callable[..., Any], given: Any, made: list[torch.Tensor], cloned: bool, seed: int) -> None:
        self.leaves = made
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.arguments = [leaf.clone() for leaf in made] if cloned else made
        args, kwargs = filled(given, self.arguments)
        for generator in (torch.default_generator, default_generator(made[0].device if made else torch.device("cpu"))):
            generator.manual_seed(seed)  # torch.manual_seed formats a stack each time
        try:
            self.results = list(leaves(fn(*args, **kwargs)))
        except Exception as error:  # compared with the other run's
            self.error = error

    def differentiable(self) -> list[int]:
        """Positions of the results that a gradient can enter."""
        return [i for i, x in enumerate(self.results) if isinstance(x, torch.Tensor) and x.requires_grad]

    def backward(self, cotangents: list[Any]) -> None:
        outputs = [self.results[i] for i in self.differentiable()]
        try:
            torch.autograd.backward(outputs, cotangents)
        except Exception as error:
            self.error = error


def _plain_leaf(x: torch.Tensor, where: Placements, gradients: bool) -> torch.Tensor:
    differentiable = gradients and where is not None and (x.dtype.is_floating_point or x.dtype.is_complex)
    copied = torch.empty_like(x).copy_(x)
    return copied.requires_grad_(differentiable)


def _compare_runs(outcome: Outcome, plain: _Run, run: _Run, mesh: DeviceMesh, options: Options) -> None:
    if _errors_differ(outcome, plain, run, "forward", mesh) or plain.error is not None:
        return
    if len(plain.results) != len(run.results):
        outcome.problems.append(f"{len(run.results)} results, not {len(plain.results)}")
        return
    for i, (expected, got) in enumerate(zip(plain.results, run.results, strict=True)):
        outcome.problems += [f"result {i}: {problem}" for problem in differences(got, expected, options)]
        if isinstance(got, DTensor):
            outcome.layouts.append(got.layout)
    for i, (wrote, own) in enumerate(zip(plain.arguments, run.arguments, strict=True)):
        outcome.problems += [f"argument {i} afterwards: {problem}" for problem in differences(own, wrote, options)]
    positions = plain.differentiable()
    if positions != run.differentiable():
        outcome.problems.append(f"results {run.differentiable()} require grad, not {positions}")
    outcome.problems = everybodys(outcome.problems, mesh)
    if outcome.problems or not positions:
        return
    _compare_gradients(outcome, plain, run, mesh, options)


def _compare_gradients(outcome: Outcome, plain: _Run, run: _Run, mesh: DeviceMesh, options: Options) -> None:
    generator = torch.Generator().manual_seed(options.seed)
    cotangents = []
    for i in plain.differentiable():
        like = plain.results[i]
        if like.layout is not torch.strided:
            cotangents.append(like.detach().clone())  # it has to be sparse too
            continue
        drawn = torch.randint(-3, 4, like.shape, generator=generator, device="cpu").to(like.dtype)
        cotangents.append(torch.empty_like(like).copy_(drawn))
    plain.backward([c.clone() for c in cotangents])
    distributed: list[torch.Tensor] = []
    for i, cotangent in zip(plain.differentiable(), cotangents, strict=True):
        if isinstance(run.results[i], DTensor):
            distributed.append(
                scatter(cotangent, mesh, _cotangent_placements(cotangent, mesh, options.cotangents), seed=options.seed)
            )
        else:
            distributed.append(cotangent)
    run.backward(distributed)
    if _errors_differ(outcome, plain, run, "backward", mesh) or plain.error is not None:
        return
    for i, (expected, leaf) in enumerate(zip(plain.leaves, run.leaves, strict=True)):
        if (expected.grad is None) != (leaf.grad is None):
            outcome.problems.append(f"gradient {i}: {leaf.grad!r}, not {expected.grad!r}")
        elif expected.grad is not None:
            loose = Options(options.values, strides=False, tolerance=options.tolerance)
            wanted = expected.grad.to_dense() if expected.grad.is_sparse else expected.grad  # DTensors have dense ones
            outcome.problems += [f"gradient {i}: {problem}" for problem in differences(leaf.grad, wanted, loose)]
            if isinstance(leaf, DTensor) and isinstance(leaf.grad, DTensor) and leaf.grad.placements != grad_placements_of(leaf):
                outcome.problems.append(f"gradient {i} has placements {leaf.grad.placements}, the leaf {leaf.placements}")


def _cotangent_placements(x: torch.Tensor, mesh: DeviceMesh, wanted: Placements) -> Sequence[Placement]:
    """As asked where that fits this result, else replicated."""
    everywhere = (Replicate(),) * mesh.ndim
    if wanted is None or not all(can_be_partial(x.dtype, p.reduce_op) for p in wanted if isinstance(p, Partial)):
        return everywhere
    try:
        Layout.of(mesh, wanted, x.shape)
    except PlacementError:
        return everywhere
    return wanted


def _errors_differ(outcome: Outcome, plain: _Run, run: _Run, when: str, mesh: DeviceMesh) -> bool:
    outcome.error, expected = run.error, plain.error
    outcome.same_error = expected is not None and isinstance(run.error, type(expected))
    found = []
    if run.error is not None and not outcome.same_error:
        wanted = "plain torch does not raise" if expected is None else f"plain torch raises {type(expected).__name__}: {expected}"
        found = [f"{when} raises {type(run.error).__name__}: {run.error}; {wanted}"]
    elif expected is not None and run.error is None:
        found = [f"{when} does not raise; plain torch raises {type(expected).__name__}: {expected}"]
    outcome.problems += everybodys(found, mesh)
    return bool(outcome.problems)
