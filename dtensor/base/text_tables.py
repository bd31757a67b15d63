"""Tables of reports: aligned plain text, or a rich table where the output is a terminal and rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def table_text(rows: Rows, numbers: bool = False) -> str:
    """Return rows of cells as text with aligned columns; the first row is the head.

    Args:
        numbers: align all columns but the first to the right.
    """
    first_width, *other_widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if numbers else str.ljust
    return "\n".join("  ".join([row[0].ljust(first_width), *map(align, row[1:], other_widths)]).rstrip() for row in rows)


def print_table(rows: Rows, numbers: bool = False) -> None:
    """Print rows of cells: with rich on a terminal, else as :func:`table_text`."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(table_text(rows, numbers), flush=True)
        return
    from rich import box  # an optional dependency
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(rows[0]):
        table.add_column(Text(name), justify="right" if numbers and k else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, highlight=False).print(table)
