"""What a choice of options takes: the work of every call, and the moves of every value, each made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..layout.layout import Layout
from ..redistribute import plan as plan_move
from .costs import FREE, kernel_bytes, kernel_seconds, move_seconds
from .graph import Graph, Node
from .strategy_options import Form, Option, form_of

Move = tuple[Layout, Layout]


class Total:
    """Moves and seconds of one graph under choices of options, one for each node."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.users = graph, graph.users()

    def moves(self, number: int, taken: Sequence[Option]) -> list[Move]:
        """The moves of one value. What follows from another form for nothing is cut from that."""
        value = self.graph.values[number]
        made = taken[value.producer.number].results[value.place]
        needed: dict[Form, Layout] = {}
        for node, place in self.users[number]:
            layout = taken[node.number].operands[place]
            if layout is not None:
                needed.setdefault(form_of(layout), layout)
        return [] if made is None else _cheapest(made, [layout for layout in needed.values() if not layout.same_data(made)])

    def all_moves(self, taken: Sequence[Option]) -> dict[int, list[Move]]:
        """By value, those that are moved."""
        found = {number: self.moves(number, taken) for number in range(len(self.graph.values))}
        return {number: moves for number, moves in found.items() if moves}

    def seconds(self, taken: Sequence[Option]) -> float:
        """Of the whole program."""
        return sum(option.seconds for option in taken) + sum(map(seconds_of, self.all_moves(taken).values()))

    def local_seconds(self, taken: Sequence[Option]) -> float:
        """Of the work of every rank, what is cut and copied for it too, without whatever is sent."""
        kernels = (kernel_seconds(n, o.rows) for n, o in zip(self.graph.nodes, taken, strict=True) if n.asked is not None)
        moves = (move for own in self.all_moves(taken).values() for move in own if not plan_move(*move).communicates)
        return sum(option.seconds for option in taken) - sum(kernels) + seconds_of(moves)

    def bytes(self, taken: Sequence[Option]) -> int:
        """That a rank receives, in moves and in the collectives of kernels."""
        return sum(map(bytes_of, self.all_moves(taken).values())) + sum(
            kernel_bytes(node.asked, option.rows, option.operands)
            for node, option in zip(self.graph.nodes, taken, strict=True)
            if node.asked is not None
        )

    def near(self, node: Node, taken: Sequence[Option]) -> float:
        """Of one node and the values that it takes and makes: what changes with its option."""
        around = {number for number in (*node.operands, *node.results) if number is not None}
        return taken[node.number].seconds + sum(seconds_of(self.moves(number, taken)) for number in around)


def seconds_of(moves: Iterable[Move]) -> float:
    """Seconds of moves, one after the other."""
    return sum(move_seconds(source, target) for source, target in moves)


def bytes_of(moves: Iterable[Move]) -> int:
    """Bytes that a rank receives in them."""
    return sum(plan_move(source, target).bytes for source, target in moves)


def _cheapest(made: Layout, needed: list[Layout]) -> list[Move]:
    best = [(made, layout) for layout in needed]
    costly = [layout for layout in needed if move_seconds(made, layout) >= FREE]
    if len(costly) < 2:
        return best
    price = seconds_of(best)
    for via in (*costly, made.replace(placements=costly[0].reduced().placements)):
        through = [(made, via), *((via if move_seconds(via, x) < FREE else made, x) for x in needed if x is not via)]
        total = seconds_of(through)
        if total < price:
            best, price = through, total
    return best
