"""A layout or a mesh as boxes: which piece of each dim every box covers, who holds it, and in which colour it is drawn.

A block is a product of intervals, one for each tensor dim, whatever the nesting, and a mesh dim cuts one tensor dim: so boxes
fill a grid of as many dims as the tensor has. The last two dims are a panel's rows and columns; the others number panels.
"""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..base.by_key import by_key
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial
from ..tensor.dtensor import DTensor
from ..tensor.printing import spans_of

MOST = 256  # boxes in a picture
_GOLDEN = 0.381966  # of the circle of hues: neighbours in number are far apart in colour


@dataclass(frozen=True, slots=True)
class Interval:
    """A piece of one dim: how it is called, and how many elements it has."""

    text: str
    size: int


@dataclass(frozen=True, slots=True)
class Box:
    """The ranks that hold a block, and what else is to be said of it. The first rank gives the colour."""

    ranks: tuple[int, ...]
    about: str

    @property
    def text(self) -> str:
        return spans_of(self.ranks)

    @property
    def colour(self) -> str:
        """Light, for dark text: ``"#eeb5b5"``."""
        parts = colorsys.hls_to_rgb(self.ranks[0] * _GOLDEN % 1.0, 0.82, 0.62)
        return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of rows and columns; of a tensor with one dim a single row, of a number a single box."""

    title: str
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    boxes: tuple[tuple[Box, ...], ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Panels under a title; ``terms`` where boxes hold terms of the value, not the value."""

    title: str
    panels: tuple[Panel, ...]
    terms: bool = False
    remark: str = ""


def boxes_of(x: object) -> Boxes | None:
    """The boxes of a tensor, a layout or a mesh; None of anything else."""
    match x:
        case DTensor():
            return _boxes_of_layout(x.layout)
        case Layout():
            return _boxes_of_layout(x)
        case DeviceMesh():
            return _boxes_of_mesh(x)
    return None


def scaled(intervals: Sequence[Interval], most: float, least: Sequence[float]) -> list[float]:
    """Lengths in proportion to sizes as far as each has room for its text."""
    total = sum(interval.size for interval in intervals)
    return [max(room, most * interval.size / total) for interval, room in zip(intervals, least, strict=True)]


def _boxes_of_layout(layout: Layout) -> Boxes:
    """The blocks of a tensor and the ranks that hold them; empty blocks, and who holds nothing else, are left out."""
    dims = tuple(_intervals(layout, d) for d in range(layout.ndim))
    count = math.prod(map(len, dims))
    if not count:
        return Boxes(repr(layout), (), remark="no elements")
    if count > MOST:
        return Boxes(repr(layout), (), remark=f"{count:,} blocks of up to {layout.max_local_nbytes:,} B")
    ranks_at = zip(layout.mesh.coordinates, layout.mesh.ranks, strict=True)
    held = by_key((layout.local_offset(at), rank) for at, rank in ranks_at if all(layout.local_shape(at)))
    cells = {}
    for index in itertools.product(*(range(len(dim)) for dim in dims)):
        block = [dim[i] for dim, i in zip(dims, index, strict=True)]
        ranks = tuple(sorted(held[tuple(begin for begin, _ in block)]))
        where = ", ".join(f"{begin}:{stop}" for begin, stop in block)
        shape = "x".join(str(stop - begin) for begin, stop in block) or "a number"
        cells[index] = Box(ranks, f"[{where}] ({shape})")
    over = zip(layout.placements, layout.mesh.named(range(layout.mesh.ndim)), strict=True)
    terms = [f"{p} over {name}" for p, name in over if isinstance(p, Partial)]
    remark = f"each rank holds a term: {', '.join(terms)}" if terms else ""
    named = [[Interval(f"{begin}:{stop}", stop - begin) for begin, stop in dim] for dim in dims]
    return Boxes(repr(layout), tuple(_panels(named, cells)), bool(terms), remark)


def _boxes_of_mesh(mesh: DeviceMesh) -> Boxes:
    """The ranks of a mesh by coordinate; of a part of a mesh those of all its copies."""
    names = mesh.named(range(mesh.ndim))
    title = f"mesh of {mesh.device_type}: " + ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    if mesh.size() > MOST:
        return Boxes(title, (), remark=f"{mesh.size():,} ranks")
    cells = {
        at: Box(tuple(sorted(ranks)), ", ".join(f"{name} {k}" for name, k in zip(names, at, strict=True)))
        for at, ranks in by_key(zip(mesh.coordinates, mesh.ranks, strict=True)).items()
    }
    named = [[Interval(f"{name} {k}", 1) for k in range(size)] for name, size in zip(names, mesh.shape, strict=True)]
    return Boxes(title, tuple(_panels(named, cells)), remark=_KINDS[mesh.kind])


_KINDS = {"in_process": "all ranks in this process", "process_group": "a process for each rank", "dry_run": "a dry run: no data"}


def _intervals(layout: Layout, dim: int) -> list[tuple[int, int]]:
    split = layout.splits[dim]
    pairs = [(0, layout.shape[dim])] if split is None else zip(split.offsets, split.sizes, strict=True)
    return [(begin, begin + size) for begin, size in pairs if size]


def _panels(dims: Sequence[Sequence[Interval]], cells: dict[tuple[int, ...], Box]) -> Iterator[Panel]:
    whole = Interval("", 1)
    rows, columns = dims[-2] if len(dims) > 1 else [whole], dims[-1] if dims else [whole]
    for before in itertools.product(*(range(len(dim)) for dim in dims[:-2])):
        named = [dim[i].text for dim, i in zip(dims, before, strict=False)]
        boxes = tuple(
            tuple(cells[(*before, *((i,) if len(dims) > 1 else ()), *((j,) if dims else ()))] for j in range(len(columns)))
            for i in range(len(rows))
        )
        yield Panel(f"[{', '.join([*named, ':', ':'])}]" if named else "", tuple(rows), tuple(columns), boxes)
