"""Sorting along a sharded dim: ``sort`` and ``topk``.

If another dim can carry the shards, the shards move there in one all-to-all. A single dim is sorted in place: each rank sorts its
block, samples of all blocks determine the bounds between ranks, and two all-to-alls send each element to its place. No rank holds
more than its share, except for equal elements. For ``topk`` the best elements of each block are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..call import Call
from ..declare import along, blockwise
from ..kernel_context import At, KernelContext, make_index_tensor
from ..rule import Kernel

Pair = tuple[torch.Tensor, torch.Tensor]  # values and their global positions


# --- sort ---
def sort_key(x: torch.Tensor, descending: bool) -> torch.Tensor:
    """Convert values to int64 keys in the sorting order: NaN is the largest, -0.0 equals 0.0."""
    if x.dtype.is_floating_point:
        wide = x.to(torch.float64) + 0.0
        bits = torch.where(wide.isnan(), torch.full_like(wide, torch.nan).abs(), wide).contiguous().view(torch.int64)
        key = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
    else:
        key = x.to(torch.int64)
    return ~key if descending else key


def sort_blocks(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Sort a sharded vector stably by sample sort, so that each rank gets its block of values and positions (a kernel)."""
    descending = bool(at.call.get("descending", False))

    def sort_block(here: At, block: torch.Tensor) -> Pair:
        """Sort one rank's block, and return its values with their global positions."""
        key = sort_key(block, descending)
        order = key.argsort(stable=True)
        return block[order], order + here.offset

    pairs = at.map(sort_block, x)
    count = len(at.sizes)

    def sample_sorted_block(here: At, pair: Pair) -> torch.Tensor:
        """Pick ``count`` evenly spaced (key, position) pairs of one sorted block. Those of an empty block are larger than all."""
        key = sort_key(pair[0], descending)
        if not key.numel():
            return torch.full((2, count), torch.iinfo(torch.int64).max, device=key.device)
        spread = torch.arange(count, device=key.device) * key.numel() // count
        return torch.stack([key[spread], pair[1][spread]])

    samples = at.all_gather(at.map(sample_sorted_block, pairs), lambda member: (2, count))

    def count_parts(here: At, pair: Pair, samples_of_ranks: list[torch.Tensor]) -> torch.Tensor:
        """Choose the bounds between ranks from all samples, and count how many elements of the block go to each rank."""
        ordered_samples = torch.cat(samples_of_ranks, 1)
        ordered_samples = ordered_samples[:, ordered_samples[1].argsort(stable=True)]
        ordered_samples = ordered_samples[:, ordered_samples[0].argsort(stable=True)]
        bounds = ordered_samples[:, count::count][:, : count - 1]
        return _part_sizes(sort_key(pair[0], descending), pair[1], bounds)

    part_counts = at.map(count_parts, pairs, samples)
    table = _send_tables(at, at.all_gather(part_counts, lambda member: (count,)))
    gathered = _exchange_pairs(at, pairs, table)

    def merge_received(_: At, pair: Pair) -> Pair:
        order = sort_key(pair[0], descending).argsort(stable=True)  # parts are received in the order of their positions
        return pair[0][order], pair[1][order]

    return _exchange_pairs(
        at, at.map(merge_received, gathered), {group: _resize_table(rows, at.sizes) for group, rows in table.items()}
    )


def _part_sizes(key: torch.Tensor, place: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the sizes of the parts of a sorted block between the ``bounds``, which are pairs of (key, position)."""
    low = torch.searchsorted(key, bounds[0].contiguous())
    high = torch.searchsorted(key, bounds[0].contiguous(), right=True)
    ends = [
        int(a + torch.searchsorted(place[a:b].contiguous(), bound))
        for a, b, bound in zip(low.tolist(), high.tolist(), bounds[1], strict=True)
    ]
    ends = [0, *ends, key.numel()]
    return make_index_tensor(key.device, [after - before for before, after in pairwise(ends)])


SendTable = list[list[int]]  # how many elements go from one group position to another


def _send_tables(at: KernelContext, gathered: list[Any]) -> dict[tuple[int, ...], SendTable]:
    """Return, for each group with ranks in this process, how many elements go from each group position to each other."""
    tables: dict[tuple[int, ...], SendTable] = {}

    def record_table(here: At, rows: list[torch.Tensor]) -> torch.Tensor:
        tables[tuple(at.call.mesh.members_of(at.mesh_dims, here.member))] = [row.tolist() for row in rows]
        return rows[0]

    at.map(record_table, gathered)
    return tables


def _resize_table(table: SendTable, sizes: Sequence[int]) -> SendTable:
    """Return the send table that turns the uneven blocks after the exchange ``table`` into blocks of ``sizes``."""
    held_sizes = [sum(row[k] for row in table) for k in range(len(sizes))]
    starts, target_starts = [0, *accumulate(held_sizes)], [0, *accumulate(sizes)]
    return [
        [max(0, min(starts[i + 1], target_starts[k + 1]) - max(starts[i], target_starts[k])) for k in range(len(sizes))]
        for i in range(len(sizes))
    ]


def _exchange_pairs(at: KernelContext, pairs: Any, tables: dict[tuple[int, ...], SendTable]) -> Any:
    """Send consecutive parts of each rank's (value, position) pairs by the tables; concatenate what arrives, by source."""
    mesh, count = at.call.mesh, len(at.sizes)

    def group_row(member: int) -> tuple[tuple[int, ...], int]:
        group = tuple(mesh.members_of(at.mesh_dims, member))
        return group, group.index(member)

    def shape_between(source: int, target: int) -> tuple[int, ...]:
        group, i = group_row(source)
        return (tables[group][i][group.index(target)],)

    def split_parts(here: At, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group, i = group_row(here.member)
        return tuple(x.split(tables[group][i]))

    received = []
    for which in (0, 1):
        chunks = at.map(lambda here, pair, which=which: split_parts(here, pair[which]), pairs)
        chunks = [at.map(lambda _, own, k=k: own[k], chunks) for k in range(count)]
        received.append(at.comm.all_to_all(chunks, at.mesh_dims, shape_between).wait())
    return at.map(lambda _, values, places: (torch.cat(values), torch.cat(places)), *received)


def sort_kernel(call: Call) -> Kernel | None:
    """Return the kernel that sorts a sharded vector, or None if another dim can be sharded instead."""
    if len(call.shape(0)) != 1 or call.operands[0].dtype is torch.uint64:
        return None
    return Kernel(sort_blocks, collectives=6, nbytes=lambda call: call.operands[0].max_local_nbytes // 2)


along("sort", kernel=sort_kernel, shapes=None)


# --- topk ---
def topk_of_blocks(at: KernelContext, x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    """Find the global ``topk`` among the best k + 1 of each block (a kernel).

    With ties the dim is all-gathered, so that all ranks select alike.
    """
    layout = at.operands[0]
    dim %= len(layout.shape)
    count = min(k + 1, layout.shape[dim])

    def topk_of_block(here: At, block: torch.Tensor) -> Pair:
        values, places = torch.topk(block, min(count, here.size), dim, largest)
        return values, places + here.offset

    def shape_of_candidates(member: int) -> tuple[int, ...]:
        """Return the shape of one rank's candidates."""
        shape = list(layout.shape_of(member))
        shape[dim] = min(count, shape[dim])
        return tuple(shape)

    pairs = at.map(topk_of_block, x)
    values, places = (
        at.all_gather(at.map(lambda _, pair, which=which: pair[which], pairs), shape_of_candidates) for which in (0, 1)
    )

    def merge_candidates(_: At, candidate_values: list[torch.Tensor], candidate_places: list[torch.Tensor]) -> Pair:
        chosen, position = torch.topk(torch.cat(candidate_values, dim), count, dim, largest)
        return chosen, torch.cat(candidate_places, dim).gather(dim, position)

    chosen = at.map(merge_candidates, values, places)

    def has_tie(_: At, pair: Pair) -> torch.Tensor:
        """Return on one rank whether two adjacent candidates are equal (NaN included)."""
        first, second = pair[0].narrow(dim, 0, max(0, count - 1)), pair[0].narrow(dim, min(1, count), max(0, count - 1))
        return ((first == second) | (first.isnan() & second.isnan())).any()

    all_mesh_dims = tuple(range(at.call.mesh.ndim))
    if at.comm.all_reduce(at.map(has_tie, chosen), all_mesh_dims, "max").wait().item():
        blocks = at.all_gather(x, layout.shape_of)
        return at.map(lambda _, parts: tuple(torch.topk(torch.cat(parts, dim), k, dim, largest, ordered)), blocks)
    return at.map(lambda _, pair: (pair[0].narrow(dim, 0, k), pair[1].narrow(dim, 0, k)), chosen)


def topk_bytes(call: Call) -> int:
    """Estimate the bytes that a rank sends: values and indices of its candidates."""
    layout = call.operands[0]
    size = layout.shape[call["dim"] % len(layout.shape)]
    return 2 * (call["k"] + 1) * layout.max_local_nbytes // max(1, size)


def topk_kernel(call: Call) -> Kernel | None:
    return Kernel(topk_of_blocks, collectives=3, nbytes=topk_bytes) if call.operands[0].dtype.is_floating_point else None


blockwise("topk", "a* [@dim] b* -> each: a* [] b* | -> each:", kernel=topk_kernel)
