"""Parts of a folded dim, taken as positions of the stack that it is folded from, above autograd.

Gate and up of one fused projection, ``(2, n)`` rows of which each rank has some of both, are ``y.chunk(2, -1)``: below autograd
that is a part of a view, which blocks show (``views/fused_projection_slices.py``), but its derivative joins the parts' gradients along the folded
dim, in an order that blocks do not have. Positions of the stack have a derivative that stacks them, and what is folded of a stack
moves nothing. So where every part is of whole positions, that is how they are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..views.flattened_sharded_dims import folded_dim
from ..views.lazy_view import RemoteView
from .above_autograd import recomposed


def _positions(x: Any, dim: int, ends: Sequence[int]) -> tuple[int, int, list[int]] | None:
    """The dim, how many elements of it are one position, and where parts that end there end in positions; None where a part is
    not of whole positions, or positions are cut."""
    found = folded_dim(x)
    if found is None or not -x.ndim <= dim < x.ndim or dim % x.ndim != found[0]:
        return None
    dim, sizes, cuts = found
    each = x.shape[dim] // sizes[0]
    if cuts[0] is not None or any(end % each for end in ends):
        return None
    return dim, each, [end // each for end in ends]


def _part(stack: Any, dim: int, start: int, end: int) -> Any:
    return stack.select(dim, start) if end == start + 1 else stack.narrow(dim, start, end - start).flatten(dim, dim + 1)


def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """As torch's, of a folded dim whose parts are positions of its stack; NotImplemented elsewhere."""
    found = _positions(x, dim, ends := [0, *accumulate(sizes)]) if type(x) is RemoteView else None
    if found is None or len(sizes) < 2 or min(sizes) < 1 or ends[-1] != x.shape[dim]:
        return NotImplemented
    dim, each, ends = found
    stack = x.unflatten(dim, (-1, each))
    if len(sizes) == ends[-1]:
        return list(stack.unbind(dim))
    parts = stack.split_with_sizes([end - start for start, end in pairwise(ends)], dim)
    return [part.squeeze(dim) if part.shape[dim] == 1 else part.flatten(dim, dim + 1) for part in parts]


def split(x: Any, size: int, dim: int = 0) -> Any:
    """As :func:`split_with_sizes`, in parts of one size."""
    if type(x) is not RemoteView or not -x.ndim <= dim < x.ndim or size < 1:
        return NotImplemented
    whole = x.shape[dim]
    return split_with_sizes(x, [min(size, whole - start) for start in range(0, whole, size)], dim)


def _ahead(x: Any, dim: int) -> tuple[int, Any] | None:
    """The folded dim of ``x`` and its stack, where ``dim`` stands before it and positions are whole; None elsewhere."""
    found = folded_dim(x)
    if found is None or found[2][0] is not None or not -x.ndim <= dim < x.ndim or dim % x.ndim >= found[0]:
        return None
    return found[0], x.unflatten(found[0], (found[1][0], -1))


def slice_of(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """As torch's, of positions of the stack or of a dim before it; NotImplemented elsewhere."""
    if type(x) is not RemoteView or not all(each is None or type(each) is int for each in (start, end)):
        return NotImplemented
    if (ahead := _ahead(x, dim)) is not None:
        at, stack = ahead
        return torch.ops.aten.slice.Tensor(stack, dim % x.ndim, start, end, step).flatten(at, at + 1)
    if step != 1 or not -x.ndim <= dim < x.ndim:
        return NotImplemented
    first, last, _ = slice(start, end).indices(x.shape[dim])
    found = _positions(x, dim, (first, last)) if first < last else None
    if found is None:
        return NotImplemented
    at, each, (first, last) = found
    return _part(x.unflatten(at, (-1, each)), at, first, last)


def select(x: Any, dim: int, index: int) -> Any:
    """As torch's, of a dim before the folded one; NotImplemented elsewhere."""
    ahead = _ahead(x, dim)
    if ahead is None:
        return NotImplemented
    at, stack = ahead
    return stack.select(dim % x.ndim, index).flatten(at - 1, at)


def index(x: Any, indices: Sequence[Any]) -> Any:
    """As torch's, where one tensor of integers names positions of a dim before the folded one; NotImplemented elsewhere."""
    named = [dim for dim, each in enumerate(indices) if each is not None]
    ahead = _ahead(x, named[0]) if len(named) == 1 and indices[named[0]].dtype in (torch.int64, torch.int32) else None
    if ahead is None:
        return NotImplemented
    at = ahead[0] - 1 + indices[named[0]].ndim
    return torch.ops.aten.index.Tensor(ahead[1], indices).flatten(at, at + 1)


recomposed("aten::split.Tensor", split)
recomposed("aten::split_with_sizes", split_with_sizes)
_INDEXING: dict[str, Callable[..., Any]] = {
    "aten::slice.Tensor": slice_of,
    "aten::select.int": select,
    "aten::index.Tensor": index,
}


def serve_indexing() -> None:
    """From now on slices and indices are taken so too: once some parameter is kept as a stack, since all programs would pay."""
    while _INDEXING:
        recomposed(*_INDEXING.popitem())
