"""Who sends which part of its block to whom in an :class:`Exchange`.

Blocks are boxes, so a part is the intersection of two boxes. Within a group the ranks that hold one same block are its
*replicas*; each part that a rank lacks comes from exactly one of them, and what it holds already is never sent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..comm.regions import Box, Route
from ..layout import Layout
from .blocks import Mask, Table, blocks, groups, leaves


@lru_cache(maxsize=4096)
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


def _boxes(start: Table, size: Table, chosen: Mask) -> tuple[Box | None, ...]:
    filled = chosen & (size > 0).all(axis=1)
    return tuple(
        Box(tuple(a), tuple(b)) if take else None
        for a, b, take in zip(start.tolist(), size.tolist(), filled.tolist(), strict=True)
    )


def _partners(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: Table, mine: int) -> tuple[Mask, Mask]:
    """To which positions, and from which, position ``mine`` has something to transfer if their boxes meet."""
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    if splitting.issuperset(mesh_dims):  # no replicas: every part has one owner
        others = np.arange(len(group)) != mine
        return others, others
    owner = _owners(before, after, mesh_dims, tuple(group.tolist()))
    return owner[mine] == mine, owner[:, mine] == np.arange(len(group))


@lru_cache(maxsize=512)
def _owners(before: Layout, after: Layout, mesh_dims: tuple[int, ...], group: tuple[int, ...]) -> Table:
    """For position ``s`` (with its replicas) and ``r``: the position that sends their common part to ``r``; -1 for none.

    The receivers of one block take its replicas in turn, so no two replicas differ by more than one send.
    """
    members = np.asarray(group, dtype=np.int64)
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    blocks_of = leaves(before.mesh, tuple(i for i in mesh_dims if i in splitting))[members]
    needs = _overlaps(before, after, members[None])[0] > 0
    owner = np.full(needs.shape, -1, dtype=np.int64)
    for block in np.unique(blocks_of):
        replicas = np.flatnonzero(blocks_of == block)
        receivers = np.flatnonzero(needs[replicas[0]] & (blocks_of != block))
        owner[np.ix_(replicas, receivers)] = replicas[np.arange(len(receivers)) % len(replicas)]
    return owner


def _overlaps(before: Layout, after: Layout, table: Table) -> Table:
    """Common elements of old block ``s`` and new block ``r`` within each group: (groups, size, size)."""
    (lo, size), (new_lo, new_size) = blocks(before), blocks(after)
    hi, new_hi = (lo + size)[table], (new_lo + new_size)[table]
    common = np.minimum(hi[:, :, None], new_hi[:, None]) - np.maximum(lo[table][:, :, None], new_lo[table][:, None])
    return np.multiply.reduce(np.maximum(common, 0), axis=-1)


def sent(before: Layout, after: Layout, mesh_dims: tuple[int, ...]) -> int:
    """Most elements that one rank sends."""
    table = groups(before.mesh, mesh_dims)
    common = _overlaps(before, after, table)
    position = np.arange(table.shape[1])
    splitting = {i for split in before.splits if split is not None for i in split.mesh_dims}
    if splitting.issuperset(mesh_dims):
        common[:, position, position] = 0
    else:
        owner = np.stack([_owners(before, after, mesh_dims, tuple(row)) for row in table.tolist()])
        common = np.where(owner == position[None, :, None], common, 0)
    return int(common.sum(axis=2).max())
