"""Block grid: the cells of a sharding spec with the places that have them, and the layout that they form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import PlacementError
from ..layout.layout import Layout
from ..layout.splits import Split
from ..mesh.device_mesh import DeviceMesh
from .rank_device import Place

Interval = tuple[int, int]


class Cell(NamedTuple):
    """Block of a tensor's grid: its offset, its shape, and the places that have a replica of it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    places: tuple[Place, ...]


def merge_equal_slices(owners: Any) -> tuple[Any, list[list[int]]]:
    """Merge adjacent equal slices of an array along each dim; return it, and per dim the number of slices in each group.

    >>> merged, counts = merge_equal_slices(np.array([[0, 0, 1], [0, 0, 1]]))
    >>> merged.tolist(), counts
    ([[0, 1]], [[2], [2, 1]])
    """
    counts = []
    for dim in range(owners.ndim):
        slices = [owners.take(i, axis=dim) for i in range(owners.shape[dim])]
        starts = [i for i, each in enumerate(slices) if i == 0 or not np.array_equal(each, slices[i - 1])]
        counts.append([b - a for a, b in itertools.pairwise([*starts, len(slices)])])
        owners = owners.take(starts, axis=dim)
    return owners, counts


def layout_of_cells(
    mesh: DeviceMesh,
    cells: Sequence[Cell],
    member_of: Mapping[Place, int],
    shape: Sequence[int],
    dtype: torch.dtype,
    what: str,
) -> Layout:
    """Return the layout on ``mesh`` in which each rank's shard is the box of its cells; raise if there is none.

    Raises:
        PlacementError: there is none.
    """
    problem = f"{what} cannot be written as placements of a tensor of shape {list(shape)} on {mesh!r}"
    cells_of: dict[int, list[Cell]] = {}
    for cell in cells:
        for rank in {member_of[place] for place in cell.places}:
            cells_of.setdefault(rank, []).append(cell)
    boxes = [bounding_box(cells_of.get(rank, ())) for rank in mesh.ranks]
    if cells_of.keys() - set(mesh.ranks) or any(box is None for box in boxes):
        raise PlacementError(f"{problem}: its ranks are {sorted(cells_of)}, and each must hold one contiguous block of elements")
    splits = []
    for dim in range(len(shape)):
        intervals = [(box[dim] if box else (0, 0)) for box in boxes]
        split = _find_split(mesh, intervals, shape[dim])
        if split is False:
            raise PlacementError(
                f"{problem}: no order of its mesh dims shards tensor dim {dim} as {intervals}; pass another mesh, or none"
            )
        splits.append(split)
    return Layout.from_splits(mesh, splits, [None] * mesh.ndim, tuple(shape), None, dtype)  # type: ignore[arg-type]  # no False


def bounding_box(cells: Sequence[Cell]) -> tuple[Interval, ...] | None:
    """Return the box that cells fill completely, as (start, end) per dim, or None if they leave holes."""
    cells = [cell for cell in cells if 0 not in cell.shape] or list(cells[:1])
    if not cells:
        return None
    low = [min(values) for values in zip(*(cell.offset for cell in cells), strict=True)]
    ends = ([a + n for a, n in zip(cell.offset, cell.shape, strict=True)] for cell in cells)
    high = [max(values) for values in zip(*ends, strict=True)]
    box = tuple(zip(low, high, strict=True))
    return box if math.prod(b - a for a, b in box) == sum(math.prod(cell.shape) for cell in cells) else None


def _find_split(mesh: DeviceMesh, intervals: Sequence[Interval], size: int) -> Split | bool | None:
    """Return the split that gives members these intervals of a tensor dim; None if unsharded, False if there is none."""
    if all(interval == (0, size) for interval in intervals):
        return None
    groups = [[mesh.members_of((d,), member) for member in mesh.members] for d in range(mesh.ndim)]
    varying = [d for d, each in enumerate(groups) if any(len({intervals[m] for m in group}) > 1 for group in each)]
    for order in itertools.permutations(varying):
        sizes: dict[int, Interval] = {}
        consistent = all(
            sizes.setdefault(mesh.index_over(order, mesh.coordinates[m]), each) == each for m, each in enumerate(intervals)
        )
        blocks = [sizes[i] for i in range(math.prod(mesh.shape[d] for d in order))] if consistent else []
        start = 0
        for low, high in blocks:
            if high > low and low != start:
                break
            start += high - low
        else:
            if consistent and start == size:
                return Split(order, tuple(high - low for low, high in blocks))
    return False
