"""Minimize a failing case with hypothesis: one mesh dim, fewer ranks, smaller dims and small integers.

The smaller case must fail in the same direction. Without hypothesis (the extra ``dtensor[verify]``) the case is not minimized.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.tensor_tree import fill_tensors, tensor_leaves
from ..layout.splits import without_sizes
from ..placement import Placement, Shard
from .forced_cases import Case
from .locate_fault import Fault, Trial, find_faulty_operator, is_backward, shows_fault
from .oracle import Outcome
from .placements import ragged_shard

_MAX_EXAMPLES = 100  # tried; if none fails, the original case stays
_MAX_DRAWN_ELEMENTS = 16  # elements of a tensor with drawn values


def minimize_fault(trial: Trial, outcome: Outcome) -> Fault:
    """Return the fault of a failing trial, for the smallest trial found, with its operator and strategies."""
    backward = is_backward(outcome)
    # on process groups, all ranks would have to try the same trials
    small = shrink_trial(trial, backward) if trial.case.mesh.kind == "in_process" else trial
    name, rows = find_faulty_operator(small)
    by_itself = replace(small, case=replace(small.case, strategies=()))
    if small.case.strategies and shows_fault(by_itself, backward):
        small = by_itself  # dispatch chooses these strategies too
    case = small.case
    direction = f"backward of {'::'.join(case.variant.name.split('.')[:2])}" if backward else "forward"
    problems = tuple(small.run().problems)
    return Fault(name, rows, direction, case.variant, case.mesh_shape, case.placements, problems, small.reproduction)


def shrink_trial(trial: Trial, backward: bool) -> Trial:
    """Return the smallest failing trial that hypothesis finds by smaller meshes, dims and values."""
    if importlib.util.find_spec("hypothesis") is None:
        return trial
    import hypothesis  # optional
    from hypothesis import strategies as st

    settings = hypothesis.settings(
        max_examples=_MAX_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    smaller_trials = st.composite(_draw_smaller_trial)(trial)
    try:
        return hypothesis.find(smaller_trials, lambda candidate: shows_fault(candidate, backward), settings=settings)
    except (hypothesis.errors.NoSuchExample, hypothesis.errors.Flaky):  # Flaky: a kernel is not deterministic
        return trial


def _draw_smaller_trial(draw: Callable[[Any], Any], trial: Trial) -> Trial:
    """Draw a trial with at most the mesh dims, ranks, sizes and values of the given one, the simplest first.

    The first choice is the simplest, and the given value is always possible.
    """
    from hypothesis import strategies as st

    dims = range(len(trial.case.mesh_shape))
    if len(dims) > 1:
        trial = _select_mesh_dims(trial, draw(st.sampled_from([*((d,) for d in dims), tuple(dims)])))
    mesh_shape = trial.case.mesh_shape
    if len(mesh_shape) == 1 and mesh_shape[0] > 2:
        mesh_shape = (draw(st.sampled_from([2, mesh_shape[0]])),)
    sample = trial.case.variant.sample
    xs = tensor_leaves(sample.arguments)
    sizes = {size: draw(st.integers(min(size, 1), size)) for size in sorted({size for x in xs for size in x.shape})}
    narrowed = [_narrow_dims(x, sizes) for x in xs]
    kinds = [draw(st.sampled_from(["small", "rounded", "given"])) for _ in narrowed]
    arguments = fill_tensors(sample.arguments, [_simplify_values(draw, x, kind) for x, kind in zip(narrowed, kinds, strict=True)])
    variant = replace(trial.case.variant, sample=sample.with_arguments(arguments))
    placements = tuple(
        _fit_placements(of_tensor, x, mesh_shape) for of_tensor, x in zip(trial.case.placements, narrowed, strict=True)
    )
    cotangents = trial.cotangents and tuple(map(without_sizes, trial.cotangents))
    return replace(trial, case=Case(variant, mesh_shape, placements, trial.case.strategies), cotangents=cotangents)


def _select_mesh_dims(trial: Trial, dims: Sequence[int]) -> Trial:
    """Return the trial with only the mesh dims ``dims``, and their placements and strategies."""
    case = trial.case
    if len(dims) == len(case.mesh_shape):
        return trial
    placements = tuple(tuple(of_tensor[d] for d in dims) for of_tensor in case.placements)
    strategies = tuple(case.strategies[d] for d in dims) if case.strategies else ()
    cotangents = trial.cotangents and tuple(trial.cotangents[d] for d in dims)
    smaller = Case(case.variant, tuple(case.mesh_shape[d] for d in dims), placements, strategies)
    return replace(trial, case=smaller, cotangents=cotangents)


def _narrow_dims(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """Return a copy of ``x`` with each dim narrowed to ``sizes[its size]``, so that dims of equal size stay equal."""
    for dim, size in enumerate(x.shape):
        x = x.narrow(dim, 0, sizes[size])
    return torch.empty_like(x).copy_(x)


def _simplify_values(draw: Callable[[Any], Any], x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return ``x`` with simpler values: drawn small integers, rounded values, or (``kind="given"``) its own."""
    from hypothesis import strategies as st

    if kind == "given" or x.dtype is torch.bool or x.dtype.itemsize == 1:
        return x
    if kind == "small" and x.numel() <= _MAX_DRAWN_ELEMENTS:
        values = draw(st.lists(st.integers(0, 2), min_size=x.numel(), max_size=x.numel()))
        return torch.empty_like(x).copy_(torch.tensor(values, device="cpu").view(x.shape))
    return x.round() + 0 if x.dtype.is_floating_point else x


def _fit_placements(placements: Sequence[Placement], x: torch.Tensor, mesh_shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return the placements adapted to the sizes of ``x`` and the ranks of the mesh; uneven shards stay uneven."""
    fitted = []
    for placement, ranks in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard) and placement.sizes is not None and len(placement.sizes) == ranks:
            placement = ragged_shard(placement.dim, x.shape[placement.dim], ranks)
        else:
            placement = without_sizes(placement)
        fitted.append(placement)
    return tuple(fitted)
