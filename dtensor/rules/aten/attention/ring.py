"""Ring attention: queries stay, blocks of keys and values travel around the ranks until each has met every query.

Each rank combines the parts of its rows as they come, by the logarithms of the rows' sums (online softmax), so that it never
holds more than two blocks of keys: its own share of the sequence and the next one, which arrives while it computes. Backward
sends gradients of keys and values on with their block; the last pass brings them home (Liu et al. 2023, "Ring attention with
blockwise transformers for near-infinite context", arXiv:2310.01889).

Cost: with n ranks n - 1 passes of one block of keys and values, in backward n - 1 more of their gradients: the bytes of an
all-gather (and a reduce-scatter), without its memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....comm import communicator_of
from ....mesh.device_mesh import DeviceMesh
from ...call import Call
from ...kernel_context import KernelContext, on_each_rank
from .blocks import Gradients, Meeting, finished, part, part_gradients, share, sums_dtype


def ranks_in_ring(call: Call) -> int:
    """How many ranks cut queries, keys and values alike along sequences of one length; 1: there is no ring."""
    query, key, value = (call.operands[call.names.index(name)] for name in ("query", "key", "value"))
    if query.shape[2] != key.shape[2]:
        return 1
    cuts = [() if layout.splits[2] is None else layout.splits[2].mesh_dims for layout in (query, key, value)]
    return math.prod(call.mesh.shape[dim] for dim in cuts[0] if dim in cuts[1] and dim in cuts[2])


Pieces = tuple[range, ...]  # positions in the sequence that a rank holds, in the order in which it holds them


@dataclass(frozen=True, slots=True)
class Ring:
    """Blocks of keys and values on their way; after ``step`` passes a rank holds the block of the rank ``step`` places before.

    Attributes:
        rows, keys: the positions that a member's queries and its own keys have.
        shapes: of a member's own keys and values.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    rows: Callable[[int], Pieces]
    keys: Callable[[int], Pieces]
    shapes: Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]
    causal: bool
    scale: float | None

    @property
    def ranks(self) -> int:
        return self.mesh.size_of(self.mesh_dims)

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(member, *args)`` once per rank held in this process."""
        return communicator_of(self.mesh).map(fn, *args)

    def member_behind(self, member: int, steps: int) -> int:
        """The one that many places before ``member`` in its group: whose block it holds after so many passes."""
        group = self.mesh.members_of(self.mesh_dims, member)
        return group[(group.index(member) - steps) % len(group)]

    def unpacked(self, member: int, step: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block that ``member`` holds."""
        shapes = self.shapes(self.member_behind(member, step))
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def meetings(self, member: int, step: int, mask: Tensor | None) -> list[list[Meeting]]:
        """For each piece of a member's rows, its meetings with the pieces of the keys that came."""
        keys = self.keys(self.member_behind(member, step))
        return [[Meeting(own, other, self.causal, self.scale, mask) for other in keys] for own in self.rows(member)]

    def passed_on(self, block: Any, step: int) -> Callable[[], Any]:
        """Every rank's ``block`` under way to the rank behind it; a call waits for the one that comes."""
        ranks, group_of = self.ranks, functools.partial(self.mesh.members_of, self.mesh_dims)

        def chunks(member: int, block: Tensor) -> list[Tensor]:
            following = (group_of(member).index(member) + 1) % ranks
            return [block if k == following else block.new_empty(0) for k in range(ranks)]

        def shape_of(source: int, target: int) -> tuple[int, ...]:
            arrives = target == self.member_behind(source, -1)
            return (sum(map(math.prod, self.shapes(self.member_behind(source, step)))) if arrives else 0,)

        def from_before(member: int, *arrived: Tensor) -> Tensor:
            return arrived[(group_of(member).index(member) - 1) % ranks]

        pending = communicator_of(self.mesh).all_to_all(self.map(chunks, block), self.mesh_dims, shape_of)
        return lambda: self.map(from_before, *pending.wait())


def packed(_: int, key: Tensor, value: Tensor) -> Tensor:
    """A block as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def ring_of(at: KernelContext, scale: float | None) -> Ring:
    """The ring of an operator's call, where each rank has one piece of the sequence."""
    call = at.call
    layouts = [at.operands[call.names.index(name)] for name in ("key", "value")]

    def shapes(member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        key, value = (layout.shape_of(member) for layout in layouts)
        return key, value

    def held(name: str) -> Callable[[int], Pieces]:
        return lambda member: (at.held(name, 2, member),)

    return Ring(call.mesh, at.mesh_dims, held("query"), held("key"), shapes, call["is_causal"], scale)


def ring_attention(
    at: KernelContext, query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Output and rows' sums of each rank's queries, as the operator gives them."""
    return attend(ring_of(at, scale), query, key, value, attn_mask)


def attend(ring: Ring, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """Output and rows' sums of each rank's queries, which meet all keys; of a mask each rank has its rows."""

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(member: int, mask: Any, query: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            key, value = ring.unpacked(member, step, block)
            return parts(ring.meetings(member, step, mask), query, key, value)

        return run

    met: tuple[Any, Any] | None = None
    blocks = ring.map(packed, key, value)
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        here = ring.map(meet(step), mask, query, blocks)
        met = here if met is None else joined(*met, *here)
        if arriving is not None:
            blocks = arriving()
    assert met is not None
    return finished(query, *met)


def parts(meetings: list[list[Meeting]], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What keys in pieces give rows in pieces, as :func:`part` tells it."""
    if len(meetings) == len(meetings[0]) == 1:
        return part(meetings[0][0], query, key, value)
    rows = query.split([len(own[0].rows) for own in meetings], 2)
    blocks = list(zip(*(x.split([len(meeting.keys) for meeting in meetings[0]], 2) for x in (key, value)), strict=True))
    found = []
    for own, piece in zip(meetings, rows, strict=True):
        each = [part(meeting, piece, *block) for meeting, block in zip(own, blocks, strict=True)]
        found.append(functools.reduce(lambda met, here: joined(*met, *here), each))
    return torch.cat([out for out, _ in found], 2), torch.cat([sums for _, sums in found], 2)


@on_each_rank
def joined(out: Tensor, sums: Tensor, other: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the rows as one."""
    total = torch.logaddexp(sums, more)
    return out * share(sums, total) + other * share(more, total), total


def ring_gradients(
    at: KernelContext, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *flags: Any, **given: Any
) -> Any:
    """Gradients of each rank's queries, keys and values."""
    return attend_backward(ring_of(at, given.get("scale")), grad, query, key, value, out, sums, given.get("attn_mask"))


def attend_backward(
    ring: Ring, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, mask: Any = None
) -> tuple[Any, Any, Any]:
    """Gradients of each rank's queries, keys and values, of what :func:`attend` gave."""

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(member: int, mask: Any, block: Tensor, grad: Tensor, query: Tensor, *rest: Tensor) -> Any:
            key, value = ring.unpacked(member, step, block)
            dq, dk, dv = parts_gradients(ring.meetings(member, step, mask), grad, query, key, value, *rest)
            return dq, packed(member, dk, dv).to(sums_dtype(query))

        return run

    blocks, total, own, coming = ring.map(packed, key, value), None, None, None
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        of_rows, here = ring.map(meet(step), mask, blocks, grad, query, out, sums)
        total = of_rows.to(here.dtype) if total is None else total + of_rows
        if own is None:
            own = here
        else:
            coming = ring.passed_on(here if coming is None else here + coming(), step)
        if arriving is not None:
            blocks = arriving()

    def at_home(member: int, total: Tensor, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = ring.unpacked(member, 0, both)
        return total.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)

    found: tuple[Any, Any, Any] = ring.map(at_home, total, query, own if coming is None else own + coming())
    return found


def parts_gradients(
    meetings: list[list[Meeting]], grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor
) -> Gradients:
    """The gradients that rows in pieces and keys in pieces give each other, added in the dtype of sums."""
    if len(meetings) == len(meetings[0]) == 1:
        return part_gradients(meetings[0][0], grad, query, key, value, *rest)
    lengths, widths = [len(own[0].rows) for own in meetings], [len(meeting.keys) for meeting in meetings[0]]
    dq, dk, dv = (torch.zeros_like(x, dtype=sums_dtype(query)) for x in (query, key, value))
    rows = list(zip(*(x.split(lengths, 2) for x in (grad, query, *rest, dq)), strict=True))
    blocks = list(zip(*(x.split(widths, 2) for x in (key, value, dk, dv)), strict=True))
    for own, (of_out, piece, *known, total) in zip(meetings, rows, strict=True):
        for meeting, (k, v, *totals) in zip(own, blocks, strict=True):
            found = part_gradients(meeting, of_out, piece, k, v, *known)
            for into, term in zip((total, *totals), found, strict=True):
                into += term
    return dq, dk, dv
