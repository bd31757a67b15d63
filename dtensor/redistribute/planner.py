"""Planner: ``plan(src, dst)`` returns the cheapest chain of slices, reductions, moves and gathers between two layouts.

[Note: Stages of a redistribution]
A chain has up to four stages. Stages that do nothing are left out.

1. *slice*: mesh dims that are replicated and shard the destination keep only their part, so that less is sent and reduced. 2.
*reduce*: partial mesh dims that do not stay partial are reduced, innermost first (:mod:`.partial_algebra`). Each reduction is
an all-reduce, or a reduce-scatter over the mesh dims that shard the destination, or over all of them. 3. *move*: the blocks of
the value are redistributed in one slice, all-gather or exchange. 4. *spread*: the value becomes partial on the partial mesh
dims of the destination.

No layout on the way has a larger block than the larger one of source and destination. So nothing is ever gathered only to be
sliced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..base.caches import BoundedDict
from ..errors import LayoutError
from ..layout.expanded_storage import first_along_dims, repeated_dims
from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Monoid
from .intervals import common_prefix, nested_split, prefix_sizes, split_depth
from .make_step import move_step, reduce_step, spread_step
from .partial_algebra import PartialChanges, Reduction, may_pad, partial_changes
from .step import Once, Plan, Repeat, Step

_PLANS: BoundedDict[tuple[Layout, Layout], Plan] = BoundedDict(4096, "redistributions")


def plan(src: Layout, dst: Layout) -> Plan:
    """Return the cheapest redistribution plan from ``src`` to ``dst``, cached. It depends on layouts alone, so ranks agree.

    At most one collective for sharded and replicated layouts, and one more per reduction for partial ones.

    Raises:
        LayoutError: the layouts are not of one tensor on one mesh, or the dtype lacks the reduction.
    """
    result = _PLANS.get((src, dst))
    if result is None:
        _check_comparable(src, dst)
        result = _PLANS.keep((src, dst), Plan(src, dst, () if src.has_same_blocks(dst) else _plan_stored_elements(src, dst)))
    return result


def estimate(src: Layout, dst: Layout) -> float:
    """Return the estimated seconds of a redistribution, or infinity if there is none; cached.

    >>> mesh = dt.DeviceMesh("cpu", 4)
    >>> estimate(Layout.of(mesh, [dt.Replicate()], (8, 8)), Layout.of(mesh, [dt.Shard(0)], (8, 8)))
    0.0
    """
    try:
        return plan(src, dst).cost
    except LayoutError:
        return math.inf


def _check_comparable(src: Layout, dst: Layout) -> None:
    """Raise LayoutError if two layouts differ in mesh, shape or dtype, which no redistribution changes."""
    for what in ("mesh", "shape", "dtype"):
        a, b = getattr(src, what), getattr(dst, what)
        if a != b:
            raise LayoutError(f"cannot redistribute {src!r} -> {dst!r}: the {what} differs ({a} and {b}); it must be the same")


def _plan_stored_elements(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Return the steps of a plan; elements that stride 0 repeats are redistributed once, and repeated on each rank."""
    dims = tuple([d for d in repeated_dims(src) if type(dst.stride[d]) is int and dst.stride[d] == 0])
    if not dims:
        return _cheapest_chain(src, dst)
    less, goal = first_along_dims(src, dims), first_along_dims(dst, dims)
    steps = _cheapest_chain(less, goal)
    return (Once(src, less, (), 0, 0.0, dims), *steps, Repeat(goal, dst, (), 0, 0.0))


def _cheapest_chain(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """Return the steps of the fastest way from ``src`` to ``dst``; of equally fast ones the shortest."""
    if src.partials == dst.partials:  # nothing to choose
        return tuple(_move_steps(src, dst))
    change = partial_changes(src, dst)
    modes = _scatter_choices(src, dst, change)
    pads = (True, False) if change.entered else (True,)
    chains = [_make_chain(src, dst, change, scatter, pad) for scatter in modes for pad in pads]
    return min(chains, key=lambda steps: (sum(step.seconds for step in steps), len(steps)))


def _scatter_choices(src: Layout, dst: Layout, change: PartialChanges) -> list[frozenset[int]]:
    """Return the sets of mesh dims to try as reduce-scatter: those that shard ``dst``, all that are reduced, none."""
    reduced = {i for reduction in change.reduced for i in reduction.mesh_dims}
    if not src.ndim or _reduces_monoid(change):
        return [frozenset()]
    sharding = reduced.intersection(i for split in dst.splits if split is not None for i in split.mesh_dims)
    return list(dict.fromkeys((frozenset(sharding), frozenset(reduced), frozenset())))


def _make_chain(src: Layout, dst: Layout, change: PartialChanges, scatter: frozenset[int], pad: bool) -> tuple[Step, ...]:
    """Return the steps of one plan from ``src`` to ``dst``: slice, reduce, move, then spread to partial."""
    steps: list[Step] = []
    at = src
    if not _reduces_monoid(change):
        at = _slice_towards(src, dst)
        if at is not src:
            steps.append(move_step(src, at))
    for reduction in change.reduced:
        for part in _split_reduction(reduction, scatter):
            after = _after_reduction(at, dst, part, scatter)
            steps.append(reduce_step(at, after, part))
            at = after
    goal = _before_spread(at, dst, change.entered, pad)
    moves = list(_move_steps(at, goal))
    return (*steps, *moves, *_spread_steps(goal, dst, change.entered))


def _reduces_monoid(change: PartialChanges) -> bool:
    """Return True if the changes reduce a monoid; blocks are then not sliced before, which a monoid need not allow."""
    return any(isinstance(reduction.op, Monoid) for reduction in change.reduced)


def _split_reduction(reduction: Reduction, scatter: frozenset[int]) -> Iterator[Reduction]:
    """Yield ``reduction`` in two parts if only some of its mesh dims scatter: those first, so that less is left."""
    first = tuple(i for i in reduction.mesh_dims if i in scatter)
    rest = tuple(i for i in reduction.mesh_dims if i not in scatter)
    yield from (reduction.over(mesh_dims) for mesh_dims in (first, rest) if mesh_dims)


# --- intermediate layouts -----------------------------------------------------------------------------------------
def _with_splits(layout: Layout, splits: list[Split | None], partials: list[str | Monoid | None] | None = None) -> Layout:
    """Return ``layout`` with other splits (sharding by mesh dim) and, if given, other partial reductions."""
    return Layout.from_splits(
        layout.mesh, splits, layout.partials if partials is None else partials, layout.shape, layout.stride, layout.dtype
    )


def _sharding_mesh_dims(layout: Layout) -> set[int]:
    return {i for split in layout.splits if split is not None for i in split.mesh_dims}


def _slice_towards(layout: Layout, dst: Layout) -> Layout:
    """Return ``layout`` sharded towards ``dst`` as far as no data is sent; each block keeps all of its part of ``dst``."""
    mesh, busy = layout.mesh, _sharding_mesh_dims(layout)
    splits = list(layout.splits)
    for dim, want in enumerate(dst.splits):
        if want is None or common_prefix(mesh, splits[dim], want) < split_depth(splits[dim]):
            continue
        count = split_depth(splits[dim])
        while count < split_depth(want) and want.mesh_dims[count] not in busy and layout.partials[want.mesh_dims[count]] is None:
            count += 1
        if count > split_depth(splits[dim]):
            splits[dim] = Split(want.mesh_dims[:count], prefix_sizes(mesh, want, count))
    return layout if splits == list(layout.splits) else _with_splits(layout, splits)


def _after_reduction(layout: Layout, dst: Layout, reduction: Reduction, scatter: frozenset[int]) -> Layout:
    """Return ``layout`` after ``reduction``, with its mesh dims in ``scatter`` as innermost shards."""
    mesh = layout.mesh
    splits = list(layout.splits)
    targets = [i for i in reduction.mesh_dims if i in scatter]
    for dim, want in enumerate(dst.splits):
        inner = [i for i in (() if want is None else want.mesh_dims) if i in targets]
        if inner:
            splits[dim] = nested_split(mesh, splits[dim], layout.shape[dim], inner, want)
    unplaced = [i for i in targets if i not in _sharding_mesh_dims(dst)]
    if unplaced:
        sizes = [size if split is None else max(split.sizes) for size, split in zip(layout.shape, splits, strict=True)]
        dim = sizes.index(max(sizes))
        splits[dim] = nested_split(mesh, splits[dim], layout.shape[dim], unplaced, None)
    partials = [None if i in reduction.mesh_dims else op for i, op in enumerate(layout.partials)]
    return _with_splits(layout, splits, partials)


def _before_spread(layout: Layout, dst: Layout, entered: tuple[int, ...], pad: bool) -> Layout:
    """Return ``dst`` before its new partial mesh dims exist: there replicated or, if it may be padded, still sharded."""
    if not entered:
        return dst
    mesh = layout.mesh
    partials = [None if i in entered else op for i, op in enumerate(dst.partials)]
    splits = list(dst.splits)
    pad = pad and not any(isinstance(dst.partials[i], Monoid) for i in entered)  # its identity is that of complete blocks
    for dim, split in enumerate(layout.splits) if pad else ():
        inner = [i for i in (() if split is None else split.mesh_dims) if i in entered]
        if inner and _spread_in_one_step(dst, inner, entered) and all(_is_paddable(dst, i, partials) for i in inner):
            splits[dim] = nested_split(mesh, splits[dim], dst.shape[dim], inner, split)
    return _with_splits(dst, splits, partials)


def _spread_in_one_step(dst: Layout, mesh_dims: list[int], entered: tuple[int, ...]) -> bool:
    """Return True if these mesh dims become partial in one step of :func:`_spread_steps`."""
    between = [i for i in entered if min(mesh_dims) <= i <= max(mesh_dims)]
    return len({dst.partials[i] for i in between}) == 1


def _is_paddable(dst: Layout, mesh_dim: int, kept: list[str | Monoid | None]) -> bool:
    op = dst.partials[mesh_dim]
    return op is not None and may_pad(op, [inner for inner in kept[mesh_dim + 1 :] if inner is not None])


def _move_steps(src: Layout, dst: Layout) -> Iterator[Step]:
    """Yield the steps that change the blocks: a slice without communication if there is one, then at most one more."""
    at = _slice_towards(src, dst)
    if not at.has_same_blocks(src):
        yield move_step(src, at)
    if not at.has_same_blocks(dst):
        yield move_step(at, dst)


def _spread_steps(layout: Layout, dst: Layout, entered: tuple[int, ...]) -> Iterator[Step]:
    """Yield the steps that make mesh dims partial, outermost first, adjacent ones with one op together."""
    at, remaining = layout, list(entered)
    while remaining:
        op = dst.partials[remaining[0]]
        run = [i for k, i in enumerate(remaining) if all(dst.partials[j] == op for j in remaining[: k + 1])]
        remaining = remaining[len(run) :]
        splits = [
            None if split is None else Split(kept_dims, prefix_sizes(at.mesh, split, len(kept_dims)))
            for split in at.splits
            for kept_dims in [() if split is None else tuple(i for i in split.mesh_dims if i not in run)]
        ]
        partials = [op if i in run else other for i, other in enumerate(at.partials)]
        after = _with_splits(at, splits, partials)
        yield spread_step(at, after, tuple(run))
        at = after
