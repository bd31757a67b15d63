"""Bounds of memory as rows of the 0/1 program: what is held at some moments must fit. Which moments, is found as one goes: a
solution that is too large at another one is solved again with that (cutting planes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..base.group_by import by_key
from .costs import move_seconds
from .liveness import Memory, copies
from .repeated_layers import Classes
from .solver import Assembly, Terms
from .strategy_options import Form

Uses = frozenset[tuple[int, int]]  # classes, and as which operand
Pattern = tuple[bool, Uses, Uses, Uses]  # at a moment: whether the tensor is there; its uses now, before, and afterwards


class Moments:
    """The rows of one program.

    Args:
        penalty: seconds for each byte too much, so that there always is a solution.
    """

    def __init__(self, assembly: Assembly, memory: Memory, penalty: float) -> None:
        self.assembly, self.memory = assembly, memory
        self.program, self.classes = assembly.program, assembly.classes
        self._again: dict[tuple[int, int, Form, Uses, Uses], int] = {}
        rows = [self._row(moment) for moment in memory.moments]
        most = max(sum(size for _, size in row) for row in rows)
        excess = self.program.variable(most * memory.limit * penalty)
        for row in rows:
            self.program.at_most([*row, (excess, -most)], 1.0)

    def _row(self, moment: int) -> Terms:
        """What is held at a moment, over the limit."""
        held: Terms = []
        for (value, pattern), count in patterns(self.classes, self.memory, moment).items():
            self._own(value, pattern, count / self.memory.limit, held)
            if value in self.assembly.moves:
                self._forms(value, pattern, count / self.memory.limit, held)
        return held

    def _own(self, value: int, pattern: Pattern, count: float, held: Terms) -> None:
        """The value as it is made: while the tensor is there, or what is seen of it in the same memory."""
        number = self.classes.number(value)
        if self.memory.home(number) is not None:
            return
        for source, (layout, variables) in enumerate(self.assembly.made[value]):
            size = count * self.memory.size(number, layout)
            if pattern[0]:
                held += [(variable, size) for variable in variables]
            elif size and value in self.assembly.moves:
                targets = self.assembly.moves[value].targets
                flows = [(form, flow) for at, form, flow in self._flows(value, pattern[1]) if at == source]
                own = [flow for form, flow in flows if not copies(layout, targets[form])]
                held += [(self._most(own), size)] if own else []

    def _forms(self, value: int, pattern: Pattern, count: float, held: Terms) -> None:
        """The forms that it is moved to: while they are used, and between two uses unless they are moved again."""
        moves = self.assembly.moves[value]
        now, before, after = (self._by_form(value, uses) for uses in pattern[1:])
        for source, form in {**now, **{key: None for key in before if key in after}}:
            key, layout, target = (source, form), moves.made[source][0], moves.targets[form]
            size = count * target.max_local_nbytes
            if not size or not copies(layout, target):
                continue
            present = self.program.variable()
            held.append((present, size))
            for flow in now.get(key, ()):
                self.program.at_most([(flow, 1.0), (present, -1.0)], 0.0)
            if key not in now:
                again = self._moved_again(value, source, form, pattern)
                both = [(self._most(before[key]), 1.0), (self._most(after[key]), 1.0)]
                self.program.at_most([*both, (present, -1.0), (again, -1.0)], 1.0)

    def _moved_again(self, value: int, source: int, form: Form, pattern: Pattern) -> int:
        """The variable of a form that is let go between these uses, and moved again."""
        key = value, source, form, pattern[2], pattern[3]
        if key not in self._again:
            moves = self.assembly.moves[value]
            seconds = move_seconds(moves.made[source][0], moves.targets[form])
            self._again[key] = self.program.variable(moves.count * seconds)
        return self._again[key]

    def _flows(self, value: int, uses: Uses) -> list[tuple[int, Form, int]]:
        flows = self.assembly.moves[value].flows
        return [flow for use in sorted(uses) for flow in flows.get(use, ())]

    def _by_form(self, value: int, uses: Uses) -> dict[tuple[int, Form], list[int]]:
        return by_key(((source, form), flow) for source, form, flow in self._flows(value, uses))

    def _most(self, variables: Sequence[int]) -> int:
        """A variable that is no less than any of these."""
        if len(variables) == 1:
            return variables[0]
        most = self.program.variable()
        for variable in variables:
            self.program.at_most([(variable, 1.0), (most, -1.0)], 0.0)
        return most


def patterns(classes: Classes, memory: Memory, moment: int) -> Counter[tuple[int, Pattern]]:
    """How the values are used that may be held at a moment: by class and pattern how many."""
    stands = {made: value for value, made in enumerate(classes.makers)}
    found: Counter[tuple[int, Pattern]] = Counter()
    for value in memory.graph.values:
        number = value.number
        if not memory.born[number] <= moment <= memory.reach[number]:
            continue
        sides: tuple[set[tuple[int, int]], ...] = (set(), set(), set())
        for node, place in memory.total.users[number]:
            side = 2 if node.number > moment else int(memory.end_of(node, place, memory.reach) < moment)
            sides[side].add((classes.of[node.number], place))
        pattern: Pattern = moment <= memory.dies[number], frozenset(sides[0]), frozenset(sides[1]), frozenset(sides[2])
        found[stands[classes.of[value.producer.number], value.place], pattern] += 1
    return found
