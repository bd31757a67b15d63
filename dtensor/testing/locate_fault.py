"""What a case shows: whether it gives what plain torch gives, and if not, which row of which rule is at fault."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..base.tensor_tree import mapped, tensors
from ..base.torch_internals import TorchDispatchMode
from ..dispatch.operand_layouts import plan_for
from ..errors import DTensorError
from ..placement import Placement
from ..plan.graph_recorder import Listening
from ..propagation.op_schema import operator_of
from ..propagation.propagate import composite
from ..propagation.strategy_table import texts_of
from ..tensor.dtensor import DTensor
from .compare import Options, differences
from .force_strategy import Undeclared, forced, overload_for
from .oracle import Outcome, compare
from .placements import Combination
from .reproduction import oracle_call, placement_text
from .strategy_cases import Case
from .variants import Variant


@dataclass(frozen=True, slots=True)
class Wrong:
    """One fault: a row under which an operator does not give what plain torch gives, in the smallest case found.

    Attributes:
        operator: whose rule has the row: that of ``variant``, or of an operator that its gradient is made of.
        rows: as ``"min -> min"`` or ``"S(1) -> S(1)"``, one for each mesh dim; none where the operator follows none.
        direction: ``"forward"`` or ``"backward of ..."``.
        variant, mesh_shape, placements: the case.
        problems: what differs, rank by rank: what it got, what was expected.
        cases: in how many cases it was met.
    """

    operator: str
    rows: tuple[str, ...]
    direction: str
    variant: Variant
    mesh_shape: tuple[int, ...]
    placements: Combination
    problems: tuple[str, ...]
    reproduction: str
    cases: int = 1

    @property
    def row(self) -> str:
        """The rows in one line."""
        return " & ".join(self.rows) or "no row"

    def __str__(self) -> str:
        where = "; ".join(map(placement_text, self.placements))
        note = f" ({self.variant.sample.note})" if self.variant.sample.note else ""
        lines = [
            f"{self.operator} | {self.row} | {self.direction}, in {self.cases} case{'s' * (self.cases > 1)}",
            f"torch.ops.{self.variant.name}{note} on a mesh of {self.mesh_shape}, operands {where}:",
            *self.problems[:4],
        ]
        return "\n  ".join(lines) + f"\n{self.reproduction}"


@dataclass(frozen=True, slots=True)
class Trial:
    """How a case is run: the seed of terms and cotangents, where cotangents lie."""

    case: Case
    seed: int
    cotangents: tuple[Placement, ...] | None = None

    @property
    def gradients(self) -> bool:
        """Operators that torch composes of others are forced below autograd."""
        sample = self.case.variant.sample
        if not (sample.gradients and self.case.rows):
            return sample.gradients
        return not composite(operator_of(overload_for(self.case.variant.call, sample.args, sample.kwargs)))

    def run(self) -> Outcome:
        case, sample = self.case, self.case.variant.sample
        call = forced(case.variant.call, *case.rows) if case.rows else case.variant.call
        return compare(
            call,
            sample.args,
            case.mesh,
            case.placements,
            kwargs=sample.kwargs,
            gradients=self.gradients,
            cloned=case.variant.writes,
            values=sample.values,
            cotangents=self.cotangents,
            seed=self.seed,
        )

    @property
    def reproduction(self) -> str:
        """A program that raises the mismatch."""
        case, sample = self.case, self.case.variant.sample
        options: dict[str, Any] = {"kwargs": sample.kwargs} if sample.kwargs else {}
        options |= {"cloned": True} if case.variant.writes else {}
        options |= {"cotangents": self.cotangents} if self.gradients else {"gradients": False}
        name = f"torch.ops.{case.variant.name}"
        call = f"forced({name}, {', '.join(map(repr, case.rows))})" if case.rows else name
        return oracle_call(call, sample.args, case.mesh, case.placements, {**options, "seed": self.seed})


def undeclared(outcome: Outcome) -> bool:
    """Whether the rule does not allow the row here, so that there is nothing to compare."""
    return isinstance(outcome.error, Undeclared)


def is_backward(outcome: Outcome) -> bool:
    """Whether the results are right and gradients are not."""
    return all(problem.startswith(("gradient", "backward")) for problem in outcome.problems)


def fails(trial: Trial, backward: bool) -> bool:
    """Whether it still shows a fault of this direction."""
    outcome = trial.run()
    return bool(outcome.problems) and not undeclared(outcome) and is_backward(outcome) == backward


def culprit(trial: Trial) -> tuple[str, tuple[str, ...]]:
    """The first operator of a run whose results are wrong for the operands it got, and its rows: (name, rows)."""
    case = trial.case
    watching = _Watching()
    with watching if case.mesh.kind == "in_process" else nullcontext():
        outcome = trial.run()
    own = "::".join(case.variant.name.split(".")[:2])
    if watching.found is not None and (not case.rows or is_backward(outcome)):
        return watching.found
    return own, case.rows


class _Watching(TorchDispatchMode):
    """Compares the results of each operator with what plain torch gives for the values of its operands."""

    of_dtensors = True  # operators are those that DTensors are asked for

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[str, tuple[str, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self.found is not None or operator_of(func).seeded
        if known or not any(isinstance(x, DTensor) for x in tensors((args, kwargs))):
            return func(*args, **kwargs)
        plain, keywords = mapped(_value, (args, kwargs))
        rows = _rows_chosen(func, args, kwargs)
        result = func(*args, **kwargs)
        if rows is not None and _differs(func, result, plain, keywords):
            self.found = str(func._schema.name), rows
        return result


def _value(x: torch.Tensor) -> torch.Tensor:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().clone()


def _differs(func: Any, result: Any, args: Any, kwargs: Any) -> bool:
    try:
        expected = tensors(func(*args, **kwargs))
    except RuntimeError:  # views of what is in other memory now
        return False
    pairs = zip(tensors(result), expected, strict=False)
    return any(differences(got, want, Options(strides=False)) for got, want in pairs)


def _rows_chosen(func: Any, args: Any, kwargs: Any) -> tuple[str, ...] | None:
    """The rows that dispatch chooses for a call; None where it follows none."""
    listening = Listening()
    try:
        plan_for(operator_of(func), args, kwargs, choose=listening)
    except (DTensorError, RuntimeError):
        return None
    found = next((asked for asked in listening.calls if asked.chosen is not None), None)
    return None if found is None else texts_of(found.chosen.choice.rows, found.lines, found.factors)  # type: ignore[union-attr]  # found
