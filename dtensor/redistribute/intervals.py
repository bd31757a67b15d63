"""Intervals: offsets and sizes of all members' blocks at once, and comparison of nested splits.

Everything is interval arithmetic per tensor dim; no element is ever enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..base.caches import memoize
from ..layout.layout import Layout
from ..layout.splits import Split, chunk_sizes
from ..mesh.coordinate_tables import Table, block_indices
from ..mesh.device_mesh import DeviceMesh

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@memoize(8192)
def block_intervals(layout: Layout) -> tuple[Table, Table]:
    """Return offsets and sizes of every member's block, each of shape (members, tensor dims)."""
    members = len(layout.mesh.members)
    kind = object if layout.has_symbols else np.int64
    offsets = np.zeros((members, layout.ndim), dtype=kind, order="F")  # read by columns
    sizes = np.empty((members, layout.ndim), dtype=kind, order="F")
    sizes[:] = layout.shape
    for dim, split in enumerate(layout.splits):
        if split is not None:
            leaf = block_indices(layout.mesh, split.mesh_dims)
            offsets[:, dim] = np.asarray(split.offsets, dtype=kind)[leaf]
            sizes[:, dim] = np.asarray(split.sizes, dtype=kind)[leaf]
    return offsets, sizes


def distinct_blocks(layout: Layout) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """Return each block that is not empty, as (offset, shape), and the members that hold it, in order."""
    offsets, sizes = block_intervals(layout)
    members_by_block: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for member, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
        if all(size):
            members_by_block.setdefault((tuple(offset), tuple(size)), []).append(member)
    return members_by_block


def block_numels(layout: Layout) -> Table:
    """Return the number of elements of every member's block."""
    return _row_products(block_intervals(layout)[1], len(layout.mesh.members))


def missing_numels(before: Layout, after: Layout) -> Table:
    """Return for every member the number of elements of its block under ``after`` that it does not have under ``before``."""
    (lo, size), (new_lo, new_size) = block_intervals(before), block_intervals(after)
    common = np.minimum(lo + size, new_lo + new_size) - np.maximum(lo, new_lo)
    return block_numels(after) - _row_products(np.maximum(common, 0), len(before.mesh.members))


def table_max(table: Table) -> int:
    """Return the greatest element of a table as an int or a symbol."""
    greatest: int = table.max() if table.dtype == object else int(table.max())
    return greatest


def _row_products(table: Table, rows: int) -> Table:
    """Return the product of each row of a table, by columns: ten times faster than a reduction along so short an axis."""
    total: Table = np.ones(rows, dtype=table.dtype)
    for column in table.T:
        total *= column
    return total


# --- nested splits -----------------------------------------------------------------------------------------------
@memoize(8192)
def prefix_sizes(mesh: DeviceMesh, split: Split, count: int) -> tuple[int, ...]:
    """Return the sizes of the blocks into which the ``count`` outermost mesh dims of ``split`` shard the tensor dim.

    >>> prefix_sizes(DeviceMesh("cpu", [[0, 1], [2, 3]]), Split((0, 1), (2, 1, 1, 0)), 1)
    (3, 1)
    """
    inner = mesh.size_of(split.mesh_dims[count:])
    return tuple(sum(split.sizes[k : k + inner]) for k in range(0, len(split.sizes), inner))


@memoize(8192)
def common_prefix(mesh: DeviceMesh, a: Split | None, b: Split | None) -> int:
    """Return how many outermost mesh dims shard into the same blocks in both splits."""
    if a is None or b is None:
        return 0
    count = 0
    while (
        count < min(len(a.mesh_dims), len(b.mesh_dims))
        and a.mesh_dims[count] == b.mesh_dims[count]
        and prefix_sizes(mesh, a, count + 1) == prefix_sizes(mesh, b, count + 1)
    ):
        count += 1
    return count


def split_depth(split: Split | None) -> int:
    """Return the number of mesh dims that ``split`` shards its tensor dim by, 0 for None."""
    return 0 if split is None else len(split.mesh_dims)


def nested_split(mesh: DeviceMesh, split: Split | None, size: int, mesh_dims: Sequence[int], like: Split | None) -> Split:
    """Return ``split``, sharded further by ``mesh_dims``: as in ``like`` if that nests inside, else evenly."""
    outer = () if split is None else split.mesh_dims
    nest = (*outer, *mesh_dims)
    if like is not None and like.mesh_dims[: len(nest)] == nest and common_prefix(mesh, split, like) == len(outer):
        return Split(nest, prefix_sizes(mesh, like, len(nest)))
    sizes = (size,) if split is None else split.sizes
    counts = tuple(mesh.shape[mesh_dim] for mesh_dim in mesh_dims)
    chunks = {block: chunk_sizes(block, counts) for block in set(sizes)}  # few sizes, many blocks
    return Split(nest, tuple(chain.from_iterable(map(chunks.__getitem__, sizes))))
