"""Send and receive plan: which rank sends which part of its block to which rank in an :class:`Exchange`.

Blocks are boxes, so a part is the intersection of two boxes. Within a group the ranks with equal blocks are *replicas*. Each
part that a rank lacks comes from exactly one of them. Data that a rank already has is never sent to it.
"""

from __future__ import annotations

import math

import numpy as np

from ..base.caches import memoize
from ..comm.pack import Box, SendRecvPlan, Traffic
from ..layout.layout import Layout
from ..mesh.coordinate_tables import Table, block_indices, group_members
from .intervals import Mask, block_intervals, table_max


@memoize(4096)
def exchange_route(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> SendRecvPlan:
    """Return what ``member`` sends to, receives from and keeps in an exchange over ``mesh_dims``.

    >>> mesh = dt.DeviceMesh("cpu", 2)
    >>> a, b = (Layout.of(mesh, [dt.Shard(dim)], (4, 6)) for dim in (0, 1))
    >>> exchange_route(a, b, (0,), 1).receives
    (Box(start=(0, 0), size=(2, 3)), None)
    """
    group = np.asarray(before.mesh.members_of(mesh_dims, member), dtype=np.int64)
    (lo, size), (new_lo, new_size) = block_intervals(before), block_intervals(after)
    mine = int(np.flatnonzero(group == member)[0])
    to, come = _partner_masks(before, after, mesh_dims, group, mine)

    start = np.maximum(lo[member], new_lo[group])
    length = np.minimum(lo[member] + size[member], new_lo[group] + new_size[group]) - start
    sends = _make_boxes(start - lo[member], length, to)
    here = np.asarray([mine])
    old = _make_boxes((start - lo[member])[here], length[here], here >= 0)[0]

    start = np.maximum(lo[group], new_lo[member])
    length = np.minimum(lo[group] + size[group], new_lo[member] + new_size[member]) - start
    receives = _make_boxes(start - new_lo[member], length, come)
    new = _make_boxes((start - new_lo[member])[here], length[here], here >= 0)[0]
    shapes = tuple(size[member].tolist()), tuple(new_size[member].tolist())
    return SendRecvPlan(*shapes, sends, receives, None if old is None or new is None else (old, new))


@memoize(4096)
def gather_route(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> SendRecvPlan:
    """Return what ``member`` sends and receives in a gather: its block goes to all others, as parts of one new block."""
    coordinates, group = before.mesh.coordinates, before.mesh.members_of(mesh_dims, member)
    origin, new = after.local_offset(coordinates[member]), after.local_shape(coordinates[member])
    parts: list[Box | None] = []
    for other in group:
        offset, size = before.local_offset(coordinates[other]), before.local_shape(coordinates[other])
        parts.append(None if 0 in size else Box(tuple([a - o for a, o in zip(offset, origin, strict=True)]), size))
    position = group.index(member)
    old, own = before.local_shape(coordinates[member]), parts[position]
    parts[position] = None
    whole = None if own is None else Box((0,) * len(old), old)
    sends = tuple([None if k == position else whole for k in range(len(group))])
    return SendRecvPlan(old, new, sends, tuple(parts), None if own is None or whole is None else (whole, own))


def gather_traffic(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Traffic | None:
    """Return the traffic of a gather of equal blocks along one tensor dim, from one member's shape; None for other gathers."""
    changed = [d for d, (old, new) in enumerate(zip(before.splits, after.splits, strict=True)) if old != new]
    if len(changed) != 1 or not before.numel or not all(split is None or split.is_even for split in before.splits):
        return None
    old, new = before.splits[changed[0]], after.splits[changed[0]]
    if old is None or old.mesh_dims != (*(() if new is None else new.mesh_dims), *mesh_dims):
        return None
    shape = before.local_shape(before.mesh.coordinates[member])
    return Traffic(math.prod(shape), len(before.mesh.members_of(mesh_dims, member)) - 1, True, (shape, changed[0]))


def exchange_traffic(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Traffic:
    """Return the messages of an exchange in the group of ``member``: the largest, partners of a rank, equality of blocks."""
    members = before.mesh.members_of(mesh_dims, member)
    group = np.asarray(members, dtype=np.int64)
    common = _overlap_numels(before, after, group[None], group[None])[0]
    position = np.arange(len(group))
    if _has_no_replicas(before, mesh_dims):
        common[position, position] = 0
    else:
        common[_sender_positions(before, after, mesh_dims, members) != position[:, None]] = 0
    sizes = block_intervals(before)[1][group]
    return Traffic(table_max(common), -(-int((common > 0).sum()) // len(group)), bool((sizes == sizes[0]).all()))


def _has_no_replicas(before: Layout, mesh_dims: tuple[int, ...]) -> bool:
    """Return True if every block has one owner within the groups over ``mesh_dims``."""
    return {i for split in before.splits if split is not None for i in split.mesh_dims}.issuperset(mesh_dims)


def _make_boxes(start: Table, size: Table, chosen: Mask) -> tuple[Box | None, ...]:
    """Return a box for each row of the tables that is chosen and not empty, else None."""
    filled = chosen & (size > 0).all(axis=1)
    return tuple(
        Box(tuple(a), tuple(b)) if take else None
        for a, b, take in zip(start.tolist(), size.tolist(), filled.tolist(), strict=True)
    )


def _partner_masks(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: Table, mine: int) -> tuple[Mask, Mask]:
    """Return masks of the group positions that ``mine`` sends to, and receives from."""
    if _has_no_replicas(before, mesh_dims):
        others = np.arange(len(group)) != mine
        return others, others
    owner = _sender_positions(before, after, mesh_dims, tuple(group.tolist()))
    return owner[mine] == mine, owner[:, mine] == np.arange(len(group))


@memoize(512)
def _sender_positions(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: tuple[int, ...]) -> Table:
    """Return for (position of a block's replica, receiver) the position that sends their common part; -1 for none."""
    replicas, owner, _ = _assign_senders(before, after, mesh_dims, np.asarray([group], dtype=np.int64))
    position = np.empty((len(group), len(group)), dtype=np.int64)
    position[replicas] = owner[0][:, None]  # all replicas of a block get the same row
    return position


def _assign_senders(before: Layout, after: Layout, mesh_dims: tuple[int, ...], table: Table) -> tuple[Table, Table, Table]:
    """Return which replica sends each part of a block to which receiver, within each group of ``table``.

    The receivers of one block use its replicas in turn, so no two replicas differ by more than one send.

    Returns:
        positions of each block's replicas (blocks, replicas), equal in all groups; the position of the sender per group, block
        and receiver, -1 for none (groups, blocks, size); and the number of elements sent (groups, blocks, size).
    """
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    first = table[0]
    block_of = block_indices(before.mesh, tuple(i for i in mesh_dims if i in splitting))[first]
    count = int(block_of.max()) + 1
    replicas = np.argsort(block_of, kind="stable").reshape(count, -1)
    common = _overlap_numels(before, after, table[:, replicas[:, 0]], table)
    common[:, block_of, np.arange(len(first))] = 0  # a receiver needs no part of its own block
    needs = common > 0
    turn = (np.cumsum(needs, axis=2) - 1) % replicas.shape[1]
    owner = np.where(needs, replicas[np.arange(count)[None, :, None], turn], -1)
    return replicas, owner, common


def _overlap_numels(before: Layout, after: Layout, senders: Table, receivers: Table) -> Table:
    """Return the common elements of each old and new block, of shape (groups, senders, receivers)."""
    (lo, size), (new_lo, new_size) = block_intervals(before), block_intervals(after)
    total: Table = np.ones((len(senders), senders.shape[1], receivers.shape[1]), dtype=np.result_type(lo, new_lo))
    for dim in range(before.ndim):
        start, new_start = lo[:, dim][senders], new_lo[:, dim][receivers]
        end, new_end = start + size[:, dim][senders], new_start + new_size[:, dim][receivers]
        common = np.minimum(end[:, :, None], new_end[:, None]) - np.maximum(start[:, :, None], new_start[:, None])
        total *= np.maximum(common, 0, out=common)
    return total


def max_sent_numel(before: Layout, after: Layout, mesh_dims: tuple[int, ...]) -> int:
    """Return the greatest number of elements that one rank sends in an exchange over ``mesh_dims``."""
    table = group_members(before.mesh, mesh_dims)
    _, owner, common = _assign_senders(before, after, mesh_dims, table)
    sender = owner + np.arange(len(table))[:, None, None] * table.shape[1]
    chosen, lengths = owner >= 0, np.zeros(table.size, dtype=common.dtype)
    np.add.at(lengths, sender[chosen], common[chosen])
    return table_max(lengths)
