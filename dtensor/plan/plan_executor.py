"""Run a program by its plan: each call takes the rows that the plan says, on operands in the forms that it says.

A moved form of a value is kept for the calls that want it later, and dropped after the last of them. What differs from the
recorded program ends the plan: from there on every call chooses for itself. Every value is a global value all the time: that is
right, and since what calls are is a global fact, all ranks leave the plan at the same call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch

from ..base.torch_internals import OpOverload, TorchDispatchMode, tree_leaves
from ..dispatch.cross_mesh import across_places, meshes_of
from ..dispatch.dispatcher import run_chosen
from ..dispatch.grad_redistribute import PLANNED
from ..dispatch.plain_tensor_args import through_copies, with_constants
from ..dispatch.version_counters import versions_of
from ..dispatch.wrap import wrap_local
from ..propagation.make_call import places_of
from ..propagation.op_schema import Operator, operator_of
from ..propagation.select_strategy import choose, declared, realized
from ..propagation.strategy_table import Chosen, by_text
from ..redistribute import execute
from ..redistribute import plan as plan_move
from ..rules.call import Call
from ..rules.rule import Factors, Rule
from ..tensor.dtensor import DTensor
from .graph_recorder import key_of
from .program_plan import PlannedCall, ProgramPlan, Spelled, placements_of


class Following(TorchDispatchMode):
    """Inside, operator calls go by the plan.

    Attributes:
        left: the call at which the program differed from the recorded one; None as long as it does not.
    """

    of_dtensors = True  # operators are those that DTensors are asked for

    def __init__(self, plan: ProgramPlan) -> None:
        super().__init__()
        self.plan = plan
        self._calls = [call for call in plan.calls if call.kind in ("call", "fixed", "parts")]
        self._at = 0
        self.left: str | None = None
        self._forms: dict[int, _Forms] = {}
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        self._entered.append(PLANNED.enter(lambda: self.left is None))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        PLANNED.leave(self._entered.pop())

    @property
    def followed(self) -> bool:
        """Whether the whole program went by the plan."""
        return self.left is None and self._at == len(self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.left is not None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if not any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        operator = operator_of(func)
        bound = operator.bind(args, kwargs)
        call = self._next(operator, bound)
        if call is None:
            return func(*args, **kwargs)
        if call.kind == "parts":
            with self:
                return run_chosen(func, args, kwargs, choose)
        self._move(operator, bound, call)
        names = operator.names[: len(args)]
        args, kwargs = tuple(bound[name] for name in names), {name: bound[name] for name in kwargs}
        if call.kind == "fixed" or _is_special(operator, bound):
            return func(*args, **kwargs)
        if operator.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # as in dispatch
                return run_chosen(func, args, kwargs, partial(_as_planned, call.rows))
        return run_chosen(func, args, kwargs, partial(_as_planned, call.rows))

    def _next(self, operator: Operator, bound: dict[str, Any]) -> PlannedCall | None:
        """What the plan says of this call; None, and nothing more from now on, if it is another one."""
        call = self._calls[self._at] if self._at < len(self._calls) else None
        key = repr(key_of(operator, bound))
        if call is None or call.key != key:
            self.left = f"call {self._at} is {key}, not {call.key if call is not None else 'the end'}"
            self._forms.clear()
            return None
        self._at += 1
        return call

    # --- operands ------------------------------------------------------------------------------------------------------
    def _move(self, operator: Operator, bound: dict[str, Any], call: PlannedCall) -> None:
        """Brings operands to the forms that the plan says; those that are written to are taken as they lie."""
        taken, dropped = [], []
        for place, ((name, index), x) in enumerate(places_of(operator, bound)):
            path = call.operands[place] if place < len(call.operands) else ()
            if not isinstance(x, DTensor) or not path or name in operator.mutated:
                continue
            if len(path[-1]) != x._layout.mesh.ndim:
                continue
            taken.append((name, index, self._form(x, path)))
            dropped += [(id(x), form) for at, form in call.drops if at == place]
        for held, form in dropped:
            if (forms := self._forms.get(held)) is not None:
                forms.made.pop(form, None)
        for name, index, x in taken:
            if index is None:
                bound[name] = x
            else:
                bound[name] = [*bound[name][:index], x, *bound[name][index + 1 :]]

    def _form(self, x: DTensor, path: Sequence[Spelled]) -> DTensor:
        forms = self._forms.get(id(x))
        if forms is None or not forms.hold(x):
            forms = self._forms[id(x)] = _Forms(x)
        held = [i for i, words in enumerate(path) if words in forms.made]
        at = forms.made[path[held[-1]]] if held else x
        for words in path[held[-1] + 1 if held else 0 :]:
            target = x._layout.replace(placements=placements_of(words))
            if not at._layout.same_data(target):
                at = forms.made[words] = wrap_local(execute(plan_move(at._layout, target), at._local), target)
        return at


class _Forms:
    """Other forms of one value."""

    __slots__ = ("made", "tensor", "versions")

    def __init__(self, x: DTensor) -> None:
        self.tensor, self.versions = weakref.ref(x), versions_of(x)
        self.made: dict[Spelled, DTensor] = {}

    def hold(self, x: DTensor) -> bool:
        """Whether they are forms of ``x`` as it is now."""
        return self.tensor() is x and self.versions is not None and self.versions == versions_of(x)


def _is_special(operator: Operator, bound: dict[str, Any]) -> bool:
    """Whether a call has a way of its own: over several meshes, plain tensors written to, views that are computed when read."""
    first = bound.get(operator.names[0])
    remote = isinstance(first, DTensor) and type(first) is not DTensor and (operator.is_view or operator.mutated)
    special = across_places(operator, bound, tuple(meshes_of(bound.values()))) or through_copies(operator, bound)
    return bool(remote or special or with_constants(operator, bound))


def _as_planned(texts: Sequence[str], rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    """The choice of the rows that a plan names; where the layouts at hand do not allow them, the cheapest."""
    lines = by_text(declared(rule, factors, call).lines)
    if all(text in lines for text in texts):
        found = realized(rule, tuple([lines[text].row_for(factors) for text in texts]), factors, call, kept)
        if found is not None:
            return found
    return choose(rule, factors, call, kept)
