"""Reductions on process groups: the backend's own if it has one, else addends are exchanged and reduced locally, in group
order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...mesh.process_groups import Group
from ...placement import Monoid
from ..communicator import BoundReduction
from ..flat_rows import chunk_lengths, view_as_row
from ..local_reduce import FUSED_SUM_DTYPES, Op, fold, reduce_stack, row_major_copy
from ..pack import Box, Packing, Scatter, view_region
from ..pending import Pending
from .torch_backends import (
    Waitable,
    all_to_all_rows,
    backend_traits_of,
    bind_native_all_reduce,
    bind_native_reduce_scatter,
    exchange_messages,
    make_pending,
    native_reduction,
    start_all_gather_rows,
    to_row_major,
    wait_then,
)
from .transfer import ROW_FACTOR, Issue, list_message_regions, peer_order


# --- reduce-scatter ------------------------------------------------------------------------------------------------------
def bind_group_reduce_scatter(group: Group, scatter: Scatter) -> Issue:
    """Bind a reduce-scatter by the backend, or by messages, or by one all-to-all of packed rows and a local reduction."""
    member, op, dtype = group.members[group.position], scatter.op, scatter.dtype
    old, chunks = tuple(scatter.old(member)), scatter.chunks_of(member)
    native = native_reduction(group, op, dtype)
    if native is not None and len({box.size for box in chunks}) == 1:
        return _bind_native_scatter(group, old, chunks, *native)
    traits, in_rows = backend_traits_of(group), len(old) == 1
    min_direct_bytes = traits.direct_bytes * (ROW_FACTOR if in_rows else 1)
    if (in_rows and traits.sends_lists) or max(box.numel for box in chunks) * dtype.itemsize >= min_direct_bytes:
        return _bind_direct_scatter(group, old, chunks, op)
    send_packing = Packing(tuple(group.to_torch(chunks)), old)
    own = chunks[group.position]
    recv_lengths = [own.numel] * group.size

    def exchange_regions(x: Tensor) -> Pending[Tensor]:
        """Start an all-to-all of packed regions; ``wait()`` reduces the received addends locally."""
        block = to_row_major(x, old)
        buffer = block.new_empty((group.size, *own.size))
        works = all_to_all_rows(group, buffer.view(-1), send_packing.pack(block), recv_lengths, send_packing.lengths)
        return make_pending(works, lambda: fold(group.to_mesh(buffer.unbind(0)), op))

    return exchange_regions


def _bind_native_scatter(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Any, view_dtype: torch.dtype) -> Issue:
    """Bind a reduce-scatter by the backend's own collective, of a packed row."""
    send_packing, own = Packing(tuple(group.to_torch(chunks)), old), chunks[group.position]
    reduce = bind_native_reduce_scatter(group, op)

    def issue_native_scatter(x: Tensor) -> Pending[Tensor]:
        """Pack the block into a row, and start the backend's reduce-scatter of it."""
        block = to_row_major(x, old)
        result = block.new_empty(own.size)
        row, into = view_as_row(send_packing.pack(block)), view_as_row(result)
        return make_pending(
            reduce(into, row) if view_dtype is x.dtype else reduce(into.view(view_dtype), row.view(view_dtype)), lambda: result
        )

    return issue_native_scatter


def _bind_direct_scatter(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Op) -> Issue:
    """Bind a reduce-scatter by messages: each region is sent to its rank, which reduces in the order of ranks."""
    own, mine = chunks[group.position], group.position
    send_regions = list_message_regions(group, tuple(chunks), old, 1)
    order = group.order or tuple(range(group.size))
    others = peer_order(group, -1) if own.numel else []

    def exchange_region_messages(x: Tensor) -> Pending[Tensor]:
        """Send each region in a message; ``wait()`` reduces the received regions with this rank's own."""
        block = to_row_major(x, old)
        addends = [view_region(block, own) if k == mine else block.new_empty(own.size) for k in range(group.size)]
        receives = [(order[k], addends[k].view(-1)) for k in others]
        works = exchange_messages(group, receives, [(part.rank, part.of(block)) for part in send_regions], x.device)
        return make_pending(works, lambda: fold(addends, op))

    return exchange_region_messages


# --- all-reduce -----------------------------------------------------------------------------------------------------------
def bind_group_all_reduce(group: Group, op: Op, dtype: torch.dtype) -> BoundReduction:
    """Bind an all-reduce: the backend's own, else in one round for small tensors, else in two."""
    native = native_reduction(group, op, dtype)
    if native is not None:
        return _bind_native_reduction(bind_native_all_reduce(group, native[0]), dtype, native[1])
    if group.size == 2 and backend_traits_of(group).adds_pairs and op in ("sum", "avg") and dtype in FUSED_SUM_DTYPES:
        return _bind_pair_sum(group, op == "avg")
    if isinstance(op, Monoid) and op.combine_all is not None:
        return BoundReduction(_bind_stack_reduction(group, op))
    # the addends of a monoid cannot be split
    max_one_round_bytes = sys.maxsize if isinstance(op, Monoid) else backend_traits_of(group).one_round_bytes

    def issue_fastest_reduction(x: Tensor) -> Pending[Tensor]:
        """Start an all-reduce by the algorithm that is fastest for the size of ``x``."""
        nbytes = x.numel() * x.dtype.itemsize
        if nbytes * group.size <= max_one_round_bytes:
            return _reduce_in_one_round(group, x, op)
        use_exchanges = group.order is None and nbytes <= backend_traits_of(group).exchanged_bytes
        return (_reduce_in_two_exchanges if use_exchanges else _reduce_in_place)(group, x, op)

    return BoundReduction(issue_fastest_reduction)


def _bind_native_reduction(
    reduce: Callable[[Tensor], list[Waitable]], dtype: torch.dtype, view_dtype: torch.dtype
) -> BoundReduction:
    """Bind an all-reduce by the backend's own collective; it can reduce in place if the dtype needs no view."""

    def reduce_in_place(result: Tensor) -> Pending[Tensor]:
        return make_pending(reduce(result), lambda: result)

    def reduce_viewed_copy(x: Tensor) -> Pending[Tensor]:
        result = row_major_copy(x)
        return make_pending(reduce(torch.view_as_real(result) if dtype.is_complex else result.view(view_dtype)), lambda: result)

    if view_dtype is not dtype:
        return BoundReduction(reduce_viewed_copy, None, True)
    return BoundReduction(lambda x: reduce_in_place(row_major_copy(x)), reduce_in_place, True)


def _bind_pair_sum(group: Group, mean: bool) -> BoundReduction:
    """Bind the backend's own sum of two ranks, in place. The sum of two addends does not depend on their order.

    For a mean both are halved before, as in the local reduction: their sum may overflow.
    """
    reduce = bind_native_all_reduce(group, dist.ReduceOp.SUM)

    def add_in_place(result: Tensor) -> Pending[Tensor]:
        return make_pending(reduce(result) if result.numel() else [], lambda: result)

    def add_copy(x: Tensor) -> Pending[Tensor]:
        block = to_row_major(x, tuple(x.shape))
        return add_in_place(block * 0.5 if mean else row_major_copy(block))

    return BoundReduction(add_copy, lambda x: add_in_place(x.mul_(0.5) if mean else x), True)


def _reduce_in_one_round(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Start an all-reduce in which each rank sends its addend to all others, and all reduce in one order."""
    block = to_row_major(x, x.shape)
    others, mine = group.size - 1, group.torch_rank
    buffer = block.new_empty((others, *block.shape))
    row = block.view(-1) if others == 1 else block.expand(others, *block.shape).contiguous().view(-1)
    lengths = [block.numel()] * group.size
    lengths[mine] = 0
    works = all_to_all_rows(group, buffer.view(-1), row, lengths, lengths)

    def finish() -> Tensor:
        received = list(buffer.unbind(0))
        return fold(group.to_mesh([*received[:mine], block, *received[mine:]]), op)

    return make_pending(works, finish)


def _bind_stack_reduction(group: Group, op: Monoid) -> Issue:
    """Bind an all-reduce by ``op.combine_all``: the addends of all ranks are gathered as one stack and reduced locally."""
    gathers, order = backend_traits_of(group).reduces, None if group.order is None else list(group.order)

    def gather_stack(x: Tensor) -> Pending[Tensor]:
        """Start to gather the addends of all ranks into one stack; ``wait()`` reduces it."""
        block = to_row_major(x, x.shape)
        stack = block.new_empty((group.size, *block.shape))
        if gathers:
            works = start_all_gather_rows(group, stack.view(-1), block.view(-1))
        else:
            lengths = [block.numel()] * group.size
            works = all_to_all_rows(group, stack.view(-1), block.expand(stack.shape).contiguous().view(-1), lengths, lengths)
        return make_pending(works, lambda: reduce_stack(stack if order is None else stack[order], op))

    return gather_stack


def _reduce_in_two_exchanges(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Start an all-reduce of two rounds, a reduce-scatter and an all-gather, each by one all-to-all."""
    size, block = group.size, to_row_major(x, tuple(x.shape))
    lengths = chunk_lengths(block.numel(), size)
    own, result = lengths[group.position], torch.empty_like(block)
    addends = block.new_empty(own * size)
    first = all_to_all_rows(group, addends, block.view(-1), [own] * size, lengths)

    def begin_all_gather() -> Callable[[], Tensor]:
        """Reduce the received addends of this rank's chunk, and start to exchange the reduced chunks."""
        reduced = wait_then(first, lambda: fold(addends.split(own), op) if own else addends)
        row = reduced.expand(size, own).contiguous().view(-1)
        second = all_to_all_rows(group, result.view(-1), row, lengths, [own] * size)
        return lambda: wait_then(second, lambda: result)

    return Pending.of_two_rounds(begin_all_gather)


def _reduce_in_place(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Start an all-reduce of two rounds, a reduce-scatter and an all-gather by messages, with no memory but the result.

    Until the reduced chunks of the other ranks arrive, their places in the result hold the addends of this rank's chunk.
    """
    size, mine = group.size, group.position
    order = group.order or tuple(range(size))
    block = to_row_major(x, tuple(x.shape))
    result = torch.empty_like(block)
    if not block.numel():
        return Pending.of(result)
    length = -(-block.numel() // size)
    # the last chunks may be shorter or missing
    addend_chunks = block.view(-1).split(length)
    result_chunks = result.view(-1).split(length)
    own = len(addend_chunks[mine]) if mine < len(addend_chunks) else 0
    scratch = [chunk if len(chunk) >= own else block.new_empty(own) for chunk in result_chunks]
    scratch += [block.new_empty(own) for _ in range(size - len(result_chunks))]
    previous_peers, next_peers = peer_order(group, -1), peer_order(group, 1)
    first = exchange_messages(
        group,
        [(order[k], scratch[k][:own]) for k in previous_peers if own],
        [(order[k], addend_chunks[k]) for k in next_peers if k < len(addend_chunks)],
        x.device,
    )

    def begin_all_gather() -> Callable[[], Tensor]:
        """Reduce this rank's chunk, and start to exchange the reduced chunks."""
        if own:
            addends = [addend_chunks[mine] if k == mine else scratch[k][:own] for k in range(size)]
            wait_then(first, lambda: fold(addends, op, out=result_chunks[mine]))
        second = exchange_messages(
            group,
            [(order[k], result_chunks[k]) for k in previous_peers if k < len(result_chunks)],
            [(order[k], result_chunks[mine]) for k in next_peers if own],
            x.device,
        )
        return lambda: wait_then(second if own else [*first, *second], lambda: result)

    return Pending.of_two_rounds(begin_all_gather)
