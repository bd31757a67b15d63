"""Layouts of a folded dim in the order of ranks, and of the stack that it is folded from."""

from __future__ import annotations

import math
import operator
from itertools import accumulate, pairwise, product, zip_longest

from ...base.caches import remembered
from ...layout.layout import Layout
from ...layout.splits import Split

DimSplits = tuple[Split | None, ...]  # how the dims that are folded are cut


@remembered(4096)
def merged_layout(layout: Layout, at: int, sizes: tuple[int, ...], cuts: DimSplits) -> tuple[Layout, Layout]:
    """A stack's layout with the dims to be folded cut so; and that of the folded tensor in the order of ranks."""
    cut, end = _with_splits(layout, at, cuts), at + len(sizes)
    splits = [*cut.splits[:at], _merge_splits(sizes, cuts), *cut.splits[end:]]
    shape = [*cut.shape[:at], math.prod(sizes), *cut.shape[end:]]
    stride = [*cut.stride[:at], *cut.stride[end - 1 :]]
    return cut, Layout.from_splits(cut.mesh, splits, cut.partials, shape, stride, cut.dtype)


@remembered(4096)
def stack_layout(layout: Layout, dim: int, sizes: tuple[int, ...], cuts: DimSplits) -> tuple[Layout, Layout]:
    """The layout of a folded tensor with ``dim`` in the order of ranks; and that of the stack."""
    cut = _with_splits(layout, dim, (_merge_splits(sizes, cuts),))
    splits = [*cut.splits[:dim], *cuts, *cut.splits[dim + 1 :]]
    shape = [*cut.shape[:dim], *sizes, *cut.shape[dim + 1 :]]
    steps = [cut.stride[dim] * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    stride = [*cut.stride[:dim], *steps, *cut.stride[dim + 1 :]]
    return cut, Layout.from_splits(cut.mesh, splits, cut.partials, shape, stride, cut.dtype)


@remembered(4096)
def find_stack_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape on the way of a view whose blocks show every dim of ``shape`` but one, which is folded of several; None where
    there is none, or ``layout`` has it.

    >>> import dtensor as dt
    >>> x = dt.zeros(6, 8, 4, 5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(1)])
    >>> regrouped(x._layout, (48, 20)), regrouped(x._layout, (48, 4, 5))
    ((6, 8, 20), None)
    """
    if 0 in layout.shape:
        return None
    ends = [*accumulate(layout.shape, operator.mul)]  # of dims, counted in slices
    inner = [end // size for end, size, split in zip(ends, layout.shape, layout.splits, strict=True) if split is not None]
    between: list[int] = []
    folded = 0
    for end, size in zip(accumulate(shape, operator.mul), shape, strict=True):
        begin = end // size
        if not any(begin < start < end for start in inner):
            between.append(size)
            continue
        folded += 1
        parts = [*pairwise([begin, *sorted({each for each in ends if begin < each < end}), end])]
        if any(after % before for before, after in parts):
            return None
        between += [after // before for before, after in parts]
    return tuple(between) if folded == 1 and tuple(between) != layout.shape else None


@remembered(4096)
def find_merged_dim(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """Where several dims become one, all others as they were.

    >>> merged_dim((2, 3, 4), (6, 4)), merged_dim((2, 3, 4), (2, 12)), merged_dim((2, 3, 4), (4, 6))
    (0, 1, None)
    """
    count = 1 + len(before) - len(after)
    if count < 2:
        return None
    at = next((d for d, (one, other) in enumerate(zip_longest(before, after)) if one != other), 0)
    return at if (*before[:at], math.prod(before[at : at + count]), *before[at + count :]) == after else None


@remembered(4096)
def find_kept_dim(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> int | None:
    """Which dim of a view of shape ``after`` is ``dim`` of what has shape ``before``, whatever becomes of others.

    >>> kept_dim((6, 8), 1, (2, 3, 8)), kept_dim((6, 8, 2), 1, (6, 4, 4))
    (2, None)
    """
    ahead = math.prod(before[:dim])
    counts = enumerate(accumulate(after[:-1], operator.mul, initial=1))
    return next((d for d, count in counts if count == ahead and after[d] == before[dim]), None)


def _merge_splits(sizes: tuple[int, ...], cuts: DimSplits) -> Split:
    """How the folded dim is cut in the order of ranks."""
    blocks = [(size,) if cut is None else cut.sizes for size, cut in zip(sizes, cuts, strict=True)]
    return Split(_mesh_dims_of(cuts), tuple(map(math.prod, product(*blocks))))


def _with_splits(layout: Layout, at: int, cuts: DimSplits) -> Layout:
    """``layout`` with dims ``at``, ... cut so, and no other by the same mesh dims."""
    taken = set(_mesh_dims_of(cuts))
    splits = [None if split is not None and taken.intersection(split.mesh_dims) else split for split in layout.splits]
    splits[at : at + len(cuts)] = cuts
    partials = [None if mesh_dim in taken else op for mesh_dim, op in enumerate(layout.partials)]
    return Layout.from_splits(layout.mesh, splits, partials, layout.shape, layout.stride, layout.dtype)


def _mesh_dims_of(cuts: DimSplits) -> tuple[int, ...]:
    return tuple(mesh_dim for cut in cuts if cut is not None for mesh_dim in cut.mesh_dims)
