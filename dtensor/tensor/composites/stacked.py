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
    """``x[..., a:b]`` likewise; all other indices are torch's."""
    taken = index if isinstance(index, tuple) else (index,)
    slices = [(place, each) for place, each in enumerate(taken) if isinstance(each, slice) and each != _ALL]
    if len(slices) == 1 and all(isinstance(each, slice) or each is ... for each in taken) and taken.count(...) < 2:
        place, part = slices[0]
        dim = place - len(taken) if ... in taken[:place] else place
        bounds = (
            part.indices(x.shape[dim]) if _whole(part) and -x.ndim <= dim < x.ndim and len(taken) - 1 <= x.ndim else (0, 0, 1)
        )
        found = _positions(x, dim, bounds[:2]) if bounds[0] < bounds[1] else None
        if found is not None:
            dim, each, (start, end) = found
            return _part(x.unflatten(dim, (-1, each)), dim, start, end)
    return super(RemoteView, x).__getitem__(index)


def _whole(part: slice) -> bool:
    return all(each is None or type(each) is int for each in (part.start, part.stop)) and part.step in (None, 1)


_ALL = slice(None)
recomposed("aten::split.Tensor", split)
recomposed("aten::split_with_sizes", split_with_sizes)
RemoteView.__getitem__ = _getitem  # type: ignore[method-assign]  # below a class, which knows no other views than itself
