"""0/1 programs and how HiGHS solves them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError

Terms = list[tuple[int, float]]  # variables and their coefficients


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
