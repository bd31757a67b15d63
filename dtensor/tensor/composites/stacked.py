"""Parts of a folded dim, taken as positions of the stack that it is folded from, above autograd.

Gate and up of one fused projection, ``(2, n)`` rows of which each rank has some of both, are ``y.chunk(2, -1)``: below autograd
that is a part of a view, which blocks show (``views/parts.py``), but its derivative joins the parts' gradients along the folded
dim, in an order that blocks do not have. Positions of the stack have a derivative that stacks them, and what is folded of a stack
moves nothing. So where every part is of whole positions, that is how they are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..views.folded import folded_dim
from ..views.remote_view import RemoteView
from .recomposed import recomposed


def _positions(x: Any, dim: int, ends: Sequence[int]) -> tuple[int, int, list[int]] | None:
    """The dim, how many elements of it are one position, and where parts that end there end in positions; None where a part is
    not of whole positions, or positions are cut."""
    found = folded_dim(x) if type(x) is RemoteView else None
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


def _getitem(x: Any, index: Any) -> Any:
    """``x[..., a:b]`` likewise, and ``x[i]``, whatever is taken of dims before the folded one; all other indices are torch's."""
    found = folded_dim(x)
    taken = None if found is None or found[2][0] is not None else _by_dim(index, x.ndim)
    if found is None or taken is None or not all(map(_all, taken[found[0] + 1 :])):
        return super(RemoteView, x).__getitem__(index)
    dim, whole = found[0], x.shape[found[0]]
    each, ahead, part = whole // found[1][0], taken[:dim], taken[dim]
    start, end, _ = part.indices(whole) if isinstance(part, slice) and _plain(part) else (0, 0, 1)
    after = _dims_of(ahead)
    if start >= end or start % each or end % each or after is None:
        return super(RemoteView, x).__getitem__(index)
    stack = x.unflatten(dim, (-1, each))
    if not all(map(_all, ahead)):
        stack = stack[tuple(ahead)]
    return _part(stack, after, start // each, end // each) if end - start < whole else stack.flatten(after, after + 1)


def _by_dim(index: Any, ndim: int) -> list[Any] | None:
    """What is taken of each dim; None where an index does not go dim by dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is ... or type(item) in (int, slice) or _names_rows(item)) for item in items):
        return None
    dots = [place for place, item in enumerate(items) if item is ...]
    if len(dots) > 1 or len(items) - len(dots) > ndim:
        return None
    place = dots[0] if dots else len(items)
    return [*items[:place], *[_ALL] * (ndim - len(items) + len(dots)), *items[place + 1 :]]


def _all(item: Any) -> bool:
    return isinstance(item, slice) and item == _ALL


def _names_rows(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)


def _dims_of(items: Sequence[Any]) -> int | None:
    """How many dims are left of those that items are taken of; None where tensors name positions of several."""
    tensors = [item for item in items if isinstance(item, Tensor)]
    numbers = sum(type(item) is int for item in items)
    if len(tensors) > 1 or (tensors and numbers):
        return None
    return len(items) - numbers - len(tensors) + sum(item.ndim for item in tensors)


def _plain(part: slice) -> bool:
    return all(each is None or type(each) is int for each in (part.start, part.stop)) and part.step in (None, 1)


_ALL = slice(None)
recomposed("aten::split.Tensor", split)
recomposed("aten::split_with_sizes", split_with_sizes)
RemoteView.__getitem__ = _getitem  # type: ignore[method-assign]  # below a class, which knows no other views than itself
