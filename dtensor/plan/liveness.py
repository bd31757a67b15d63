"""When a rank holds what: the liveness of every value and of every form that it is moved to, exact over the recorded program.

A tensor is held from the call that makes it until the program, and autograd for it, have let it go; its views, and what was
written to it in place, are the same memory. A moved form is held from its first use to its last, or, where memory is scarce, let
go in between and moved again: that is what gathering a weight again for backward is. What a kernel needs within one call, and
what autograd keeps of a call beside tensors of the program, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..base.caches import remembered
from ..base.group_by import by_key
from ..layout.layout import Layout
from ..redistribute import VIEWS
from ..redistribute import plan as plan_move
from .costs import move_seconds
from .graph import Graph, Node, Value
from .objective import Move, Total
from .strategy_options import Form, Option, form_of


@remembered(1 << 16)
def copies(source: Layout, target: Layout) -> bool:
    """Whether a move gives memory of its own; what is cut off is a view."""
    return not all(isinstance(step, VIEWS) for step in plan_move(source, target).steps)


@dataclass(slots=True)
class Piece:
    """A form of a value while it is held once.

    Attributes:
        uses: the nodes that take it, in order; ``start``, ``end``: the first and last node while which it is held.
    """

    uses: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Held:
    """What is held under some choice of options.

    Attributes:
        peak: most bytes of one rank; ``moment``: the node at which.
        pieces: by value and form.
        seconds, nbytes: of what is moved again.
    """

    peak: int
    moment: int
    pieces: dict[tuple[int, Form], list[Piece]]
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Gap:
    """Time between two uses of a form, in which it need not be held."""

    key: tuple[int, Form]
    after: int  # the piece before the gap
    start: int
    end: int
    nbytes: float
    move: Move

    @property
    def price(self) -> float:
        return move_seconds(*self.move) / self.nbytes


class Memory:
    """The memory of one graph.

    Args:
        limit: bytes that a rank may hold; infinite: nothing is moved again.

    Attributes:
        moments: nodes at which a solution has held too much; see :mod:`~dtensor.plan.memory_constraints`.
    """

    def __init__(self, graph: Graph, limit: float = float("inf")) -> None:
        self.graph, self.total, self.limit = graph, Total(graph), limit
        self.homes = [home_of(graph, value) for value in graph.values]
        self.born = [0 if value.producer.kind == "input" else value.producer.number for value in graph.values]
        self.moments: list[int] = []
        last = len(graph.nodes) - 1
        self.dies = [last if value.dies is None else value.dies for value in graph.values]
        self.reach = self.dies[:]  # until when memory is held if nothing is moved
        for number in reversed(range(len(graph.values))):
            if (home := self.home(number)) is not None:
                self.reach[home] = max(self.reach[home], self.reach[number])

    def home(self, number: int) -> int | None:
        """The value whose memory this one shows, if it is taken as it lies."""
        place = self.homes[number]
        return None if place is None else self.graph.values[number].producer.operands[place]

    def size(self, number: int, layout: Layout) -> float:
        """Bytes of a value."""
        factor = self.graph.values[number].producer.memory
        return layout.max_local_nbytes * (1.0 if factor is None else factor)

    def end_of(self, node: Node, place: int, reach: Sequence[int]) -> int:
        """Until when memory is held that a node takes as an operand: what it gives may show it."""
        shown = [reach[n] for n in node.results if n is not None and self.homes[n] == place]
        return max([node.number, *shown])

    # --- exact ---------------------------------------------------------------------------------------------------------
    def held(self, taken: Sequence[Option], remembered: bool = False) -> Held:
        """What a rank holds under these options, with what is moved again so as to stay within the limit, if that can be.

        Args:
            remembered: no plan is followed: what calls have made keeps its forms as long as it lives, what is given has none.
        """
        reach, profile = self.dies[:], np.zeros(len(self.graph.nodes) + 1)
        pieces: dict[tuple[int, Form], list[Piece]] = {}
        gaps: list[_Gap] = []
        for value in reversed(self.graph.values):
            number, made = value.number, taken[value.producer.number].results[value.place]
            if made is None:
                continue
            moves = {form_of(target): (source, target) for source, target in self.total.moves(number, taken)}
            for form, uses in self._uses(number, taken, moves, reach).items():
                found = pieces[number, form] = _pieces(uses)
                if copies(*moves[form]):
                    size = moves[form][1].max_local_nbytes
                    given = remembered and self.graph.values[value.root].producer.kind == "input"
                    for piece in found if given else (Piece([], found[0].start, found[-1].end),):
                        _add(profile, piece.start, max(piece.end, self.dies[number] if remembered and not given else 0), size)
                    gaps += [] if remembered else _gaps((number, form), found, size, moves[form])
            if self.home(number) is None:
                _add(profile, self.born[number], reach[number], self.size(number, made))
        profile = np.cumsum(profile[:-1])
        again = _let_go(profile, gaps, self.limit)
        split = by_key((gap.key, gap.after) for gap in again)
        pieces = {key: _joined(found, split.get(key, ())) for key, found in pieces.items()}
        moment = int(profile.argmax())
        seconds = sum(move_seconds(*gap.move) for gap in again)
        return Held(int(profile[moment]), moment, pieces, seconds, sum(plan_move(*gap.move).bytes for gap in again))

    def _uses(
        self, number: int, taken: Sequence[Option], moves: dict[Form, Move], reach: list[int]
    ) -> dict[Form, list[tuple[int, int]]]:
        """By form, the nodes that take it and until when; what takes the value as it lies prolongs ``reach``."""
        found: dict[Form, list[tuple[int, int]]] = {}
        for node, place in self.total.users[number]:
            layout = taken[node.number].operands[place]
            if layout is None:
                continue
            form, end = form_of(layout), self.end_of(node, place, reach)
            while form in moves:  # a form that is had from another one needs that, too
                found.setdefault(form, []).append((node.number, end))
                end = node.number if copies(*moves[form]) else end
                form = form_of(moves[form][0])
            reach[number] = max(reach[number], end)
        return found


def home_of(graph: Graph, value: Value) -> int | None:
    """Which operand's memory a value is, written to or seen otherwise; None if it has its own."""
    node = value.producer
    if node.kind in ("move", "gradient", "same"):
        return 0
    if value.root == value.number:
        return None
    roots = [None if n is None or n == value.number else graph.values[n].root for n in node.operands]
    return roots.index(value.root) if value.root in roots else None


def _pieces(uses: list[tuple[int, int]]) -> list[Piece]:
    """Uses, in order, that follow on each other at once."""
    found: list[Piece] = []
    for start, end in uses:
        if found and start <= found[-1].end + 1:
            found[-1].uses.append(start)
            found[-1].end = max(found[-1].end, end)
        else:
            found.append(Piece([start], start, end))
    return found


def _joined(pieces: list[Piece], let_go: Sequence[int]) -> list[Piece]:
    """Pieces that are held as one: between which the form is not let go."""
    found = [pieces[0]]
    for i, piece in enumerate(pieces[1:]):
        if i in let_go:
            found.append(piece)
        else:
            found[-1] = Piece([*found[-1].uses, *piece.uses], found[-1].start, piece.end)
    return found


def _gaps(key: tuple[int, Form], pieces: list[Piece], nbytes: int, move: Move) -> list[_Gap]:
    between = enumerate(pairwise(pieces))
    return [_Gap(key, i, a.end + 1, b.start - 1, nbytes, move) for i, (a, b) in between if nbytes]


def _add(profile: Any, start: int, end: int, nbytes: float) -> None:
    """To the differences of a profile."""
    profile[start] += nbytes
    profile[end + 1] -= nbytes


def _let_go(profile: Any, gaps: list[_Gap], limit: float) -> list[_Gap]:
    """Gaps in which forms are let go, so that the profile stays within the limit: at the fullest moment what is dearest to hold
    for what moving it again takes; and of those in the end none that is not needed. The profile is changed accordingly."""
    left, taken = sorted(gaps, key=lambda gap: gap.price), []
    while left and profile.max() > limit:
        moment = int(profile.argmax())
        gap = next((gap for gap in left if gap.start <= moment <= gap.end), None)
        if gap is None:
            break
        left.remove(gap)
        taken.append(gap)
        profile[gap.start : gap.end + 1] -= gap.nbytes
    for gap in sorted(taken, key=lambda gap: -move_seconds(*gap.move)):
        if (profile[gap.start : gap.end + 1] + gap.nbytes).max() <= limit:
            profile[gap.start : gap.end + 1] += gap.nbytes
            taken.remove(gap)
    return taken
