"""Grids of blocks with their owners: which of them together are a layout."""

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
    """One block of a grid: where it starts, its size, and the places that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    places: tuple[Place, ...]


def collapse(owners: Any) -> tuple[Any, list[list[int]]]:
    """Neighbouring slices of an array with the same owners taken together, and how many went into each, per dim.

    >>> merged, counts = collapse(np.array([[0, 0, 1], [0, 0, 1]]))
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


def layout_of_boxes(
    mesh: DeviceMesh,
    cells: Sequence[Cell],
    member_of: Mapping[Place, int],
    shape: Sequence[int],
    dtype: torch.dtype,
    what: str,
) -> Layout:
    """The layout on ``mesh`` under which every rank holds its cells.

    Raises:
        PlacementError: there is none.
    """
    wrong = f"{what} cannot be said for a tensor of shape {list(shape)} on {mesh!r}"
    held: dict[int, list[Cell]] = {}
    for cell in cells:
        for rank in {member_of[place] for place in cell.places}:
            held.setdefault(rank, []).append(cell)
    boxes = [box_of(held.get(rank, ())) for rank in mesh.ranks]
    if held.keys() - set(mesh.ranks) or any(box is None for box in boxes):
        raise PlacementError(f"{wrong}: its ranks are {sorted(held)}, and each must hold one contiguous block of elements")
    splits = []
    for dim in range(len(shape)):
        intervals = [(box[dim] if box else (0, 0)) for box in boxes]
        found = _split_of(mesh, intervals, shape[dim])
        if found is False:
            raise PlacementError(f"{wrong}: no order of its mesh dims shards tensor dim {dim} as {intervals}")
        splits.append(found)
    return Layout.from_splits(mesh, splits, [None] * mesh.ndim, tuple(shape), None, dtype)  # type: ignore[arg-type]  # no False


def box_of(cells: Sequence[Cell]) -> tuple[Interval, ...] | None:
    """The box that cells make together, as (start, end) per dim; None if they leave holes."""
    cells = [cell for cell in cells if 0 not in cell.shape] or list(cells[:1])
    if not cells:
        return None
    low = [min(values) for values in zip(*(cell.offset for cell in cells), strict=True)]
    ends = ([a + n for a, n in zip(cell.offset, cell.shape, strict=True)] for cell in cells)
    high = [max(values) for values in zip(*ends, strict=True)]
    box = tuple(zip(low, high, strict=True))
    return box if math.prod(b - a for a, b in box) == sum(math.prod(cell.shape) for cell in cells) else None


def _split_of(mesh: DeviceMesh, intervals: Sequence[Interval], size: int) -> Split | bool | None:
    """How mesh dims cut a tensor dim so that members have these intervals; False if they cannot."""
    if all(interval == (0, size) for interval in intervals):
        return None
    lines = [[mesh.members_of((d,), member) for member in mesh.members] for d in range(mesh.ndim)]
    varying = [d for d, each in enumerate(lines) if any(len({intervals[m] for m in line}) > 1 for line in each)]
    for order in itertools.permutations(varying):
        sizes: dict[int, Interval] = {}
        agreed = all(
            sizes.setdefault(mesh.index_over(order, mesh.coordinates[m]), each) == each for m, each in enumerate(intervals)
        )
        leaves = [sizes[i] for i in range(math.prod(mesh.shape[d] for d in order))] if agreed else []
        start = 0
        for low, high in leaves:
            if high > low and low != start:
                break
            start += high - low
        else:
            if agreed and start == size:
                return Split(order, tuple(high - low for low, high in leaves))
    return False
