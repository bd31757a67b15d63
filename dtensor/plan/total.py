"""What a choice of options takes: the work of every call, and the moves of every value, each made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..layout.layout import Layout
from ..redistribute import plan as plan_move
from .graph import Graph, Node
from .options import Form, Option, form_of
from .prices import FREE, move_seconds

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

    def bytes(self, taken: Sequence[Option]) -> int:
        """That a rank receives, in moves and in the collectives of kernels."""
        moved = sum(bytes_of(moves) for moves in self.all_moves(taken).values())
        return moved + sum(option.nbytes for option in taken)

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
