"""Blocks of attention: output and gradients for a block of queries and a block of keys, by the CPU operator or a reference.

A block of keys gives a partial output of every row. Partial outputs are combined by the logarithms of the rows' sums: ``out = sum
over blocks of exp(lse_block - lse) * out_block`` (Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"). With the
rows' global ``lse``, the backward pass of a block of keys is the operator itself. Under a causal mask, a block of keys before the
rows is visible, one after them is not, and the rows' own block is causal. Otherwise the mask is made explicitly.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....base.torch_internals import flash_attention_on_cpu
from ...kernel_context import At, KernelContext, on_each_rank

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


# --- operators on blocks, which may be empty -------------------------------------------------------------------------------
@on_each_rank
def attention_block(query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """Compute attention of a block of queries and a block of keys: output and log-sum of each row; zeros if a block is empty."""
    if query.numel() and key.numel():
        rows, sums = (flash_attention_on_cpu if has_fused_kernel(query) else attention_reference)(
            query, key, value, *args, **keywords
        )
        return rows, sums
    lead = query.shape[:3]
    return query.new_zeros(*lead, value.shape[3]), query.new_zeros(lead, dtype=sums_dtype(query))


@on_each_rank
def attention_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Gradients:
    """Compute the gradients of attention on one block, by the CPU operator or the reference; zeros if a block is empty."""
    if query.numel() and key.numel():
        run = (
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default if has_fused_kernel(query) else gradients_reference
        )
        return run(grad, query, key, value, *args, **keywords)
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def has_fused_kernel(query: Tensor) -> bool:
    """Return True if the CPU attention operator runs on the device of ``query``."""
    return query.is_cpu or query.is_meta


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention like the CPU operator, for other devices: with all weights of the block in memory."""
    _, _, scores = _masked_scores(query, key, is_causal, attn_mask, scale)
    sums = scores.logsumexp(-1)
    weights = _softmax_weights(scores, sums)
    return (weights @ _repeat_key_heads(value, query).to(weights.dtype)).to(query.dtype), sums


def gradients_reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    """Compute the gradients of attention like the CPU operator, for other devices: with all weights of the block in memory."""
    query_, key_, scores = _masked_scores(query, key, is_causal, attn_mask, scale)
    weights, upstream = _softmax_weights(scores, sums), grad.to(scores.dtype)
    row_dot = (upstream * out).sum(-1, keepdim=True)
    scores = weights * (upstream @ _repeat_key_heads(value, query).to(weights.dtype).mT - row_dot)
    step = _scale_or_default(query, scale)
    gradients = scores @ key_ * step, scores.mT @ query_ * step, weights.mT @ upstream
    grouped = [x.unflatten(1, (key.shape[1], -1)).sum(2) for x in gradients[1:]]
    return tuple(x.to(like.dtype) for x, like in zip((gradients[0], *grouped), (query, key, value), strict=True))


def _masked_scores(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys repeated for the query heads, and their scaled and masked products, all in the dtype of sums."""
    query_, key_ = (x.to(sums_dtype(query)) for x in (query, _repeat_key_heads(key, query)))
    scores = query_ @ key_.mT * _scale_or_default(query, scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return query_, key_, scores


def _softmax_weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the softmax weights of the keys from scores and log-sums; zeros for rows that attend to nothing."""
    return (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()


def _scale_or_default(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _repeat_key_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat each head of keys or values for the query heads that share it (grouped queries)."""
    each = query.shape[1] // x.shape[1]
    return x if each == 1 else x.repeat_interleave(each, 1)


def sums_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


# --- a block of rows (queries) and a block of keys -------------------------------------------------------------------------
class BlockPair(NamedTuple):
    """A block of queries (rows) and a block of keys: their sequence positions, the complete mask, and the operator's settings."""

    rows: range
    keys: range
    causal: bool
    scale: float | None
    mask: Tensor | None

    def mask_arguments(self, like: Tensor) -> dict[str, Any] | None:
        """Return the operator's mask arguments for this pair of blocks, or None if no row attends to any of the keys."""
        rows, keys, mask = self.rows, self.keys, self.mask
        if not keys or (self.causal and keys.start >= rows.stop):
            return None
        if mask is not None and mask.shape[-1] not in (1, len(keys)):
            mask = mask[..., keys.start : keys.stop]
        is_own_block = self.causal and mask is None and keys.start == rows.start and len(rows) <= len(keys)
        if self.causal and not is_own_block and keys.stop > rows.start + 1:
            causal = make_causal_bias(rows, keys, like)
            mask = causal if mask is None else mask + causal  # both masks together may hide everything from a row
        return {"is_causal": is_own_block, "attn_mask": mask, "scale": self.scale}


def make_causal_bias(rows: range, keys: range, like: Tensor) -> Tensor:
    """Return the causal mask of a pair of blocks as a bias: 0 where key position <= query position, else -inf."""
    query_positions = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    key_positions = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    return torch.zeros(len(rows), len(keys), dtype=like.dtype, device=like.device).masked_fill_(
        key_positions > query_positions, -math.inf
    )


def partial_attention(pair: BlockPair, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention of a block of rows on a block of keys: partial output, and log-sum of each row (-inf without keys)."""
    mask_arguments = pair.mask_arguments(query)
    if mask_arguments is None:
        rows, dtype = query.shape[:3], sums_dtype(query)
        return query.new_zeros(*rows, value.shape[3]), query.new_full(rows, -math.inf, dtype=dtype)
    out, sums = attention_block(query, key, value, 0.0, **mask_arguments)
    mask = mask_arguments["attn_mask"]
    return out, sums if mask is None else sums.masked_fill((mask == -math.inf).all(-1), -math.inf)


def partial_gradients(pair: BlockPair, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Gradients:
    """Compute the gradients of rows and keys that come from this pair of blocks.

    ``rest``: outputs and log-sums of the rows over all keys.
    """
    mask_arguments = pair.mask_arguments(query)
    if mask_arguments is None:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    causal = mask_arguments.pop("is_causal")
    return attention_gradients(grad, query, key, value, *rest, 0.0, causal, **mask_arguments)


def row_weight(sums: Tensor, total: Tensor) -> Tensor:
    """Return the weight of a partial output in the combined output of its row, from its log-sum and the total log-sum."""
    return torch.where(sums == -math.inf, 0.0, (sums - total).exp()).unsqueeze(-1)


@on_each_rank
def scale_partial_output(out: Tensor, sums: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight this rank's partial output, so that the outputs of all ranks add up, and return it with the total log-sums."""
    total = torch.stack(parts).logsumexp(0)
    return out.to(total.dtype) * row_weight(sums, total), total


@on_each_rank
def finish_rows(query: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Convert combined outputs to the dtype of the operator, and set log-sums of rows that attend to nothing to 0."""
    return out.to(query.dtype), torch.where(total == -math.inf, 0.0, total)


# --- kernels: sharded queries with all keys, or all queries with sharded keys -----------------------------------------------
def block_pair_of(at: KernelContext, here: At, scale: float | None, mask: Tensor | None) -> BlockPair:
    """Return the positions of one rank's queries and keys, with the operator's settings."""
    return BlockPair(
        at.block_range("query", 2, here.member), at.block_range("key", 2, here.member), at.call["is_causal"], scale, mask
    )


def attention_of_blocks(
    at: KernelContext, query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Compute attention with sharded queries or keys: for keys, partial outputs are weighted and all-reduced (a kernel)."""

    def attention_of_block(here: At, mask: Tensor | None, *block: Tensor) -> tuple[Tensor, Tensor]:
        return partial_attention(block_pair_of(at, here, scale, mask), *block)

    out, sums = at.map(attention_of_block, attn_mask, query, key, value)
    if "s" in at.splits:
        addends, sums = scale_partial_output(out, sums, at.all_gather(sums))
        out = at.all_reduce(addends, "sum")
    return finish_rows(query, out, sums)


def attention_gradients_of_blocks(at: KernelContext, *block: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """Compute each rank's addends of attention's gradients, for sharded queries or sharded keys (a kernel)."""

    def gradients_of_block(here: At, mask: Tensor | None, *block: Tensor) -> Gradients:
        return partial_gradients(block_pair_of(at, here, scale, mask), *block)

    return at.map(gradients_of_block, attn_mask, *block[:6])
