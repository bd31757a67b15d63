"""Graph recorder: runs a program eagerly, and adds a graph node for each operator call on DTensors."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..base.caches import nested_key
from ..base.tensor_tree import iter_tree_leaves, tensor_leaves
from ..base.torch_internals import autograd_node, sequence_number, tree_leaves
from ..base.user_frames import find_user_frame, source_line_of
from ..comm.events import Event, current_redistribution_steps, listening
from ..dispatch import FRESH_CACHE, REDISTRIBUTING_GRAD, facts_of_call
from ..layout.layout import Layout
from ..propagation.make_call import iter_operand_slots
from ..propagation.op_schema import OperatorSchema
from ..propagation.propagate import CallPlan
from ..propagation.select_strategy import select_strategies
from ..rules.registry import lookup
from ..state.version_counters import versions_of
from ..tensor.call_listener import CallListener, OperatorCall
from ..tensor.dtensor import DTensor
from ..tensor.observers import OBSERVERS
from .graph import Graph, Kind, Node, RuleQuery, RuleQueryRecorder, Value


def record_graph(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Graph]:
    """Run ``step`` once, eagerly, and return its result and the program graph of its operator calls."""
    recorder = GraphRecorder()
    with recorder, OBSERVERS.entered(recorder), FRESH_CACHE.entered(recorder), listening(recorder.add_collective):
        result = step(*args, **kwargs)
    for x in tree_leaves(result):
        if isinstance(x, DTensor):
            recorder.note_returned(x)
    recorder.complete_graph()
    return result, recorder.graph


class GraphRecorder(CallListener):
    """A dispatch mode that records operator calls below autograd; as an observer, it records redistributions and layout reads.

    Args:
        for_placement: the inputs will be placed, so no value has to keep the layout of this run.
    """

    def __init__(self, for_placement: bool = False) -> None:
        super().__init__()
        self.graph, self.for_placement = Graph(), for_placement
        # By address of a tensor: (weak reference, version counters, number of its value)
        self._tensors: dict[int, tuple[Any, Any, int]] = {}
        self._finalizers: dict[int, Any] = {}  # by number of a value, the weak reference that notes its end
        self._forward_lines: dict[int, str] = {}  # source lines of forward calls, by autograd's sequence number
        self._plans: dict[Any, tuple[CallPlan, RuleQuery | None]] = {}
        self._write_nodes: dict[int, list[float]] = {}  # by root value, the nodes that write to its memory

    # --- operator calls ------------------------------------------------------------------------------------------------
    def add_collective(self, event: Event) -> None:
        self.graph.collectives.append((event, current_redistribution_steps()))

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        """Run an operator call and add it to the graph: with a choice of strategies, as its parts, or fixed."""
        if call.bypasses_rules:
            return self._record_fixed(call)
        plan, query = self._get_or_make_plan(call)
        if plan.how == "decompose":
            self._add_node("parts", call.operator.name).key = call_key(call.operator, call.bound)
            with self:
                return call.run_with_strategies(select_strategies)
        if plan.how != "rule" or plan.chosen is None or query is None or _has_other_writes(plan, call.operator, query):
            return self._record_fixed(call, plan)
        return self._record_call(call, plan, query)

    def _record_call(self, call: OperatorCall, plan: CallPlan, query: RuleQuery) -> Any:
        """Run a call that has a choice of strategies, and add it to the graph with the rule query."""
        operator, bound = call.operator, call.bound
        operands = [self._get_or_add_value(x) for _, x in iter_operand_slots(operator, bound)]
        node = self._add_node("call", operator.name)
        node.key, node.operands = call_key(operator, bound), operands
        node.query, node.recorded_layouts, node.is_view = query, plan.operands, operator.is_view
        node.pinned = frozenset(query.inplace_results.values())
        result = call.run()
        self._add_results(node, result, bound[operator.names[0]])
        if len(node.results) != len(plan.chosen.results):  # type: ignore[union-attr]  # calls have one
            node.kind, node.query = "fixed", None
        return result

    def _get_or_make_plan(self, call: OperatorCall) -> tuple[CallPlan, RuleQuery | None]:
        """Return the dispatch plan of a call, cached, and the one query that it made to a rule, else None."""
        operator, bound = call.operator, call.bound
        try:
            key = operator.func, nested_key(bound, _argument_key), tuple(facts_of_call(operator, bound).items())
            entry = self._plans.get(key)
        except TypeError:  # an argument is not hashable
            key, entry = None, None
        if entry is None:
            recorder = RuleQueryRecorder()
            plan = call.make_plan(recorder)
            entry = plan, recorder.queries[0] if len(recorder.queries) == 1 else None
            if key is not None:
                self._plans[key] = entry
        return entry

    def _record_fixed(self, call: OperatorCall, plan: CallPlan | None = None) -> Any:
        """Run a call that has no choice of strategies, and add it to the graph with its present layouts."""
        operator, bound = call.operator, call.bound
        inputs = [x for _, x in iter_operand_slots(operator, bound)]
        operands = [self._get_or_add_value(x) for x in inputs]
        node = self._add_node("fixed", operator.name)
        node.key, node.is_view, node.operands = call_key(operator, bound), operator.is_view, operands
        planned = plan.operands if plan is not None and len(plan.operands) == len(inputs) else ()
        node.recorded_layouts = planned or tuple(x._layout if isinstance(x, DTensor) else None for x in inputs)
        names = operator.mutated.union(_declared_writes(plan) if plan is not None else ())
        written = {id(x) for name in names for x in tensor_leaves(bound.get(name)) if isinstance(x, DTensor)}
        if operator.is_view or operator.reshapes:
            written |= {id(x) for x in inputs}
        node.pinned = frozenset(i for i, x in enumerate(inputs) if id(x) in written)
        result = call.run()
        self._add_results(node, result, inputs[0] if inputs else None)
        return result

    def _add_results(self, node: Node, result: Any, base: Any = None) -> None:
        """Add a value to the graph for each DTensor of a node's result; ``base``: the tensor that a view is of."""
        viewed = node.operands[0] if node.is_view and node.operands else None
        root, base = (None, None) if viewed is None else (self.graph.values[viewed].root, base)
        for place, x in enumerate(iter_tree_leaves(result)):
            value = self._add_value(x, node, place, root, base) if isinstance(x, DTensor) else None
            node.results.append(None if value is None else value.number)
            if value is not None and node.accumulates_grad:
                value.keeps_layout = True

    def _add_node(self, kind: Kind, name: str) -> Node:
        """Add a node to the graph, with the user's source line; a backward node has the line of its forward node."""
        running = autograd_node()
        if running is None:
            place = source_line_of(find_user_frame(sys._getframe(1)))
            line = self._forward_lines[sequence_number()] = f"{place.file}:{place.number}" if place.file else ""
        else:
            line = self._forward_lines.get(running._sequence_nr() + 1, "")
        node = Node(len(self.graph.nodes), kind, name, line=line, is_backward=running is not None)
        if running is not None and not self.for_placement:
            node.accumulates_grad = running.name() == "torch::autograd::AccumulateGrad"
        self.graph.nodes.append(node)
        return node

    # --- values --------------------------------------------------------------------------------------------------------
    def find_value(self, x: Any) -> Value | None:
        """Return the graph value that a tensor is at present; None if no call has used it."""
        entry = self._tensors.get(id(x))
        return None if entry is None or entry[0]() is not x else self.graph.values[entry[2]]

    def _get_or_add_value(self, x: Any) -> int | None:
        """Return the number of a tensor's present value, added if the tensor is new or was written; None if no DTensor."""
        if not isinstance(x, DTensor):
            return None
        entry = self._tensors.get(id(x))
        if entry is None or entry[0]() is not x:
            base = x._base
            root = None if base is None or base is x else self._get_or_add_value(base)
            root = None if root is None else self.graph.values[root].root
            return self._add_value(x, self._add_node("input", "input"), 0, root).number
        if entry[1] != versions_of(x):
            before = self.graph.values[entry[2]]
            node = self._add_node("written", "written")
            node.operands, node.recorded_layouts, node.pinned = [before.number], (before.layout,), frozenset((0,))
            return self._add_value(x, node, 0, before.root).number
        return entry[2]

    def _add_value(self, x: DTensor, node: Node, place: int, root: int | None = None, base: Any = None) -> Value:
        """Add the graph value that ``x`` is from now on, made by ``node``. ``base``: the owner of its version counter."""
        number = len(self.graph.values)
        if node.kind in ("input", "written"):
            node.results = [number]
        before = self._tensors.get(id(x))
        if root is None and before is not None and before[0]() is x:  # the call has written to x
            root = self.graph.values[before[2]].root
            self._write_nodes.setdefault(root, []).append(node.number)
        value = Value(number, node, place, x._layout, number if root is None else root)
        self.graph.values.append(value)
        self._bind_tensor(x, value, base)
        return value

    def _bind_tensor(self, x: DTensor, value: Value, base: Any = None) -> None:
        self._tensors[id(x)] = weakref.ref(x), versions_of(x if base is None else base), value.number
        self._finalizers[value.number] = weakref.ref(x, lambda _: self._end_value(value))

    def _end_value(self, value: Value) -> None:
        """Record the last node at which the tensor of a value exists; called when the tensor is freed."""
        value.last_node = len(self.graph.nodes) - 1
        self._finalizers.pop(value.number, None)

    # --- observer of redistributions and reads (see tensor/observers.py) -------------------------------------------------
    def on_redistribution(self, x: Any, made: Any) -> None:
        """Add a node for an explicit redistribution of ``x`` to ``made``.

        Dispatch also redistributes the gradient of a redistributed operand back. That gradient stays the same value, and the plan
        chooses its layout.
        """
        operands = [self._get_or_add_value(x)]
        if REDISTRIBUTING_GRAD.get():
            self._bind_tensor(made, self.graph.values[operands[0] or 0])
            return
        node = self._add_node("move", "redistribute")
        node.operands, node.recorded_layouts = operands, (made._layout,)
        self._add_results(node, made)

    def on_leaf_gradient(self, grad: Any, leaf: list[Layout]) -> None:
        """Add a node for the gradient of a leaf, which gets the layout of the leaf's gradients."""
        operands = [self._get_or_add_value(grad)]
        target = grad._layout.replace(placements=leaf[0].reduced().placements)
        owner = self._find_leaf(leaf) if self.for_placement else None
        node = self._add_node("move" if owner is None else "gradient", "gradient")
        node.operands, node.recorded_layouts, node.key = operands, (target,), tuple(leaf[0].shape)
        if owner is not None:
            node.operands, node.recorded_layouts, node.pinned = [*operands, owner], (target, leaf[0]), frozenset((1,))
        value = self._add_value(grad, node, 0, len(self.graph.values))
        node.results, value.layout = [value.number], target

    def _find_leaf(self, grad_layout: list[Layout]) -> int | None:
        """Return the number of the leaf value that has this list as its ``_grad_layout``; None if there is none."""
        known = ((entry[0](), entry[2]) for entry in self._tensors.values())
        return next((number for x, number in known if x is not None and x.__dict__.get("_grad_layout") is grad_layout), None)

    def on_layout_read(self, x: Any) -> None:
        """Mark that the value of a tensor keeps its layout, because the user reads the layout."""
        number = None if self.for_placement else self._get_or_add_value(x)
        if number is not None:
            self.graph.values[number].keeps_layout = True

    def note_returned(self, x: Any) -> None:
        """Mark that the value of a tensor keeps its layout and may be written to, because the user gets it."""
        self.on_layout_read(x)
        value = self.graph.values[self._get_or_add_value(x) or 0]
        if value.root != value.number:
            self._write_nodes.setdefault(value.root, []).append(math.inf)

    def complete_graph(self) -> None:
        """Complete the graph after the run: make those views fixed that must alias their written base.

        A view that is alive when its memory is written to must alias its base. Such a view is a fixed call.
        """
        self._finalizers.clear()
        values = self.graph.values
        last_nodes = [math.inf if value.last_node is None else value.last_node for value in values]
        for value in reversed(values):
            viewed = value.producer.operands[0] if value.producer.is_view else None
            if viewed is not None:
                last_nodes[viewed] = max(last_nodes[viewed], last_nodes[value.number])
        for node in self.graph.nodes:
            if not node.is_view or node.operands[0] is None:
                continue
            writes = [at for at in self._write_nodes.get(values[node.operands[0]].root, ()) if at > node.number]
            if writes and max([last_nodes[n] for n in node.results if n is not None], default=0) >= min(writes):
                node.kind, node.query, node.pinned = "fixed", None, node.pinned | {0}
                node.recorded_layouts = tuple(None if n is None else values[n].layout for n in node.operands)


def call_key(operator: OperatorSchema, bound: dict[str, Any]) -> tuple[object, ...]:
    """Return a key that identifies a call when the program runs again, without layouts and without changing numbers."""
    return (operator.name, *(_static_key(bound.get(name), name in operator.scalars) for name in operator.names))


def _static_key(value: Any, is_number: bool) -> object:
    """Return the part of a call key for one argument: shape and dtype of a tensor, "number" for a number, else the value."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), *value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_static_key(item, is_number) for item in value)
    if isinstance(value, float) or (is_number and isinstance(value, int)):
        return "number"
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _has_other_writes(plan: CallPlan, operator: OperatorSchema, query: RuleQuery) -> bool:
    """Return True if a call writes to a tensor that is no result (such as ``out=``), or redistributes what it writes to."""
    returned = {name for name in operator.returns if name is not None}
    redistributes = any(not plan.operands[i].has_same_blocks(plan.call.operands[i]) for i in query.inplace_results.values())
    unreturned = operator.mutated - returned or set(_declared_writes(plan)) - returned
    return bool(operator.outs or operator.reshapes or unreturned or plan.write_back or redistributes)


def _declared_writes(plan: CallPlan) -> tuple[str, ...]:
    """Return the names of the arguments that the call's rule declares as written, although the schema does not."""
    rule = lookup(plan.call.func)
    return rule.writes(plan.call) if rule is not None and rule.writes is not None else ()


def _argument_key(value: Any) -> Any:
    """Return a hashable key of one argument: layout of a DTensor, metadata of a plain tensor, type and value of others."""
    if isinstance(value, torch.Tensor):
        return value._layout if isinstance(value, DTensor) else (tuple(value.shape), value.stride(), value.dtype)
    return type(value), value
