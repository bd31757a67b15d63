"""Operations that are others put together: where all parts have rules, so have they.

They are called with DTensors, and each part is placed by its own rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride, memory_order, outermost_first
from ...base.torch_internals import assert_async
from ..verbs import composed

aten = torch.ops.aten


# --- masks: the elements that a mask picks, in row-major order ---
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask) if x.ndim or mask.ndim else (x.reshape(1), mask.reshape(1))
    return aten.index.Tensor(x, [mask])


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The k-th element picked is the k-th of the source."""
    x, whole = torch.broadcast_tensors(x, mask)
    if source.numel() < whole.numel():
        assert_async(whole.sum() <= source.numel(), "Number of elements of source < number of ones in mask")
    place = whole.reshape(-1).cumsum(0).sub(1).clamp(min=0).view(whole.shape)
    if not source.numel():
        return x.clone(memory_format=torch.contiguous_format)
    values = source.reshape(-1).take(place.clamp(max=source.numel() - 1))
    return torch.where(whole, values, x).contiguous()  # row-major, whatever comes in


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    picked, total = masked_select(grad, mask), math.prod(sizes)
    return torch.nn.functional.pad(picked, (0, total - picked.shape[0])).view(sizes)


def unsafe_masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any) -> Tensor:
    if not x.numel():
        places = [None if index is None else torch.zeros_like(index) for index in indices]
        return x.new_full(aten._unsafe_index(x.new_empty([max(1, size) for size in x.shape]), places).shape, fill)
    return aten._unsafe_index.Tensor(x, _inside(x, indices)).masked_fill(mask.logical_not(), fill)


def unsafe_masked_index_put(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    if not x.numel():
        return x.clone()
    return aten._unsafe_index_put.default(x, _inside(x, indices), values.masked_fill(mask.logical_not(), 0), True)


def _inside(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if index is None else index.clamp(min=-size, max=size - 1) for index, size in zip(indices, x.shape, strict=False)
    ]


composed("masked_select", masked_select, "expand, index by mask")
composed("masked_scatter", masked_scatter, "cumsum, take, where")
composed("masked_scatter_backward", masked_scatter_backward, "masked_select, pad")
composed("_unsafe_masked_index", unsafe_masked_index, "clamp, _unsafe_index, masked_fill")
composed("_unsafe_masked_index_put_accumulate", unsafe_masked_index_put, "clamp, masked_fill, _unsafe_index_put")


# --- shapes ---
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    rows = x.nonzero()[:size]
    return torch.nn.functional.pad(rows, (0, 0, 0, size - rows.shape[0]), value=fill_value).contiguous()


def chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Tensor:
    """Each tensor in ``num_chunks`` padded chunks along ``dim``, the rest flat, one tensor's chunks beside another's."""
    if num_chunks < 1 or not tensors:
        raise RuntimeError("_chunk_cat expects a non-empty list of tensors and a positive num_chunks")
    dim, rows = dim % max(1, tensors[0].ndim), []
    for x in tensors:
        each = -(-x.shape[dim] // num_chunks)
        missing = each * num_chunks - x.shape[dim]
        padded = torch.nn.functional.pad(x, (*(0, 0) * (x.ndim - dim - 1), 0, missing)) if missing else x
        rows.append(padded.reshape(*x.shape[:dim], num_chunks, each * math.prod(x.shape[dim + 1 :])))
    return torch.cat(rows, dim + 1)


def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Each block between zeros, one below the other."""
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
        rows.append(torch.nn.functional.pad(x, (before, total - before - x.shape[1])))
        before += x.shape[1]
    return torch.cat(rows)


def zeros_like_other(x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """Where forward AD keeps the tangent of ``other``, after the batch dims that ``x`` has."""
    return torch.zeros_like(other.expand(*x.shape[:self_num_batch_dims], *other.shape) if self_num_batch_dims else other)


composed("_new_zeros_with_same_feature_meta", zeros_like_other, "zeros_like")


def resized(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """The elements as they lie in memory, as many as there is room for; what comes after them is undefined (0 here)."""
    made = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    if x.shape == made.shape and (memory_format is None or x.stride() == made.stride()):
        return x
    if made.numel() <= x.numel() or memory_order(tuple(x.shape), x.stride()) is None:  # a view of the same memory
        same = made.numel() == x.numel() and x.is_contiguous() and made.is_contiguous()
        return x.view(size) if same else aten.as_strided.default(x, list(size), made.stride())
    flat, total = x.permute(outermost_first(x.stride())).reshape(-1), made.numel()
    flat = flat[:total] if total <= flat.shape[0] else torch.nn.functional.pad(flat, (0, total - flat.shape[0]))
    order = outermost_first(made.stride())
    return flat.view([made.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(made.ndim)])


def resized_as(x: Tensor, template: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    if memory_format is torch.preserve_format:
        formats = (torch.contiguous_format, *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(template.ndim, [])))
        memory_format = next((f for f in formats if template.is_contiguous(memory_format=f)), torch.contiguous_format)
    return resized(x, template.shape, memory_format=memory_format)


def set_to(x: Tensor, source: Tensor | None = None, offset: int = 0, size: Any = None, stride: Sequence[int] = ()) -> Tensor:
    """Other memory: that of ``source``, which a storage alone does not give."""
    if source is None:
        return x.new_empty(0)
    return source if size is None else source.as_strided(size, stride or contiguous_stride(tuple(size)), offset)


composed("set_", set_to, "as_strided, new_empty")
composed("resize_as_", resized_as, "permute, slice, pad, view")
composed("resize_", resized, "permute, slice, pad, view")
composed("nonzero_static", nonzero_static, "nonzero, pad")
composed("_chunk_cat", chunk_cat, "pad, reshape, cat")
composed("block_diag", block_diag, "pad, cat")


# --- norms of slices ---
def renorm(x: Tensor, p: Any, dim: int, maxnorm: Any) -> Tensor:
    """Slices whose norm is larger are scaled down to it."""
    if x.ndim < 2:
        raise RuntimeError(f"renorm: input needs at least 2 dimensions, got {x.ndim} dimensions")
    dim %= x.ndim
    rest = [d for d in range(x.ndim) if d != dim]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    norm = torch.linalg.vector_norm(x, p, rest, keepdim=True, dtype=wide)
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    return (x * factor.to(x.dtype)).contiguous()


composed("renorm", renorm, "linalg_vector_norm, where, mul")
