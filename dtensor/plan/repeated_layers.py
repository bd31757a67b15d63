"""Layers repeat: calls that are alike, among neighbours that are alike, choose alike, and are variables once.

Classes come from rounds of refinement (Weisfeiler and Lehman): at first a class is what is called on what; each round tells apart
what is fed by, or feeds, different classes. After a bounded number of rounds the layers in the middle of a stack are alike, the
first and the last few are not. Any such partition is sound: it only keeps calls of a class from choosing differently.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .graph import Graph, Node

_ROUNDS = 6


@dataclass(slots=True)
class Class:
    """Nodes that choose alike.

    Attributes:
        node: one of them; ``count``: how many there are.
        feeds: for each operand the values, as numbers of :class:`Classes`, that some of them takes.
        results: its values.
    """

    node: Node
    count: int
    feeds: list[list[int]] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class Classes:
    """The classes of a graph; a value stands for the same result of all nodes of its class.

    Attributes:
        of: the class of each node.
        makers: for each value its class and which of its results it is.
        users: for each value the classes that take it, and as which operand.
    """

    of: list[int]
    classes: list[Class]
    makers: list[tuple[int, int]]
    users: list[list[tuple[int, int]]]

    def number(self, value: int) -> int:
        """One of the graph's values that a value stands for."""
        own, place = self.makers[value]
        found = self.classes[own].node.results[place]
        assert found is not None
        return found

    def together(self, chosen: Sequence[Any]) -> list[Any]:
        """What was chosen for nodes, alike in each class, for each class."""
        return [chosen[own.node.number] for own in self.classes]

    def spread(self, chosen: Sequence[Any]) -> list[Any]:
        """What was chosen for classes, for each node."""
        return [chosen[own] for own in self.of]


def classes_of(graph: Graph, start: Sequence[Hashable]) -> Classes:
    """The classes of a graph, within these ones. Where little repeats, every node is a class."""
    colors = _refined(graph, _numbered(start))
    if len(set(colors)) > len(colors) * 0.6:
        colors = list(range(len(colors)))
    return _quotient(graph, _numbered(colors))


def _numbered(colors: Sequence[Hashable]) -> list[int]:
    """Colors as numbers in order of first appearance."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(color, len(seen)) for color in colors]


def _refined(graph: Graph, colors: list[int]) -> list[int]:
    users = graph.users()
    makers = [(value.producer.number, value.place) for value in graph.values]
    count = len(set(colors))
    for _ in range(_ROUNDS):
        found: list[Any] = []
        for node in graph.nodes:
            fed = tuple([None if n is None else (colors[makers[n][0]], makers[n][1]) for n in node.operands])
            feeding = tuple(
                [
                    None if n is None else tuple(sorted({(colors[user.number], place) for user, place in users[n]}))
                    for n in node.results
                ]
            )
            found.append((colors[node.number], fed, feeding))
        colors = _numbered(found)
        if len(set(colors)) == count:
            break
        count = len(set(colors))
    return colors


def _quotient(graph: Graph, of: list[int]) -> Classes:
    found = Classes(of, [], [], [])
    value_of: dict[tuple[int, int], int] = {}
    for node, own in zip(graph.nodes, of, strict=True):
        if own < len(found.classes):
            found.classes[own].count += 1
            continue
        made = Class(node, 1, [[] for _ in node.operands])
        for place, number in enumerate(node.results):
            if number is not None:
                value_of[own, place] = len(found.makers)
                found.makers.append((own, place))
            made.results.append(None if number is None else value_of[own, place])
        found.classes.append(made)
    found.users = [[] for _ in found.makers]
    edges: set[tuple[int, int, int]] = set()
    for node, own in zip(graph.nodes, of, strict=True):
        for place, number in enumerate(node.operands):
            if number is None:
                continue
            value = graph.values[number]
            taken = value_of[of[value.producer.number], value.place]
            if (taken, own, place) not in edges:
                edges.add((taken, own, place))
                found.classes[own].feeds[place].append(taken)
                found.users[taken].append((own, place))
    return found
