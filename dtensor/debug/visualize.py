"""``visualize_sharding``: which ranks hold which block of a DTensor, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError
from ..layout.layout import Layout
from ..tensor.dtensor import DTensor

Block = tuple[tuple[int, int], ...]  # (start, stop) in every tensor dim


def visualize_sharding(dtensor: DTensor, header: str = "", use_rich: bool = False) -> None:
    """Prints the blocks of ``dtensor`` and the ranks that hold each: a grid of up to two dims, else a line per block.

    No communication; every rank prints the same, so programs with a process per rank call it on one of them.

    Args:
        header: a line above.
        use_rich: accepted for programs written for torch; the text is plain.

    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> dt.debug.visualize_sharding(dt.zeros(5, 4, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]))
         0:4
    0:3  0, 1
    3:5  2, 3
    """
    if not isinstance(dtensor, DTensor):
        raise ArgumentError(
            f"visualize_sharding takes a DTensor, got {type(dtensor).__name__}; make one with distribute_tensor()"
        )
    if header:
        print(header)
    print(sharding_text(dtensor))


def sharding_text(x: DTensor | Layout) -> str:
    """What :func:`visualize_sharding` prints."""
    layout: Layout = x if isinstance(x, Layout) else x.layout
    held = _holders(layout)
    if not held:
        return "no elements"
    if layout.ndim == 0:
        return next(iter(held.values()))
    if layout.ndim == 1:
        return table([[_span(*span) for (span,) in held], list(held.values())])
    if layout.ndim == 2:
        return _grid(held)
    return table([[f"[{', '.join(_span(*span) for span in block)}]", ranks] for block, ranks in held.items()])


def _holders(layout: Layout) -> dict[Block, str]:
    """Ranks by block, empty blocks left out, blocks in the tensor's order."""
    ranks: dict[Block, list[int]] = {}
    for member, coordinate in enumerate(layout.mesh.coordinates):
        start, shape = layout.local_offset(coordinate), layout.local_shape(coordinate)
        block = tuple((begin, begin + size) for begin, size in zip(start, shape, strict=True))
        if all(stop > begin for begin, stop in block):
            ranks.setdefault(block, []).append(layout.mesh.ranks[member])
    marks = " (partial)" if layout.is_partial else ""
    return {block: ", ".join(map(str, sorted(found))) + marks for block, found in sorted(ranks.items())}


def _span(begin: int, stop: int) -> str:
    return f"{begin}:{stop}"


def _grid(held: dict[Block, str]) -> str:
    rows, columns = (sorted({block[d] for block in held}) for d in (0, 1))
    body = [[_span(*row), *(held.get((row, column), "") for column in columns)] for row in rows]
    return table([["", *(_span(*column) for column in columns)], *body])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
