"""Repeated layers: equivalence classes of nodes. All nodes of a class take the same option, so the solver has fewer variables.

The classes come from rounds of color refinement (Weisfeiler and Leman). At first a class has equal calls. Each round splits
classes with inputs from, or outputs to, different classes. The number of rounds is bounded. Then the layers in the middle of a
stack are in common classes, and the first and last few layers are not. Every such partition is sound: it only prevents the calls
of a class from choosing differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .graph import Graph, Node

_MAX_ROUNDS = 6
_MAX_CLASS_RATIO = 0.6  # classes per node; with more of them, each node is a class


@dataclass(slots=True)
class NodeClass:
    """Equivalence class of nodes, which take the same option: a representative node and how many there are.

    Attributes:
        node: one of the nodes; ``count``: how many there are.
        feeds: for each operand, the values of :class:`NodeClasses` that one of the nodes uses.
        results: for each result, the value of :class:`NodeClasses`; None for a result that is no DTensor.
    """

    node: Node
    count: int
    feeds: list[list[int]] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class NodeClasses:
    """Equivalence classes of a graph's nodes. One value represents the same result of all nodes of a class.

    Attributes:
        class_of: for each node the number of its class.
        classes: the classes.
        makers: for each value its class, and the index among the results.
        users: for each value the classes that use it, and the index of the operand.
    """

    class_of: list[int]
    classes: list[NodeClass]
    makers: list[tuple[int, int]]
    users: list[list[tuple[int, int]]]

    def graph_value(self, value: int) -> int:
        """Return the number of a graph value that the value ``value`` of the classes represents."""
        maker, place = self.makers[value]
        number = self.classes[maker].node.results[place]
        assert number is not None
        return number

    def per_class(self, choices: Sequence[Any]) -> list[Any]:
        """Return one choice for each class, from choices for each node that are equal within a class."""
        return [choices[own.node.number] for own in self.classes]

    def per_node(self, choices: Sequence[Any]) -> list[Any]:
        """Return one choice for each node, from choices for each class."""
        return [choices[number] for number in self.class_of]


def find_classes(graph: Graph, start: Sequence[Hashable]) -> NodeClasses:
    """Return the equivalence classes of nodes with equal ``start`` colors and equivalent neighbors in the graph.

    Args:
        graph: the graph.
        start: for each node a color. Nodes of different colors are in different classes.
    """
    colors = _refine_colors(graph, _number_colors(start))
    if len(set(colors)) > len(colors) * _MAX_CLASS_RATIO:
        colors = list(range(len(colors)))
    return _make_classes(graph, _number_colors(colors))


def _number_colors(colors: Sequence[Hashable]) -> list[int]:
    """Return ``colors`` as ints from 0, in order of first appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(color, len(numbers)) for color in colors]


def _refine_colors(graph: Graph, colors: list[int]) -> list[int]:
    """Return node colors refined by the colors of neighbors, until no class of equal colors splits further."""
    users = graph.find_users()
    makers = [(value.producer.number, value.place) for value in graph.values]
    count = len(set(colors))
    for _ in range(_MAX_ROUNDS):
        refined: list[Any] = []
        for node in graph.nodes:
            inputs = tuple([None if n is None else (colors[makers[n][0]], makers[n][1]) for n in node.operands])
            outputs = tuple(
                [
                    None if n is None else tuple(sorted({(colors[user.number], place) for user, place in users[n]}))
                    for n in node.results
                ]
            )
            refined.append((colors[node.number], inputs, outputs))
        colors = _number_colors(refined)
        if len(set(colors)) == count:
            break
        count = len(set(colors))
    return colors


def _make_classes(graph: Graph, class_of: list[int]) -> NodeClasses:
    """Make the equivalence classes of nodes, with their counts, values, and the edges between them."""
    classes = NodeClasses(class_of, [], [], [])
    value_of: dict[tuple[int, int], int] = {}
    for node, own in zip(graph.nodes, class_of, strict=True):
        if own < len(classes.classes):
            classes.classes[own].count += 1
            continue
        node_class = NodeClass(node, 1, [[] for _ in node.operands])
        for place, number in enumerate(node.results):
            if number is not None:
                value_of[own, place] = len(classes.makers)
                classes.makers.append((own, place))
            node_class.results.append(None if number is None else value_of[own, place])
        classes.classes.append(node_class)
    classes.users = [[] for _ in classes.makers]
    edges: set[tuple[int, int, int]] = set()
    for node, own in zip(graph.nodes, class_of, strict=True):
        for place, number in enumerate(node.operands):
            if number is None:
                continue
            value = graph.values[number]
            used = value_of[class_of[value.producer.number], value.place]
            if (used, own, place) not in edges:
                edges.add((used, own, place))
                classes.classes[own].feeds[place].append(used)
                classes.users[used].append((own, place))
    return classes
