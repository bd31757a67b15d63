"""Slices of fused projections: parts of a lazy view that are local views of its base.

Example: the queries, keys and values of a fused projection. ``y.view(t, 3, heads, k)`` does not keep the shards of ``y``'s last
dim: the first dim of the result that it becomes has three positions. So it is a lazy view, and a read of it moves every element.
But ``y.view(t, 3, heads, k)[:, 0]`` is ``y[:, :heads * k].view(t, heads, k)``: a slice of each rank's shard, with heads as a dim.
So a part is searched in the memory of the base: a slice along one dim, viewed in another shape, with permuted dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...base.caches import BoundedDict, nested_key
from ...base.tensor_tree import as_sequence
from ...layout.layout import Layout
from ...propagation.op_schema import OperatorSchema, operator_schema_of
from ..dtensor import DTensor
from .lazy_view import LazyView, Origin, apply_views, changes_values, is_local, plan_of, trace_to_base

_aten = torch.ops.aten
_SINGLE_RESULT = {_aten.select.int, _aten.slice.Tensor}
_MANY_RESULTS = {_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default}
_PART_OPERATORS = _SINGLE_RESULT | _MANY_RESULTS
_VIEW = _aten.view.default


class _BasePart(NamedTuple):
    """Positions ``start`` to ``end`` along dim ``dim`` of a base, viewed in ``shape``, with dims permuted by ``order``."""

    dim: int
    start: int
    end: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def view_calls(self) -> list[tuple[Any, ...]]:
        """Return the view operations from the base to the part."""
        calls = [(_aten.slice.Tensor, self.dim, self.start, self.end), (_VIEW, list(self.shape))]
        is_permuted = self.order != tuple(range(len(self.order)))
        return [*calls, (_aten.permute.default, list(self.order))] if is_permuted else calls


_BASE_PARTS: BoundedDict[Any, tuple[_BasePart, ...]] = BoundedDict(4096, "fused_projection_slices.parts")


def slice_of_base(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the parts of a lazy view that a slice, split or select picks as views of its base; else NotImplemented."""
    x = args[0] if args else None
    if operator.func not in _PART_OPERATORS or type(x) is not LazyView or x._layout.has_symbols:
        return NotImplemented
    base, links = trace_to_base(x)
    if base._layout.dtype.is_complex or any(origin.pinned or changes_values(origin.plan) for origin, _ in links):
        return NotImplemented
    view_calls = [
        (origin.operator.func, place, nested_key(origin.args[1:]), nested_key(origin.kwargs)) for origin, place in links
    ]
    key = (base._layout, tuple(view_calls), operator.func, nested_key(args[1:]), nested_key(kwargs))
    parts = _BASE_PARTS.get(key)
    if parts is None:
        candidates = _find_parts(base._layout, links, operator, args[1:], kwargs)
        parts = _BASE_PARTS.keep(key, candidates if all(_is_local_part(base, part) for part in candidates) else ())
    views = [apply_views(base, part.view_calls) for part in parts]
    return NotImplemented if not views else views[0] if operator.func in _SINGLE_RESULT else views


def _find_parts(
    layout: Layout,
    links: Sequence[tuple[Origin, int]],
    operator: OperatorSchema,
    static_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[_BasePart, ...]:
    """Return where in the base the parts are that ``operator`` picks of a view, computed on meta; () if one is no slice."""
    base = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    view: Any = base
    for origin, place in links:
        view = origin.operator.func(view, *origin.args[1:], **origin.kwargs)
        view = view[place] if isinstance(view, (list, tuple)) else view
        if view.dtype is not layout.dtype:  # complex numbers may be conjugated lazily
            return ()
    picked = operator.func(view, *static_args, **kwargs)
    parts = [_find_part(base, each) for each in as_sequence(picked)]
    return tuple([part for part in parts if part is not None]) if None not in parts else ()


def _find_part(base: torch.Tensor, part_view: torch.Tensor) -> _BasePart | None:
    """Return ``part_view``, a view of ``base``, as a slice that is viewed and permuted; None if it is no such view."""
    if not part_view.numel() or not base.is_contiguous():
        return None
    strides = part_view.stride()
    order = sorted(range(part_view.ndim), key=lambda d: -strides[d])
    shape = tuple([part_view.shape[d] for d in order])
    inverse = tuple(sorted(range(part_view.ndim), key=order.__getitem__))
    for dim, (size, step) in enumerate(zip(base.shape, base.stride(), strict=True)):
        count, rest = divmod(part_view.numel() * size, base.numel())
        start = part_view.storage_offset() // step
        if rest or not 0 < count < size or start + count > size:
            continue
        result = _BasePart(dim, start, start + count, shape, inverse)
        try:
            candidate = base.narrow(dim, start, count).view(shape).permute(inverse)
        except RuntimeError:  # dims of the shape are not contiguous in the slice
            continue
        if (candidate.stride(), candidate.storage_offset()) == (part_view.stride(), part_view.storage_offset()):
            return result
    return None


def _is_local_part(base: DTensor, part: _BasePart) -> bool:
    """Return True if shards of the slice, viewed in the shape of the part, are shards of the part."""
    base_slice = apply_views(base, part.view_calls[:1])
    return type(base_slice) is DTensor and is_local(plan_of(operator_schema_of(_VIEW), (base_slice, list(part.shape)), {}))
