"""Reductions on process groups: the backend's own where it has one, else terms are sent and folded here, in group order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.process_groups import Group
from ..placement import Monoid
from .backend_base import Reduction
from .backends import (
    Ending,
    after,
    all_gather_rows,
    all_reduction,
    all_to_all_rows,
    native_reduction,
    post,
    row_major,
    scattered_reduction,
    started,
    traits_of,
)
from .flat_rows import as_row, chunk_lengths
from .local_reduce import SUMMED, Op, dense, fold, fold_stack
from .pack import Box, Packing, Scatter, region
from .pending import Pending
from .transfer import ROWS, Issue, parts_of, turns


# --- reduce-scatter ------------------------------------------------------------------------------------------------------
def bind_scatter(group: Group, scatter: Scatter) -> Issue:
    """``chunks[k]`` of every member's block, reduced, goes to group position k."""
    member, op, dtype = group.members[group.position], scatter.op, scatter.dtype
    old, chunks = tuple(scatter.old(member)), scatter.chunks_of(member)
    native = native_reduction(group, op, dtype)
    if native is not None and len({box.size for box in chunks}) == 1:
        return _scattered_natively(group, old, chunks, *native)
    traits, in_rows = traits_of(group), len(old) == 1
    least = traits.direct_bytes * (ROWS if in_rows else 1)
    if (in_rows and traits.sends_lists) or max(box.numel for box in chunks) * dtype.itemsize >= least:
        return _scattered_directly(group, old, chunks, op)
    leaving = Packing(tuple(group.to_torch(chunks)), old)
    own = chunks[group.position]
    arriving = [own.numel] * group.size

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, old)
        buffer = block.new_empty((group.size, *own.size))
        works = all_to_all_rows(group, buffer.view(-1), leaving.pack(block), arriving, leaving.lengths)
        return started(works, lambda: fold(group.to_mesh(buffer.unbind(0)), op))

    return issue


def _scattered_natively(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Any, seen: torch.dtype) -> Issue:
    leaving, own = Packing(tuple(group.to_torch(chunks)), old), chunks[group.position]
    reduce = scattered_reduction(group, op)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, old)
        result = block.new_empty(own.size)
        row, into = as_row(leaving.pack(block)), as_row(result)
        return started(reduce(into, row) if seen is x.dtype else reduce(into.view(seen), row.view(seen)), lambda: result)

    return issue


def _scattered_directly(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Op) -> Issue:
    own, mine = chunks[group.position], group.position
    outgoing = parts_of(group, tuple(chunks), old, 1)
    order = group.order or tuple(range(group.size))
    others = turns(group, -1) if own.numel else []

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, old)
        terms = [region(block, own) if k == mine else block.new_empty(own.size) for k in range(group.size)]
        receives = [(order[k], terms[k].view(-1)) for k in others]
        works = post(group, receives, [(part.rank, part.of(block)) for part in outgoing], x.device)
        return started(works, lambda: fold(terms, op))

    return issue


# --- all-reduce -----------------------------------------------------------------------------------------------------------
def bind_all_reduce(group: Group, op: Op, dtype: torch.dtype) -> Reduction:
    """The backend's own all-reduce, else in one round where little is sent, else in two."""
    native = native_reduction(group, op, dtype)
    if native is not None:
        return _natively(all_reduction(group, native[0]), dtype, native[1])
    if group.size == 2 and traits_of(group).adds_pairs and op in ("sum", "avg") and dtype in SUMMED:
        return _of_two(group, op == "avg")
    if isinstance(op, Monoid) and op.combine_all is not None:
        return Reduction(_stacked(group, op))
    most = sys.maxsize if isinstance(op, Monoid) else traits_of(group).one_round_bytes  # terms of a monoid stay whole

    def issue(x: Tensor) -> Pending[Tensor]:
        nbytes = x.numel() * x.dtype.itemsize
        if nbytes * group.size <= most:
            return _reduced_by_all(group, x, op)
        exchanged = group.order is None and nbytes <= traits_of(group).exchanged_bytes
        return (_in_two_exchanges if exchanged else _all_reduce_in_place)(group, x, op)

    return Reduction(issue)


def _natively(reduce: Callable[[Tensor], list[Ending]], dtype: torch.dtype, seen: torch.dtype) -> Reduction:
    def taking(result: Tensor) -> Pending[Tensor]:
        return started(reduce(result), lambda: result)

    def run(x: Tensor) -> Pending[Tensor]:
        result = dense(x)
        return started(reduce(torch.view_as_real(result) if dtype.is_complex else result.view(seen)), lambda: result)

    return Reduction(lambda x: taking(dense(x)), taking, True) if seen is dtype else Reduction(run, None, True)


def _of_two(group: Group, mean: bool) -> Reduction:
    """The backend's own sum, in place: of two terms it is the fold's, whichever comes first. Those of a mean are halved before,
    as the fold does it: their sum may not be finite.
    """
    reduce = all_reduction(group, dist.ReduceOp.SUM)

    def issue(result: Tensor) -> Pending[Tensor]:
        return started(reduce(result) if result.numel() else [], lambda: result)

    def run(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, tuple(x.shape))
        return issue(block * 0.5 if mean else dense(block))

    return Reduction(run, lambda x: issue(x.mul_(0.5) if mean else x), True)


def _reduced_by_all(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """The reduction of the group's ``x``, each sent to all in one round and reduced by all in one order."""
    block = row_major(x, x.shape)
    others, mine = group.size - 1, group.torch_rank
    buffer = block.new_empty((others, *block.shape))
    row = block.view(-1) if others == 1 else block.expand(others, *block.shape).contiguous().view(-1)
    lengths = [block.numel()] * group.size
    lengths[mine] = 0
    works = all_to_all_rows(group, buffer.view(-1), row, lengths, lengths)

    def finish() -> Tensor:
        arrived = list(buffer.unbind(0))
        return fold(group.to_mesh([*arrived[:mine], block, *arrived[mine:]]), op)

    return started(works, finish)


def _stacked(group: Group, op: Monoid) -> Issue:
    """Where terms are reduced as a stack they arrive as one, this rank's own among them."""
    gathers, order = traits_of(group).reduces, None if group.order is None else list(group.order)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, x.shape)
        stack = block.new_empty((group.size, *block.shape))
        if gathers:
            works = all_gather_rows(group, stack.view(-1), block.view(-1))
        else:
            lengths = [block.numel()] * group.size
            works = all_to_all_rows(group, stack.view(-1), block.expand(stack.shape).contiguous().view(-1), lengths, lengths)
        return started(works, lambda: fold_stack(stack if order is None else stack[order], op))

    return issue


def _in_two_exchanges(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Reduce-scatter, then all-gather, an all-to-all each."""
    size, block = group.size, row_major(x, tuple(x.shape))
    lengths = chunk_lengths(block.numel(), size)
    own, result = lengths[group.position], torch.empty_like(block)
    terms = block.new_empty(own * size)
    first = all_to_all_rows(group, terms, block.view(-1), [own] * size, lengths)

    def begin() -> Callable[[], Tensor]:
        reduced = after(first, lambda: fold(terms.split(own), op) if own else terms)
        row = reduced.expand(size, own).contiguous().view(-1)
        second = all_to_all_rows(group, result.view(-1), row, lengths, [own] * size)
        return lambda: after(second, lambda: result)

    return Pending.of_two_rounds(begin)


def _all_reduce_in_place(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Reduce-scatter, then all-gather, by messages and with no memory but the result: until the other ranks' reduced
    chunks arrive in it, their places hold their terms of this rank's chunk.
    """
    size, mine = group.size, group.position
    order = group.order or tuple(range(size))
    block = row_major(x, tuple(x.shape))
    result = torch.empty_like(block)
    if not block.numel():
        return Pending.of(result)
    length = -(-block.numel() // size)
    given, places = block.view(-1).split(length), result.view(-1).split(length)  # the last ones may be shorter, or missing
    own = len(given[mine]) if mine < len(given) else 0
    scratch = [place if len(place) >= own else block.new_empty(own) for place in places]
    scratch += [block.new_empty(own) for _ in range(size - len(places))]
    behind, ahead = turns(group, -1), turns(group, 1)
    first = post(
        group,
        [(order[k], scratch[k][:own]) for k in behind if own],
        [(order[k], given[k]) for k in ahead if k < len(given)],
        x.device,
    )

    def begin() -> Callable[[], Tensor]:
        if own:
            terms = [given[mine] if k == mine else scratch[k][:own] for k in range(size)]
            after(first, lambda: fold(terms, op, out=places[mine]))
        second = post(
            group,
            [(order[k], places[k]) for k in behind if k < len(places)],
            [(order[k], places[mine]) for k in ahead if own],
            x.device,
        )
        return lambda: after(second if own else [*first, *second], lambda: result)

    return Pending.of_two_rounds(begin)
