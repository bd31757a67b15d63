"""What memory holds of a tensor whose elements are repeated, as those of an expanded one are: each of them once."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.caches import remembered
from ..base.symbolic_sizes import has_symbols
from .layout import Layout


@remembered(4096)
def repeated(layout: Layout) -> tuple[int, ...]:
    """The dims of step 0 in memory: each rank's block is one element along them, again and again. Not those of which some rank
    has none.

    >>> repeated(Layout.of(DeviceMesh("cpu", 2), [Shard(0)], (4, 3, 1), (0, 1, 0)))
    (0,)
    """
    found = []
    for d, (size, step, split) in enumerate(zip(layout.shape, layout.stride, layout.splits, strict=True)):
        there = split is None or (not has_symbols(split.sizes) and min(split.sizes) > 0)
        if type(step) is int and step == 0 and there and (type(size) is not int or size > 1):
            found.append(d)
    return tuple(found)


def once(layout: Layout, dims: Sequence[int]) -> Layout:
    """That of the first element along some repeated dims, which every rank has."""
    if not dims:
        return layout
    shape = [1 if d in dims else size for d, size in enumerate(layout.shape)]
    splits = [None if d in dims else split for d, split in enumerate(layout.splits)]
    return Layout.from_splits(layout.mesh, splits, layout.partials, shape, layout.stride, layout.dtype)


def stored(layout: Layout) -> Layout:
    """That of what memory holds.

    >>> layout = Layout.of(DeviceMesh("cpu", 2), [Shard(1)], (4, 6), (0, 1))
    >>> stored(layout).max_local_nbytes, layout.max_local_nbytes
    (12, 48)
    """
    return once(layout, repeated(layout))
