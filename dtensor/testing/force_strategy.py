"""Run an operator under given rows of its rule, whatever would cost least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base.tensor_tree import tensors
from ..base.torch_internals import TorchDispatchMode, resolve_packet
from ..dispatch.dispatcher import run_chosen
from ..dispatch.operand_layouts import plan_for
from ..plan.graph import Asked
from ..propagation.op_schema import Operator, operator_of
from ..propagation.propagate import composite
from ..propagation.select_strategy import Chooser, declared, realized
from ..propagation.strategy_table import Chosen, Where, by_text
from ..rules.call import Call
from ..rules.rule import Factors, Rule
from ..tensor.dtensor import DTensor


class Undeclared(LookupError):
    """The rule has no such row for this call, or does not allow it here.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> from dtensor.testing import forced
    >>> forced(torch.ops.aten.exp, "sum -> sum")(dt.ones(4, device_mesh=mesh, placements=[dt.Partial()]))
    Traceback (most recent call last):
    dtensor.testing.force_strategy.Undeclared: ...

    Raised before anything is communicated.
    """


def forced(op: Any, *rows: str) -> Callable[..., Any]:
    """``op`` under these rows of its rule, one for each mesh dim, as :class:`Undeclared` errors and reports write them.

    Operands are first brought to where the rows want them. On plain tensors it is ``op`` itself.

    Raises:
        Undeclared: the rule has no such row for the call.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Replicate()])
    >>> forced(torch.ops.aten.exp, "S(0) -> S(0)")(x).placements, torch.exp(x).placements
    ((Shard(dim=0),), (Replicate(),))

    Costs the moves to where the row wants its operands.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return under(op, args, kwargs, partial(_picked, rows))

    return call


def under(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser) -> Any:
    """The results of an operator (or of the overload of it that takes these arguments) whose rows ``choose`` picks."""
    if not any(isinstance(x, DTensor) for x in tensors((args, kwargs))):
        return op(*args, **kwargs)
    overload = overload_for(op, args, kwargs)
    if composite(operator_of(overload)):
        return run_chosen(overload, args, kwargs, choose)  # torch would call what it is composed of
    with _Picking(overload, choose) as picking:
        result = overload(*args, **kwargs)
    if not picking.met:
        raise Undeclared(f"{overload} is decomposed into other operators and has no strategies of its own")
    return result


def overload_for(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that torch calls with these arguments."""
    if hasattr(op, "_schema"):
        return op
    return getattr(op, resolve_packet(op._qualified_op_name, *args, **kwargs))


class _Picking(TorchDispatchMode):
    """The first call of an overload follows the rows that ``choose`` picks; others go their usual way."""

    def __init__(self, overload: Any, choose: Chooser) -> None:
        super().__init__()
        self.overload, self.choose = overload, choose
        self.met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.met or func is not self.overload:
            return func(*args, **(kwargs or {}))
        self.met = True
        return run_chosen(func, args, kwargs or {}, self.choose)


def _picked(rows: Sequence[str], rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen:
    lines = by_text(declared(rule, factors, call).lines)
    for text in rows:
        if text not in lines:
            raise Undeclared(f"{call.func} has no strategy {text!r} for this call; it has {list(lines)}")
    chosen = realized(rule, tuple([lines[text].row_for(factors) for text in rows]), factors, call, kept)
    if chosen is None:
        raise Undeclared(f"the rule of {call.func} does not allow {' & '.join(rows)} for this call")
    return chosen


# --- what a rule declares --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a rule has for one call: by their text, where each wants the tensors of the call (None: as they are)."""

    rule: Rule
    wanted: Mapping[str, tuple[Where | None, ...]]
    counts: tuple[int, int]  # operands, results


def asked_for(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked | None:
    """What this call on distributed tensors asks of a rule; None where no rule with rows comes into play. Nothing runs."""
    found: list[Asked] = []

    def look(rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> None:
        found.append(Asked(rule, factors, call, kept, None))

    with suppress(Exception):  # what plain torch refuses too
        plan_for(operator_of(overload_for(op, args, kwargs)), args, kwargs, look)
    return found[0] if found else None


def rows_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows | None:
    """The rows that are declared for this call on distributed tensors; None where no rule with rows comes into play."""
    asked = asked_for(op, args, kwargs)
    if asked is None:
        return None
    operator = operator_of(overload_for(op, args, kwargs))
    places = _places(operator, operator.bind(args, kwargs), asked.call, tensors((args, kwargs)))
    wanted = {
        text: tuple(None if place is None else line.operands[place] for place in places)
        for text, line in by_text(asked.lines).items()
    }
    return Rows(asked.rule, wanted, (len(asked.factors.operands), len(asked.factors.results)))


def _places(operator: Operator, bound: dict[str, Any], call: Call, xs: Sequence[torch.Tensor]) -> list[int | None]:
    """For each tensor of the call the operand that it is; of lists that are worked on element by element all are alike."""
    places: list[int | None] = [None] * len(xs)
    place_of = {id(x): i for i, x in enumerate(xs)}
    for name in dict.fromkeys(call.names):
        value = bound[name]
        items = [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (list, tuple)) else [value]
        for k, x in enumerate(items):
            own = call.operands_of(name)
            if id(x) in place_of:
                places[place_of[id(x)]] = own[0 if operator.facts.per_element else k]
    return places
