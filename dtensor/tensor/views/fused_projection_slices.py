"""Parts of a view that blocks do not show, which are parts of its base that they do show.

The queries, keys and values of a fused projection: ``y.view(t, 3, heads, k)`` has a cut of ``y``'s last dim nowhere, since the
first of the dims that it becomes has three positions, so it is a remote view and to read it moves every element. But
``y.view(t, 3, heads, k)[:, 0]`` is ``y[:, :heads * k].view(t, heads, k)``: each rank's part of a slice, seen in heads. So a part
is looked for in the memory of the base: a slice along one of its dims, seen in another shape, its dims in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...base.caches import Bounded, nested_key
from ...base.tensor_tree import listed
from ...dispatch.dispatcher import dispatch
from ...layout.layout import Layout
from ...propagation.op_schema import Operator, operator_of
from ..dtensor import DTensor
from .lazy_view import Origin, RemoteView, changes_values, is_local, plan_of, trace_to_base

_aten = torch.ops.aten
_SINGLE_RESULT = {_aten.select.int, _aten.slice.Tensor}
_MANY_RESULTS = {_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default}
_PART_OPERATORS = _SINGLE_RESULT | _MANY_RESULTS
_SLICE, _VIEW, _PERMUTE = _aten.slice.Tensor, _aten.view.default, _aten.permute.default


class _BasePart(NamedTuple):
    """Positions ``start`` to ``end`` along a dim of a base, seen in a shape, with its dims in an order."""

    dim: int
    start: int
    end: int
    shape: tuple[int, ...]
    order: tuple[int, ...]


_BASE_PARTS: Bounded[Any, tuple[_BasePart, ...]] = Bounded(4096, "parts.of_views")


def slice_of_base(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a view that picks a part of a remote view shows, where blocks of its base show it; NotImplemented elsewhere."""
    x = args[0] if args else None
    if operator.func not in _PART_OPERATORS or type(x) is not RemoteView or x._layout.sized:
        return NotImplemented
    base, links = trace_to_base(x)
    if base._layout.dtype.is_complex or any(origin.pinned or changes_values(origin.plan) for origin, _ in links):
        return NotImplemented
    steps = [(origin.operator.func, place, nested_key(origin.args[1:]), nested_key(origin.kwargs)) for origin, place in links]
    key = (base._layout, tuple(steps), operator.func, nested_key(args[1:]), nested_key(kwargs))
    parts = _BASE_PARTS.get(key)
    if parts is None:
        found = _find_parts(base._layout, links, operator, args[1:], kwargs)
        parts = _BASE_PARTS.keep(key, found if all(_is_local_part(base, part) for part in found) else ())
    viewed = links[0][0].viewed
    made = [_make_part_view(base, part, viewed.__dict__.get("_counted", viewed)) for part in parts]
    return NotImplemented if not made else made[0] if operator.func in _SINGLE_RESULT else made


def _find_parts(
    layout: Layout, links: Sequence[tuple[Origin, int]], operator: Operator, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_BasePart, ...]:
    """Where in its base each part is that is picked of a view; () where one of them is no such part."""
    whole = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    shown: Any = whole
    for origin, place in links:
        shown = origin.operator.func(shown, *origin.args[1:], **origin.kwargs)
        shown = shown[place] if isinstance(shown, (list, tuple)) else shown
        if shown.dtype is not layout.dtype:  # complex numbers may be seen mirrored
            return ()
    picked = operator.func(shown, *rest, **kwargs)
    parts = [_find_part(whole, each) for each in listed(picked)]
    return tuple([part for part in parts if part is not None]) if None not in parts else ()


def _find_part(whole: torch.Tensor, picked: torch.Tensor) -> _BasePart | None:
    """Where ``picked``, a view of ``whole``, is in it."""
    if not picked.numel() or not whole.is_contiguous():
        return None
    steps = picked.stride()
    order = sorted(range(picked.ndim), key=lambda d: -steps[d])
    shape = tuple([picked.shape[d] for d in order])
    back = tuple(sorted(range(picked.ndim), key=order.__getitem__))
    for dim, (size, step) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        count, rest = divmod(picked.numel() * size, whole.numel())
        start = picked.storage_offset() // step
        if rest or not 0 < count < size or start + count > size:
            continue
        part = _BasePart(dim, start, start + count, shape, back)
        try:
            found = whole.narrow(dim, start, count).view(shape).permute(back)
        except RuntimeError:  # its dims are apart in memory
            continue
        if (found.stride(), found.storage_offset()) == (picked.stride(), picked.storage_offset()):
            return part
    return None


def _is_local_part(base: DTensor, part: _BasePart) -> bool:
    """Whether blocks show it."""
    piece = _slice_base(base, part)
    return type(piece) is DTensor and is_local(plan_of(operator_of(_VIEW), (piece, list(part.shape)), {}))


def _make_part_view(base: DTensor, part: _BasePart, counted: Any) -> Any:
    made = _slice_base(base, part)
    for func, dims in (_VIEW, part.shape), (_PERMUTE, part.order):
        if dims != tuple(range(len(dims))):  # else it is in that order
            made.__dict__.setdefault("_counted", counted)
            made = dispatch(DTensor, func, (), (made, list(dims)), {}) if type(made) is DTensor else func(made, list(dims))
    return made


def _slice_base(base: DTensor, part: _BasePart) -> Any:
    return dispatch(DTensor, _SLICE, (), (base, part.dim, part.start, part.end), {})
