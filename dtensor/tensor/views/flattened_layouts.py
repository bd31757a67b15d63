"""Flattened layouts: layouts of flattened tensors with elements in the order of ranks, and of the stacks behind them."""

from __future__ import annotations

import math
import operator
from itertools import accumulate, pairwise, product, zip_longest

from ...base.caches import memoize
from ...layout.layout import Layout
from ...layout.splits import Split

DimSplits = tuple[Split | None, ...]  # the splits of the dims that are flattened


@memoize(4096)
def merged_layout(layout: Layout, at: int, sizes: tuple[int, ...], dim_splits: DimSplits) -> tuple[Layout, Layout]:
    """Return the layout of an unflattened stack with dims split by ``dim_splits``, and the layout once these are flattened."""
    split_layout, end = _with_splits(layout, at, dim_splits), at + len(sizes)
    splits = [*split_layout.splits[:at], _merge_splits(sizes, dim_splits), *split_layout.splits[end:]]
    shape = [*split_layout.shape[:at], math.prod(sizes), *split_layout.shape[end:]]
    stride = [*split_layout.stride[:at], *split_layout.stride[end - 1 :]]
    return split_layout, Layout.from_splits(split_layout.mesh, splits, split_layout.partials, shape, stride, split_layout.dtype)


@memoize(4096)
def stack_layout(layout: Layout, dim: int, sizes: tuple[int, ...], dim_splits: DimSplits) -> tuple[Layout, Layout]:
    """Return the layout of a tensor with ``dim`` in the order of ranks, and that of the stack with ``dim`` unflattened."""
    flat_layout = _with_splits(layout, dim, (_merge_splits(sizes, dim_splits),))
    splits = [*flat_layout.splits[:dim], *dim_splits, *flat_layout.splits[dim + 1 :]]
    shape = [*flat_layout.shape[:dim], *sizes, *flat_layout.shape[dim + 1 :]]
    strides = [flat_layout.stride[dim] * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    stride = [*flat_layout.stride[:dim], *strides, *flat_layout.stride[dim + 1 :]]
    return flat_layout, Layout.from_splits(flat_layout.mesh, splits, flat_layout.partials, shape, stride, flat_layout.dtype)


@memoize(4096)
def find_stack_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a local view, from which ``shape`` is made by flattening several dims to one.

    The other dims of ``shape`` are dims of the intermediate view. Returns None if there is none, or if ``layout`` has its shape.

    >>> import dtensor as dt
    >>> x = dt.zeros(6, 8, 4, 5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(1)])
    >>> find_stack_shape(x._layout, (48, 20)), find_stack_shape(x._layout, (48, 4, 5))
    ((6, 8, 20), None)
    """
    if 0 in layout.shape:
        return None
    ends = [*accumulate(layout.shape, operator.mul)]  # products of the sizes up to each dim
    shard_starts = [end // size for end, size, split in zip(ends, layout.shape, layout.splits, strict=True) if split is not None]
    stack_shape: list[int] = []
    flattened_count = 0
    for end, size in zip(accumulate(shape, operator.mul), shape, strict=True):
        begin = end // size
        if not any(begin < start < end for start in shard_starts):
            stack_shape.append(size)
            continue
        flattened_count += 1
        parts = [*pairwise([begin, *sorted({end_ for end_ in ends if begin < end_ < end}), end])]
        if any(after % before for before, after in parts):
            return None
        stack_shape += [after // before for before, after in parts]
    return tuple(stack_shape) if flattened_count == 1 and tuple(stack_shape) != layout.shape else None


@memoize(4096)
def find_merged_dim(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """Return the first of the dims that a view of shape ``after`` flattens to one, if all others are unchanged; else None.

    >>> find_merged_dim((2, 3, 4), (6, 4)), find_merged_dim((2, 3, 4), (2, 12)), find_merged_dim((2, 3, 4), (4, 6))
    (0, 1, None)
    """
    count = 1 + len(before) - len(after)
    if count < 2:
        return None
    at = next((d for d, (one, other) in enumerate(zip_longest(before, after)) if one != other), 0)
    return at if (*before[:at], math.prod(before[at : at + count]), *before[at + count :]) == after else None


@memoize(4096)
def find_kept_dim(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> int | None:
    """Return the dim of a view of shape ``after`` that is dim ``dim`` of its base of shape ``before``; None if there is none.

    >>> find_kept_dim((6, 8), 1, (2, 3, 8)), find_kept_dim((6, 8, 2), 1, (6, 4, 4))
    (2, None)
    """
    elements_before = math.prod(before[:dim])
    counts = enumerate(accumulate(after[:-1], operator.mul, initial=1))
    return next((d for d, count in counts if count == elements_before and after[d] == before[dim]), None)


def _merge_splits(sizes: tuple[int, ...], dim_splits: DimSplits) -> Split:
    """Return the split of a flattened dim if each rank flattens its local block, so that slices are in the order of ranks."""
    blocks = [(size,) if split is None else split.sizes for size, split in zip(sizes, dim_splits, strict=True)]
    return Split(_mesh_dims_of(dim_splits), tuple(map(math.prod, product(*blocks))))


def _with_splits(layout: Layout, at: int, dim_splits: DimSplits) -> Layout:
    """Return ``layout`` with dims ``at``, ... split by ``dim_splits``, and no other dim sharded over the same mesh dims."""
    used_mesh_dims = set(_mesh_dims_of(dim_splits))
    splits = [None if split is not None and used_mesh_dims.intersection(split.mesh_dims) else split for split in layout.splits]
    splits[at : at + len(dim_splits)] = dim_splits
    partials = [None if mesh_dim in used_mesh_dims else op for mesh_dim, op in enumerate(layout.partials)]
    return Layout.from_splits(layout.mesh, splits, partials, layout.shape, layout.stride, layout.dtype)


def _mesh_dims_of(dim_splits: DimSplits) -> tuple[int, ...]:
    """Return the mesh dims of several splits."""
    return tuple(mesh_dim for split in dim_splits if split is not None for mesh_dim in split.mesh_dims)
