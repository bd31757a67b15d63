"""Ring attention: queries stay, blocks of keys and values travel around the ranks until each has met every query.

Each rank combines the partial outputs of its rows by the logarithms of the rows' sums (online softmax). So it never holds more
than two blocks of keys: its own share of the sequence and the next one, which arrives during computation. The backward pass sends
gradients of keys and values on with their block; the last step returns them to their owner (Liu et al. 2023, "Ring attention with
blockwise transformers for near-infinite context", arXiv:2310.01889).

Cost: with n ranks n - 1 steps that send one block of keys and values, in backward n - 1 more of their gradients. These are the
bytes of an all-gather (and a reduce-scatter), without its memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....comm.map_ranks import communicator_of
from ....mesh.device_mesh import DeviceMesh
from ...call import Call
from ...kernel_context import KernelContext, on_each_rank
from .blocks import BlockPair, Gradients, finish_rows, partial_attention, partial_gradients, row_weight, sums_dtype


def ranks_in_ring(call: Call) -> int:
    """Return the number of ranks that shard queries, keys and values alike along equal sequences (1: no ring)."""
    query, key, value = (call.operands[call.names.index(name)] for name in ("query", "key", "value"))
    if query.shape[2] != key.shape[2]:
        return 1
    mesh_dims = [() if layout.splits[2] is None else layout.splits[2].mesh_dims for layout in (query, key, value)]
    return math.prod(call.mesh.shape[dim] for dim in mesh_dims[0] if dim in mesh_dims[1] and dim in mesh_dims[2])


SequencePieces = tuple[range, ...]  # sequence positions of a rank, in its memory order


@dataclass(frozen=True, slots=True)
class Ring:
    """Blocks of keys and values in transit. After ``step`` steps a rank holds the block of the rank ``step`` positions before it.

    Attributes:
        rows, keys: functions from a rank to the positions of its queries and of its own keys.
        shapes: function from a rank to the shapes of its own keys and values.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    rows: Callable[[int], SequencePieces]
    keys: Callable[[int], SequencePieces]
    shapes: Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]
    causal: bool
    scale: float | None

    @property
    def ranks(self) -> int:
        return self.mesh.size_of(self.mesh_dims)

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(member, *args)`` for each rank of this process, with its local tensors."""
        return communicator_of(self.mesh).map(fn, *args)

    def member_behind(self, member: int, steps: int) -> int:
        """Return the rank ``steps`` positions before ``member`` in the ring: ``member`` holds its block after so many steps."""
        group = self.mesh.members_of(self.mesh_dims, member)
        return group[(group.index(member) - steps) % len(group)]

    def unpack_block(self, member: int, step: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """Unpack the message that ``member`` holds after ``step`` steps into keys and values."""
        shapes = self.shapes(self.member_behind(member, step))
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def block_pairs(self, member: int, step: int, mask: Tensor | None) -> list[list[BlockPair]]:
        """Pair each piece of a rank's rows with each piece of the keys that it holds after ``step`` steps."""
        keys = self.keys(self.member_behind(member, step))
        return [[BlockPair(own, other, self.causal, self.scale, mask) for other in keys] for own in self.rows(member)]

    def send_to_next(self, block: Any, step: int) -> Callable[[], Any]:
        """Start to send every rank's ``block`` to the next rank, and return a function that waits for the block received."""
        ranks, group_of = self.ranks, functools.partial(self.mesh.members_of, self.mesh_dims)

        def make_chunks(member: int, block: Tensor) -> list[Tensor]:
            following = (group_of(member).index(member) + 1) % ranks
            return [block if k == following else block.new_empty(0) for k in range(ranks)]

        def shape_of(source: int, target: int) -> tuple[int, ...]:
            arrives = target == self.member_behind(source, -1)
            return (sum(map(math.prod, self.shapes(self.member_behind(source, step)))) if arrives else 0,)

        def receive_from_previous(member: int, *arrived: Tensor) -> Tensor:
            return arrived[(group_of(member).index(member) - 1) % ranks]

        pending = communicator_of(self.mesh).all_to_all(self.map(make_chunks, block), self.mesh_dims, shape_of)
        return lambda: self.map(receive_from_previous, *pending.wait())


def pack_block(_: int, key: Tensor, value: Tensor) -> Tensor:
    """Pack keys and values into one flat message, for :meth:`Ring.unpack_block`."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def make_ring(at: KernelContext, scale: float | None) -> Ring:
    """Make the ring for one call of the attention operator, in which each rank has one piece of the sequence."""
    call = at.call
    layouts = [at.operands[call.names.index(name)] for name in ("key", "value")]

    def shapes(member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        key, value = (layout.shape_of(member) for layout in layouts)
        return key, value

    def positions_of(name: str) -> Callable[[int], SequencePieces]:
        return lambda member: (at.block_range(name, 2, member),)

    return Ring(call.mesh, at.mesh_dims, positions_of("query"), positions_of("key"), shapes, call["is_causal"], scale)


def ring_attention(
    at: KernelContext, query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Compute attention by the ring, with the CPU operator's arguments: output and log-sums of own queries (a kernel)."""
    return attend_on_ring(make_ring(at, scale), query, key, value, attn_mask)


def attend_on_ring(ring: Ring, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """Compute attention of each rank's queries on all keys, which go around the ring. Each rank has its rows of the mask."""

    def attend_block(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function that computes one rank's partial attention on the keys of ring step ``step``."""

        def attend_on_rank(member: int, mask: Any, query: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            key, value = ring.unpack_block(member, step, block)
            return attend_on_pieces(ring.block_pairs(member, step, mask), query, key, value)

        return attend_on_rank

    merged: tuple[Any, Any] | None = None
    blocks = ring.map(pack_block, key, value)
    for step in range(ring.ranks):
        arriving = ring.send_to_next(blocks, step) if step + 1 < ring.ranks else None
        partial_output = ring.map(attend_block(step), mask, query, blocks)
        merged = partial_output if merged is None else merge_partial_outputs(*merged, *partial_output)
        if arriving is not None:
            blocks = arriving()
    assert merged is not None
    return finish_rows(query, *merged)


def attend_on_pieces(pairs: list[list[BlockPair]], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute partial attention for rows and keys that consist of several pieces of the sequence."""
    if len(pairs) == len(pairs[0]) == 1:
        return partial_attention(pairs[0][0], query, key, value)
    rows = query.split([len(own[0].rows) for own in pairs], 2)
    blocks = list(zip(*(x.split([len(meeting.keys) for meeting in pairs[0]], 2) for x in (key, value)), strict=True))
    outputs = []
    for own, piece in zip(pairs, rows, strict=True):
        each = [partial_attention(meeting, piece, *block) for meeting, block in zip(own, blocks, strict=True)]
        outputs.append(functools.reduce(lambda merged, output: merge_partial_outputs(*merged, *output), each))
    return torch.cat([out for out, _ in outputs], 2), torch.cat([sums for _, sums in outputs], 2)


@on_each_rank
def merge_partial_outputs(out: Tensor, sums: Tensor, other: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial outputs of the same rows, and their log-sums, into one."""
    total = torch.logaddexp(sums, more)
    return out * row_weight(sums, total) + other * row_weight(more, total), total


def ring_gradients(
    at: KernelContext, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *flags: Any, **keywords: Any
) -> Any:
    """Compute the gradients of attention by the ring, with the arguments of the CPU operator's backward (a kernel)."""
    return attend_on_ring_backward(
        make_ring(at, keywords.get("scale")), grad, query, key, value, out, sums, keywords.get("attn_mask")
    )


def attend_on_ring_backward(
    ring: Ring, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, mask: Any = None
) -> tuple[Any, Any, Any]:
    """Compute the gradients of each rank's queries, keys and values, where those of keys and values go around the ring."""

    def block_gradients(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function that computes one rank's gradients on the keys of ring step ``step``."""

        def block_gradients_on_rank(member: int, mask: Any, block: Tensor, grad: Tensor, query: Tensor, *rest: Tensor) -> Any:
            """Return one rank's query gradient, and the packed gradients of the keys and values that it holds."""
            key, value = ring.unpack_block(member, step, block)
            dq, dk, dv = gradients_of_pieces(ring.block_pairs(member, step, mask), grad, query, key, value, *rest)
            return dq, pack_block(member, dk, dv).to(sums_dtype(query))

        return block_gradients_on_rank

    blocks, total, own_key_gradients, arriving_gradients = ring.map(pack_block, key, value), None, None, None
    for step in range(ring.ranks):
        arriving = ring.send_to_next(blocks, step) if step + 1 < ring.ranks else None
        query_gradients, key_gradients = ring.map(block_gradients(step), mask, blocks, grad, query, out, sums)
        total = query_gradients.to(key_gradients.dtype) if total is None else total + query_gradients
        if own_key_gradients is None:
            own_key_gradients = key_gradients
        else:
            arriving_gradients = ring.send_to_next(
                key_gradients if arriving_gradients is None else key_gradients + arriving_gradients(), step
            )
        if arriving is not None:
            blocks = arriving()

    def unpack_gradients(member: int, total: Tensor, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unpack the gradients of a rank's own keys and values, and convert all to the dtype of the query."""
        dk, dv = ring.unpack_block(member, 0, both)
        return total.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)

    gradients: tuple[Any, Any, Any] = ring.map(
        unpack_gradients,
        total,
        query,
        own_key_gradients if arriving_gradients is None else own_key_gradients + arriving_gradients(),
    )
    return gradients


def gradients_of_pieces(
    pairs: list[list[BlockPair]], grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor
) -> Gradients:
    """Compute the gradients for rows and keys that consist of several pieces of the sequence, added in the dtype of sums."""
    if len(pairs) == len(pairs[0]) == 1:
        return partial_gradients(pairs[0][0], grad, query, key, value, *rest)
    lengths, widths = [len(own[0].rows) for own in pairs], [len(pair.keys) for pair in pairs[0]]
    dq, dk, dv = (torch.zeros_like(x, dtype=sums_dtype(query)) for x in (query, key, value))
    rows = list(zip(*(x.split(lengths, 2) for x in (grad, query, *rest, dq)), strict=True))
    blocks = list(zip(*(x.split(widths, 2) for x in (key, value, dk, dv)), strict=True))
    for own, (of_out, piece, *row_results, total) in zip(pairs, rows, strict=True):
        for pair, (k, v, *totals) in zip(own, blocks, strict=True):
            gradients = partial_gradients(pair, of_out, piece, k, v, *row_results)
            for into, term in zip((total, *totals), gradients, strict=True):
                into += term
    return dq, dk, dv
