"""Ring attention: queries stay, blocks of keys and values travel around the ranks until each has met every query.

Each rank combines the parts of its rows as they come, by the logarithms of the rows' sums (online softmax), so that it never
holds more than two blocks of keys: its own share of the sequence and the next one, which arrives while it computes. Backward
sends gradients of keys and values on with their block; the last pass brings them home. A causal mask needs no mask here: a block
of keys before the rows is seen whole, one behind them not at all, the own one causally (Liu et al. 2023, "Ring attention with
blockwise transformers for near-infinite context", arXiv:2310.01889).

Cost: with n ranks n - 1 passes of one block of keys and values, in backward n - 1 more of their gradients: the bytes of an
all-gather (and a reduce-scatter), without its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..kernels import At, KernelContext
from .attention_blocks import attention_block, attention_gradients, row_sums, share, span, sums_dtype, unseen


def ranks_in_ring(call: Call) -> int:
    """How many ranks cut queries, keys and values alike along sequences of one length; 1: there is no ring."""
    query, key, value = (call.operands[call.names.index(name)] for name in ("query", "key", "value"))
    if query.shape[2] != key.shape[2]:
        return 1
    cuts = [() if layout.splits[2] is None else layout.splits[2].mesh_dims for layout in (query, key, value)]
    return math.prod(call.mesh.shape[dim] for dim in cuts[0] if dim in cuts[1] and dim in cuts[2])


@dataclass(frozen=True, slots=True)
class Ring:
    """Blocks of keys and values on their way; after ``step`` passes a rank holds the block of the rank ``step`` places before."""

    at: KernelContext

    @property
    def ranks(self) -> int:
        return len(self.at.sizes)

    def origin(self, member: int, step: int) -> int:
        """Whose block ``member`` holds."""
        group = self.at.call.mesh.members_of(self.at.mesh_dims, member)
        return group[(group.index(member) - step) % len(group)]

    def shapes(self, member: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys and the values that ``member`` holds."""
        coordinate = self.at.call.mesh.coordinates[self.origin(member, step)]
        key, value = (self.at.operands[self.at.call.names.index(name)] for name in ("key", "value"))
        return key.local_shape(coordinate), value.local_shape(coordinate)

    def unpacked(self, member: int, step: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        shapes = self.shapes(member, step)
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def passed_on(self, block: Any, step: int) -> Callable[[], Any]:
        """Every rank's ``block`` under way to the rank behind it; a call waits for the one that comes."""
        ranks, mesh, mesh_dims = self.ranks, self.at.call.mesh, self.at.mesh_dims

        def chunks(here: At, block: Tensor) -> list[Tensor]:
            return [block if k == (here.index + 1) % ranks else block.new_empty(0) for k in range(ranks)]

        def shape_of(source: int, target: int) -> tuple[int, ...]:
            group = mesh.members_of(mesh_dims, source)
            following = group[(group.index(source) + 1) % ranks]
            return (sum(map(math.prod, self.shapes(source, step))) if target == following else 0,)

        pending = self.at.comm.all_to_all(self.at.map(chunks, block), mesh_dims, shape_of, async_op=True)
        return lambda: self.at.map(lambda here, *arrived: arrived[(here.index - 1) % ranks], *pending.wait())


def packed(_: At, key: Tensor, value: Tensor) -> Tensor:
    """A block as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def seen_by(ring: Ring, here: At, step: int, causal: bool, mask: Tensor | None) -> tuple[bool, bool, Tensor | None]:
    """(whether the rows here see anything of the block, whether causally, the columns of the mask that belong to it)."""
    origin = ring.origin(here.member, step)
    columns = span(ring.at, "key", origin)
    if mask is not None and mask.shape[-1] != 1:
        mask = mask[..., columns.start : columns.stop]
    return not causal or columns.start <= here.offset, causal and step == 0, mask


def ring_attention(
    at: KernelContext,
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    """Output and rows' sums of each rank's queries, as the operator gives them."""
    ring = Ring(at)

    def start(_: At, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows, dtype = query.shape[:3], sums_dtype(query)
        return query.new_zeros(*rows, value.shape[3], dtype=dtype), query.new_full(rows, -math.inf, dtype=dtype)

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(here: At, query: Tensor, block: Tensor, mask: Any, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
            seen, causal, mask = seen_by(ring, here, step, is_causal, mask)
            if not seen:
                return out, sums
            key, value = ring.unpacked(here.member, step, block)
            part, own = attention_block(query, key, value, dropout_p, causal, attn_mask=mask, scale=scale)
            own = own.masked_fill(unseen(query, key, mask), -math.inf) if mask is not None or not key.numel() else own
            total = torch.logaddexp(sums, own)
            return out * share(sums, total) + part * share(own, total), total

        return run

    blocks = at.map(packed, key, value)
    out, sums = at.map(start, query, value)
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        out, sums = at.map(meet(step), query, blocks, attn_mask, out, sums)
        if arriving is not None:
            blocks = arriving()
    return at.map(lambda _, out, query: out.to(query.dtype), out, query), at.map(lambda _, sums: row_sums(sums), sums)


def ring_gradients(
    at: KernelContext,
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    sums: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    """Gradients of each rank's queries, keys and values."""
    ring = Ring(at)

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(here: At, block: Tensor, mask: Any, total: Tensor, grad: Tensor, query: Tensor, *rest: Tensor) -> Any:
            seen, causal, mask = seen_by(ring, here, step, is_causal, mask)
            if not seen:
                return total, torch.zeros_like(block, dtype=total.dtype)
            key, value = ring.unpacked(here.member, step, block)
            dq, dk, dv = attention_gradients(grad, query, key, value, *rest, dropout_p, causal, attn_mask=mask, scale=scale)
            return total + dq, packed(here, dk, dv).to(total.dtype)

        return run

    blocks = at.map(packed, key, value)
    total = at.map(lambda _, query: torch.zeros_like(query, dtype=sums_dtype(query)), query)
    own, coming = None, None
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        total, here = at.map(meet(step), blocks, attn_mask, total, grad, query, out, sums)
        if step == 0:
            own = here
        else:
            coming = ring.passed_on(here if coming is None else here + coming(), step)
        if arriving is not None:
            blocks = arriving()

    def finished(here: At, total: Tensor, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = ring.unpacked(here.member, 0, both)
        return total.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)

    assert coming is not None, "a ring has two ranks or more"
    return at.map(finished, total, query, own + coming())
