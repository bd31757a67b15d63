"""A failing case made small by hypothesis: one mesh dim, fewer ranks, smaller dims, small integers, while it fails in the same
direction. Without hypothesis (the extra ``dtensor[verify]``) it stays as it was found.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.tensor_tree import filled, tensors
from ..placement import Placement, Shard
from .locate_fault import Trial, Wrong, culprit, fails, is_backward
from .oracle import Outcome
from .placements import ragged_shard
from .strategy_cases import Case

_EXAMPLES = 100  # in which one that fails must be among; the case that was found is what is left else
_FEW = 16  # elements that are drawn one by one


def wrong_of(trial: Trial, outcome: Outcome) -> Wrong:
    """The fault that a failing trial shows, small and named."""
    backward = is_backward(outcome)
    # processes would have to agree on what they try
    small = shrunk(trial, backward) if trial.case.mesh.kind == "in_process" else trial
    name, rows = culprit(small)
    by_itself = replace(small, case=replace(small.case, rows=()))
    if small.case.rows and fails(by_itself, backward):
        small = by_itself  # dispatch chooses these rows too
    case = small.case
    direction = f"backward of {'::'.join(case.variant.name.split('.')[:2])}" if backward else "forward"
    problems = tuple(small.run().problems)
    return Wrong(name, rows, direction, case.variant, case.mesh_shape, case.placements, problems, small.reproduction)


def shrunk(trial: Trial, backward: bool) -> Trial:
    """The smallest trial found that fails alike, on meshes, shapes and numbers no larger than those of this one."""
    if importlib.util.find_spec("hypothesis") is None:
        return trial
    import hypothesis  # optional
    from hypothesis import strategies as st

    how = hypothesis.settings(
        max_examples=_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    smaller = st.composite(_smaller)(trial)
    try:
        return hypothesis.find(smaller, lambda candidate: fails(candidate, backward), settings=how)
    except (hypothesis.errors.NoSuchExample, hypothesis.errors.Flaky):  # a kernel may not do the same twice
        return trial


def _smaller(draw: Callable[[Any], Any], trial: Trial) -> Trial:
    """A trial no larger than the given one. What is drawn first is the least; each choice has the given one as an end."""
    from hypothesis import strategies as st

    dims = range(len(trial.case.mesh_shape))
    if len(dims) > 1:
        trial = _on_dims(trial, draw(st.sampled_from([*((d,) for d in dims), tuple(dims)])))
    mesh_shape = trial.case.mesh_shape
    if len(mesh_shape) == 1 and mesh_shape[0] > 2:
        mesh_shape = (draw(st.sampled_from([2, mesh_shape[0]])),)
    sample = trial.case.variant.sample
    xs = tensors(sample.given)
    sizes = {size: draw(st.integers(min(size, 1), size)) for size in sorted({size for x in xs for size in x.shape})}
    cut = [_cut(x, sizes) for x in xs]
    kinds = [draw(st.sampled_from(["small", "rounded", "given"])) for _ in cut]
    given = filled(sample.given, [_valued(draw, x, kind) for x, kind in zip(cut, kinds, strict=True)])
    variant = replace(trial.case.variant, sample=sample.of(given))
    where = tuple(_fitted(own, x, mesh_shape) for own, x in zip(trial.case.placements, cut, strict=True))
    cotangents = trial.cotangents and tuple(map(_chunked, trial.cotangents))
    return replace(trial, case=Case(variant, mesh_shape, where, trial.case.rows), cotangents=cotangents)


def _on_dims(trial: Trial, dims: Sequence[int]) -> Trial:
    case = trial.case
    if len(dims) == len(case.mesh_shape):
        return trial
    where = tuple(tuple(own[d] for d in dims) for own in case.placements)
    rows = tuple(case.rows[d] for d in dims) if case.rows else ()
    cotangents = trial.cotangents and tuple(trial.cotangents[d] for d in dims)
    smaller = Case(case.variant, tuple(case.mesh_shape[d] for d in dims), where, rows)
    return replace(trial, case=smaller, cotangents=cotangents)


def _cut(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """All dims of one size cut to another: those that belong together stay alike."""
    for dim, size in enumerate(x.shape):
        x = x.narrow(dim, 0, sizes[size])
    return torch.empty_like(x).copy_(x)


def _valued(draw: Callable[[Any], Any], x: torch.Tensor, kind: str) -> torch.Tensor:
    from hypothesis import strategies as st

    if kind == "given" or x.dtype is torch.bool or x.dtype.itemsize == 1:
        return x
    if kind == "small" and x.numel() <= _FEW:
        values = draw(st.lists(st.integers(0, 2), min_size=x.numel(), max_size=x.numel()))
        return torch.empty_like(x).copy_(torch.tensor(values, device="cpu").view(x.shape))
    return x.round() + 0 if x.dtype.is_floating_point else x


def _chunked(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _fitted(own: Sequence[Placement], x: torch.Tensor, mesh_shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """The same placements for a tensor of other sizes, ragged ones ragged, on a mesh of another size."""
    fitted = []
    for placement, ranks in zip(own, mesh_shape, strict=True):
        if isinstance(placement, Shard) and placement.sizes is not None and len(placement.sizes) == ranks:
            placement = ragged_shard(placement.dim, x.shape[placement.dim], ranks)
        else:
            placement = _chunked(placement)
        fitted.append(placement)
    return tuple(fitted)
