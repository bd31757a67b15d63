"""The cheapest combination of options, as a 0/1 program for HiGHS.

Variables: which option each node takes; how each value gets from the form that it is made in to each form that somebody needs, as
a flow for each use; and which moves are made. A move is paid for once, whoever uses it, and a form that follows from another one
without communication uses that one's move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from ..layout.layout import Layout
from .costs import FREE, move_seconds
from .repeated_layers import Classes
from .strategy_options import Form, Option, Options, form_of, whole

Terms = list[tuple[int, float]]  # variables and their coefficients
Made = tuple[Layout, list[int]]  # a layout, and the variables of the options that have it


@dataclass(slots=True)
class Program:
    """A linear program under construction, minimised: costs by variable, rows by their bounds."""

    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # variables that are 0 or 1
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, whole: bool = False) -> int:
        self.costs.append(cost)
        if whole:
            self.whole.append(len(self.costs) - 1)
        return len(self.costs) - 1

    def equal(self, terms: Terms, value: float) -> None:
        self.rows.append((terms, value, value))

    def at_most(self, terms: Terms, value: float) -> None:
        self.rows.append((terms, -math.inf, value))

    def solved(self, seconds: float, gap: float) -> list[float] | None:
        """The values of the variables in the best solution found; None if there is none."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise PlanError('planning a program needs scipy: pip install "dtensor[plan]"') from None
        at, columns, data = [0], [], []
        for terms, _, _ in self.rows:
            columns += [variable for variable, _ in terms]
            data += [value for _, value in terms]
            at.append(len(columns))
        matrix: Any = csr_array((data, columns, at), shape=(len(self.rows), len(self.costs)))
        matrix.sum_duplicates()
        kinds = np.zeros(len(self.costs))
        kinds[self.whole] = 1
        found = milp(
            np.asarray(self.costs) * 1e6,
            integrality=kinds,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        return None if found.x is None else list(found.x)


class Assembly:
    """The program of a graph's classes along one mesh dim.

    Attributes:
        takes: for each class the variables of its options; ``made``: for each value the layouts that it may be made in;
            ``moves``: the moves of those that are used.
    """

    def __init__(self, classes: Classes, options: Options, mesh_dim: int) -> None:
        self.classes, self.options, self.mesh_dim = classes, options, mesh_dim
        self.program = Program()
        self.takes = [
            [self.program.variable(own.count * option.seconds, whole=len(options) > 1) for option in options]
            for own, options in zip(classes.classes, options, strict=True)
        ]
        for variables in self.takes:
            self.program.equal([(variable, 1.0) for variable in variables], 1.0)
        self.made = [
            list(self._forms(maker, [option.results[place] for option in options[maker]]).values())
            for maker, place in classes.makers
        ]
        self.moves = {value: self._value(value, users) for value, users in enumerate(classes.users) if users}

    def _value(self, value: int, users: Sequence[tuple[int, int]]) -> _Moves:
        needs = [self._forms(user, [option.operands[place] for option in self.options[user]]) for user, place in users]
        moves = _Moves(self, self.made[value], needs, self.classes.classes[self.classes.makers[value][0]].count)
        for (user, place), need in zip(users, needs, strict=True):
            node = self.classes.classes[user].node
            moves.use((user, place), need, place in node.pinned, len(users) == 1)
        return moves

    def _forms(self, own: int, layouts: Sequence[Layout | None]) -> dict[Form, Made]:
        """Which options of a class have which form."""
        found: dict[Form, Made] = {}
        for layout, variable in zip(layouts, self.takes[own], strict=True):
            assert layout is not None
            found.setdefault(form_of(layout), (layout, []))[1].append(variable)
        return found

    def solved(self, seconds: float, gap: float = 5e-4) -> list[Option] | None:
        """The option that each class takes."""
        found = self.program.solved(seconds, gap)
        if found is None:
            return None
        return [
            own[max(range(len(own)), key=lambda k: found[variables[k]])]
            for own, variables in zip(self.options, self.takes, strict=True)
        ]


class _Moves:
    """The moves of one value, of which there are ``count``."""

    def __init__(self, assembly: Assembly, made: list[Made], needs: list[dict[Form, Made]], count: int) -> None:
        self.assembly, self.program, self.made, self.count = assembly, assembly.program, made, count
        targets = {form: layout for need in needs for form, (layout, _) in need.items()}
        together = whole(made[0][0], assembly.mesh_dim)
        targets.setdefault(form_of(together), together)
        self.targets = targets
        self._shared: dict[tuple[int, Form], int] = {}
        self.flows: dict[tuple[int, int], list[tuple[int, Form, int]]] = {}  # by use: from which, to which form, the variable

    def _move(self, source: int, target: Form) -> int:
        """The variable of a move that whoever needs it shares."""
        key = source, target
        if key not in self._shared:
            layout, variables = self.made[source]
            variable = self._shared[key] = self.program.variable(self.count * move_seconds(layout, self.targets[target]))
            self.program.at_most([(variable, 1.0), *((v, -1.0) for v in variables)], 0.0)
        return self._shared[key]

    def use(self, use: tuple[int, int], need: dict[Form, Made], pinned: bool, alone: bool) -> None:
        """The flow of one use: all that is made goes to what is needed."""
        leaving: list[Terms] = [[] for _ in self.made]
        flows = self.flows[use] = []
        for form, (target, wanting) in need.items():
            arriving: Terms = []
            for source, (layout, _) in enumerate(self.made):
                flow = self._flow(source, layout, form, target, pinned, alone)
                if flow is not None:
                    flows.append((source, form, flow))
                    arriving.append((flow, 1.0))
                    leaving[source].append((flow, 1.0))
            self.program.equal([*arriving, *((variable, -1.0) for variable in wanting)], 0.0)
        for (_, variables), terms in zip(self.made, leaving, strict=True):
            self.program.equal([*terms, *((variable, -1.0) for variable in variables)], 0.0)

    def _flow(self, source: int, layout: Layout, form: Form, target: Layout, pinned: bool, alone: bool) -> int | None:
        seconds = move_seconds(layout, target)
        if math.isinf(seconds) or (pinned and seconds):
            return None
        if alone or seconds < FREE:
            return self.program.variable(self.count * seconds)
        flow = self.program.variable()
        enough = [other for other, via in self.targets.items() if other == form or self._follows(layout, via, target, seconds)]
        self.program.at_most([(flow, 1.0), *((self._move(source, other), -1.0) for other in enough)], 0.0)
        return flow

    def _follows(self, layout: Layout, via: Layout, target: Layout, seconds: float) -> bool:
        """Whether ``target`` comes for nothing once there is ``via``."""
        return move_seconds(via, target) < FREE and not math.isinf(move_seconds(layout, via))
