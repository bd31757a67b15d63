"""Draw the figures of docs/concepts.md: ``python docs/pictures/draw.py`` writes them beside this file.

Each figure has a light card as its background, so that its text is readable on a light and on a dark page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch

import dtensor as dt
from dtensor.debug.layout_boxes import boxes_of
from dtensor.debug.svg import svg_of

COLORS = ("#f6b8b0", "#b5e0c0", "#b7cdf2", "#f3dd9a")  # one for each rank
GRAY, DARK, LINE = "#e9edf2", "#1c2430", "#44505f"
MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


class Drawing:
    """SVG elements on a card of a fixed size."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self.parts: list[str] = []

    def box(self, x: float, y: float, wide: float, high: float, fill: str = GRAY, text: str = "", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" fill="{fill}" stroke="{LINE}"{dash}/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + wide / 2, y + high / 2 + 4.5 + (i - (len(lines) - 1) / 2) * 16, line)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", mono: bool = True, bold: bool = False) -> None:
        font, weight = (MONO if mono else SANS), (' font-weight="600"' if bold else "")
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-family="{font}"{weight} fill="{DARK}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#head)"/>')

    def svg(self) -> str:
        head = (
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            f'<path d="M0,0 L9,4 L0,8 z" fill="{LINE}"/></marker></defs>'
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        card = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#fbfcfe"/>'
        style = "font-size:13px;max-width:100%;height:auto"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}" role="img" aria-label="{escape(self.label)}">'
            f"{head}{card}{''.join(self.parts)}</svg>\n"
        )


def uneven_layout() -> Drawing:
    """A (5, 3) tensor on a 2 x 2 mesh; blocks and shapes come from the library."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layout = dt.Layout.of(mesh, [dt.Shard(0), dt.Shard(1)], (5, 3))
    drawing = Drawing(760, 300, "A tensor of shape (5, 3), sharded on a 2 x 2 mesh")
    drawing.text(115, 32, "mesh (2, 2)", mono=False, bold=True)
    for i, name in enumerate(("tp=0", "tp=1")):
        drawing.text(80 + 70 * i, 66, name)
    for i, name in enumerate(("dp=0", "dp=1")):
        drawing.text(22, 110 + 70 * i, name)
    drawing.text(370, 32, "global tensor (5, 3)", mono=False, bold=True)
    drawing.text(625, 32, "local tensors", mono=False, bold=True)
    values = torch.arange(15).reshape(5, 3)
    for rank, coordinate in enumerate(mesh.coordinates):
        color = COLORS[rank]
        drawing.box(48 + 70 * coordinate[1], 76 + 70 * coordinate[0], 64, 64, color, f"rank {rank}")
        (row, column), (rows, columns) = layout.local_offset(coordinate), layout.local_shape(coordinate)
        x, y = 540 + 125 * coordinate[1], 56 + 128 * coordinate[0]
        for i in range(rows):
            for j in range(columns):
                value = str(int(values[row + i, column + j]))
                drawing.box(295 + 50 * (column + j), 56 + 40 * (row + i), 50, 40, color, value)
                drawing.box(x + 32 * j, y + 26 * i, 32, 26, color, value)
        drawing.text(x + 16 * columns, y + 26 * rows + 18, f"({rows}, {columns})")
    drawing.text(115, 250, "[Shard(0), Shard(1)]")
    drawing.text(115, 272, "dp shards tensor dim 0,", mono=False)
    drawing.text(115, 289, "tp shards tensor dim 1", mono=False)
    return drawing


def operator_call() -> Drawing:
    """The steps of one call, with the plan cache between the hit path and the miss path."""
    drawing = Drawing(760, 372, "The life of one operator call: plan cache, sharding propagation, local operation")
    drawing.box(20, 30, 150, 52, GRAY, "torch.mm(x, w)")
    drawing.box(230, 30, 210, 52, GRAY, "__torch_dispatch__\nunwrap, make cache key")
    drawing.box(520, 30, 200, 52, COLORS[3], "plan cache")
    drawing.arrow((170, 56), (228, 56))
    drawing.arrow((440, 56), (518, 56))
    drawing.text(112, 132, "miss: sharding propagation, once for these layouts", "start", mono=False, bold=True)
    steps = ("rule\n(factors)", "candidate\nstrategies", "cost model:\nthe cheapest", "plan, bound\nto steps")
    for i, step in enumerate(steps):
        drawing.box(20 + 176 * i, 144, 150, 58, COLORS[2], step)
        if i:
            drawing.arrow((170 + 176 * (i - 1), 173), (194 + 176 * (i - 1), 173))
    drawing.arrow((560, 82), (560, 112), (95, 112), (95, 142))
    drawing.text(545, 104, "miss", "end", mono=False)
    drawing.arrow((623, 144), (623, 84))
    drawing.text(632, 128, "store", "start", mono=False)
    drawing.text(126, 264, "hit: run the plan", "start", mono=False, bold=True)
    drawing.box(20, 276, 180, 62, COLORS[0], "redistribute inputs\n(if layouts disagree)", dashed=True)
    drawing.box(234, 276, 150, 62, COLORS[1], "local operation\non each rank")
    drawing.box(418, 276, 150, 62, COLORS[0], "write back\n(in-place, out=)", dashed=True)
    drawing.box(602, 276, 126, 62, COLORS[1], "wrap: DTensor\n+ layout")
    for start, stop in ((200, 232), (384, 416), (568, 600)):
        drawing.arrow((start, 307), (stop, 307))
    drawing.arrow((744, 56), (744, 232), (110, 232), (110, 274))
    drawing.parts.append(f'<line x1="720" y1="56" x2="744" y2="56" stroke="{LINE}" stroke-width="1.6"/>')
    drawing.text(735, 225, "hit", "end", mono=False)
    drawing.text(20, 360, "dashed: only if this plan needs the step", "start", mono=False)
    return drawing


def rule_factors() -> Drawing:
    """The three strategies of ``m k, k n -> m n`` on a mesh dim of two ranks, and replication."""
    drawing = Drawing(760, 430, "The strategies of the rule m k, k n -> m n on one mesh dim of two ranks")
    drawing.text(380, 28, "aten::mm   m k, k n -> m n   on one mesh dim of 2 ranks", bold=True)
    for x, name in ((180, "x (m, k)"), (360, "w (k, n)"), (560, "x @ w (m, n)")):
        drawing.text(x, 56, name)
    cases = (
        ("shard m", ("rows", "Shard(0)"), ("all", "Replicate()"), ("rows", "Shard(0)")),
        ("shard n", ("all", "Replicate()"), ("columns", "Shard(1)"), ("columns", "Shard(1)")),
        ("shard k", ("columns", "Shard(1)"), ("rows", "Shard(0)"), ("sum", 'Partial("sum")')),
    )
    for i, (name, *tensors) in enumerate(cases):
        y = 70 + 118 * i
        drawing.text(24, y + 42, name, "start", bold=True)
        for (how, placement), x in zip(tensors, (180, 360, 560), strict=True):
            _two_ranks(drawing, x - 55, y, how)
            drawing.text(x, y + 98, placement)
        drawing.text(270, y + 44, "@")
        drawing.text(460, y + 44, "=")
        drawing.text(640, y + 36, ("rows of y", "columns of y", "one addend each:")[i], "start", mono=False)
        drawing.text(640, y + 53, ("stay sharded", "stay sharded", "y is their sum")[i], "start", mono=False)
    return drawing


def _two_ranks(drawing: Drawing, x: float, y: float, how: str) -> None:
    """One tensor of a strategy: which part each of the two ranks has."""
    if how == "rows":
        drawing.box(x, y, 110, 40, COLORS[0], "rank 0")
        drawing.box(x, y + 40, 110, 40, COLORS[2], "rank 1")
    elif how == "columns":
        drawing.box(x, y, 55, 80, COLORS[0], "rank 0")
        drawing.box(x + 55, y, 55, 80, COLORS[2], "rank 1")
    elif how == "sum":
        drawing.box(x + 14, y, 96, 66, COLORS[2])
        drawing.box(x, y + 14, 96, 66, COLORS[0], "rank 0")
        drawing.text(x + 62, y + 11.5, "+ rank 1")
    else:
        drawing.box(x, y, 110, 80, GRAY, "ranks 0, 1")


def layers() -> Drawing:
    """The layers of the package, lowest at the bottom; imports go down only."""
    drawing = Drawing(760, 382, "The layers of the package; imports go down only")
    rows = (
        ("extensions", "checkpoint  plan  capture  testing  debug  clusters  sharding_spec", COLORS[0]),
        ("models", "parallel/tensor  parallel/data", COLORS[0]),
        ("tensor", "tensor  tensor/views  tensor/overrides  interop", COLORS[3]),
        ("dispatch", "dispatch: plan cache, steps", COLORS[3]),
        ("planning", "rules  rules/aten  redistribute  propagation  cost  random", COLORS[2]),
        ("values, collectives", "mesh  layout  comm  ranks  placement", COLORS[1]),
        ("base", "errors  base  watch", COLORS[1]),
    )
    for i, (name, folders, color) in enumerate(rows):
        drawing.text(176, 46 + 46 * i, name, "end", mono=False, bold=True)
        drawing.box(190, 24 + 46 * i, 520, 38, color, folders)
    drawing.arrow((730, 30), (730, 334))
    drawing.text(450, 366, "a file imports from its own folder and from layers below", mono=False)
    return drawing


def layout_picture(shape: tuple[int, ...], placements: list[dt.Placement], **mesh_dims: int) -> str:
    """The library's own drawing of a layout on a light card; the mesh is 2 x 2 unless its dims are given by name."""
    mesh_dims = mesh_dims or {"dp": 2, "tp": 2}
    mesh = dt.init_device_mesh("cpu", tuple(mesh_dims.values()), mesh_dim_names=tuple(mesh_dims))
    picture = svg_of(boxes_of(dt.Layout.of(mesh, placements, shape))).replace("currentColor", DARK)
    head, end, body = picture.partition(">")
    return f'{head}{end}<rect width="100%" height="100%" rx="8" fill="#fbfcfe"/>{body}\n'


def figures() -> dict[str, str]:
    """Return the SVG of each figure by its file name."""
    rows, columns, replicated = dt.Shard(0), dt.Shard(1), dt.Replicate()
    return {
        "uneven_layout.svg": uneven_layout().svg(),
        "operator_call.svg": operator_call().svg(),
        "rule_factors.svg": rule_factors().svg(),
        "layers.svg": layers().svg(),
        "rows_on_dp.svg": layout_picture((5, 3), [rows, replicated]),
        "rows_and_columns.svg": layout_picture((5, 4), [rows, columns]),
        "batch_on_dp.svg": layout_picture((8, 17), [rows, replicated]),
        "weight_on_tp.svg": layout_picture((128, 32), [replicated, rows]),
        "weight_on_4_dp.svg": layout_picture((8, 6), [rows], dp=4),
        "head_on_4_tp.svg": layout_picture((50, 32), [rows], tp=4),
    }


if __name__ == "__main__":
    for name, text in figures().items():
        (Path(__file__).parent / name).write_text(text)
