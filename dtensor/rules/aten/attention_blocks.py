"""Attention of blocks of queries and keys, for the CPU operator, whose mask argument lets a block be computed.

Queries of one block see all keys: without a causal mask the operator does that by itself, with one the mask is written out
for its rows. Keys of one block give a part of every row, combined by the logarithms of the rows' sums: ``out = sum over
blocks of exp(lse_block - lse) * out_block`` (Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"). With the
rows' global ``lse`` given, the backward pass of a block of keys is the operator itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..blockwise import on_each_rank
from ..kernels import KernelContext

aten = torch.ops.aten


def visible(here_rows: range, here_keys: range, like: Tensor) -> Tensor:
    """The causal mask of a block as an additive one: 0 where key j <= query i, else -inf."""
    rows = torch.arange(here_rows.start, here_rows.stop, device=like.device)[:, None]
    keys = torch.arange(here_keys.start, here_keys.stop, device=like.device)[None, :]
    return torch.zeros(len(here_rows), len(here_keys), dtype=like.dtype, device=like.device).masked_fill_(keys > rows, -math.inf)


def span(at: KernelContext, name: str, member: int) -> range:
    """The positions of its sequence that a member's block of operand ``name`` holds."""
    layout, coordinate = at.operands[at.call.names.index(name)], at.call.mesh.coordinates[member]
    start = layout.local_offset(coordinate)[2]
    return range(start, start + layout.local_shape(coordinate)[2])


def block_mask(at: KernelContext, member: int, query: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """The mask of a block: the one given, or the causal one written out."""
    return visible(span(at, "query", member), span(at, "key", member), query) if causal else mask


@on_each_rank
def attention_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator, which divides by zero where there are no queries or no keys; rows without keys are zeros."""
    if query.numel() and key.numel():
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    rows = query.shape[:3]
    return query.new_zeros(*rows, value.shape[3]), query.new_zeros(rows, dtype=sums_dtype(query))


def sums_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


@on_each_rank
def attention_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward operator, with the same care for empty blocks."""
    if query.numel() and key.numel():
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def attention_of_rows(
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
    """Causal attention of some queries to all keys: no communication."""

    def one(here: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        mask = block_mask(at, here.member, query, is_causal, mask)
        return attention_block(query, key, value, dropout_p, False, attn_mask=mask, scale=scale)

    return at.map(one, query, key, value, attn_mask)


def attention_over_keys(
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
    """Each block of keys gives a part of every row; the parts are weighted by their share of the row's sum and added."""

    def part(here: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = block_mask(at, here.member, query, is_causal, mask)
        out, sums = attention_block(query, key, value, dropout_p, False, attn_mask=mask, scale=scale)
        return out, sums.contiguous().masked_fill_(unseen(query, key, mask), -math.inf)

    out, sums = at.map(part, query, key, value, attn_mask)
    gathered = at.all_gather(sums, lambda member: at.operands[0].local_shape(at.call.mesh.coordinates[member])[:3])

    def weighted(_: Any, out: Tensor, own: Tensor, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.stack(blocks).logsumexp(0)
        return out.to(total.dtype) * share(own, total), row_sums(total)

    parts, total = at.map(weighted, out, sums, *gathered)
    whole = at.all_reduce(parts, "sum")
    return at.map(lambda _, whole, query: whole.to(query.dtype), whole, query), total


def share(part: Tensor, total: Tensor) -> Tensor:
    """What a part of a row weighs in it, by the logarithms of their sums."""
    return torch.where(part == -math.inf, 0.0, (part - total).exp()).unsqueeze(-1)


def row_sums(total: Tensor) -> Tensor:
    """As the operator gives them: 0 for rows that see nothing."""
    return torch.where(total == -math.inf, 0.0, total)


def unseen(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Rows that see no key of the block, broadcastable to (batch, heads, queries)."""
    if mask is None or not key.shape[2]:
        return torch.full((1, 1, 1), key.shape[2] == 0, device=query.device)
    return (mask == -math.inf).all(-1)


def gradients_of_blocks(
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
    """Gradients that a block of queries or of keys gives, the causal mask written out for it."""

    def one(
        here: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None
    ) -> Any:
        mask = block_mask(at, here.member, query, is_causal, mask)
        return attention_gradients(grad, query, key, value, out, sums, dropout_p, False, attn_mask=mask, scale=scale)

    return at.map(one, grad, query, key, value, out, sums, attn_mask)
