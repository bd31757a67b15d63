"""``plan(src, dst)``: the cheapest chain of steps between two layouts.

A chain has up to four stages; the stages that do nothing vanish:

1. *slice*: mesh dims that hold copies and split the destination keep their part only, so that less is moved and reduced;
2. *reduce*: terms that do not stay are reduced, innermost first (:mod:`.partial_algebra`), each reduction as an all-reduce or as
   a reduce-scatter over the mesh dims that split the destination, or over all of them;
3. *move*: the blocks of the value go where they belong, in one slice, all-gather or exchange;
4. *spread*: the value becomes terms of the partial mesh dims of the destination.

No layout on the way has a larger block than the larger one of source and destination, which is why nothing is ever
gathered only to be sliced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..base.caches import Bounded
from ..errors import LayoutError
from ..layout.expanded_storage import once, repeated
from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Monoid
from .intervals import common_prefix, depth, nested, prefix_sizes
from .make_step import move_step, reduce_step, spread_step
from .partial_algebra import Changes, Reduction, changes, may_pad
from .step import Once, Plan, Repeat, Step

_PLANS: Bounded[tuple[Layout, Layout], Plan] = Bounded(4096, "redistributions")


def plan(src: Layout, dst: Layout) -> Plan:
    """The cheapest plan found, cached; it depends on the layouts alone, so all ranks make the same one.

    At most one collective for sharded and replicated layouts, and one more per reduction for partial ones.

    Raises:
        LayoutError: the layouts are not of one tensor on one mesh, or the dtype lacks the reduction.
    """
    found = _PLANS.get((src, dst))
    if found is None:
        _check(src, dst)
        found = _PLANS.keep((src, dst), Plan(src, dst, () if src.same_data(dst) else _stored_once(src, dst)))
    return found


def estimate(src: Layout, dst: Layout) -> float:
    """Seconds that the redistribution takes, infinite where there is none; cached.

    >>> mesh = dt.DeviceMesh("cpu", 4)
    >>> estimate(Layout.of(mesh, [dt.Replicate()], (8, 8)), Layout.of(mesh, [dt.Shard(0)], (8, 8)))
    0.0
    """
    try:
        return plan(src, dst).cost
    except LayoutError:
        return math.inf


def _check(src: Layout, dst: Layout) -> None:
    for what in ("mesh", "shape", "dtype"):
        a, b = getattr(src, what), getattr(dst, what)
        if a != b:
            raise LayoutError(f"cannot redistribute {src!r} -> {dst!r}: the {what} differs ({a} and {b}); it must be the same")


def _stored_once(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The chain of what memory holds, each element once: what is repeated is so again on each rank."""
    dims = tuple([d for d in repeated(src) if type(dst.stride[d]) is int and dst.stride[d] == 0])
    if not dims:
        return _cheapest(src, dst)
    less, goal = once(src, dims), once(dst, dims)
    steps = _cheapest(less, goal)
    return (Once(src, less, (), 0, 0.0, dims), *steps, Repeat(goal, dst, (), 0, 0.0))


def _cheapest(src: Layout, dst: Layout) -> tuple[Step, ...]:
    if src.partials == dst.partials:  # nothing to choose
        return tuple(_moves(src, dst))
    change = changes(src, dst)
    modes = _modes(src, dst, change)
    pads = (True, False) if change.entered else (True,)
    chains = [_chain(src, dst, change, scatter, pad) for scatter in modes for pad in pads]
    return min(chains, key=lambda steps: (sum(step.seconds for step in steps), len(steps)))


def _modes(src: Layout, dst: Layout, change: Changes) -> list[frozenset[int]]:
    """The sets of mesh dims to reduce-scatter over: none, those that split the destination, all that are reduced."""
    reduced = {i for reduction in change.reduced for i in reduction.mesh_dims}
    if not src.ndim or _folds(change):
        return [frozenset()]
    wanted = reduced.intersection(i for split in dst.splits if split is not None for i in split.mesh_dims)
    return list(dict.fromkeys((frozenset(wanted), frozenset(reduced), frozenset())))


def _chain(src: Layout, dst: Layout, change: Changes, scatter: frozenset[int], pad: bool) -> tuple[Step, ...]:
    steps: list[Step] = []
    at = src
    if not _folds(change):
        at = _sliced(src, dst)
        if at is not src:
            steps.append(move_step(src, at))
    for reduction in change.reduced:
        for part in _parts(reduction, scatter):
            after = _reduced(at, dst, part, scatter)
            steps.append(reduce_step(at, after, part))
            at = after
    goal = _goal(at, dst, change.entered, pad)
    moves = list(_moves(at, goal))
    return (*steps, *moves, *_spreads(goal, dst, change.entered))


def _folds(change: Changes) -> bool:
    """Whether a monoid is reduced. It need not act elementwise along a dim that ``src`` leaves whole: no cutting before."""
    return any(isinstance(reduction.op, Monoid) for reduction in change.reduced)


def _parts(reduction: Reduction, scatter: frozenset[int]) -> Iterator[Reduction]:
    """The reduction, cut in two where it scatters over some of its mesh dims only: those first, for less is left then."""
    first = tuple(i for i in reduction.mesh_dims if i in scatter)
    rest = tuple(i for i in reduction.mesh_dims if i not in scatter)
    yield from (reduction.part(mesh_dims) for mesh_dims in (first, rest) if mesh_dims)


# --- the layouts on the way ---------------------------------------------------------------------------------------
def _with(layout: Layout, splits: list[Split | None], partials: list[str | Monoid | None] | None = None) -> Layout:
    return Layout.from_splits(
        layout.mesh, splits, layout.partials if partials is None else partials, layout.shape, layout.stride, layout.dtype
    )


def _splitting(layout: Layout) -> set[int]:
    return {i for split in layout.splits if split is not None for i in split.mesh_dims}


def _sliced(layout: Layout, dst: Layout) -> Layout:
    """``layout`` cut as far towards ``dst`` as no data has to move; each block still holds all of its part of ``dst``."""
    mesh, busy = layout.mesh, _splitting(layout)
    splits = list(layout.splits)
    for dim, want in enumerate(dst.splits):
        if want is None or common_prefix(mesh, splits[dim], want) < depth(splits[dim]):
            continue
        count = depth(splits[dim])
        while count < depth(want) and want.mesh_dims[count] not in busy and layout.partials[want.mesh_dims[count]] is None:
            count += 1
        if count > depth(splits[dim]):
            splits[dim] = Split(want.mesh_dims[:count], prefix_sizes(mesh, want, count))
    return layout if splits == list(layout.splits) else _with(layout, splits)


def _reduced(layout: Layout, dst: Layout, reduction: Reduction, scatter: frozenset[int]) -> Layout:
    """``layout`` with the terms of ``reduction`` reduced; the mesh dims in ``scatter`` then split innermost."""
    mesh = layout.mesh
    splits = list(layout.splits)
    targets = [i for i in reduction.mesh_dims if i in scatter]
    for dim, want in enumerate(dst.splits):
        inner = [i for i in (() if want is None else want.mesh_dims) if i in targets]
        if inner:
            splits[dim] = nested(mesh, splits[dim], layout.shape[dim], inner, want)
    homeless = [i for i in targets if i not in _splitting(dst)]
    if homeless:
        sizes = [size if split is None else max(split.sizes) for size, split in zip(layout.shape, splits, strict=True)]
        dim = sizes.index(max(sizes))
        splits[dim] = nested(mesh, splits[dim], layout.shape[dim], homeless, None)
    partials = [None if i in reduction.mesh_dims else op for i, op in enumerate(layout.partials)]
    return _with(layout, splits, partials)


def _goal(layout: Layout, dst: Layout, entered: tuple[int, ...], pad: bool) -> Layout:
    """``dst`` before its new terms exist: those mesh dims hold copies or, to be padded, still split innermost."""
    if not entered:
        return dst
    mesh = layout.mesh
    partials = [None if i in entered else op for i, op in enumerate(dst.partials)]
    splits = list(dst.splits)
    pad = pad and not any(isinstance(dst.partials[i], Monoid) for i in entered)  # its identity is that of a whole block
    for dim, split in enumerate(layout.splits) if pad else ():
        inner = [i for i in (() if split is None else split.mesh_dims) if i in entered]
        if inner and _one_spread(dst, inner, entered) and all(_paddable(dst, i, partials) for i in inner):
            splits[dim] = nested(mesh, splits[dim], dst.shape[dim], inner, split)
    return _with(dst, splits, partials)


def _one_spread(dst: Layout, mesh_dims: list[int], entered: tuple[int, ...]) -> bool:
    """Whether these mesh dims become partial in one step of :func:`_spreads`."""
    between = [i for i in entered if min(mesh_dims) <= i <= max(mesh_dims)]
    return len({dst.partials[i] for i in between}) == 1


def _paddable(dst: Layout, mesh_dim: int, kept: list[str | Monoid | None]) -> bool:
    op = dst.partials[mesh_dim]
    return op is not None and may_pad(op, [inner for inner in kept[mesh_dim + 1 :] if inner is not None])


def _moves(src: Layout, dst: Layout) -> Iterator[Step]:
    """A free slice where there is one, then at most one step more."""
    at = _sliced(src, dst)
    if not at.same_data(src):
        yield move_step(src, at)
    if not at.same_data(dst):
        yield move_step(at, dst)


def _spreads(layout: Layout, dst: Layout, entered: tuple[int, ...]) -> Iterator[Step]:
    """The new terms, outermost mesh dim first; neighbours with one op, and shards of one tensor dim, in one step."""
    at, left = layout, list(entered)
    while left:
        op = dst.partials[left[0]]
        run = [i for k, i in enumerate(left) if all(dst.partials[j] == op for j in left[: k + 1])]
        left = left[len(run) :]
        splits = [
            None if split is None else Split(kept, prefix_sizes(at.mesh, split, len(kept)))
            for split in at.splits
            for kept in [() if split is None else tuple(i for i in split.mesh_dims if i not in run)]
        ]
        partials = [op if i in run else other for i, other in enumerate(at.partials)]
        after = _with(at, splits, partials)
        yield spread_step(at, after, tuple(run))
        at = after
