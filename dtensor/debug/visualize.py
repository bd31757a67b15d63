"""Visualize sharding: show the ranks that hold each shard of a DTensor, as colored boxes or as text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Literal

from ..base.text_tables import table_text
from ..errors import ArgumentError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..tensor.dtensor import DTensor
from .layout_boxes import COLORS, TERMINAL_STYLES, Box, Boxes, Panel, boxes_of, scale_lengths
from .svg import svg_of

_PANEL_WIDTH, _PANEL_HEIGHT = 56, 9  # letters and lines, unless labels need more


def visualize_sharding(dtensor: DTensor | Layout | DeviceMesh, header: str = "", use_rich: bool | None = None) -> None:
    """Show the shards of a tensor and the ranks that hold each, or the ranks of a mesh.

    A notebook shows a drawing. A terminal shows colored boxes to scale if ``rich`` is installed; 8 colors are enough. Everything
    else gets text: a grid for up to two tensor dims, one line per shard for more. No communication. Every rank shows the same, so
    a program with one process per rank calls it on one of them.

    Args:
        dtensor: a DTensor, Layout or DeviceMesh.
        header: a line above.
        use_rich: True: colored boxes wherever the output goes; False: text; None: as described above.

    Raises:
        ArgumentError: ``dtensor`` has no sharding, or ``use_rich=True`` without rich (``pip install 'dtensor[terminal]'``).

    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> dt.debug.visualize_sharding(dt.zeros(5, 4, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]))
         0:4
    0:3  0, 1
    3:5  2, 3
    """
    boxes = boxes_of(dtensor)
    if boxes is None:
        kind = type(dtensor).__name__
        raise ArgumentError(
            f"visualize_sharding takes a DTensor, Layout or DeviceMesh, got {kind}; make a DTensor with distribute_tensor()"
        )
    if use_rich and not _has_rich():
        raise ArgumentError("use_rich=True needs rich; pip install 'dtensor[terminal]'")
    notebook = _notebook_display() if use_rich is None else None
    if notebook is not None:
        notebook.display({"text/html": (f"<p>{header}</p>" if header else "") + svg_of(boxes)}, raw=True)
        return
    if header:
        print(header)
    if use_rich or (use_rich is None and sys.stdout.isatty() and _has_rich()):
        _print_boxes(boxes, force=bool(use_rich))
    else:
        print(boxes_text(boxes))


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _notebook_display() -> Any:
    """Return IPython's display module in a notebook, else None."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return None if running is None or not hasattr(running, "kernel") else sys.modules["IPython"].display


# --- colored ------------------------------------------------------------------------------------------------------------
def _print_boxes(boxes: Boxes, force: bool) -> None:
    """Print boxes to the terminal, colored by rich if the terminal has colors."""
    from rich.console import Console  # optional
    from rich.text import Text

    colors: Literal["truecolor", "auto"] = "truecolor" if force else "auto"
    console = Console(file=sys.stdout, force_terminal=force or None, color_system=colors, highlight=False)
    if console.color_system is None or console.no_color:  # TERM=dumb, NO_COLOR
        print(boxes_text(boxes))
        return
    styles = TERMINAL_STYLES if console.color_system == "standard" else [f"#111111 on {color}" for color in COLORS]
    console.print(Text(boxes.title, style="bold"))
    for panel in boxes.panels:
        if panel.title:
            console.print(Text(panel.title))
        for line in _panel_lines(panel, styles):
            console.print(Text.assemble(*line), no_wrap=True, overflow="ignore", crop=False)
    if boxes.remark:
        console.print(Text(boxes.remark, style="italic"))


def _panel_lines(panel: Panel, styles: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return the lines of a panel to print, each a list of (text, rich style)."""
    left = max(len(row.text) for row in panel.rows) + 1
    least = [max(len(column.text), *(len(line[j].text) for line in panel.boxes)) + 2 for j, column in enumerate(panel.columns)]
    widths = list(map(round, scale_lengths(panel.columns, _PANEL_WIDTH, least)))
    heights = list(map(round, scale_lengths(panel.rows, _PANEL_HEIGHT, [1] * len(panel.rows)))) if len(panel.rows) > 1 else [3]
    lines = []
    if panel.columns[0].text:
        labels = "".join(c.text.center(wide) for c, wide in zip(panel.columns, widths, strict=True))
        lines.append([(" " * left + labels.rstrip(), "")])
    for row, boxes, high in zip(panel.rows, panel.boxes, heights, strict=True):
        for k in range(high):
            middle = k == high // 2
            lines.append([((row.text if middle else "").rjust(left - 1) + " ", "")])
            for box, wide in zip(boxes, widths, strict=True):
                lines[-1].append(((box.text if middle else "").center(wide), styles[box.color]))
    return lines


# --- as text ------------------------------------------------------------------------------------------------------------
def boxes_text(boxes: Boxes) -> str:
    """Return boxes as plain text: a grid, or one line per shard for more than two dims."""

    def ranks_text(box: Box) -> str:
        return ", ".join(map(str, box.ranks)) + (" (partial)" if boxes.partial else "")

    if not boxes.panels:
        return boxes.remark
    if len(boxes.panels) > 1 or boxes.panels[0].title:
        return table_text(
            [[box.about.partition(" (")[0], ranks_text(box)] for p in boxes.panels for line in p.boxes for box in line]
        )
    (panel,) = boxes.panels
    body = [[row.text, *(ranks_text(box) for box in line)] for row, line in zip(panel.rows, panel.boxes, strict=True)]
    rows = [["", *(column.text for column in panel.columns)], *body] if panel.columns[0].text else body
    return table_text(rows if panel.rows[0].text else [row[1:] for row in rows])
