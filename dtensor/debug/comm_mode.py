"""``CommDebugMode``: the collectives that ran inside a ``with`` block."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..comm import events
from ..comm.events import Event


class CommDebugMode:
    """Counts collectives and the bytes they bring to a rank; modes nest, each counts its own block.

    One call of a collective counts once, whether its ranks are processes or all live here. Groups of one rank do not
    communicate and do not count.

    >>> mesh = DeviceMesh("cpu", 2)
    >>> with CommDebugMode() as comm:
    ...     _ = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()
    >>> dict(comm.get_comm_counts()), dict(comm.get_comm_bytes())
    ({'all_gather': 1}, {'all_gather': 8})
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __enter__(self) -> CommDebugMode:
        self.events.clear()
        events.listeners.append(self._record)
        return self

    def __exit__(self, *exception: Any) -> None:
        events.listeners.remove(self._record)

    def _record(self, event: Event) -> None:
        self.events.append(event)

    def get_total_counts(self) -> int:
        """Number of collectives of all kinds."""
        return len(self.events)

    def get_comm_counts(self) -> dict[str, int]:
        """Number of collectives of each kind; 0 for a kind that did not run."""
        counts: dict[str, int] = defaultdict(int)
        for event in self.events:
            counts[event.kind] += 1
        return counts

    def get_comm_bytes(self) -> dict[str, int]:
        """Bytes received by one rank (the largest over ranks, for each collective) of each kind."""
        totals: dict[str, int] = defaultdict(int)
        for event in self.events:
            totals[event.kind] += event.bytes
        return totals

    def get_table(self) -> str:
        """One line for each kind, mesh dims and group size, in order of first use."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for event in self.events:
            row = rows.setdefault((event.kind, event.over, str(event.group_size)), [0, 0])
            row[0] += 1
            row[1] += event.bytes
        head = ("collective", "over", "ranks", "count", "bytes received per rank")
        lines = [head, *((*key, str(count), f"{size:,}") for key, (count, size) in rows.items())]
        lines.append(("total", "", "", str(len(self.events)), f"{sum(event.bytes for event in self.events):,}"))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def __str__(self) -> str:
        return self.get_table()

    def __repr__(self) -> str:
        return f"<CommDebugMode: {self.get_total_counts()} collectives, {sum(event.bytes for event in self.events):,} bytes>"
