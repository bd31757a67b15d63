"""Chunks of a flattened stack: ``chunk``, ``split`` and slices of ``x.view(-1, k)``, computed as slices of ``x``.

Example: ``y.chunk(2, -1)`` of a fused gate and up projection. The last dim of ``y`` is flattened from ``(2, n)`` with ``n``
sharded, so each rank has elements of both halves. Below autograd, a half is a slice of a lazy view
(``views/fused_projection_slices.py``). Its derivative would concatenate gradients along the flattened dim, in an order that
local shards do not have. The derivative of stack positions stacks gradients, which moves nothing. So a part that consists of
complete stack positions is taken from the unflattened stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..views.flattened_sharded_dims import find_flattened_dim
from ..views.lazy_view import LazyView


def _stack_positions(x: Any, dim: int, ends: Sequence[int]) -> tuple[int, int, list[int]] | None:
    """Return the flattened dim, its elements for each index of the first flattened dim, and ``ends`` as such indices.

    Returns None if ``dim`` is not the flattened dim, an end is inside a position, or the positions are sharded.
    """
    flattened = find_flattened_dim(x)
    if flattened is None or not -x.ndim <= dim < x.ndim or dim % x.ndim != flattened[0]:
        return None
    dim, sizes, splits = flattened
    position_size = x.shape[dim] // sizes[0]
    if splits[0] is not None or any(end % position_size for end in ends):
        return None
    return dim, position_size, [end // position_size for end in ends]


def _flattened_positions(stack: Any, dim: int, start: int, end: int) -> Any:
    return stack.select(dim, start) if end == start + 1 else stack.narrow(dim, start, end - start).flatten(dim, dim + 1)


def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """Split a flattened dim at indices of the first dim that was flattened; NotImplemented for all other splits."""
    positions = _stack_positions(x, dim, ends := [0, *accumulate(sizes)]) if type(x) is LazyView else None
    if positions is None or len(sizes) < 2 or min(sizes) < 1 or ends[-1] != x.shape[dim]:
        return NotImplemented
    dim, position_size, ends = positions
    stack = x.unflatten(dim, (-1, position_size))
    if len(sizes) == ends[-1]:
        return list(stack.unbind(dim))
    parts = stack.split_with_sizes([end - start for start, end in pairwise(ends)], dim)
    return [part.squeeze(dim) if part.shape[dim] == 1 else part.flatten(dim, dim + 1) for part in parts]


def split(x: Any, size: int, dim: int = 0) -> Any:
    """Split a flattened dim into parts of ``size`` elements; see :func:`split_with_sizes`."""
    if type(x) is not LazyView or not -x.ndim <= dim < x.ndim or size < 1:
        return NotImplemented
    total = x.shape[dim]
    return split_with_sizes(x, [min(size, total - start) for start in range(0, total, size)], dim)


def _stack_behind(x: Any, dim: int) -> tuple[int, Any] | None:
    """Return the flattened dim of ``x``, and ``x`` unflattened, if ``dim`` is before that dim and its first part unsharded.

    Returns None otherwise.
    """
    flattened = find_flattened_dim(x)
    if flattened is None or flattened[2][0] is not None or not -x.ndim <= dim < x.ndim or dim % x.ndim >= flattened[0]:
        return None
    return flattened[0], x.unflatten(flattened[0], (flattened[1][0], -1))


def slice_of(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Slice a flattened dim at indices of its first part, or a dim before it, on the unflattened tensor; else NotImplemented."""
    if type(x) is not LazyView or not all(bound is None or type(bound) is int for bound in (start, end)):
        return NotImplemented
    if (behind := _stack_behind(x, dim)) is not None:
        at, stack = behind
        return torch.ops.aten.slice.Tensor(stack, dim % x.ndim, start, end, step).flatten(at, at + 1)
    if step != 1 or not -x.ndim <= dim < x.ndim:
        return NotImplemented
    first, last, _ = slice(start, end).indices(x.shape[dim])
    positions = _stack_positions(x, dim, (first, last)) if first < last else None
    if positions is None:
        return NotImplemented
    at, position_size, (first, last) = positions
    return _flattened_positions(x.unflatten(at, (-1, position_size)), at, first, last)


def select(x: Any, dim: int, index: int) -> Any:
    """Select along a dim before the flattened one, on the unflattened tensor; NotImplemented for all other dims."""
    behind = _stack_behind(x, dim)
    if behind is None:
        return NotImplemented
    at, stack = behind
    return stack.select(dim % x.ndim, index).flatten(at - 1, at)


def index(x: Any, indices: Sequence[Any]) -> Any:
    """Index a dim before the flattened one by an integer tensor, on the unflattened tensor; NotImplemented for all others."""
    dims = [dim for dim, tensor in enumerate(indices) if tensor is not None]
    behind = _stack_behind(x, dims[0]) if len(dims) == 1 and indices[dims[0]].dtype in (torch.int64, torch.int32) else None
    if behind is None:
        return NotImplemented
    at = behind[0] - 1 + indices[dims[0]].ndim
    return torch.ops.aten.index.Tensor(behind[1], indices).flatten(at, at + 1)
