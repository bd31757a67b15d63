"""Sharded indexing, exchange: indexing along a sharded dim with sharded indices.

Indices are replicated (the index tensor caches that copy, so the next call with it moves nothing). So each rank knows how many
elements go between each pair of ranks, and all ranks raise together. One all-to-all sends exactly these elements. It is not
issued if all indices are local. If values are unknown (a traced program, a dry run) or a recording must hold for other values,
complete shards are all-gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...base.recorder_hooks import ACTIVE_RECORDERS
from ...base.tracing import is_tracing
from ...layout.layout import Layout
from ...ranks.per_rank import shards_of
from ..kernel_context import At, KernelContext, make_index_tensor
from .sharded_index_local import Address, bind_indexing, crop_block, find_positions, pad_block, run_on_block


def read_by_exchange(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """Read the elements at a rank's part of sharded indices: their owners send them in one all-to-all."""
    result, block = at.results[0], args[0]
    assert result is not None
    exchange = _IndexExchange(address, op, at, result, find_index_position(address, op, at), args)
    index_position = exchange.lead

    def read_block(here: At, block: Tensor, requested: list[Tensor], is_global: bool = False) -> Tensor:
        return exchange.apply_operator(block, exchange.to_block_positions(here, requested, is_global), args[1:], named)

    if exchange.has_no_values:
        parts = at.all_gather(block, at.operands[0].shape_of)
        joint = at.map(lambda here, *parts: torch.cat(parts, exchange.dim), *parts)
        return at.map(
            lambda here, x, located: exchange.restore_index_dims(
                here, read_block(here, x, exchange.part_of(here, located), True)
            ),
            joint,
            exchange.located,
        )
    if exchange.all_local:
        return at.map(
            lambda here, x, located: exchange.restore_index_dims(here, read_block(here, x, exchange.part_of(here, located))),
            block,
            exchange.located,
        )

    def pick_requested(k: int, here: At, block: Tensor, located: list[Tensor]) -> Tensor:
        requested = exchange.part_of(here, located, k)
        return read_block(here, block, [each[requested[0] == here.index] for each in requested])

    def join_received(here: At, parts: list[Tensor], located: list[Tensor]) -> Tensor:
        """Concatenate the elements received from all ranks, in the order of this rank's indices."""
        owners, *_ = exchange.part_of(here, located)
        return exchange.restore_index_dims(
            here, torch.cat(parts, index_position).index_select(index_position, owners.argsort(stable=True).argsort())
        )

    chunks = [at.map(partial(pick_requested, k), block, exchange.located) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: exchange.shape_between(taker, giver, giver)).wait()
    return at.map(join_received, arrived, exchange.located)


def write_by_exchange(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """Write sharded sources at sharded indices: each rank sends source elements to the ranks that own their positions.

    If an element is written twice, the writes have the order of the global indices.
    """
    source_layout, place = at.operands[-1], address.argument
    index_position = find_index_position(address, op, at)
    if address.form != "elements":  # dims before it may be broadcast
        index_position += source_layout.ndim - (
            at.operands[0].ndim - len(address.dims(at.call) or ()) + at.compute_once(count_index_dims)
        )
    exchange = _IndexExchange(address, op, at, source_layout, index_position, args)
    flat_source = at.map(lambda here, source: exchange.flatten_index_dims(source, index_position), args[place + 1])

    def write_block(here: At, block: Tensor, requested: list[Tensor], source: Tensor) -> Tensor:
        rest = [*args[1 : place + 1], source, *args[place + 2 :]]
        return exchange.apply_operator(block, exchange.to_block_positions(here, requested), rest, named, writing=True)

    if exchange.has_no_values:
        parts = at.all_gather(
            flat_source, lambda member: exchange.shape_with(math.prod(exchange.index_block_shape(member)), member)
        )
        source = at.map(lambda here, *parts: torch.cat(parts, index_position), *parts)
        return at.map(
            lambda here, x, located, source: write_block(here, x, exchange.group_part(here, located), source),
            args[0],
            exchange.located,
            source,
        )
    if exchange.all_local:
        return at.map(
            lambda here, x, located, source: write_block(here, x, exchange.part_of(here, located), source),
            args[0],
            exchange.located,
            flat_source,
        )

    def pick_source(k: int, here: At, source: Tensor, located: list[Tensor]) -> Tensor:
        return source.index_select(index_position, (exchange.part_of(here, located)[0] == k).nonzero()[:, 0])

    def join_and_write(here: At, block: Tensor, parts: list[Tensor], located: list[Tensor]) -> Tensor:
        """Write the elements received from all ranks to this rank's block, in the order of the global indices."""
        requested = exchange.group_part(here, located)
        mine, source = [each[requested[0] == here.index] for each in requested], torch.cat(parts, index_position)
        if not exchange.in_order:
            sort = mine[1].argsort()
            source, mine = source.index_select(index_position, sort), [each[sort] for each in mine]
        return write_block(here, block, mine, source)

    chunks = [at.map(partial(pick_source, k), flat_source, exchange.located) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: exchange.shape_between(giver, taker, giver)).wait()
    return at.map(join_and_write, args[0], arrived, exchange.located)


def find_index_position(address: Address, op: Any, at: KernelContext) -> int:
    """Return the position of the index dims among the dims of the indexed elements."""
    return 0 if address.form == "elements" else bind_indexing(address, op, at)[2]


def count_index_dims(call: Any) -> int:
    """Return the number of dims of a call's indices after broadcasting."""
    return max(call.operands[i].ndim for i, name in enumerate(call.names) if name in ("index", "indices"))


class _IndexExchange:
    """The indices of each group position, and the exchange that they need.

    Attributes:
        located: on each rank, for each indexed element of the rank's block of the other dims: the owner's group position, the
            number of the element, and the position by indexed dim.
        dim: the indexed dim that is sharded.
        lead: the position of the index dims in ``layout``, which is sharded as they are. ndim: their number. first: the sharded
            one.
        has_no_values: index values are unknown, or the recording must hold for other values.
        all_local: each rank indexes elements of its own block only.
        in_order: elements from each group position follow those from the positions before it.
    """

    def __init__(self, address: Address, op: Any, at: KernelContext, layout: Layout, lead: int, args: tuple[Any, ...]) -> None:
        """Locate the owner of each indexed element, and count the elements between each pair of ranks if values are known."""
        self.address, self.at, self.layout, self.lead = address, at, layout, lead
        self.runs = bind_indexing(address, op, at)
        self.dims = self.runs[1]
        (factor,) = at.splits
        self.dim, self.ndim = int(factor[1:]), at.compute_once(count_index_dims)
        self.first = self.dim if address.form == "elements" else 0
        self.has_no_values = bool(ACTIVE_RECORDERS) or is_tracing() or any(x.is_meta for x in shards_of(args[0]))
        self.ends = list(accumulate(at.sizes))
        starts = [span.start for span in self._spans_of(at.comm.held[0])]
        self.in_order = starts == sorted(starts)
        self.located = at.map(self._locate_indices, args[0], args[address.argument])
        if self.has_no_values:
            return
        counts = at.map(self._count_requests, self.located)
        self._table = dict(zip(at.comm.held, [own.tolist() for own in shards_of(counts)], strict=True))
        tables = self._table.values()
        self.all_local = not any(n for table in tables for k, row in enumerate(table) for j, n in enumerate(row) if j != k)

    def _locate_indices(self, here: At, block: Tensor, index: Any) -> list[Tensor]:
        """Return the owner, the number and the positions of each indexed element, for this rank's block of other dims."""
        offset, positions = self.layout.local_offset(self.at.call.mesh.coordinates[here.member]), []
        for place in find_positions(self.address, index, [self.at.operands[0].shape[d] for d in self.dims], block.device):
            for d, size in enumerate(self.index_block_shape(here.member)):
                if d != self.first and size != place.shape[d]:
                    place = place.narrow(d, offset[self.lead + d], size)
            positions.append(self.flatten_index_dims(place))
        sharded = positions[self.dims.index(self.dim)]
        return [_find_owners(sharded, self.ends), torch.arange(sharded.shape[0], device=sharded.device), *positions]

    def index_block_shape(self, member: int) -> tuple[int, ...]:
        """Return the sizes of a rank's block along the index dims."""
        return tuple(self.layout.shape_of(member)[self.lead : self.lead + self.ndim])

    def flatten_index_dims(self, x: Tensor, lead: int = 0) -> Tensor:
        """Return ``x`` with its index dims (from dim ``lead`` on) flattened into one, the sharded index dim first."""
        x = x.movedim(lead + self.first, lead) if self.first else x
        return x.flatten(lead, lead + self.ndim - 1) if self.ndim > 1 else x

    def restore_index_dims(self, here: At, x: Tensor) -> Tensor:
        """Undo the flattening of index dims in one rank's indexed elements."""
        if self.ndim == 1:
            return x
        first, *others = self.index_block_shape(here.member)[self.first], *self._other_index_sizes(here.member)
        x = x.unflatten(self.lead, (first, *others))
        return x.movedim(self.lead, self.lead + self.first).contiguous() if self.first else x

    def _other_index_sizes(self, member: int) -> tuple[int, ...]:
        sizes = self.index_block_shape(member)
        return (*sizes[: self.first], *sizes[self.first + 1 :])

    def _spans_of(self, member: int) -> list[range]:
        """Return for each group position the range of flattened indices that are in its block."""
        key = "spans", member
        spans: list[range] | None = self.at.cache.get(key)
        if spans is None:
            mesh, rows, d = self.at.call.mesh, math.prod(self._other_index_sizes(member)), self.lead + self.first
            spans = self.at.cache[key] = []
            for other in mesh.members_of(self.at.mesh_dims, member):
                coordinate = mesh.coordinates[other]
                start = self.layout.local_offset(coordinate)[d] * rows
                spans.append(range(start, start + self.layout.local_shape(coordinate)[d] * rows))
        return spans

    def part_of(self, here: At, each: list[Tensor], position: int | None = None) -> list[Tensor]:
        """Narrow each located tensor to the indices of one group position (default: this rank)."""
        span = self._spans_of(here.member)[here.index if position is None else position]
        return [x[span.start : span.stop] for x in each]

    def group_part(self, here: At, each: list[Tensor]) -> list[Tensor]:
        """Concatenate for each located tensor the indices of all group positions."""
        spans = self._spans_of(here.member)
        return [torch.cat([x[span.start : span.stop] for span in spans]) for x in each]

    def to_block_positions(self, here: At, requested: list[Tensor], is_global: bool = False) -> list[Tensor]:
        """Convert located positions to positions in this rank's block, or keep them global.

        Elements of other ranks get the position behind the end.
        """
        places = dict(zip(self.dims, requested[2:], strict=True))
        if not is_global:
            own = places[self.dim] - here.offset if here.offset else places[self.dim]
            places[self.dim] = torch.where(requested[0] == here.index, own, here.size) if self.has_no_values else own
        return [*requested[:2], *places.values()]

    def apply_operator(
        self, block: Tensor, requested: list[Tensor], arguments: Sequence[Any], named: Any, writing: bool = False
    ) -> Tensor:
        """Run the read or write on one rank's block, with these positions as its index."""
        dropped = int(self.has_no_values) if writing else None
        if self.address.form != "elements":
            return run_on_block(self.runs, self.address, block, requested[2:], arguments, named, dropped)
        moved = pad_block(block, self.dims, dropped or 0).movedim(self.dim, 0)  # flatten: index single elements
        rows, operator_arguments = math.prod(moved.shape[1:]), list(arguments)
        operator_arguments[0], operator_arguments[self.address.argument - 1] = (
            0,
            requested[2] * rows + requested[1].remainder(max(1, rows)),
        )
        result: Tensor = self.runs[0](moved.reshape(-1), *operator_arguments, **named)
        return crop_block(result.reshape(moved.shape).movedim(0, self.dim), block, self.dims).contiguous() if writing else result

    def _count_requests(self, here: At, located: list[Tensor]) -> Tensor:
        count = len(self.at.sizes)
        return torch.stack([located[0][span.start : span.stop].bincount(minlength=count) for span in self._spans_of(here.member)])

    def shape_with(self, count: int, member: int) -> tuple[int, ...]:
        """Return the shape of ``count`` indexed elements in a rank's block."""
        shape = self.layout.shape_of(member)
        return (*shape[: self.lead], count, *shape[self.lead + self.ndim :])

    def shape_between(self, requester: int, owner: int, giver: int) -> tuple[int, ...]:
        """Return the shape of the elements that one rank requests of another. ``giver``: the rank of the two that sends them."""
        mesh = self.at.call.mesh
        k, j = (mesh.index_over(self.at.mesh_dims, mesh.coordinates[member]) for member in (requester, owner))
        counts = self._table.get(giver) or next(iter(self._table.values()))  # a process with one rank only asks about its group
        return self.shape_with(counts[k][j], giver)


def _find_owners(index: Tensor, ends: list[int]) -> Tensor:
    """Return the group position of the block that has each index. ``ends``: the end of each block along the dim."""
    return torch.searchsorted(make_index_tensor(index.device, ends), index, right=True)
