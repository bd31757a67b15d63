"""Decompositions: operations that are functions of other operators. They are called with DTensors, and each part follows its own
rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.memory_order import contiguous_stride, dims_outermost_first, memory_order
from ...base.torch_internals import assert_async
from ...errors import UnsupportedOperationError
from ..declare import composed
from ..op_traits import declare_traits

aten = torch.ops.aten


# --- masks: the selected elements, in row-major order ---
def _check_mask(mask: Tensor, name: str) -> None:
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"{name} takes a boolean mask, got dtype {mask.dtype}")


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Compute ``masked_select`` by an index with the mask."""
    _check_mask(mask, "masked_select")
    x, mask = torch.broadcast_tensors(x, mask) if x.ndim or mask.ndim else (x.reshape(1), mask.reshape(1))
    return aten.index.Tensor(x, [mask])


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Compute ``masked_scatter``: the k-th element where the mask is True becomes the k-th element of ``source``."""
    _check_mask(mask, "masked_scatter")
    x, full_mask = torch.broadcast_tensors(x, mask)
    if source.numel() < full_mask.numel():
        assert_async(full_mask.sum() <= source.numel(), "Number of elements of source < number of ones in mask")
    source_positions = full_mask.reshape(-1).cumsum(0).sub(1).clamp(min=0).view(full_mask.shape)
    if not source.numel():
        return x.clone(memory_format=torch.contiguous_format)
    values = source.reshape(-1).take(source_positions.clamp(max=source.numel() - 1))
    return torch.where(full_mask, values, x).contiguous()  # row-major for any input


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    selected, total = masked_select(grad, mask), math.prod(sizes)
    return F.pad(selected, (0, total - selected.shape[0])).view(sizes)


def unsafe_masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Tensor:
    """Compute ``_unsafe_masked_index``: index ``x``, with ``fill`` where the mask is False. Indices there may be out of range."""
    if not x.numel():
        places = [None if index is None else torch.zeros_like(index) for index in indices]
        return x.new_full(aten._unsafe_index(x.new_empty([max(1, size) for size in x.shape]), places).shape, fill)
    return aten._unsafe_index.Tensor(x, _clamp_indices(x, indices)).masked_fill(mask.logical_not(), fill)


def unsafe_masked_index_put(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """Copy ``x``, and add values at the indices where the mask is True. Indices elsewhere may be out of range."""
    if not x.numel():
        return x.clone()
    return aten._unsafe_index_put.default(x, _clamp_indices(x, indices), values.masked_fill(mask.logical_not(), 0), True)


def _clamp_indices(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Clamp the indices of each dim to its range, so that masked ones are valid."""
    return [
        None if index is None else index.clamp(min=-size, max=size - 1) for index, size in zip(indices, x.shape, strict=False)
    ]


composed("masked_select", masked_select)
composed("masked_scatter", masked_scatter)
composed("masked_scatter_backward", masked_scatter_backward)
composed("_unsafe_masked_index", unsafe_masked_index)
composed("_unsafe_masked_index_put_accumulate", unsafe_masked_index_put)


# --- shapes ---
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    rows = x.nonzero()[:size]
    return F.pad(rows, (0, 0, 0, size - rows.shape[0]), value=fill_value).clone(memory_format=torch.contiguous_format)


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Tensor:
    """Compute ``_chunk_cat``: split each tensor into padded chunks along ``dim``, flatten them, and join the tensors."""
    aten._chunk_cat(
        [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors], dim, num_chunks
    )  # raise what torch raises
    dim, rows = dim % max(1, tensors[0].ndim), []
    for x in tensors:
        chunk_size = -(-x.shape[dim] // num_chunks)
        missing = chunk_size * num_chunks - x.shape[dim]
        padded = F.pad(x, (*(0, 0) * (x.ndim - dim - 1), 0, missing)) if missing else x
        rows.append(padded.reshape(*x.shape[:dim], num_chunks, chunk_size * math.prod(x.shape[dim + 1 :])))
    return torch.cat(rows, dim + 1)


def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Build the matrix that has the tensors as blocks on its diagonal, and zeros elsewhere."""
    for i, x in enumerate(tensors):
        if x.ndim > 2:
            raise RuntimeError(
                f"torch.block_diag: Input tensors must have 2 or fewer dimensions. Input {i} has {x.ndim} dimensions"
            )
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    blocks = [torch.atleast_2d(x).to(dtype) for x in tensors]
    total, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(F.pad(x, (before, total - before - x.shape[1])))
        before += x.shape[1]
    return torch.cat(rows)


def zeros_like_other(x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Return zeros like ``other`` with the batch dims of ``x`` in front, for the tangents of forward AD."""
    return torch.zeros_like(other.expand(*x.shape[:self_num_batch_dims], *other.shape) if self_num_batch_dims else other)


composed("_new_zeros_with_same_feature_meta", zeros_like_other)


def resize_decomposition(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize ``x``: keep its elements in memory order, as many as fit. New elements are 0 (in torch undefined)."""
    target = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    if x.shape == target.shape and (memory_format is None or x.stride() == target.stride()):
        return x
    if target.numel() <= x.numel() or memory_order(tuple(x.shape), x.stride()) is None:  # a view of the same memory
        same = target.numel() == x.numel() and x.is_contiguous() and target.is_contiguous()
        return x.view(size) if same else aten.as_strided.default(x, list(size), target.stride())
    if x._base is not None and x.numel():
        raise UnsupportedOperationError(
            f"resize_: a view of shape {tuple(x.shape)} cannot grow to {tuple(size)}, beyond its elements in "
            "the storage of its base; resize the base, or a clone"
        )
    flat, total = x.permute(dims_outermost_first(x.stride())).reshape(-1), target.numel()
    flat = flat[:total] if total <= flat.shape[0] else F.pad(flat, (0, total - flat.shape[0]))
    order = dims_outermost_first(target.stride())
    return flat.view([target.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(target.ndim)])


def resize_as_decomposition(x: Tensor, template: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Resize ``x`` to the shape of a template, also to its memory format if the format is to be preserved."""
    if memory_format is torch.preserve_format:
        formats = (torch.contiguous_format, *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(template.ndim, [])))
        memory_format = next((f for f in formats if template.is_contiguous(memory_format=f)), torch.contiguous_format)
    return resize_decomposition(x, template.shape, memory_format=memory_format)


def set_decomposition(
    x: Tensor, source: Tensor | None = None, offset: int = 0, size: Any = None, stride: Sequence[int] = ()
) -> Tensor:
    """Return ``source``, or a strided view of it, as the new memory of ``x``. Refuse a plain storage."""
    if source is None:
        return x.new_empty(0)
    if not isinstance(source, Tensor):
        raise UnsupportedOperationError(
            "x.set_(source) on a DTensor takes a DTensor and shares its storage; a plain storage has no layout"
        )
    return source if size is None else source.as_strided(size, stride or contiguous_stride(tuple(size)), offset)


composed("set_", set_decomposition)
composed("resize_as_", resize_as_decomposition)
composed("resize_", resize_decomposition)
composed("nonzero_static", nonzero_static)
composed("_chunk_cat", chunk_cat)
composed("block_diag", block_diag)


# --- norms of slices ---
def renorm(x: Tensor, p: Any, dim: int, maxnorm: Any) -> Tensor:
    """Scale each slice along ``dim`` down to norm ``maxnorm`` if its norm is larger."""
    if x.ndim < 2:
        raise RuntimeError(f"renorm: input needs at least 2 dimensions, got {x.ndim} dimensions")
    dim %= x.ndim
    rest = [d for d in range(x.ndim) if d != dim]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    norm = torch.linalg.vector_norm(x, p, rest, keepdim=True, dtype=wide)
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    return (x * factor.to(x.dtype)).contiguous()


composed("renorm", renorm)


# --- gradients of torch.amp.GradScaler ---
def check_and_unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients in place for ``GradScaler``, and set ``found_inf`` to 1 on all ranks if any element is not finite.

    The largest magnitude is not finite exactly if some element is not. So one reduction gives all ranks the same answer.
    """
    largest = torch.stack(list(torch._foreach_norm(grads, float("inf"))))
    broken: Any = largest.isfinite().all().logical_not().to(found_inf.dtype)
    found_everywhere = broken if hasattr(found_inf, "_layout") else broken.full_tensor()
    torch.maximum(found_inf, found_everywhere, out=found_inf)
    torch._foreach_mul_(grads, inv_scale.reshape(()))  # both are one number, of any shape


composed("_amp_foreach_non_finite_check_and_unscale_", check_and_unscale)
declare_traits("_amp_foreach_non_finite_check_and_unscale", per_element=True)


# --- the fused inference operators of nn.TransformerEncoderLayer and nn.MultiheadAttention ---
def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the fused inference operator of ``nn.MultiheadAttention`` from parts: output, and weights if requested."""
    projected = [
        F.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    ]
    is_hidden = None if mask is None else broadcast_mask(mask, mask_type)
    weights = None
    if need_weights:
        q, k, v = projected
        scores = (q * (embed_dim // num_head) ** -0.5) @ k.transpose(-2, -1)
        weights = (scores if is_hidden is None else scores.masked_fill(is_hidden, float("-inf"))).softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        q, k, v = projected
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if is_hidden is None else is_hidden.logical_not())
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def broadcast_mask(mask: Tensor, mask_type: int | None) -> Tensor:
    """Return a boolean mask that is True at hidden keys, and that broadcasts to (batch, heads, queries, keys).

    Mask type 0 is (queries, keys), 1 is (batch, keys), 2 is full. Masks of numbers hide where they are not zero, as in the
    operator.
    """
    hidden = mask.bool()
    return hidden[:, None, None, :] if mask_type == 1 else hidden


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Compute the fused inference operator of ``nn.TransformerEncoderLayer`` from its parts."""

    def self_attention(x: Tensor) -> Tensor:
        own = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *own, mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + self_attention(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + self_attention(src))
    return norm_2(x + feed_forward(x))


composed("_native_multi_head_attention", native_multi_head_attention)
composed("_transformer_encoder_layer_fwd", transformer_encoder_layer)
