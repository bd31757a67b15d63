"""Objective of the planner: estimated seconds and received bytes of a program, for one option of each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..layout.layout import Layout
from ..redistribute import plan as plan_redistribution
from .graph import Graph, Node
from .node_costs import NEGLIGIBLE_SECONDS, kernel_bytes, node_kernel_seconds, redistribute_seconds
from .strategy_options import CanonicalLayout, Option, canonical_layout

Move = tuple[Layout, Layout]  # a redistribution: source and target


class Objective:
    """Estimated seconds and received bytes of a graph under ``options``, one for each node."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.users = graph, graph.find_users()

    def list_moves(self, number: int, options: Sequence[Option]) -> list[Move]:
        """Return the redistributions (source, target) of one value that its users need, by the cheapest paths."""
        value = self.graph.values[number]
        source = options[value.producer.number].results[value.place]
        needed: dict[CanonicalLayout, Layout] = {}
        for node, place in self.users[number]:
            layout = options[node.number].operands[place]
            if layout is not None:
                needed.setdefault(canonical_layout(layout), layout)
        if source is None:
            return []
        return _cheapest_moves(source, [layout for layout in needed.values() if not layout.has_same_blocks(source)])

    def list_all_moves(self, options: Sequence[Option]) -> dict[int, list[Move]]:
        """Return the redistributions (source, target) of each value that has some, by number of the value."""
        moves_of = {number: self.list_moves(number, options) for number in range(len(self.graph.values))}
        return {number: moves for number, moves in moves_of.items() if moves}

    def total_seconds(self, options: Sequence[Option]) -> float:
        """Return the estimated seconds of the program under these options: calls and redistributions."""
        return sum(option.seconds for option in options) + sum(map(moves_seconds, self.list_all_moves(options).values()))

    def local_seconds(self, options: Sequence[Option]) -> float:
        """Return the estimated seconds of the program without communication: local work and local redistributions."""
        pairs = zip(self.graph.nodes, options, strict=True)
        kernels = (node_kernel_seconds(node, option.strategies) for node, option in pairs if node.query is not None)
        all_moves = self.list_all_moves(options).values()
        local_moves = (move for moves in all_moves for move in moves if not plan_redistribution(*move).communicates)
        return sum(option.seconds for option in options) - sum(kernels) + moves_seconds(local_moves)

    def received_bytes(self, options: Sequence[Option]) -> int:
        """Return the bytes that one rank receives in the program: redistributions and kernel collectives."""
        return sum(map(moves_bytes, self.list_all_moves(options).values())) + sum(
            kernel_bytes(node.query, option.strategies, option.operands)
            for node, option in zip(self.graph.nodes, options, strict=True)
            if node.query is not None
        )

    def seconds_around(self, node: Node, options: Sequence[Option]) -> float:
        """Return the estimated seconds of a node and of the redistributions of its operands and results."""
        numbers = {number for number in (*node.operands, *node.results) if number is not None}
        return options[node.number].seconds + sum(moves_seconds(self.list_moves(number, options)) for number in numbers)


def moves_seconds(moves: Iterable[Move]) -> float:
    """Return the estimated seconds of redistributions, one after the other."""
    return sum(redistribute_seconds(source, target) for source, target in moves)


def moves_bytes(moves: Iterable[Move]) -> int:
    """Return the bytes that a rank receives in these redistributions."""
    return sum(plan_redistribution(source, target).bytes for source, target in moves)


def _cheapest_moves(source: Layout, needed: list[Layout]) -> list[Move]:
    """Return the cheapest redistributions from ``source`` to all needed layouts, directly or through one intermediate."""
    best = [(source, layout) for layout in needed]
    costly = [layout for layout in needed if redistribute_seconds(source, layout) >= NEGLIGIBLE_SECONDS]
    if len(costly) < 2:
        return best
    best_seconds = moves_seconds(best)
    for via in (*costly, source.replace(placements=costly[0].reduced().placements)):
        moves = [
            (source, via),
            *((via if redistribute_seconds(via, x) < NEGLIGIBLE_SECONDS else source, x) for x in needed if x is not via),
        ]
        seconds = moves_seconds(moves)
        if seconds < best_seconds:
            best, best_seconds = moves, seconds
    return best
