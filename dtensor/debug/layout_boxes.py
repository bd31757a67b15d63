"""Layout boxes: the shards of a layout or the ranks of a mesh as boxes, each with its interval of every dim, ranks and color.

A shard is a product of intervals, one for each tensor dim, so boxes fill a grid with as many dims as the tensor. The last two
dims are the rows and columns of a panel; each index of the other dims is a panel of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..base.group_by import group_by_key
from ..base.units import bytes_text
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial
from ..tensor.dtensor import DTensor
from ..tensor.printing import spans_of

MAX_BOXES = 256  # most boxes in a picture
# Light colors for dark text, and the style of each on a terminal of 8 colors.
COLORS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99", "#cab2d6", "#ffff99", "#c7c7c7", "#e0b98c")
TERMINAL_STYLES = (
    "black on cyan",
    "black on yellow",
    "black on green",
    "black on red",
    "white on magenta",
    "black on white",
    "white on blue",
    "white on black",
)


@dataclass(frozen=True, slots=True)
class Interval:
    """Part of one dim that a row or column of boxes has: its label and its number of elements."""

    text: str
    size: int


@dataclass(frozen=True, slots=True)
class Box:
    """Drawn box of one shard: the ranks that have it, its description, and the index of its color."""

    ranks: tuple[int, ...]
    about: str
    color: int = 0

    @property
    def text(self) -> str:
        return spans_of(self.ranks)


@dataclass(frozen=True, slots=True)
class Panel:
    """A grid of boxes: a single row for a tensor with one dim, a single box for a scalar."""

    title: str
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    boxes: tuple[tuple[Box, ...], ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Panels under a title; ``partial``: each rank holds a partial value."""

    title: str
    panels: tuple[Panel, ...]
    partial: bool = False
    remark: str = ""


def boxes_of(x: object) -> Boxes | None:
    """Return the boxes of a tensor, a layout or a mesh; None for anything else."""
    match x:
        case DTensor():
            return _boxes_of_layout(x.layout)
        case Layout():
            return _boxes_of_layout(x)
        case DeviceMesh():
            return _boxes_of_mesh(x)
    return None


def scale_lengths(intervals: Sequence[Interval], length: float, least: Sequence[float]) -> list[float]:
    """Return the drawn length of each interval: in proportion to its size, and at least ``least``."""
    total = sum(interval.size for interval in intervals)
    return [max(minimum, length * interval.size / total) for interval, minimum in zip(intervals, least, strict=True)]


def _boxes_of_layout(layout: Layout) -> Boxes:
    """Return the boxes of a layout's shards, each with the ranks that have it; empty shards are left out."""
    dims = tuple(_dim_intervals(layout, d) for d in range(layout.ndim))
    count = math.prod(map(len, dims))
    if not count:
        return Boxes(repr(layout), (), remark="no elements")
    if count > MAX_BOXES:
        return Boxes(repr(layout), (), remark=f"{count:,} shards of up to {bytes_text(layout.max_local_nbytes)}")
    ranks_at = zip(layout.mesh.coordinates, layout.mesh.ranks, strict=True)
    ranks_of = group_by_key((layout.local_offset(at), rank) for at, rank in ranks_at if all(layout.local_shape(at)))
    cells = {}
    for index in itertools.product(*(range(len(dim)) for dim in dims)):
        block = [dim[i] for dim, i in zip(dims, index, strict=True)]
        ranks = tuple(sorted(ranks_of[tuple(begin for begin, _ in block)]))
        where = ", ".join(f"{begin}:{stop}" for begin, stop in block)
        shape = "x".join(str(stop - begin) for begin, stop in block) or "scalar"
        cells[index] = Box(ranks, f"[{where}] ({shape})")
    over = zip(layout.placements, layout.mesh.named(range(layout.mesh.ndim)), strict=True)
    partial = [f"{p} over {name}" for p, name in over if isinstance(p, Partial)]
    remark = f"each rank holds a partial value: {', '.join(partial)}" if partial else ""
    named = [[Interval(f"{begin}:{stop}", stop - begin) for begin, stop in dim] for dim in dims]
    return Boxes(repr(layout), tuple(_make_panels(named, cells)), bool(partial), remark)


def _boxes_of_mesh(mesh: DeviceMesh) -> Boxes:
    """Return a box with the ranks at each coordinate of a mesh; for a submesh those of all its sibling submeshes."""
    names = mesh.named(range(mesh.ndim))
    title = f"{mesh.device_type} mesh: " + ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    if mesh.size() > MAX_BOXES:
        return Boxes(title, (), remark=f"{mesh.size():,} ranks")
    cells = {
        at: Box(tuple(sorted(ranks)), ", ".join(f"{name} {k}" for name, k in zip(names, at, strict=True)))
        for at, ranks in group_by_key(zip(mesh.coordinates, mesh.ranks, strict=True)).items()
    }
    named = [[Interval(f"{name} {k}", 1) for k in range(size)] for name, size in zip(names, mesh.shape, strict=True)]
    return Boxes(title, tuple(_make_panels(named, cells)), remark=_MESH_REMARKS[mesh.kind])


_MESH_REMARKS = {
    "in_process": "all ranks in this process",
    "process_group": "one process per rank",
    "dry_run": "dry run: no data",
}


def _dim_intervals(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """Return the (start, end) of each non-empty shard along one tensor dim."""
    split = layout.splits[dim]
    pairs = [(0, layout.shape[dim])] if split is None else zip(split.offsets, split.sizes, strict=True)
    return [(begin, begin + size) for begin, size in pairs if size]


def _make_panels(dims: Sequence[Sequence[Interval]], cells: dict[tuple[int, ...], Box]) -> Iterator[Panel]:
    """Yield a panel of boxes in rows and columns for each index of the leading dims."""
    single = Interval("", 1)
    rows, columns = dims[-2] if len(dims) > 1 else [single], dims[-1] if dims else [single]
    for before in itertools.product(*(range(len(dim)) for dim in dims[:-2])):
        named = [dim[i].text for dim, i in zip(dims, before, strict=False)]
        boxes = tuple(
            tuple(cells[(*before, *((i,) if len(dims) > 1 else ()), *((j,) if dims else ()))] for j in range(len(columns)))
            for i in range(len(rows))
        )
        yield Panel(f"[{', '.join([*named, ':', ':'])}]" if named else "", tuple(rows), tuple(columns), _color_boxes(boxes))


def _color_boxes(boxes: Sequence[Sequence[Box]]) -> tuple[tuple[Box, ...], ...]:
    """Return the boxes with a color for each: that of its first rank, or the next one that no neighbor has."""
    colored: list[list[Box]] = []
    for i, line in enumerate(boxes):
        colored.append([])
        for j, box in enumerate(line):
            above = colored[i - 1][max(j - 1, 0) : j + 2] if i else []
            taken = {neighbor.color for neighbor in (*colored[i][-1:], *above)}
            free = (k % len(COLORS) for k in itertools.count(box.ranks[0]))
            colored[i].append(replace(box, color=next(color for color in free if color not in taken)))
    return tuple(map(tuple, colored))
