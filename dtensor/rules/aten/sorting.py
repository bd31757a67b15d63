"""Order along a sharded dim: ``sort`` and ``topk``.

Where another dim can carry the shards they move there, one all-to-all. A dim that is alone is sorted where it is: each rank sorts
its block, samples of all tell where to part them, and two all-to-alls bring every element to its place, so that no rank
holds more than its share and what equal elements make of it. The best of each block are enough for ``topk``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..call import Call
from ..declare import along, blockwise
from ..kernel_context import At, KernelContext, integers_on
from ..rule import Kernel

Pair = tuple[torch.Tensor, torch.Tensor]  # values and their places in the whole


# --- sort ---
def sort_key(x: torch.Tensor, descending: bool) -> torch.Tensor:
    """Integers in the order of the values: NaN is the largest, -0.0 is 0.0."""
    if x.dtype.is_floating_point:
        wide = x.to(torch.float64) + 0.0
        bits = torch.where(wide.isnan(), torch.full_like(wide, torch.nan).abs(), wide).contiguous().view(torch.int64)
        key = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
    else:
        key = x.to(torch.int64)
    return ~key if descending else key


def sort_blocks(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A stable sort, by value and then by place."""
    descending = bool(at.call.get("descending", False))

    def own(here: At, block: torch.Tensor) -> Pair:
        key = sort_key(block, descending)
        order = key.argsort(stable=True)
        return block[order], order + here.offset

    pairs = at.map(own, x)
    count = len(at.sizes)

    def sample(here: At, pair: Pair) -> torch.Tensor:
        """``count`` pairs of (key, place) spread over the block; those of an empty one are beyond all."""
        key = sort_key(pair[0], descending)
        if not key.numel():
            return torch.full((2, count), torch.iinfo(torch.int64).max, device=key.device)
        spread = torch.arange(count, device=key.device) * key.numel() // count
        return torch.stack([key[spread], pair[1][spread]])

    samples = at.all_gather(at.map(sample, pairs), lambda member: (2, count))

    def part(here: At, pair: Pair, taken: list[torch.Tensor]) -> torch.Tensor:
        """How many elements of the block go to each rank: the sizes of its parts."""
        drawn = torch.cat(taken, 1)
        drawn = drawn[:, drawn[1].argsort(stable=True)]
        drawn = drawn[:, drawn[0].argsort(stable=True)]
        bounds = drawn[:, count::count][:, : count - 1]
        return _parted(sort_key(pair[0], descending), pair[1], bounds)

    parts = at.map(part, pairs, samples)
    table = _tables(at, at.all_gather(parts, lambda member: (count,)))
    gathered = _exchange(at, pairs, table)

    def merged(_: At, pair: Pair) -> Pair:
        order = sort_key(pair[0], descending).argsort(stable=True)  # parts came in the order of their places
        return pair[0][order], pair[1][order]

    return _exchange(at, at.map(merged, gathered), {group: _to_blocks(rows, at.sizes) for group, rows in table.items()})


def _parted(key: torch.Tensor, place: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Sizes of the parts of a sorted block between the bounds, pairs of (key, place)."""
    low = torch.searchsorted(key, bounds[0].contiguous())
    high = torch.searchsorted(key, bounds[0].contiguous(), right=True)
    ends = [
        int(a + torch.searchsorted(place[a:b].contiguous(), bound))
        for a, b, bound in zip(low.tolist(), high.tolist(), bounds[1], strict=True)
    ]
    ends = [0, *ends, key.numel()]
    return integers_on(key.device, [after - before for before, after in pairwise(ends)])


Table = list[list[int]]  # how many elements go from one group position to another


def _tables(at: KernelContext, gathered: list[Any]) -> dict[tuple[int, ...], Table]:
    """The table of each group that has members here."""
    found: dict[tuple[int, ...], Table] = {}

    def note(here: At, rows: list[torch.Tensor]) -> torch.Tensor:
        found[tuple(at.call.mesh.members_of(at.mesh_dims, here.member))] = [row.tolist() for row in rows]
        return rows[0]

    at.map(note, gathered)
    return found


def _to_blocks(table: Table, sizes: Sequence[int]) -> Table:
    """From what each rank holds after an exchange, in order, to blocks of ``sizes``."""
    held = [sum(row[k] for row in table) for k in range(len(sizes))]
    starts, wanted = [0, *accumulate(held)], [0, *accumulate(sizes)]
    return [
        [max(0, min(starts[i + 1], wanted[k + 1]) - max(starts[i], wanted[k])) for k in range(len(sizes))]
        for i in range(len(sizes))
    ]


def _exchange(at: KernelContext, pairs: Any, tables: dict[tuple[int, ...], Table]) -> Any:
    """Consecutive parts of every rank's pairs to the ranks that the table names; what comes is in the order of the sources."""
    mesh, count = at.call.mesh, len(at.sizes)

    def row_of(member: int) -> tuple[tuple[int, ...], int]:
        group = tuple(mesh.members_of(at.mesh_dims, member))
        return group, group.index(member)

    def shape_of(source: int, target: int) -> tuple[int, ...]:
        group, i = row_of(source)
        return (tables[group][i][group.index(target)],)

    def cut(here: At, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group, i = row_of(here.member)
        return tuple(x.split(tables[group][i]))

    received = []
    for which in (0, 1):
        chunks = at.map(lambda here, pair, which=which: cut(here, pair[which]), pairs)
        chunks = [at.map(lambda _, own, k=k: own[k], chunks) for k in range(count)]
        received.append(at.comm.all_to_all(chunks, at.mesh_dims, shape_of).wait())
    return at.map(lambda _, values, places: (torch.cat(values), torch.cat(places)), *received)


def of_one_dim(call: Call) -> Kernel | None:
    """Where no other dim can carry the shards."""
    if len(call.shape(0)) != 1 or call.operands[0].dtype is torch.uint64:
        return None
    return Kernel(sort_blocks, collectives=6, nbytes=lambda call: call.operands[0].max_local_nbytes // 2)


along("sort", kernel=of_one_dim, shapes=None)


# --- topk ---
def best_of_blocks(at: KernelContext, x: Any, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    """The best of each block and one more, gathered; where equal ones leave the choice open, one device's is all ranks'."""
    layout = at.operands[0]
    dim %= len(layout.shape)
    count = min(k + 1, layout.shape[dim])

    def own(here: At, block: torch.Tensor) -> Pair:
        values, places = torch.topk(block, min(count, here.size), dim, largest)
        return values, places + here.offset

    def shape_of(member: int) -> tuple[int, ...]:
        shape = list(layout.shape_of(member))
        shape[dim] = min(count, shape[dim])
        return tuple(shape)

    pairs = at.map(own, x)
    values, places = (at.all_gather(at.map(lambda _, pair, which=which: pair[which], pairs), shape_of) for which in (0, 1))

    def best(_: At, found: list[torch.Tensor], where: list[torch.Tensor]) -> Pair:
        chosen, position = torch.topk(torch.cat(found, dim), count, dim, largest)
        return chosen, torch.cat(where, dim).gather(dim, position)

    chosen = at.map(best, values, places)

    def tied(_: At, pair: Pair) -> torch.Tensor:
        first, second = pair[0].narrow(dim, 0, max(0, count - 1)), pair[0].narrow(dim, min(1, count), max(0, count - 1))
        return ((first == second) | (first.isnan() & second.isnan())).any()

    everywhere = tuple(range(at.call.mesh.ndim))
    if at.comm.all_reduce(at.map(tied, chosen), everywhere, "max").wait().item():
        blocks = at.all_gather(x, layout.shape_of)
        return at.map(lambda _, parts: tuple(torch.topk(torch.cat(parts, dim), k, dim, largest, ordered)), blocks)
    return at.map(lambda _, pair: (pair[0].narrow(dim, 0, k), pair[1].narrow(dim, 0, k)), chosen)


def best_bytes(call: Call) -> int:
    layout = call.operands[0]
    size = layout.shape[call["dim"] % len(layout.shape)]
    return 2 * (call["k"] + 1) * layout.max_local_nbytes // max(1, size)


def of_floats(call: Call) -> Kernel | None:
    return Kernel(best_of_blocks, collectives=3, nbytes=best_bytes) if call.operands[0].dtype.is_floating_point else None


blockwise("topk", "a* [@dim] b* -> each: a* [] b* | -> each:", kernel=of_floats)
