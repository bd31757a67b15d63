"""Liveness: when a rank holds each value and each redistributed copy of it, exact over the recorded program.

A tensor is held from the call that makes it until the program, and autograd for it, drop it. Its views and in-place results are
in the same memory. A redistributed copy is held from its first use to its last. If memory is scarce, it is freed in between and
made again, such as a weight that is gathered again for backward. Not counted are the temporary memory of a kernel in one call,
and what autograd saves of a call besides tensors of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..base.caches import memoize
from ..base.group_by import group_by_key
from ..layout.layout import Layout
from ..redistribute import VIEWS
from ..redistribute import plan as plan_redistribution
from .graph import Graph, Node, Value
from .node_costs import redistribute_seconds
from .objective import Move, Objective
from .strategy_options import CanonicalLayout, Option, canonical_layout

CopyKey = tuple[int, CanonicalLayout]  # a redistributed copy: the number of the value, and the layout


@memoize(1 << 16)
def makes_copy(source: Layout, target: Layout) -> bool:
    """Return True if this redistribution allocates memory; False if it only takes a local view."""
    return not all(isinstance(step, VIEWS) for step in plan_redistribution(source, target).steps)


@dataclass(slots=True)
class LiveRange:
    """Range of nodes (start, end) in which a redistributed copy is held, and ``uses``, the nodes that use it."""

    uses: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The memory that a choice of options needs.

    Attributes:
        peak: most bytes of one rank.
        peak_node: the number of the node at the peak.
        live_ranges: the live ranges of each copy.
        seconds, nbytes: cost of the redistributions that are made again.
    """

    peak: int
    peak_node: int
    live_ranges: dict[CopyKey, list[LiveRange]]
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Gap:
    """Gap between two uses of a copy, in which it may be freed and made again. ``after``: the number of the live range before."""

    key: CopyKey
    after: int
    start: int
    end: int
    nbytes: float
    move: Move

    @property
    def seconds_per_byte(self) -> float:
        return redistribute_seconds(*self.move) / self.nbytes


class MemoryModel:
    """The memory model of one graph.

    Args:
        graph: the graph.
        limit: bytes that a rank may hold. With an infinite limit no copy is made again.

    Attributes:
        first_nodes, last_nodes: for each value the first and the last node at which its tensor exists.
        alias_last_nodes: for each value the last node at which it or an alias of it exists, if no alias is redistributed.
        critical_nodes: nodes at which a solution has needed too much, see [Note: Memory as cutting planes] in ``solver.py``.
    """

    def __init__(self, graph: Graph, limit: float = float("inf")) -> None:
        self.graph, self.objective, self.limit = graph, Objective(graph), limit
        self._aliased_operands = [_find_aliased_operand(graph, value) for value in graph.values]
        self.first_nodes = [0 if value.producer.kind == "input" else value.producer.number for value in graph.values]
        self.critical_nodes: list[int] = []
        last = len(graph.nodes) - 1
        self.last_nodes = [last if value.last_node is None else value.last_node for value in graph.values]
        self.alias_last_nodes = self.last_nodes[:]
        for number in reversed(range(len(graph.values))):
            if (base := self.aliased_value(number)) is not None:
                self.alias_last_nodes[base] = max(self.alias_last_nodes[base], self.alias_last_nodes[number])

    def aliased_value(self, number: int) -> int | None:
        """Return the number of the value that this one aliases if neither is redistributed; None if it owns its memory."""
        place = self._aliased_operands[number]
        return None if place is None else self.graph.values[number].producer.operands[place]

    def count_bytes(self, number: int, layout: Layout) -> float:
        """Return the bytes of a value on the rank with the most, and for a parameter those of its optimizer state."""
        factor = self.graph.values[number].producer.bytes_factor
        return layout.max_local_nbytes * (1.0 if factor is None else factor)

    def find_last_use(self, node: Node, place: int, last_nodes: Sequence[int]) -> int:
        """Return the last node at which ``node`` needs its operand's memory, which a result may alias."""
        aliases = [last_nodes[n] for n in node.results if n is not None and self._aliased_operands[n] == place]
        return max([node.number, *aliases])

    # --- exact usage ---------------------------------------------------------------------------------------------------
    def compute_usage(self, options: Sequence[Option], without_plan: bool = False) -> MemoryUsage:
        """Return the peak memory of a rank under these options, with copies freed and made again to meet the limit.

        Args:
            options: one for each node.
            without_plan: whether calls choose for themselves. Then a computed value keeps its copies as long as it exists, and an
                input keeps none.
        """
        last_nodes, profile = self.last_nodes[:], np.zeros(len(self.graph.nodes) + 1)
        live_ranges: dict[CopyKey, list[LiveRange]] = {}
        gaps: list[_Gap] = []
        for value in reversed(self.graph.values):
            number, layout = value.number, options[value.producer.number].results[value.place]
            if layout is None:
                continue
            moves = {canonical_layout(target): (source, target) for source, target in self.objective.list_moves(number, options)}
            for key, uses in self._find_uses(number, options, moves, last_nodes).items():
                ranges = live_ranges[number, key] = _make_live_ranges(uses)
                if makes_copy(*moves[key]):
                    size = moves[key][1].max_local_nbytes
                    of_input = without_plan and self.graph.values[value.root].producer.kind == "input"
                    cached_until = self.last_nodes[number] if without_plan and not of_input else 0
                    for one in ranges if of_input else (LiveRange([], ranges[0].start, ranges[-1].end),):
                        _add_bytes(profile, one.start, max(one.end, cached_until), size)
                    if size and not without_plan:
                        pairs = enumerate(pairwise(ranges))
                        gaps += [_Gap((number, key), i, a.end + 1, b.start - 1, size, moves[key]) for i, (a, b) in pairs]
            if self.aliased_value(number) is None:
                _add_bytes(profile, self.first_nodes[number], last_nodes[number], self.count_bytes(number, layout))
        profile = np.cumsum(profile[:-1])
        freed = _choose_freed_gaps(profile, gaps, self.limit)
        freed_after = group_by_key((gap.key, gap.after) for gap in freed)
        live_ranges = {key: _join_ranges(ranges, freed_after.get(key, ())) for key, ranges in live_ranges.items()}
        peak_node = int(profile.argmax())
        seconds = sum(redistribute_seconds(*gap.move) for gap in freed)
        nbytes = sum(plan_redistribution(*gap.move).bytes for gap in freed)
        return MemoryUsage(int(profile[peak_node]), peak_node, live_ranges, seconds, nbytes)

    def _find_uses(
        self, number: int, options: Sequence[Option], moves: dict[CanonicalLayout, Move], last_nodes: list[int]
    ) -> dict[CanonicalLayout, list[tuple[int, int]]]:
        """Return, by layout of the copy, the (node, last node) uses of a value's copies; extend ``last_nodes`` otherwise."""
        found: dict[CanonicalLayout, list[tuple[int, int]]] = {}
        for node, place in self.objective.users[number]:
            layout = options[node.number].operands[place]
            if layout is None:
                continue
            key, end = canonical_layout(layout), self.find_last_use(node, place, last_nodes)
            while key in moves:  # a copy that is made from another copy also uses that one
                found.setdefault(key, []).append((node.number, end))
                end = node.number if makes_copy(*moves[key]) else end
                key = canonical_layout(moves[key][0])
            last_nodes[number] = max(last_nodes[number], end)
        return found


def _find_aliased_operand(graph: Graph, value: Value) -> int | None:
    """Return the index of the producer's operand that a value aliases; None if it has memory of its own."""
    node = value.producer
    if node.kind in ("move", "gradient", "written"):
        return 0
    if value.root == value.number:
        return None
    roots = [None if n is None or n == value.number else graph.values[n].root for n in node.operands]
    return roots.index(value.root) if value.root in roots else None


def _make_live_ranges(uses: list[tuple[int, int]]) -> list[LiveRange]:
    """Return the live ranges of one copy from its (node, last node) uses; uses that touch share a range."""
    ranges: list[LiveRange] = []
    for start, end in uses:
        if ranges and start <= ranges[-1].end + 1:
            ranges[-1].uses.append(start)
            ranges[-1].end = max(ranges[-1].end, end)
        else:
            ranges.append(LiveRange([start], start, end))
    return ranges


def _join_ranges(ranges: list[LiveRange], freed_after: Sequence[int]) -> list[LiveRange]:
    """Return live ranges joined across gaps, except behind the ranges ``freed_after``, where the copy is freed."""
    joined = [ranges[0]]
    for i, one in enumerate(ranges[1:]):
        if i in freed_after:
            joined.append(one)
        else:
            joined[-1] = LiveRange([*joined[-1].uses, *one.uses], joined[-1].start, one.end)
    return joined


def _add_bytes(differences: Any, start: int, end: int, nbytes: float) -> None:
    """Add ``nbytes`` for the nodes ``start .. end`` to a memory profile that is stored as differences."""
    differences[start] += nbytes
    differences[end + 1] -= nbytes


def _choose_freed_gaps(profile: Any, gaps: list[_Gap], limit: float) -> list[_Gap]:
    """Choose gaps in which copies are freed until the memory profile, which changes, stays within the limit.

    At the highest peak, the gap with the least seconds per byte is freed. At the end, gaps that turn out to be unnecessary are
    held again, the most expensive ones first.
    """
    rest, freed = sorted(gaps, key=lambda gap: gap.seconds_per_byte), []
    while rest and profile.max() > limit:
        peak = int(profile.argmax())
        gap = next((gap for gap in rest if gap.start <= peak <= gap.end), None)
        if gap is None:
            break
        rest.remove(gap)
        freed.append(gap)
        profile[gap.start : gap.end + 1] -= gap.nbytes
    for gap in sorted(freed, key=lambda gap: -redistribute_seconds(*gap.move)):
        if (profile[gap.start : gap.end + 1] + gap.nbytes).max() <= limit:
            profile[gap.start : gap.end + 1] += gap.nbytes
            freed.remove(gap)
    return freed
