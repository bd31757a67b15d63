"""Make step: the one step between two layouts, with its cost."""

from __future__ import annotations

from ..base.caches import memoize
from ..cost.link import collective_seconds, local_seconds
from ..layout.layout import Layout
from ..placement import Monoid
from .intervals import common_prefix, missing_numels, split_depth, table_max
from .partial_algebra import Reduction
from .send_recv_plan import max_sent_numel
from .step import AllGather, AllReduce, Exchange, ReduceScatter, Slice, Spread, Step

EXACT_PAIRS = 1 << 12  # with more pairs of ranks, sending is assumed to be as balanced as receiving


@memoize(8192)
def reduce_step(before: Layout, after: Layout, reduction: Reduction) -> Step:
    """Return the step that runs ``reduction``: an all-reduce if blocks stay as they are, else a reduce-scatter."""
    mesh, dims = before.mesh, reduction.mesh_dims
    if before.numel == 0:
        return Slice(before, after, (), 0, 0.0)
    size, divisor = mesh.size_of(dims), mesh.size_of(reduction.averaged)
    if before.splits == after.splits:
        nbytes = -(-2 * (size - 1) * before.max_local_nbytes // size)  # an even reduce-scatter and an all-gather
        seconds = collective_seconds(mesh, dims, "all_reduce", nbytes)
        return AllReduce(before, after, dims, nbytes, seconds, reduction.op, divisor, reduction.finish)
    assert not isinstance(reduction.op, Monoid), "a monoid need not act pointwise along the dim that would be scattered"
    nbytes = (size - 1) * after.max_local_nbytes
    sent = before.max_local_nbytes  # uneven blocks: the rank with the smallest block sends nearly everything
    wire = collective_seconds(mesh, dims, "reduce_scatter", max(nbytes, sent * (size - 1) // size))
    seconds = wire + local_seconds(mesh, nbytes)
    return ReduceScatter(before, after, dims, nbytes, seconds, reduction.op, divisor)


def spread_step(before: Layout, after: Layout, mesh_dims: tuple[int, ...]) -> Step:
    """Return the step in which a value becomes partial on ``mesh_dims``, all with one op."""
    op = after.partials[mesh_dims[0]]
    assert op is not None
    free = op in ("max", "min", "avg") and before.splits == after.splits
    return Spread(before, after, (), 0, 0.0 if free else local_seconds(before.mesh, after.max_local_nbytes), op)


@memoize(8192)
def move_step(before: Layout, after: Layout) -> Step:
    """Return the slice, all-gather or exchange that changes the blocks. Partial values stay partial."""
    itemsize = before.dtype.itemsize
    gathers = all(common_prefix(before.mesh, a, b) == split_depth(b) for a, b in zip(before.splits, after.splits, strict=True))
    received = _max_missing(before, after, gathers) * itemsize
    if not received:
        return Slice(before, after, (), 0, 0.0)
    dims = _changed_mesh_dims(before, after)
    if gathers:
        most = max(received, (before.mesh.size_of(dims) - 1) * before.max_local_nbytes)  # uneven: the largest is sent to all
        return AllGather(before, after, dims, received, _transfer_seconds(after, dims, "all_gather", most))
    wider = _with_replicas(before, after, dims)
    if wider == dims or len(before.mesh.members) * before.mesh.size_of(wider) > EXACT_PAIRS:
        return Exchange(before, after, dims, received, _transfer_seconds(after, dims, "exchange", received))
    busiest = [max(received, max_sent_numel(before, after, group) * itemsize) for group in (dims, wider)]
    choices = [
        (_transfer_seconds(after, group, "exchange", most), group) for group, most in zip((dims, wider), busiest, strict=True)
    ]
    seconds, dims = min(choices, key=lambda choice: choice[0])
    return Exchange(before, after, dims, received, seconds)


def _max_missing(before: Layout, after: Layout, gathers: bool) -> int:
    """Return the most elements of a new block that its member does not have yet, over members."""
    if gathers and _is_even(before) and _is_even(after):
        return (after.max_local_nbytes - before.max_local_nbytes) // before.dtype.itemsize
    return table_max(missing_numels(before, after))


def _is_even(layout: Layout) -> bool:
    return all(split is None or split.is_even for split in layout.splits)


def _transfer_seconds(after: Layout, dims: tuple[int, ...], kind: str, nbytes: int) -> float:
    """Return the estimated seconds of a transfer collective, and of assembling the new block from what it receives."""
    return collective_seconds(after.mesh, dims, kind, nbytes) + local_seconds(after.mesh, after.max_local_nbytes)


def _changed_mesh_dims(before: Layout, after: Layout) -> tuple[int, ...]:
    """Return the mesh dims that must communicate: their ranks together have all that each of them needs.

    These mesh dims shard ``before``, and differently or not at all ``after``. All other mesh dims shard both layouts equally,
    or have replicas.
    """
    changed: set[int] = set()
    for a, b in zip(before.splits, after.splits, strict=True):
        if a is not None:
            changed.update(a.mesh_dims[common_prefix(before.mesh, a, b) :])
    return tuple(sorted(changed))


def _with_replicas(before: Layout, after: Layout, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``dims`` with mesh dims that are replicated before and sharded after, so that replicas share the sending."""
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    extra = {i for split in after.splits if split is not None for i in split.mesh_dims} - splitting
    return tuple(sorted({*dims, *extra}))
