"""A failing case made small: fewer ranks, smaller dims, small integers, while it fails in the same direction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..base.nested import replace as replace_tensors
from ..base.nested import tensors
from ..layout.splits import chunk_sizes
from ..placement import Placement, Shard
from .faults import Trial, Wrong, culprit, fails, is_backward
from .oracle import Outcome
from .placements import mesh_of, ragged_sizes
from .row_cases import Case
from .variants import Variant

_TRIES = 120
_FEW = 16  # elements that are tried one by one


def wrong_of(trial: Trial, outcome: Outcome) -> Wrong:
    """The fault that a failing trial shows, small and named."""
    backward = is_backward(outcome)
    # processes would have to agree on what they try
    small = shrunk(trial, backward) if mesh_of(trial.case.mesh_shape).kind == "in_process" else trial
    name, rows = culprit(small)
    by_itself = replace(small, case=replace(small.case, rows=()))
    if small.case.rows and fails(by_itself, backward):
        small = by_itself  # dispatch chooses these rows too
    case = small.case
    direction = f"backward of {'::'.join(case.variant.name.split('.')[:2])}" if backward else "forward"
    problems = tuple(small.run().problems)
    return Wrong(name, rows, direction, case.variant, case.mesh_shape, case.placements, problems, small.reproduction)


def shrunk(trial: Trial, backward: bool) -> Trial:
    """The smallest failing trial on the way down: of each kind of step the first that still fails is taken, again and again."""
    tries = itertools.count()
    steps: tuple[Callable[[Trial], Iterator[Trial]], ...] = (_on_one_dim, _on_fewer_ranks, _smaller, _simpler)
    for step in steps:
        further = True
        while further:
            further = False
            for candidate in step(trial):
                if next(tries) > _TRIES:
                    return trial
                if fails(candidate, backward):
                    trial, further = candidate, True
                    break
    return trial


def _on_one_dim(trial: Trial) -> Iterator[Trial]:
    case = trial.case
    for mesh_dim in range(len(case.mesh_shape)) if len(case.mesh_shape) > 1 else ():
        where = tuple((_chunked(own[mesh_dim]),) for own in case.placements)
        rows = case.rows[mesh_dim : mesh_dim + 1]
        cotangents = trial.cotangents and (_chunked(trial.cotangents[mesh_dim]),)
        smaller = Case(case.variant, case.mesh_shape[mesh_dim : mesh_dim + 1], where, rows)
        yield replace(trial, case=smaller, cotangents=cotangents)


def _chunked(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def _on_fewer_ranks(trial: Trial) -> Iterator[Trial]:
    case = trial.case
    if len(case.mesh_shape) == 1 and case.mesh_shape[0] > 2:
        yield _refitted(trial, case.variant, (2,))


def _refitted(trial: Trial, variant: Variant, mesh_shape: tuple[int, ...]) -> Trial:
    """The same placements for tensors of other sizes, ragged ones ragged, on a mesh of another size."""
    xs = tensors((variant.sample.args, variant.sample.kwargs))
    where = tuple(_fitted(own, x, mesh_shape) for own, x in zip(trial.case.placements, xs, strict=True))
    cotangents = trial.cotangents and tuple(map(_chunked, trial.cotangents))
    return replace(trial, case=Case(variant, mesh_shape, where, trial.case.rows), cotangents=cotangents)


def _fitted(own: Sequence[Placement], x: torch.Tensor, mesh_shape: tuple[int, ...]) -> tuple[Placement, ...]:
    fitted = []
    for placement, ranks in zip(own, mesh_shape, strict=True):
        if isinstance(placement, Shard) and placement.sizes is not None and len(placement.sizes) == ranks:
            sizes = ragged_sizes(x.shape[placement.dim], ranks)
            even = sizes == chunk_sizes(x.shape[placement.dim], (ranks,))
            placement = Shard(placement.dim) if even else Shard(placement.dim, sizes=sizes)
        else:
            placement = _chunked(placement)
        fitted.append(placement)
    return tuple(fitted)


def _smaller(trial: Trial) -> Iterator[Trial]:
    """All dims of one size cut to another: those that belong together stay alike."""
    variant = trial.case.variant
    sizes = {size for x in tensors((variant.sample.args, variant.sample.kwargs)) for size in x.shape}
    for size in sorted(sizes, reverse=True):
        for fewer in dict.fromkeys((1, 2, 3, size - 1)):
            if 0 < fewer < size:
                yield _with(trial, lambda x, size=size, fewer=fewer: _cut(x, size, fewer))  # type: ignore[misc]


def _cut(x: torch.Tensor, size: int, fewer: int) -> torch.Tensor:
    for dim in range(x.ndim):
        if x.shape[dim] == size:
            x = x.narrow(dim, 0, fewer)
    return torch.empty_like(x).copy_(x)


def _simpler(trial: Trial) -> Iterator[Trial]:
    """Integers for fractions, then each element 0, 1 or 2."""
    sample = trial.case.variant.sample
    xs = tensors((sample.args, sample.kwargs))
    rounded = [x.round() + 0 if x.dtype.is_floating_point else x for x in xs]
    if any(
        not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(xs, rounded, strict=True) if x.dtype.is_floating_point
    ):
        following = iter(rounded)
        yield _with(trial, lambda _: next(following))
    for i, x in enumerate(xs):
        if x.dtype is torch.bool or x.dtype.itemsize == 1 or x.numel() > _FEW:
            continue
        for place in range(x.numel()):
            for value in (0, 1, 2):
                if x.flatten()[place] == value:
                    break
                yield _with(trial, _setting(i, place, value))


def _setting(tensor: int, place: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    count = itertools.count()

    def change(x: torch.Tensor) -> torch.Tensor:
        if next(count) != tensor:
            return x
        changed = x.clone()
        changed[torch.unravel_index(torch.tensor(place), x.shape)] = value
        return changed

    return change


def _with(trial: Trial, change: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
    variant = trial.case.variant
    args, kwargs = replace_tensors(change, (variant.sample.args, variant.sample.kwargs))
    smaller = replace(variant, sample=replace(variant.sample, args=args, kwargs=kwargs))
    return _refitted(trial, smaller, trial.case.mesh_shape)
