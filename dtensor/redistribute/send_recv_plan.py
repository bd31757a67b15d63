"""Who sends which part of its block to whom in an :class:`Exchange`.

Blocks are boxes, so a part is the intersection of two boxes. Within a group the ranks that hold one same block are its
*replicas*; each part that a rank lacks comes from exactly one of them, and what it holds already is never sent.
"""

from __future__ import annotations

import math

import numpy as np

from ..base.caches import remembered
from ..comm.pack import Box, Route, Traffic
from ..layout.layout import Layout
from ..mesh.coordinate_tables import Table, groups, leaves
from .intervals import Mask, blocks, largest


@remembered(4096)
def routes(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Route:
    """What ``member`` sends, receives and keeps.

    >>> mesh = dt.DeviceMesh("cpu", 2)
    >>> a, b = (Layout.of(mesh, [dt.Shard(dim)], (4, 6)) for dim in (0, 1))
    >>> routes(a, b, (0,), 1).receives
    (Box(start=(0, 0), size=(2, 3)), None)
    """
    group = np.asarray(before.mesh.members_of(mesh_dims, member), dtype=np.int64)
    (lo, size), (new_lo, new_size) = blocks(before), blocks(after)
    mine = int(np.flatnonzero(group == member)[0])
    to, come = _partners(before, after, mesh_dims, group, mine)

    start = np.maximum(lo[member], new_lo[group])
    length = np.minimum(lo[member] + size[member], new_lo[group] + new_size[group]) - start
    sends = _boxes(start - lo[member], length, to)
    here = np.asarray([mine])
    old = _boxes((start - lo[member])[here], length[here], here >= 0)[0]

    start = np.maximum(lo[group], new_lo[member])
    length = np.minimum(lo[group] + size[group], new_lo[member] + new_size[member]) - start
    receives = _boxes(start - new_lo[member], length, come)
    new = _boxes((start - new_lo[member])[here], length[here], here >= 0)[0]
    shapes = tuple(size[member].tolist()), tuple(new_size[member].tolist())
    return Route(*shapes, sends, receives, None if old is None or new is None else (old, new))


@remembered(4096)
def gathered(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Route:
    """As :func:`routes`, of a gather: every member has another part of the group's one new block, and sends it to all others."""
    coordinates, group = before.mesh.coordinates, before.mesh.members_of(mesh_dims, member)
    origin, new = after.local_offset(coordinates[member]), after.local_shape(coordinates[member])
    parts: list[Box | None] = []
    for other in group:
        at, size = before.local_offset(coordinates[other]), before.local_shape(coordinates[other])
        parts.append(None if 0 in size else Box(tuple([a - o for a, o in zip(at, origin, strict=True)]), size))
    mine = group.index(member)
    old, own = before.local_shape(coordinates[member]), parts[mine]
    parts[mine] = None
    whole = None if own is None else Box((0,) * len(old), old)
    sends = tuple([None if k == mine else whole for k in range(len(group))])
    return Route(old, new, sends, tuple(parts), None if own is None or whole is None else (whole, own))


def gather_traffic(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Traffic | None:
    """What a gather of equal blocks along one tensor dim is, found without all members' parts; None for any other."""
    changed = [d for d, (old, new) in enumerate(zip(before.splits, after.splits, strict=True)) if old != new]
    if len(changed) != 1 or not before.numel or not all(split is None or split.even for split in before.splits):
        return None
    old, new = before.splits[changed[0]], after.splits[changed[0]]
    if old is None or old.mesh_dims != (*(() if new is None else new.mesh_dims), *mesh_dims):
        return None
    shape = before.local_shape(before.mesh.coordinates[member])
    return Traffic(math.prod(shape), len(before.mesh.members_of(mesh_dims, member)) - 1, True, (shape, changed[0]))


def traffic(before: Layout, after: Layout, mesh_dims: tuple[int, ...], member: int) -> Traffic:
    """What the group of ``member`` has for each other."""
    members = before.mesh.members_of(mesh_dims, member)
    group = np.asarray(members, dtype=np.int64)
    common = _overlaps(before, after, group[None], group[None])[0]
    position = np.arange(len(group))
    if _without_replicas(before, mesh_dims):
        common[position, position] = 0
    else:
        common[_owners(before, after, mesh_dims, members) != position[:, None]] = 0
    sizes = blocks(before)[1][group]
    return Traffic(largest(common), -(-int((common > 0).sum()) // len(group)), bool((sizes == sizes[0]).all()))


def _without_replicas(before: Layout, mesh_dims: tuple[int, ...]) -> bool:
    """Whether within groups over ``mesh_dims`` every block has one owner."""
    return {i for split in before.splits if split is not None for i in split.mesh_dims}.issuperset(mesh_dims)


def _boxes(start: Table, size: Table, chosen: Mask) -> tuple[Box | None, ...]:
    filled = chosen & (size > 0).all(axis=1)
    return tuple(
        Box(tuple(a), tuple(b)) if take else None
        for a, b, take in zip(start.tolist(), size.tolist(), filled.tolist(), strict=True)
    )


def _partners(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: Table, mine: int) -> tuple[Mask, Mask]:
    """To which positions, and from which, position ``mine`` has something to transfer if their boxes meet."""
    if _without_replicas(before, mesh_dims):
        others = np.arange(len(group)) != mine
        return others, others
    owner = _owners(before, after, mesh_dims, tuple(group.tolist()))
    return owner[mine] == mine, owner[:, mine] == np.arange(len(group))


@remembered(512)
def _owners(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: tuple[int, ...]) -> Table:
    """For position ``s`` (with its replicas) and ``r``: the position that sends their common part to ``r``; -1 for none."""
    replicas, owner, _ = _turns(before, after, mesh_dims, np.asarray([group], dtype=np.int64))
    position = np.empty((len(group), len(group)), dtype=np.int64)
    position[replicas] = owner[0][:, None]  # what is settled for a block holds for all that have it
    return position


def _turns(before: Layout, after: Layout, mesh_dims: tuple[int, ...], table: Table) -> tuple[Table, Table, Table]:
    """Who sends what within each group of ``table`` (groups, size).

    The receivers of one block take its replicas in turn, so no two replicas differ by more than one send.

    Returns:
        positions of each block's replicas (blocks, replicas), alike in all groups; per group, block and receiver the sender's
        position, -1 for none (groups, blocks, size); and the elements sent (groups, blocks, size).
    """
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    first = table[0]
    block_of = leaves(before.mesh, tuple(i for i in mesh_dims if i in splitting))[first]
    count = int(block_of.max()) + 1
    replicas = np.argsort(block_of, kind="stable").reshape(count, -1)
    common = _overlaps(before, after, table[:, replicas[:, 0]], table)
    common[:, block_of, np.arange(len(first))] = 0  # its own
    needs = common > 0
    turn = (np.cumsum(needs, axis=2) - 1) % replicas.shape[1]
    owner = np.where(needs, replicas[np.arange(count)[None, :, None], turn], -1)
    return replicas, owner, common


def _overlaps(before: Layout, after: Layout, senders: Table, receivers: Table) -> Table:
    """Common elements of old block ``s`` and new block ``r`` within each group: (groups, senders, receivers)."""
    (lo, size), (new_lo, new_size) = blocks(before), blocks(after)
    total: Table = np.ones((len(senders), senders.shape[1], receivers.shape[1]), dtype=np.result_type(lo, new_lo))
    for dim in range(before.ndim):
        start, new_start = lo[:, dim][senders], new_lo[:, dim][receivers]
        end, new_end = start + size[:, dim][senders], new_start + new_size[:, dim][receivers]
        common = np.minimum(end[:, :, None], new_end[:, None]) - np.maximum(start[:, :, None], new_start[:, None])
        total *= np.maximum(common, 0, out=common)
    return total


def sent(before: Layout, after: Layout, mesh_dims: tuple[int, ...]) -> int:
    """Most elements that one rank sends."""
    table = groups(before.mesh, mesh_dims)
    _, owner, common = _turns(before, after, mesh_dims, table)
    sender = owner + np.arange(len(table))[:, None, None] * table.shape[1]
    chosen, lengths = owner >= 0, np.zeros(table.size, dtype=common.dtype)
    np.add.at(lengths, sender[chosen], common[chosen])
    return largest(lengths)
