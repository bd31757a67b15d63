"""Attention of blocks of queries and keys, by the CPU operator, whose mask lets a block be computed; elsewhere written out.

A block of keys gives a part of every row, and parts are combined by the logarithms of the rows' sums: ``out = sum over blocks of
exp(lse_block - lse) * out_block`` (Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"). With the rows' global
``lse`` given, the backward pass of a block of keys is the operator itself. Under a causal mask a block before the rows is seen
whole, one behind them not at all, the own one causally; elsewhere the mask is written out.
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


# --- the operators, which divide by zero where there are no queries or no keys ---------------------------------------------
@on_each_rank
def attention_block(query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Rows without keys are zeros."""
    if query.numel() and key.numel():
        rows, sums = (flash_attention_on_cpu if is_served(query) else attention_written_out)(query, key, value, *args, **given)
        return rows, sums
    lead = query.shape[:3]
    return query.new_zeros(*lead, value.shape[3]), query.new_zeros(lead, dtype=sums_dtype(query))


@on_each_rank
def attention_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Gradients:
    if query.numel() and key.numel():
        run = aten._scaled_dot_product_flash_attention_for_cpu_backward.default if is_served(query) else gradients_written_out
        return run(grad, query, key, value, *args, **given)
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def is_served(query: Tensor) -> bool:
    """Whether the operator runs here."""
    return query.is_cpu or query.is_meta


def attention_written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What the operator gives; the weights of a block are whole in memory."""
    _, _, scores = _scores(query, key, is_causal, attn_mask, scale)
    sums = scores.logsumexp(-1)
    weights = _weights(scores, sums)
    return (weights @ _by_query_head(value, query).to(weights.dtype)).to(query.dtype), sums


def gradients_written_out(
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
    query_, key_, scores = _scores(query, key, is_causal, attn_mask, scale)
    weights, upstream = _weights(scores, sums), grad.to(scores.dtype)
    own = (upstream * out).sum(-1, keepdim=True)
    scores = weights * (upstream @ _by_query_head(value, query).to(weights.dtype).mT - own)
    step = _scale_of(query, scale)
    found = scores @ key_ * step, scores.mT @ query_ * step, weights.mT @ upstream
    grouped = [x.unflatten(1, (key.shape[1], -1)).sum(2) for x in found[1:]]
    return tuple(x.to(like.dtype) for x, like in zip((found[0], *grouped), (query, key, value), strict=True))


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, one for each head, in the dtype of sums, and their products, masked."""
    query_, key_ = (x.to(sums_dtype(query)) for x in (query, _by_query_head(key, query)))
    scores = query_ @ key_.mT * _scale_of(query, scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return query_, key_, scores


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Of rows that see nothing: zeros."""
    return (scores - sums.masked_fill(sums == -math.inf, 0.0).unsqueeze(-1)).exp()


def _scale_of(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _by_query_head(x: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values repeated for the heads of queries that share them."""
    each = query.shape[1] // x.shape[1]
    return x if each == 1 else x.repeat_interleave(each, 1)


def sums_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


# --- rows meet a block of keys ---------------------------------------------------------------------------------------------
class Meeting(NamedTuple):
    """Positions in the sequences of the rows and of the keys that they meet, the operator's other arguments, the whole mask."""

    rows: range
    keys: range
    causal: bool
    scale: float | None
    mask: Tensor | None

    def seen(self, like: Tensor) -> dict[str, Any] | None:
        """What the operator is told of masks; None where the rows see nothing of the keys."""
        rows, keys, mask = self.rows, self.keys, self.mask
        if not keys or (self.causal and keys.start >= rows.stop):
            return None
        if mask is not None and mask.shape[-1] not in (1, len(keys)):
            mask = mask[..., keys.start : keys.stop]
        own = self.causal and mask is None and keys.start == rows.start and len(rows) <= len(keys)
        if self.causal and not own and keys.stop > rows.start + 1:
            causal = visible(rows, keys, like)
            mask = causal if mask is None else mask + causal  # a row may see nothing by both together
        return {"is_causal": own, "attn_mask": mask, "scale": self.scale}


def visible(rows: range, keys: range, like: Tensor) -> Tensor:
    """The causal mask of a block as an additive one: 0 where key j <= query i, else -inf."""
    i = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    return torch.zeros(len(rows), len(keys), dtype=like.dtype, device=like.device).masked_fill_(j > i, -math.inf)


def part(meeting: Meeting, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What the keys give the rows, and the logarithms of the rows' sums: -inf of rows that see none of them."""
    seen = meeting.seen(query)
    if seen is None:
        rows, dtype = query.shape[:3], sums_dtype(query)
        return query.new_zeros(*rows, value.shape[3]), query.new_full(rows, -math.inf, dtype=dtype)
    out, sums = attention_block(query, key, value, 0.0, **seen)
    mask = seen["attn_mask"]
    return out, sums if mask is None else sums.masked_fill((mask == -math.inf).all(-1), -math.inf)


def part_gradients(meeting: Meeting, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Gradients:
    """The gradients that rows and keys give each other, with the rows' results ``rest`` of the whole."""
    seen = meeting.seen(query)
    if seen is None:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    causal = seen.pop("is_causal")
    return attention_gradients(grad, query, key, value, *rest, 0.0, causal, **seen)


def share(sums: Tensor, total: Tensor) -> Tensor:
    """What a part of a row weighs in it, by the logarithms of their sums."""
    return torch.where(sums == -math.inf, 0.0, (sums - total).exp()).unsqueeze(-1)


@on_each_rank
def weighed(out: Tensor, sums: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A part of the rows as a term of the whole, and the logarithms of the whole's sums."""
    total = torch.stack(parts).logsumexp(0)
    return out.to(total.dtype) * share(sums, total), total


@on_each_rank
def finished(query: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """As the operator gives them: sums of 0 for rows that see nothing."""
    return out.to(query.dtype), torch.where(total == -math.inf, 0.0, total)


# --- kernels: a block of rows meets all keys, or all rows meet a block of keys ----------------------------------------------
def meeting_of(at: KernelContext, here: At, scale: float | None, mask: Tensor | None) -> Meeting:
    """Each rank's own rows and keys."""
    return Meeting(at.held("query", 2, here.member), at.held("key", 2, here.member), at.call["is_causal"], scale, mask)


def attention_of_blocks(
    at: KernelContext, query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Each block of keys gives a part of every row; the parts are weighted by their share of the row's sum and added."""

    def own(here: At, mask: Tensor | None, *block: Tensor) -> tuple[Tensor, Tensor]:
        return part(meeting_of(at, here, scale, mask), *block)

    out, sums = at.map(own, attn_mask, query, key, value)
    if "s" in at.splits:
        terms, sums = weighed(out, sums, at.all_gather(sums))
        out = at.all_reduce(terms, "sum")
    return finished(query, out, sums)


def gradients_of_blocks(at: KernelContext, *block: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """Terms of the gradients, of a block of queries or of keys."""

    def own(here: At, mask: Tensor | None, *block: Tensor) -> Gradients:
        return part_gradients(meeting_of(at, here, scale, mask), *block)

    return at.map(own, attn_mask, *block[:6])
