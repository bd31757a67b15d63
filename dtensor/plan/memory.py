"""What a rank holds at once, as far as it depends on layouts: inputs, what forward makes for backward, forms kept in between.

Transient memory (workspaces, what lives within one operator) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .graph import Graph, Node, Value
from .options import Option
from .prices import FREE, move_seconds
from .total import Total


@dataclass(slots=True)
class Memory:
    """The memory of one graph.

    Attributes:
        limit: bytes per rank.
        factors: by value, bytes held for each of its bytes until the peak.
        crossing: by value, whether forward makes it and backward takes it.
        forward: by value, whether forward takes it.
    """

    limit: float
    factors: list[float]
    crossing: list[bool]
    forward: list[bool]

    @staticmethod
    def of(graph: Graph, limit: float) -> Memory:
        """The memory of ``graph``."""
        users = graph.users()
        crossing = [_crosses(value, users[value.number]) for value in graph.values]
        forward = [any(not node.backward for node, _ in users[value.number]) for value in graph.values]
        return Memory(limit, [_factor(value, crossing[value.number]) for value in graph.values], crossing, forward)

    def keeps(self, value: int, user: Node) -> bool:
        """Whether a form of a value that is moved for this user is held: forward has used it, or a view of it crosses over."""
        if user.backward:
            return self.forward[value]
        return user.view and any(number is not None and self.crossing[number] for number in user.results)

    def bytes(self, graph: Graph, total: Total, taken: Sequence[Option]) -> float:
        """Bytes per rank under these options."""
        held = 0.0
        for value in graph.values:
            layout = taken[value.producer.number].results[value.place]
            if self.factors[value.number] and layout is not None:
                held += self.factors[value.number] * layout.max_local_nbytes
        for number, moves in total.all_moves(taken).items():
            kept = [taken[node.number].operands[i] for node, i in total.users[number] if self.keeps(number, node)]
            for source, target in moves:
                if move_seconds(source, target) >= FREE and any(x is not None and x.same_data(target) for x in kept):
                    held += target.max_local_nbytes
        return held


def _crosses(value: Value, users: Sequence[tuple[Node, int]]) -> bool:
    """Whether forward makes it and backward takes it."""
    return not value.producer.backward and any(node.backward for node, _ in users)


def _factor(value: Value, crosses: bool) -> float:
    producer = value.producer
    if producer.kind == "input":
        return 1.0 if producer.memory is None else producer.memory
    return 1.0 if crosses and not producer.view and value.root == value.number else 0.0
