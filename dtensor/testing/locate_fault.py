"""Locate a fault: run a case, compare it with plain torch, and find the operator and the strategy that are wrong."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..base.tensor_tree import map_tensors, tensor_leaves
from ..errors import DTensorError
from ..placement import Placement
from ..plan.graph import RuleQueryRecorder
from ..propagation.op_schema import operator_schema_of
from ..propagation.propagate import is_composite
from ..propagation.strategy_table import texts_of_strategies
from ..tensor.call_listener import CallListener, OperatorCall
from ..tensor.dtensor import DTensor
from .call_variants import Variant
from .compare import CompareOptions, find_differences
from .force_strategy import Undeclared, forced, overload_for
from .forced_cases import Case
from .oracle import Outcome, compare
from .placements import Combination
from .reproduction import oracle_program, placement_text


@dataclass(frozen=True, slots=True)
class Fault:
    """Strategy under which an operator differs from plain torch, in the smallest case that was found.

    Attributes:
        operator: the operator with the wrong rule: that of ``variant``, or one that its gradient is computed with.
        rows: the strategies, such as ``"min -> min"`` or ``"S(1) -> S(1)"``, one for each mesh dim; () if the operator has none.
        direction: ``"forward"`` or ``"backward of ..."``.
        variant, mesh_shape, placements: the case.
        problems: the differences, rank by rank.
        reproduction: a program that raises the mismatch.
        cases: number of cases with this fault.
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
        """Return the strategies of all mesh dims in one line."""
        return " & ".join(self.rows) or "no strategy"

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
    """Case with a random seed, and the placements of the cotangents of its backward pass."""

    case: Case
    seed: int
    cotangents: tuple[Placement, ...] | None = None

    @property
    def gradients(self) -> bool:
        """Return True if gradients are compared; not for composite operators with forced strategies, which run below autograd."""
        sample = self.case.variant.sample
        if not (sample.gradients and self.case.strategies):
            return sample.gradients
        return not is_composite(operator_schema_of(overload_for(self.case.variant.call, sample.args, sample.kwargs)))

    def run(self) -> Outcome:
        """Run the case, with its strategies forced if it has some, and compare it with plain torch."""
        case, sample = self.case, self.case.variant.sample
        call = forced(case.variant.call, *case.strategies) if case.strategies else case.variant.call
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
        """Return the source of a program that raises the mismatch."""
        case, sample = self.case, self.case.variant.sample
        options: dict[str, Any] = {"kwargs": sample.kwargs} if sample.kwargs else {}
        options |= {"cloned": True} if case.variant.writes else {}
        options |= {"cotangents": self.cotangents} if self.gradients else {"gradients": False}
        name = f"torch.ops.{case.variant.name}"
        call = f"forced({name}, {', '.join(map(repr, case.strategies))})" if case.strategies else name
        return oracle_program(call, sample.args, case.mesh, case.placements, {**options, "seed": self.seed})


def is_undeclared(outcome: Outcome) -> bool:
    """Return True if the rule did not allow the strategies of the trial, so that there is nothing to compare."""
    return isinstance(outcome.error, Undeclared)


def is_backward(outcome: Outcome) -> bool:
    """Return True if all problems of the outcome are in the backward pass."""
    return all(problem.startswith(("gradient", "backward")) for problem in outcome.problems)


def shows_fault(trial: Trial, backward: bool) -> bool:
    """Return True if running the trial shows a fault in its forward pass, or with ``backward`` in gradients only."""
    outcome = trial.run()
    return bool(outcome.problems) and not is_undeclared(outcome) and is_backward(outcome) == backward


def find_faulty_operator(trial: Trial) -> tuple[str, tuple[str, ...]]:
    """Return the name and strategies of the first operator of a run with results that differ from plain torch."""
    case = trial.case
    comparing = _CompareEachOperator()
    with comparing if case.mesh.kind == "in_process" else nullcontext():
        outcome = trial.run()
    own = "::".join(case.variant.name.split(".")[:2])
    if comparing.faulty_call is not None and (not case.strategies or is_backward(outcome)):
        return comparing.faulty_call
    return own, case.strategies


class _CompareEachOperator(CallListener):
    """Dispatch mode that compares the results of each operator with those of plain torch for the values of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.faulty_call: tuple[str, tuple[str, ...]] | None = None

    def is_listening(self, call: OperatorCall) -> bool:
        return self.faulty_call is None and not call.operator.seeded

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        """Run a call; note its name and strategies if plain torch computes another result."""
        args, kwargs = map_tensors(_full_value, (call.args, call.kwargs))
        strategies = _chosen_strategies(call)
        result = call.run()
        if strategies is not None and _has_difference(call.func, result, args, kwargs):
            self.faulty_call = str(call.func._schema.name), strategies
        return result


def _full_value(x: torch.Tensor) -> torch.Tensor:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().clone()


def _has_difference(func: Any, result: Any, args: Any, kwargs: Any) -> bool:
    """Return True if the operator on plain tensors gives other values than ``result``."""
    try:
        expected = tensor_leaves(func(*args, **kwargs))
    except RuntimeError:  # a view op cannot run on the clone
        return False
    pairs = zip(tensor_leaves(result), expected, strict=False)
    return any(find_differences(got, want, CompareOptions(strides=False)) for got, want in pairs)


def _chosen_strategies(call: OperatorCall) -> tuple[str, ...] | None:
    """Return the texts of the strategies that dispatch chooses for a call; None if it chooses none."""
    recorder = RuleQueryRecorder()
    try:
        call.make_plan(recorder)
    except (DTensorError, RuntimeError):
        return None
    for query in recorder.queries:
        if query.chosen is not None:
            return texts_of_strategies(query.chosen.choice.strategies, query.strategies, query.factors)
    return None
