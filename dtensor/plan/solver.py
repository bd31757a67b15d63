"""Solver: finds the cheapest combination of options as a 0/1 linear program, which HiGHS solves.

The variables tell which option each node takes, which redistributions are made, and how each use of a value gets its layout: as a
flow from the layout in which the value is made to the layout that is used. A redistribution is paid for once for all uses. A
layout that follows from another copy without communication can use that copy.

[Note: Memory as cutting planes] A memory limit adds one constraint for each *critical* node: the values that are held while the
node runs must fit. Critical nodes are found one after the other. A solution that needs too much memory at another node is solved
again with the constraint of that node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.group_by import group_by_key
from ..errors import PlanError
from ..layout.layout import Layout
from .liveness import MemoryModel, makes_copy
from .node_costs import NEGLIGIBLE_SECONDS, redistribute_seconds
from .repeated_layers import NodeClasses
from .strategy_options import CanonicalLayout, Option, Options, canonical_layout, replicated_along

Terms = list[tuple[int, float]]  # variables and their coefficients
LayoutVars = tuple[Layout, list[int]]  # a layout, and the variables of the options that have it
Uses = frozenset[tuple[int, int]]  # (class, index of the operand)
UsePattern = tuple[bool, Uses, Uses, Uses]  # at a node: whether the tensor exists; its uses at present, before, and afterwards


@dataclass(slots=True)
class LinearProgram:
    """Mixed-integer linear program to be minimized. All variables are between 0 and 1.

    Attributes:
        costs: for each variable its coefficient in the objective.
        integers: variables that are 0 or 1.
        rows: constraints: terms, lower and upper bound.
    """

    costs: list[float] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)

    def add_variable(self, cost: float = 0.0, is_integer: bool = False) -> int:
        """Add a variable with this cost in the objective, and return its number."""
        self.costs.append(cost)
        if is_integer:
            self.integers.append(len(self.costs) - 1)
        return len(self.costs) - 1

    def add_equality(self, terms: Terms, value: float) -> None:
        self.rows.append((terms, value, value))

    def add_upper_bound(self, terms: Terms, value: float) -> None:
        self.rows.append((terms, -math.inf, value))

    def solve(self, seconds: float, gap: float) -> list[float] | None:
        """Return the variables' values in the best solution that HiGHS finds in ``seconds``; None if it finds none.

        Args:
            seconds: time limit.
            gap: relative gap to the optimum at which the search may end.
        """
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise PlanError('planning a program needs scipy: pip install "dtensor[plan]"') from None
        row_starts, columns, data = [0], [], []
        for terms, _, _ in self.rows:
            columns += [variable for variable, _ in terms]
            data += [value for _, value in terms]
            row_starts.append(len(columns))
        matrix: Any = csr_array((data, columns, row_starts), shape=(len(self.rows), len(self.costs)))
        matrix.sum_duplicates()
        integrality = np.zeros(len(self.costs))
        integrality[self.integers] = 1
        solution = milp(
            np.asarray(self.costs) * 1e6,
            integrality=integrality,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        return None if solution.x is None else list(solution.x)


class PlanningProblem:
    """The linear program for the classes of a graph along one mesh dim.

    Attributes:
        program: the linear program.
        option_vars: for each class the variables of its options.
        sources: for each value the layouts in which it may be made.
        moves: the redistributions of each value that is used.
    """

    def __init__(self, classes: NodeClasses, options: Options, mesh_dim: int) -> None:
        self.classes, self.options, self.mesh_dim = classes, options, mesh_dim
        self.program = LinearProgram()
        self.option_vars = [
            [self.program.add_variable(own.count * option.seconds, is_integer=len(options) > 1) for option in options]
            for own, options in zip(classes.classes, options, strict=True)
        ]
        for variables in self.option_vars:
            self.program.add_equality([(variable, 1.0) for variable in variables], 1.0)
        self.sources = [
            list(self._group_by_layout(maker, [option.results[place] for option in options[maker]]).values())
            for maker, place in classes.makers
        ]
        self.moves = {value: self._add_moves(value, users) for value, users in enumerate(classes.users) if users}

    def _add_moves(self, value: int, users: Sequence[tuple[int, int]]) -> _ValueMoves:
        """Add variables and constraints for the redistributions of a value to the layouts that its users may need."""
        needs = [self._group_by_layout(user, [option.operands[place] for option in self.options[user]]) for user, place in users]
        moves = _ValueMoves(self, self.sources[value], needs, self.classes.classes[self.classes.makers[value][0]].count)
        for (user, place), need in zip(users, needs, strict=True):
            node = self.classes.classes[user].node
            moves.add_use((user, place), need, place in node.pinned, len(users) == 1)
        return moves

    def _group_by_layout(self, own: int, layouts: Sequence[Layout | None]) -> dict[CanonicalLayout, LayoutVars]:
        """Return ``layouts``, one per option of class ``own``, each distinct one with the variables of its options."""
        groups: dict[CanonicalLayout, LayoutVars] = {}
        for layout, variable in zip(layouts, self.option_vars[own], strict=True):
            assert layout is not None
            groups.setdefault(canonical_layout(layout), (layout, []))[1].append(variable)
        return groups

    def solve(self, seconds: float, gap: float = 5e-4) -> list[Option] | None:
        """Return the option that each class takes in the best solution; None if none was found in time."""
        values = self.program.solve(seconds, gap)
        if values is None:
            return None
        return [
            own[max(range(len(own)), key=lambda k: values[variables[k]])]
            for own, variables in zip(self.options, self.option_vars, strict=True)
        ]


class _ValueMoves:
    """Variables of the redistributions of one value of the classes, which represents ``count`` values of the graph.

    Attributes:
        targets: the layouts that are needed, and the replicated one.
        flows: for each use ``(number of the source, target, variable)``.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        sources: list[LayoutVars],
        needs: list[dict[CanonicalLayout, LayoutVars]],
        count: int,
    ) -> None:
        self.program, self.sources, self.count = problem.program, sources, count
        self.targets = {key: layout for need in needs for key, (layout, _) in need.items()}
        replicated = replicated_along(sources[0][0], problem.mesh_dim)
        self.targets.setdefault(canonical_layout(replicated), replicated)
        self._move_vars: dict[tuple[int, CanonicalLayout], int] = {}
        self.flows: dict[tuple[int, int], list[tuple[int, CanonicalLayout, int]]] = {}

    def _get_or_add_move(self, source: int, target: CanonicalLayout) -> int:
        """Return the variable of the redistribution from source ``source`` to ``target``, which all uses share."""
        key = source, target
        if key not in self._move_vars:
            layout, variables = self.sources[source]
            cost = self.count * redistribute_seconds(layout, self.targets[target])
            move = self._move_vars[key] = self.program.add_variable(cost)
            self.program.add_upper_bound([(move, 1.0), *((variable, -1.0) for variable in variables)], 0.0)
        return self._move_vars[key]

    def add_use(self, use: tuple[int, int], need: dict[CanonicalLayout, LayoutVars], is_pinned: bool, is_only_use: bool) -> None:
        """Add flow variables and constraints for one use: from each layout made to each layout that the use needs."""
        leaving: list[Terms] = [[] for _ in self.sources]
        flows = self.flows[use] = []
        for key, (target, needing) in need.items():
            arriving: Terms = []
            for source, (layout, _) in enumerate(self.sources):
                flow = self._add_flow(source, layout, key, target, is_pinned, is_only_use)
                if flow is not None:
                    flows.append((source, key, flow))
                    arriving.append((flow, 1.0))
                    leaving[source].append((flow, 1.0))
            self.program.add_equality([*arriving, *((variable, -1.0) for variable in needing)], 0.0)
        for (_, variables), terms in zip(self.sources, leaving, strict=True):
            self.program.add_equality([*terms, *((variable, -1.0) for variable in variables)], 0.0)

    def _add_flow(
        self, source: int, layout: Layout, key: CanonicalLayout, target: Layout, is_pinned: bool, is_only_use: bool
    ) -> int | None:
        """Return the variable of the flow between two layouts; None if redistribution is impossible or not allowed."""
        seconds = redistribute_seconds(layout, target)
        if math.isinf(seconds) or (is_pinned and seconds):
            return None
        if is_only_use or seconds < NEGLIGIBLE_SECONDS:
            return self.program.add_variable(self.count * seconds)
        flow = self.program.add_variable()
        sufficient = [other for other, via in self.targets.items() if other == key or _is_free_from(layout, via, target)]
        moves = [(self._get_or_add_move(source, other), -1.0) for other in sufficient]
        self.program.add_upper_bound([(flow, 1.0), *moves], 0.0)
        return flow


def _is_free_from(source: Layout, via: Layout, target: Layout) -> bool:
    """Return True if ``target`` can be made from ``via`` without communication, and ``via`` from ``source``."""
    return redistribute_seconds(via, target) < NEGLIGIBLE_SECONDS and not math.isinf(redistribute_seconds(source, via))


# --- memory ----------------------------------------------------------------------------------------------------------------
class _MemoryConstraints:
    """Builder of the memory constraints of all critical nodes of a problem. See [Note: Memory as cutting planes].

    Args:
        problem: the problem.
        memory: the memory model, which has the limit and the critical nodes.
        penalty: seconds for each byte over the limit. It is finite, so that there always is a solution.
    """

    def __init__(self, problem: PlanningProblem, memory: MemoryModel, penalty: float) -> None:
        self.problem, self.memory = problem, memory
        self.program, self.classes = problem.program, problem.classes
        self._repeats: dict[tuple[int, int, CanonicalLayout, Uses, Uses], int] = {}
        rows = [self._make_row(node) for node in memory.critical_nodes]
        most = max(sum(size for _, size in row) for row in rows)
        excess = self.program.add_variable(most * memory.limit * penalty)
        for row in rows:
            self.program.add_upper_bound([*row, (excess, -most)], 1.0)

    def _make_row(self, node: int) -> Terms:
        """Return the linear terms for the bytes that are held at a node, as fractions of the limit."""
        held: Terms = []
        for (value, pattern), count in _count_patterns(self.classes, self.memory, node).items():
            self._add_value(value, pattern, count / self.memory.limit, held)
            if value in self.problem.moves:
                self._add_copies(value, pattern, count / self.memory.limit, held)
        return held

    def _add_value(self, value: int, pattern: UsePattern, count: float, held: Terms) -> None:
        """Add the memory of a value as it is made to ``held``, if it or an alias in use exists at the node."""
        number = self.classes.graph_value(value)
        if self.memory.aliased_value(number) is not None:
            return
        for source, (layout, variables) in enumerate(self.problem.sources[value]):
            size = count * self.memory.count_bytes(number, layout)
            if pattern[0]:
                held += [(variable, size) for variable in variables]
            elif size and value in self.problem.moves:
                targets = self.problem.moves[value].targets
                flows = [(key, flow) for at, key, flow in self._flows_of(value, pattern[1]) if at == source]
                own = [flow for key, flow in flows if not makes_copy(layout, targets[key])]
                held += [(self._add_maximum(own), size)] if own else []

    def _add_copies(self, value: int, pattern: UsePattern, count: float, held: Terms) -> None:
        """Add the memory of a value's copies at the node to ``held``, unless they are freed and made again."""
        moves = self.problem.moves[value]
        now, before, after = (self._flows_by_copy(value, uses) for uses in pattern[1:])
        for source, target in {**now, **{key: None for key in before if key in after}}:
            key, layout, target_layout = (source, target), moves.sources[source][0], moves.targets[target]
            size = count * target_layout.max_local_nbytes
            if not size or not makes_copy(layout, target_layout):
                continue
            present = self.program.add_variable()
            held.append((present, size))
            for flow in now.get(key, ()):
                self.program.add_upper_bound([(flow, 1.0), (present, -1.0)], 0.0)
            if key not in now:
                repeat = self._get_or_add_repeat(value, source, target, pattern)
                both = [(self._add_maximum(before[key]), 1.0), (self._add_maximum(after[key]), 1.0)]
                self.program.add_upper_bound([*both, (present, -1.0), (repeat, -1.0)], 1.0)

    def _get_or_add_repeat(self, value: int, source: int, target: CanonicalLayout, pattern: UsePattern) -> int:
        """Return the variable that is 1 if a copy is freed between these uses and made again."""
        key = value, source, target, pattern[2], pattern[3]
        if key not in self._repeats:
            moves = self.problem.moves[value]
            seconds = redistribute_seconds(moves.sources[source][0], moves.targets[target])
            self._repeats[key] = self.program.add_variable(moves.count * seconds)
        return self._repeats[key]

    def _flows_of(self, value: int, uses: Uses) -> list[tuple[int, CanonicalLayout, int]]:
        flows = self.problem.moves[value].flows
        return [flow for use in sorted(uses) for flow in flows.get(use, ())]

    def _flows_by_copy(self, value: int, uses: Uses) -> dict[tuple[int, CanonicalLayout], list[int]]:
        return group_by_key(((source, target), flow) for source, target, flow in self._flows_of(value, uses))

    def _add_maximum(self, variables: Sequence[int]) -> int:
        """Return a variable that is at least each of ``variables``: the only one, or a new one with constraints."""
        if len(variables) == 1:
            return variables[0]
        maximum = self.program.add_variable()
        for variable in variables:
            self.program.add_upper_bound([(variable, 1.0), (maximum, -1.0)], 0.0)
        return maximum


def add_memory_constraints(problem: PlanningProblem, memory: MemoryModel, penalty: float) -> None:
    """Add a constraint for each critical node of ``memory``. ``penalty``: seconds for each byte over the limit."""
    if memory.critical_nodes:
        _MemoryConstraints(problem, memory, penalty)


def _count_patterns(classes: NodeClasses, memory: MemoryModel, node: int) -> Counter[tuple[int, UsePattern]]:
    """Return how many graph values may be held at a node, by value of the classes and pattern of uses around the node."""
    class_values = {maker: value for value, maker in enumerate(classes.makers)}
    counts: Counter[tuple[int, UsePattern]] = Counter()
    for value in memory.graph.values:
        number = value.number
        if not memory.first_nodes[number] <= node <= memory.alias_last_nodes[number]:
            continue
        sides: tuple[set[tuple[int, int]], ...] = (set(), set(), set())  # at the node, before it, after it
        for user, place in memory.objective.users[number]:
            side = 2 if user.number > node else int(memory.find_last_use(user, place, memory.alias_last_nodes) < node)
            sides[side].add((classes.class_of[user.number], place))
        exists = node <= memory.last_nodes[number]
        pattern: UsePattern = exists, frozenset(sides[0]), frozenset(sides[1]), frozenset(sides[2])
        counts[class_values[classes.class_of[value.producer.number], value.place], pattern] += 1
    return counts
