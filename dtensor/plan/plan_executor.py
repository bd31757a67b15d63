"""Plan executor: runs a program by its plan. Each call takes the planned strategies, on operands in the planned layouts.

A redistributed copy of a value is kept for later calls, and freed after the last one. The first call that differs from the
recorded program ends the plan, and from there on every call chooses for itself. This is correct, because each value stays a
global value. The calls of a program are global facts, so all ranks leave the plan at the same call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import torch

from ..dispatch import HAS_PROGRAM_PLAN
from ..propagation.make_call import iter_operand_slots
from ..propagation.select_strategy import bound_strategies_of, realize_selection, select_strategies
from ..propagation.strategy_table import StrategySelection, strategies_by_text
from ..redistribute import execute
from ..redistribute import plan as plan_redistribution
from ..rules.call import Call
from ..rules.rule import Factors, Rule
from ..state.version_counters import is_unwritten, versions_of
from ..state.wrap import wrap_local
from ..tensor.call_listener import CallListener, OperatorCall
from ..tensor.dtensor import DTensor
from .graph_recorder import call_key
from .program_plan import PlannedCall, ProgramPlan, Spelled, placements_of


class PlanExecutor(CallListener):
    """Dispatch mode that runs operator calls by a program plan, until a call differs from the plan.

    Attributes:
        difference: the first call that differed from the recorded program; None as long as there is none.
    """

    def __init__(self, plan: ProgramPlan) -> None:
        super().__init__()
        self.plan = plan
        self._calls = [call for call in plan.calls if call.kind in ("call", "fixed", "parts")]
        self._position = 0
        self.difference: str | None = None
        self._copies: dict[int, _Copies] = {}  # by address of the DTensor
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        self._entered.append(HAS_PROGRAM_PLAN.enter(lambda: self.difference is None))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        HAS_PROGRAM_PLAN.leave(self._entered.pop())

    @property
    def is_complete(self) -> bool:
        """Return True if every call so far has followed the plan, and the plan has no further call."""
        return self.difference is None and self._position == len(self._calls)

    def is_listening(self, call: OperatorCall) -> bool:
        return self.difference is None

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        """Redistribute the operands of a call as planned, and run it with the planned strategies."""
        planned = self._take_planned(call)
        if planned is None:
            return call.run()
        if planned.kind == "parts":
            with self:
                return call.run_with_strategies(select_strategies)
        self._redistribute_operands(call, planned)
        if planned.kind == "fixed" or _runs_specially(call):
            return call.run()
        is_normal_view = call.operator.is_view and torch.is_inference_mode_enabled() and not call.args[0].is_inference()
        with torch.inference_mode(False) if is_normal_view else nullcontext():  # as dispatch does
            return call.run_with_strategies(partial(_choose_planned, planned.rows))

    def _take_planned(self, call: OperatorCall) -> PlannedCall | None:
        """Return the next planned call; if the present call differs from it, abandon the plan and return None."""
        planned = self._calls[self._position] if self._position < len(self._calls) else None
        key = repr(call_key(call.operator, call.bound))
        if planned is None or planned.key != key:
            self.difference = f"call {self._position} is {key}, not {planned.key if planned is not None else 'the end'}"
            self._copies.clear()
            return None
        self._position += 1
        return planned

    # --- operands ------------------------------------------------------------------------------------------------------
    def _redistribute_operands(self, call: OperatorCall, planned: PlannedCall) -> None:
        """Replace the operands of a call by planned redistributed copies, and free copies that the plan drops."""
        operator, bound = call.operator, call.bound
        redistributed, dropped = [], []
        for place, ((name, index), x) in enumerate(iter_operand_slots(operator, bound)):
            path = planned.operands[place] if place < len(planned.operands) else ()
            if not isinstance(x, DTensor) or not path or name in operator.mutated:
                continue
            if len(path[-1]) != x._layout.mesh.ndim:
                continue
            redistributed.append((name, index, self._get_or_make_copy(x, path)))
            dropped += [(id(x), placements) for at, placements in planned.drops if at == place]
        for address, placements in dropped:
            if (copies := self._copies.get(address)) is not None:
                copies.by_placements.pop(placements, None)
        for name, index, x in redistributed:
            bound[name] = x if index is None else [*bound[name][:index], x, *bound[name][index + 1 :]]
        call.args = tuple(bound[name] for name in operator.names[: len(call.args)])
        call.kwargs = {name: bound[name] for name in call.kwargs}

    def _get_or_make_copy(self, x: DTensor, path: Sequence[Spelled]) -> DTensor:
        """Return ``x`` redistributed along a path of placements, from the last copy on it that exists."""
        copies = self._copies.get(id(x))
        if copies is None or not copies.is_valid_for(x):
            copies = self._copies[id(x)] = _Copies(x)
        existing = [i for i, placements in enumerate(path) if placements in copies.by_placements]
        copy = copies.by_placements[path[existing[-1]]] if existing else x
        for placements in path[existing[-1] + 1 if existing else 0 :]:
            target = x._layout.replace(placements=placements_of(placements))
            if not copy._layout.has_same_blocks(target):
                local = execute(plan_redistribution(copy._layout, target), copy._local)
                copy = copies.by_placements[placements] = wrap_local(local, target)
        return copy


class _Copies:
    """Cache of the redistributed copies of one tensor, by placements, for one state of its version counter."""

    __slots__ = ("by_placements", "tensor", "versions")

    def __init__(self, x: DTensor) -> None:
        self.tensor, self.versions = weakref.ref(x), versions_of(x)
        self.by_placements: dict[Spelled, DTensor] = {}

    def is_valid_for(self, x: DTensor) -> bool:
        """Return True if the copies are of ``x``, and ``x`` was not written to since."""
        return self.tensor() is x and is_unwritten(self.versions, versions_of(x))


def _runs_specially(call: OperatorCall) -> bool:
    """Return True if dispatch runs a call without its rule, or the call is on a lazy view."""
    first = call.bound.get(call.operator.names[0])
    is_lazy_view = isinstance(first, DTensor) and type(first) is not DTensor and (call.operator.is_view or call.operator.mutated)
    return bool(is_lazy_view or call.bypasses_rules)


def _choose_planned(
    texts: Sequence[str], rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> StrategySelection | None:
    """Return the selection of the planned strategies; the cheapest selection if the present layouts do not allow them."""
    lines = strategies_by_text(bound_strategies_of(rule, factors, call).strategies)
    if all(text in lines for text in texts):
        chosen = realize_selection(
            rule, tuple([lines[text].strategy_for(factors) for text in texts]), factors, call, inplace_results
        )
        if chosen is not None:
            return chosen
    return select_strategies(rule, factors, call, inplace_results)
