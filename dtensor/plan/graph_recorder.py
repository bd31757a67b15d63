"""Record a program: it runs as it is, and every operator call on DTensors becomes a node of a graph."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..base.caches import nested_key
from ..base.tensor_tree import leaves
from ..base.torch_internals import OpOverload, TorchDispatchMode, autograd_node, sequence_number, tree_leaves
from ..base.user_frames import place_of, users_frame
from ..comm.events import Event, listening, steps_under_way
from ..dispatch.cross_mesh import across_places, meshes_of
from ..dispatch.dispatcher import run_chosen
from ..dispatch.facts import facts_of_call
from ..dispatch.grad_redistribute import BRINGING
from ..dispatch.operand_layouts import plan_of_bound
from ..dispatch.plain_tensor_args import through_copies, with_constants
from ..dispatch.redistribution_cache import AFRESH
from ..dispatch.version_counters import versions_of
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.make_call import places_of
from ..propagation.op_schema import Operator, operator_of
from ..propagation.propagate import Plan
from ..propagation.select_strategy import choose
from ..propagation.strategy_table import Chosen
from ..rules.call import Call
from ..rules.registry import lookup
from ..rules.rule import Factors, Rule
from ..tensor.dtensor import DTensor
from ..tensor.observers import OBSERVERS
from .graph import Asked, Graph, Kind, Node, Value


def recorded(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Graph]:
    """What ``step`` gives, and the graph of its calls. It runs once, as it would without being recorded."""
    recorder = Recorder()
    with recorder, OBSERVERS.entered(recorder), AFRESH.entered(recorder), listening(recorder.heard):
        made = step(*args, **kwargs)
    for x in tree_leaves(made):
        if isinstance(x, DTensor):
            recorder.given_back(x)
    recorder.finish()
    return made, recorder.graph


class Listening:
    """A ``choose`` that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Asked] = []

    def __call__(self, rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
        chosen = choose(rule, factors, call, kept)
        self.calls.append(Asked(rule, factors, call, kept, chosen))
        return chosen


class Recorder(TorchDispatchMode):
    """Listens to operator calls below autograd; to moves and looks outside of them as an observer.

    Args:
        placing: inputs are going to be placed: nothing has to lie as it does in this run.
    """

    of_dtensors = True  # operators are those that DTensors are asked for

    def __init__(self, placing: bool = False) -> None:
        super().__init__()
        self.graph, self.placing = Graph(), placing
        self._known: dict[int, tuple[Any, Any, int]] = {}  # id -> the tensor (weakly), its versions, its value
        self._alive: dict[int, Any] = {}  # by value, what tells that its tensor is gone
        self._lines: dict[int, str] = {}  # of forward calls, by autograd's number
        self._plans: dict[Any, tuple[Plan, Asked | None]] = {}
        self._written: dict[int, list[float]] = {}  # by value that others show, when its memory is written to

    # --- operator calls ------------------------------------------------------------------------------------------------
    def heard(self, event: Event) -> None:
        self.graph.heard.append((event, steps_under_way()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        operator = operator_of(func)
        bound = operator.bind(args, kwargs)
        meshes = tuple(meshes_of(bound.values()))
        special = across_places(operator, bound, meshes) or through_copies(operator, bound)
        if special or with_constants(operator, bound):
            return self._opaque(operator, bound, func, args, kwargs)
        plan, asked = self._planned(operator, bound, meshes)
        if plan.how == "decompose":
            self._node("parts", operator.name).key = key_of(operator, bound)
            with self:
                return run_chosen(func, args, kwargs, choose)
        if plan.how != "rule" or plan.chosen is None or asked is None or _writes_otherwise(plan, operator, asked):
            return self._opaque(operator, bound, func, args, kwargs, plan)
        return self._call(operator, plan, asked, bound, func, args, kwargs)

    def _call(self, operator: Operator, plan: Plan, asked: Asked, bound: Any, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [self._value(x) for _, x in places_of(operator, bound)]
        node = self._node("call", operator.name)
        node.key, node.operands = key_of(operator, bound), operands
        node.asked, node.wanted, node.view = asked, plan.operands, operator.is_view
        node.pinned = frozenset(asked.kept.values())
        made = func(*args, **kwargs)
        self._results(node, made, bound[operator.names[0]])
        if len(node.results) != len(plan.chosen.results):  # type: ignore[union-attr]  # calls have one
            node.kind, node.asked = "fixed", None
        return made

    def _planned(self, operator: Operator, bound: dict[str, Any], meshes: tuple[DeviceMesh, ...]) -> tuple[Plan, Asked | None]:
        """The plan of a call, and what its rule was asked if that was one question; calls that are alike share both."""
        try:
            key = operator.func, nested_key(bound, _leaf), tuple(facts_of_call(operator, bound).items())
            found = self._plans.get(key)
        except TypeError:  # an argument that is not hashed
            key, found = None, None
        if found is None:
            listening = Listening()
            plan = plan_of_bound(operator, bound, meshes, listening)
            found = plan, listening.calls[0] if len(listening.calls) == 1 else None
            if key is not None:
                self._plans[key] = found
        return found

    def _opaque(self, operator: Operator, bound: Any, func: Any, args: Any, kwargs: Any, plan: Plan | None = None) -> Any:
        given = [x for _, x in places_of(operator, bound)]
        operands = [self._value(x) for x in given]
        node = self._node("fixed", operator.name)
        node.key, node.view, node.operands = key_of(operator, bound), operator.is_view, operands
        taken = plan.operands if plan is not None and len(plan.operands) == len(given) else ()
        node.wanted = taken or tuple(x._layout if isinstance(x, DTensor) else None for x in given)
        names = operator.mutated.union(_declared_writes(plan) if plan is not None else ())
        written = {id(x) for name in names for x in tree_leaves(bound.get(name)) if isinstance(x, DTensor)}
        if operator.is_view or operator.reshapes:
            written |= {id(x) for x in given}
        node.pinned = frozenset(i for i, x in enumerate(given) if id(x) in written)
        made = func(*args, **kwargs)
        self._results(node, made, given[0] if given else None)
        return made

    def _results(self, node: Node, made: Any, base: Any = None) -> None:
        """``base``: what a view is one of."""
        shown = node.operands[0] if node.view and node.operands else None
        root, base = (None, None) if shown is None else (self.graph.values[shown].root, base)
        for place, x in enumerate(leaves(made)):
            value = self._new(x, node, place, root, base) if isinstance(x, DTensor) else None
            node.results.append(None if value is None else value.number)
            if value is not None and node.gathers:
                value.kept = True

    def _node(self, kind: Kind, name: str) -> Node:
        running = autograd_node()
        if running is None:
            place = place_of(users_frame(sys._getframe(1)))
            line = self._lines[sequence_number()] = f"{place.file}:{place.number}" if place.file else ""
        else:
            line = self._lines.get(running._sequence_nr() + 1, "")
        node = Node(len(self.graph.nodes), kind, name, line=line, backward=running is not None)
        node.gathers = not self.placing and _accumulates(running)
        self.graph.nodes.append(node)
        return node

    # --- values --------------------------------------------------------------------------------------------------------
    def value_of(self, x: Any) -> Value | None:
        """The value that a tensor is now; None if no call has taken it."""
        found = self._known.get(id(x))
        return None if found is None or found[0]() is not x else self.graph.values[found[2]]

    def _value(self, x: Any) -> int | None:
        """The value that a tensor is now."""
        if not isinstance(x, DTensor):
            return None
        found = self._known.get(id(x))
        if found is None or found[0]() is not x:
            base = x._base
            root = None if base is None or base is x else self._value(base)
            return self._new(x, self._node("input", "input"), 0, None if root is None else self.graph.values[root].root).number
        if found[1] != versions_of(x):
            before = self.graph.values[found[2]]
            node = self._node("same", "written")
            node.operands, node.wanted, node.pinned = [before.number], (before.layout,), frozenset((0,))
            return self._new(x, node, 0, before.root).number
        return found[2]

    def _new(self, x: DTensor, node: Node, place: int, root: int | None = None, base: Any = None) -> Value:
        """The value that ``x`` is from now on; ``base``: what it is a view of, whose versions it will have above."""
        number = len(self.graph.values)
        if node.kind in ("input", "same"):
            node.results = [number]
        before = self._known.get(id(x))
        if root is None and before is not None and before[0]() is x:  # written to
            root = self.graph.values[before[2]].root
            self._written.setdefault(root, []).append(node.number)
        value = Value(number, node, place, x._layout, number if root is None else root)
        self.graph.values.append(value)
        self._as_value(x, value, base)
        return value

    def _as_value(self, x: DTensor, value: Value, base: Any = None) -> None:
        self._known[id(x)] = weakref.ref(x), versions_of(x if base is None else base), value.number
        self._alive[value.number] = weakref.ref(x, lambda _: self._gone(value))

    def _gone(self, value: Value) -> None:
        """Nobody has the tensor any more: neither the program nor what autograd keeps for backward."""
        value.dies = len(self.graph.nodes) - 1
        self._alive.pop(value.number, None)

    # --- what happens beside operator calls ----------------------------------------------------------------------------
    def moved(self, x: Any, made: Any) -> None:
        """An explicit redistribution, or a leaf's gradient on its way to the leaf's layout. A gradient that is brought back is
        the value that it was: where it lies is up to the plan."""
        operands = [self._value(x)]
        if BRINGING.get():
            self._as_value(made, self.graph.values[operands[0] or 0])
            return
        node = self._node("move", "redistribute")
        node.operands, node.wanted = operands, (made._layout,)
        self._results(node, made)

    def arrived(self, grad: Any, leaf: list[Layout]) -> None:
        """From here on the gradient lies as the leaf's gradients do, whether it has to be moved for that or not."""
        operands = [self._value(grad)]
        target = grad._layout.replace(placements=leaf[0].reduced().placements)
        owner = self._leaf(leaf) if self.placing else None
        node = self._node("move" if owner is None else "gradient", "gradient")
        node.operands, node.wanted, node.key = operands, (target,), tuple(leaf[0].shape)
        if owner is not None:
            node.operands, node.wanted, node.pinned = [*operands, owner], (target, leaf[0]), frozenset((1,))
        value = self._new(grad, node, 0, len(self.graph.values))
        node.results, value.layout = [value.number], target

    def _leaf(self, place: list[Layout]) -> int | None:
        """The value of the leaf that knows its layout by this list."""
        known = ((found[0](), found[2]) for found in self._known.values())
        return next((number for x, number in known if x is not None and x.__dict__.get("_grad_layout") is place), None)

    def looked_at(self, x: Any) -> None:
        """The user sees how it lies."""
        number = None if self.placing else self._value(x)
        if number is not None:
            self.graph.values[number].kept = True

    def given_back(self, x: Any) -> None:
        """The user gets it, and may write to it."""
        self.looked_at(x)
        value = self.graph.values[self._value(x) or 0]
        if value.root != value.number:
            self._written.setdefault(value.root, []).append(math.inf)

    def finish(self) -> None:
        """What is alive now stays. Views that are alive as their memory is written to are made of it as it lies: they show it."""
        self._alive.clear()
        values = self.graph.values
        alive = [math.inf if value.dies is None else value.dies for value in values]
        for value in reversed(values):
            shown = value.producer.operands[0] if value.producer.view else None
            if shown is not None:
                alive[shown] = max(alive[shown], alive[value.number])
        for node in self.graph.nodes:
            if not node.view or node.operands[0] is None:
                continue
            writes = [at for at in self._written.get(values[node.operands[0]].root, ()) if at > node.number]
            if writes and max([alive[n] for n in node.results if n is not None], default=0) >= min(writes):
                node.kind, node.asked, node.pinned = "fixed", None, node.pinned | {0}
                node.wanted = tuple(None if n is None else values[n].layout for n in node.operands)


def _accumulates(running: Any) -> bool:
    """Whether autograd is adding up a leaf's gradient."""
    return running is not None and running.name() == "torch::autograd::AccumulateGrad"


def key_of(operator: Operator, bound: dict[str, Any]) -> tuple[object, ...]:
    """What two calls must share to be the same call of a program: nothing of layouts, nor of numbers that change."""
    return (operator.name, *(_static(bound.get(name), name in operator.scalars) for name in operator.names))


def _static(value: Any, number: bool) -> object:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), *value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_static(item, number) for item in value)
    if isinstance(value, float) or (number and isinstance(value, int)):
        return "number"
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _writes_otherwise(plan: Plan, operator: Operator, asked: Asked) -> bool:
    """Whether something is written that is no result (running statistics, ``out=``, how a tensor is seen), or is moved for it."""
    returned = {name for name in operator.returns if name is not None}
    moved = any(not plan.operands[i].same_data(plan.call.operands[i]) for i in asked.kept.values())
    aside = operator.outs or operator.reshapes or operator.mutated - returned or set(_declared_writes(plan)) - returned
    return bool(aside or plan.write_back or moved)


def _declared_writes(plan: Plan) -> tuple[str, ...]:
    """Arguments that are written to, though the schema does not say so."""
    rule = lookup(plan.call.func)
    return rule.writes(plan.call) if rule is not None and rule.writes is not None else ()


def _leaf(value: Any) -> Any:
    """An argument in a key: of a tensor how it lies, of a number its type too."""
    if isinstance(value, torch.Tensor):
        return value._layout if isinstance(value, DTensor) else (tuple(value.shape), value.stride(), value.dtype)
    return type(value), value
