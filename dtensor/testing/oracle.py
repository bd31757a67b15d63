"""Oracle: compares a function on plain tensors with the same function on DTensors, for given placements.

The local tensor of every rank is compared with the same block of the plain result. Also compared are dtype, global shape and
strides, values, results that are not tensors, errors, arguments after in-place operations, and gradients with their placements.
It runs in one process and, with the same arguments on every rank, on process groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.generators import default_generator
from ..base.tensor_tree import fill_tensors, iter_tree_leaves, tensor_leaves
from ..comm import events
from ..errors import PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Placements, Replicate
from ..tensor.dtensor import DTensor, grad_placements_of
from .compare import TOLERANCE as TOLERANCE  # imported by tests that scale it
from .compare import CompareOptions, find_differences, gather_problems
from .scatter import can_be_partial, scatter


class Mismatch(AssertionError):
    """A program gives other results on DTensors than on plain tensors.

    Results are gathered for the comparison. The error names each rank with wrong values.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> from dtensor.testing import check
    >>> check(lambda x: x.to_local() if isinstance(x, dt.DTensor) else x, torch.ones(4), mesh=mesh, placements=[[dt.Shard(0)]])
    Traceback (most recent call last):
    dtensor.testing.oracle.Mismatch: ...
    """


@dataclass(slots=True)
class Outcome:
    """Outcome of a comparison.

    Attributes:
        problems: one line each; empty if there are no differences.
        layouts: of the result tensors of the forward pass.
        events: the collectives of the forward pass.
        error: the error of the distributed run.
        same_error: True if plain torch raised an error of the same class.

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


def check(
    fn: Callable[..., Any], *args: Any, mesh: DeviceMesh, placements: Sequence[Placements | None], **options: Any
) -> Outcome:
    """Check that ``fn(*args)`` gives the same results on plain tensors and on DTensors.

    Args:
        args: plain tensors (also inside lists, tuples, dicts) and any other arguments of ``fn``.
        mesh: the mesh of the DTensors.
        placements: for each tensor among ``args``, in order, its placements in any form; None leaves it plain.
        options: see :func:`compare`.

    Raises:
        Mismatch: results differ; the message lists all differences.

    Costs one run of ``fn`` on each, and gathers of the compared tensors.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (3,))
    >>> check(torch.mm, torch.randn(5, 6), torch.randn(6, 7), mesh=mesh, placements=[[dt.Shard(1)], [dt.Shard(0)]]).layouts
    [float32[5, 7] on (0=P(sum))]
    """
    outcome = compare(fn, args, mesh, placements, **options)
    if outcome.problems:
        lines = "\n  ".join(outcome.problems)
        raise Mismatch(f"under {list(placements)} on {mesh!r}:\n  {lines}") from outcome.error
    return outcome


def compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: DeviceMesh,
    placements: Sequence[Placements | None],
    *,
    kwargs: dict[str, Any] | None = None,
    gradients: bool = True,
    cloned: bool = False,
    values: bool = True,
    strides: bool = True,
    cotangents: Placements | None = None,
    tolerance: tuple[float, float] | None = None,
    seed: int = 0,
) -> Outcome:
    """Return the differences between ``fn`` on plain tensors and on DTensors.

    Args:
        kwargs: keyword arguments of ``fn``, also with tensors (``placements`` lists them after those of ``args``).
        gradients: compare gradients of all floating arguments that are distributed, with random cotangents.
        cloned: give ``fn`` clones of the leaves, so that it may write to them.
        values: compare values, not only shapes, dtypes and strides.
        strides: compare global strides.
        cotangents: placements of the cotangents; None: replicated.
        tolerance: (relative, absolute) for floating results, default by dtype.
        seed: of the partial addends, the cotangents and the random operations of ``fn``.

    Costs one run of ``fn`` on each, and gathers of the compared tensors. An error of ``fn`` is in the outcome.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> compare(torch.exp, [torch.ones(4)], mesh, [[dt.Shard(0)]]).problems
    []
    """
    arguments = (tuple(args), dict(kwargs or {}))
    inputs = [x.detach() for x in tensor_leaves(arguments)]  # leaves are made from them below
    if len(inputs) != len(placements):
        raise ValueError(f"{len(placements)} placements for {len(inputs)} tensors: give one entry per tensor (None: stays plain)")
    compare_options = CompareOptions(values, strides, tolerance, cotangents, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gather warnings, and those of plain torch
        plain = _Run(
            fn,
            arguments,
            [_plain_leaf(x, of_tensor, gradients) for x, of_tensor in zip(inputs, placements, strict=True)],
            cloned,
            seed,
        )
        outcome = Outcome()
        distributed_leaves = [
            _plain_leaf(x, of_tensor, gradients) if of_tensor is None else scatter(x, mesh, of_tensor, seed=seed + 7 * i)
            for i, (x, of_tensor) in enumerate(zip(inputs, placements, strict=True))
        ]
        for leaf, plain_leaf in zip(distributed_leaves, plain.leaves, strict=True):
            if isinstance(leaf, DTensor):
                leaf.requires_grad_(plain_leaf.requires_grad)
        with events.listening(outcome.events.append):
            run = _Run(fn, arguments, distributed_leaves, cloned, seed)
        _compare_runs(outcome, plain, run, mesh, compare_options)
    return outcome


class _Run:
    """Run of a function on plain tensors or DTensors: its results or error, and its leaves and arguments afterwards."""

    def __init__(
        self, fn: Callable[..., Any], call_arguments: Any, run_leaves: list[torch.Tensor], cloned: bool, seed: int
    ) -> None:
        self.leaves = run_leaves
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.arguments = [leaf.clone() for leaf in run_leaves] if cloned else run_leaves
        args, kwargs = fill_tensors(call_arguments, self.arguments)
        for generator in (
            torch.default_generator,
            default_generator(run_leaves[0].device if run_leaves else torch.device("cpu")),
        ):
            generator.manual_seed(seed)  # torch.manual_seed formats a stack each time
        try:
            self.results = list(iter_tree_leaves(fn(*args, **kwargs)))
        except Exception as error:  # compared with the error of the other run
            self.error = error

    def differentiable_results(self) -> list[int]:
        """Return the positions of the results that require grad."""
        return [i for i, x in enumerate(self.results) if isinstance(x, torch.Tensor) and x.requires_grad]

    def backward(self, cotangents: list[Any]) -> None:
        """Run backward from the results with these cotangents; keep an error instead of raising it."""
        outputs = [self.results[i] for i in self.differentiable_results()]
        try:
            torch.autograd.backward(outputs, cotangents)
        except Exception as error:
            self.error = error


def _plain_leaf(x: torch.Tensor, placements: Placements | None, gradients: bool) -> torch.Tensor:
    """Return a copy of ``x`` that requires grad if gradients are compared, ``x`` is floating and it has placements."""
    differentiable = gradients and placements is not None and (x.dtype.is_floating_point or x.dtype.is_complex)
    copied = torch.empty_like(x).copy_(x)
    return copied.requires_grad_(differentiable)


def _compare_runs(outcome: Outcome, plain: _Run, run: _Run, mesh: DeviceMesh, options: CompareOptions) -> None:
    """Record in ``outcome`` how results, arguments and gradients of a DTensor run differ from those of a plain run."""
    if _errors_differ(outcome, plain, run, "forward", mesh) or plain.error is not None:
        return
    if len(plain.results) != len(run.results):
        outcome.problems.append(f"{len(run.results)} results, not {len(plain.results)}")
        return
    for i, (expected, got) in enumerate(zip(plain.results, run.results, strict=True)):
        outcome.problems += [f"result {i}: {problem}" for problem in find_differences(got, expected, options)]
        if isinstance(got, DTensor):
            outcome.layouts.append(got.layout)
    for i, (wrote, own) in enumerate(zip(plain.arguments, run.arguments, strict=True)):
        outcome.problems += [f"argument {i} afterwards: {problem}" for problem in find_differences(own, wrote, options)]
    positions = plain.differentiable_results()
    if positions != run.differentiable_results():
        outcome.problems.append(f"results {run.differentiable_results()} require grad, not {positions}")
    outcome.problems = gather_problems(outcome.problems, mesh)
    if outcome.problems or not positions:
        return
    _compare_gradients(outcome, plain, run, mesh, options)


def _compare_gradients(outcome: Outcome, plain: _Run, run: _Run, mesh: DeviceMesh, options: CompareOptions) -> None:
    """Run backward of both runs from equal random cotangents; record in ``outcome`` how leaf gradients differ."""
    generator = torch.Generator().manual_seed(options.seed)
    cotangents = []
    for i in plain.differentiable_results():
        result = plain.results[i]
        if result.layout is not torch.strided:
            cotangents.append(result.detach().clone())  # its cotangent must be sparse too
            continue
        random = torch.randint(-3, 4, result.shape, generator=generator, device="cpu").to(result.dtype)
        cotangents.append(torch.empty_like(result).copy_(random))
    plain.backward([c.clone() for c in cotangents])
    distributed: list[torch.Tensor] = []
    for i, cotangent in zip(plain.differentiable_results(), cotangents, strict=True):
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
            loose = CompareOptions(options.values, strides=False, tolerance=options.tolerance)
            expected_grad = (
                expected.grad.to_dense() if expected.grad.is_sparse else expected.grad
            )  # gradients of DTensors are dense
            outcome.problems += [f"gradient {i}: {problem}" for problem in find_differences(leaf.grad, expected_grad, loose)]
            if isinstance(leaf, DTensor) and isinstance(leaf.grad, DTensor) and leaf.grad.placements != grad_placements_of(leaf):
                outcome.problems.append(f"gradient {i} has placements {leaf.grad.placements}, the leaf {leaf.placements}")


def _cotangent_placements(x: torch.Tensor, mesh: DeviceMesh, requested: Placements | None) -> Sequence[Placement]:
    """Return the requested placements if a cotangent like ``x`` can have them, else replicated ones."""
    replicated = (Replicate(),) * mesh.ndim
    try:
        placements = Layout.of(mesh, requested, x.shape).placements  # None: replicated
    except PlacementError:
        return replicated
    fits = all(can_be_partial(x.dtype, p.reduce_op) for p in placements if isinstance(p, Partial))
    return placements if fits else replicated


def _errors_differ(outcome: Outcome, plain: _Run, run: _Run, phase: str, mesh: DeviceMesh) -> bool:
    """Return True if the errors of both runs differ in type or only one raised, and record that in ``outcome``."""
    outcome.error, expected = run.error, plain.error
    outcome.same_error = expected is not None and isinstance(run.error, type(expected))
    problems = []
    if run.error is not None and not outcome.same_error:
        plain_behavior = (
            "plain torch does not raise" if expected is None else f"plain torch raises {type(expected).__name__}: {expected}"
        )
        problems = [f"{phase} raises {type(run.error).__name__}: {run.error}; {plain_behavior}"]
    elif expected is not None and run.error is None:
        problems = [f"{phase} does not raise; plain torch raises {type(expected).__name__}: {expected}"]
    outcome.problems += gather_problems(problems, mesh)
    return bool(outcome.problems)
