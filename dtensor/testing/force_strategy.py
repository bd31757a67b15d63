"""Force strategies: run an operator under given strategies of its rule, regardless of cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import resolve_packet
from ..dispatch import plan_call, run_with_strategies
from ..plan.graph import RuleQuery
from ..propagation.op_schema import OperatorSchema, operator_schema_of
from ..propagation.propagate import is_composite
from ..propagation.select_strategy import StrategySelector, bound_strategies_of, realize_selection
from ..propagation.strategy_table import DimPlacement, StrategySelection, strategies_by_text
from ..rules.call import Call
from ..rules.rule import Factors, Rule
from ..tensor.call_listener import CallListener, OperatorCall
from ..tensor.dtensor import DTensor


class Undeclared(LookupError):
    """Raised if the rule has no such strategy for this call, or does not allow it here.

    Raised before anything is communicated.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> from dtensor.testing import forced
    >>> forced(torch.ops.aten.exp, "sum -> sum")(dt.ones(4, device_mesh=mesh, placements=[dt.Partial()]))
    Traceback (most recent call last):
    dtensor.testing.force_strategy.Undeclared: ...
    """


def forced(op: Any, *rows: str) -> Callable[..., Any]:
    """Return a function that runs ``op`` under the given strategies of its rule, one for each mesh dim.

    Strategies are written as in :class:`Undeclared` errors and in reports. Operands are first redistributed to the placements
    that the strategies need, and only that communicates. On plain tensors the function is ``op`` itself.

    Raises:
        Undeclared: the rule has no such strategy for the call.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Replicate()])
    >>> forced(torch.ops.aten.exp, "S(0) -> S(0)")(x).placements, torch.exp(x).placements
    ((Shard(dim=0),), (Replicate(),))
    """

    def run_forced(*args: Any, **kwargs: Any) -> Any:
        return run_with_chooser(op, args, kwargs, partial(_choose_strategies, rows))

    return run_forced


def run_with_chooser(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choose: StrategySelector) -> Any:
    """Run an operator on DTensors with the strategies that ``choose`` selects, and return its results.

    ``op`` may be a packet; then the overload for these arguments runs.
    """
    if not any(isinstance(x, DTensor) for x in tensor_leaves((args, kwargs))):
        return op(*args, **kwargs)
    overload = overload_for(op, args, kwargs)
    if is_composite(operator_schema_of(overload)):
        return run_with_strategies(overload, args, kwargs, choose)  # torch would call its decomposition
    with _ForceFirstCall(overload, choose) as forcing:
        result = overload(*args, **kwargs)
    if not forcing.was_called:
        raise Undeclared(f"{overload} is decomposed into other operators and has no strategies of its own")
    return result


def overload_for(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the overload that torch calls with these arguments."""
    if hasattr(op, "_schema"):
        return op
    return getattr(op, resolve_packet(op._qualified_op_name, *args, **kwargs))


class _ForceFirstCall(CallListener):
    """Dispatch mode that runs the first call of an overload with the strategies that ``choose`` selects."""

    def __init__(self, overload: Any, choose: StrategySelector) -> None:
        super().__init__()
        self.overload, self.choose = overload, choose
        self.was_called = False

    def is_listening(self, call: OperatorCall) -> bool:
        return not self.was_called and call.func is self.overload

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        self.was_called = True
        return call.run_with_strategies(self.choose)


def _choose_strategies(
    strategies: Sequence[str], rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> StrategySelection:
    """Return the rule's selection for the named strategies, one per mesh dim; raise if it does not allow them here."""
    declared_lines = strategies_by_text(bound_strategies_of(rule, factors, call).strategies)
    for text in strategies:
        if text not in declared_lines:
            raise Undeclared(f"{call.func} has no strategy {text!r} for this call; it has {list(declared_lines)}")
    chosen = realize_selection(
        rule, tuple([declared_lines[text].strategy_for(factors) for text in strategies]), factors, call, inplace_results
    )
    if chosen is None:
        raise Undeclared(f"the rule of {call.func} does not allow {' & '.join(strategies)} for this call")
    return chosen


# --- what a rule declares --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DeclaredStrategies:
    """Strategies that a rule has for one call.

    Attributes:
        targets: by the text of a strategy, the placement that each tensor of the call needs; None: any placement.
        tensor_counts: numbers of operands and of results.
    """

    rule: Rule
    targets: Mapping[str, tuple[DimPlacement | None, ...]]
    tensor_counts: tuple[int, int]  # operands, results


def query_rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuleQuery | None:
    """Return the query of the rule for this call on DTensors, without running it; None if no rule with strategies applies."""
    queries: list[RuleQuery] = []

    def record_query(rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]) -> None:
        queries.append(RuleQuery(rule, factors, call, inplace_results, None))

    with suppress(Exception):  # calls that plain torch rejects too
        operator = operator_schema_of(overload_for(op, args, kwargs))
        plan_call(operator, operator.bind(args, kwargs), record_query)
    return queries[0] if queries else None


def declared_strategies(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeclaredStrategies | None:
    """Return the strategies that the rule declares for this call on DTensors; None if no rule with strategies applies."""
    query = query_rule(op, args, kwargs)
    if query is None:
        return None
    operator = operator_schema_of(overload_for(op, args, kwargs))
    indices = _operand_indices(operator, operator.bind(args, kwargs), query.call, tensor_leaves((args, kwargs)))
    targets = {
        text: tuple(None if index is None else line.operands[index] for index in indices)
        for text, line in strategies_by_text(query.strategies).items()
    }
    return DeclaredStrategies(query.rule, targets, (len(query.factors.operands), len(query.factors.results)))


def _operand_indices(operator: OperatorSchema, bound: dict[str, Any], call: Call, xs: Sequence[torch.Tensor]) -> list[int | None]:
    """Return for each tensor of the call the index of the operand that it is; None if it is no operand.

    In a list operator that works element by element, all elements have the index of the first.
    """
    indices: list[int | None] = [None] * len(xs)
    position_of = {id(x): i for i, x in enumerate(xs)}
    for name in dict.fromkeys(call.names):
        value = bound[name]
        items = [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (list, tuple)) else [value]
        for k, x in enumerate(items):
            operand_indices = call.operands_of(name)
            if id(x) in position_of:
                indices[position_of[id(x)]] = operand_indices[0 if operator.traits.per_element else k]
    return indices
