"""Expanded storage: the layout of the storage of a tensor with repeated elements (stride 0), as ``expand`` makes one."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.caches import memoize
from ..base.symbolic_sizes import contains_symbols
from .layout import Layout


@memoize(4096)
def repeated_dims(layout: Layout) -> tuple[int, ...]:
    """Return the tensor dims of stride 0 and size > 1, along which every rank's local tensor repeats one element.

    A dim of which some rank has no element does not count.

    >>> repeated_dims(Layout.of(DeviceMesh("cpu", 2), [Shard(0)], (4, 3, 1), (0, 1, 0)))
    (0,)
    """
    dims = []
    for d, (size, step, split) in enumerate(zip(layout.shape, layout.stride, layout.splits, strict=True)):
        on_all_ranks = split is None or (not contains_symbols(split.sizes) and min(split.sizes) > 0)
        if type(step) is int and step == 0 and on_all_ranks and (type(size) is not int or size > 1):
            dims.append(d)
    return tuple(dims)


def first_along_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    """Return ``layout`` with size 1 along ``dims``, which are repeated dims."""
    if not dims:
        return layout
    shape = [1 if d in dims else size for d, size in enumerate(layout.shape)]
    splits = [None if d in dims else split for d, split in enumerate(layout.splits)]
    return Layout.from_splits(layout.mesh, splits, layout.partials, shape, layout.stride, layout.dtype)


def storage_layout(layout: Layout) -> Layout:
    """Return the layout of the elements that are stored: ``layout`` with size 1 along its repeated dims.

    >>> layout = Layout.of(DeviceMesh("cpu", 2), [Shard(1)], (4, 6), (0, 1))
    >>> storage_layout(layout).max_local_nbytes, layout.max_local_nbytes
    (12, 48)
    """
    return first_along_dims(layout, repeated_dims(layout))
