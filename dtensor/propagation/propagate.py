"""Propagation: make the :class:`CallPlan` of an operator call from its global arguments.

A plan has the redistributions, the local call and the layouts of the results.

The plan is the first of these: the rule of the operator with the cheapest strategy for each mesh dim, its decomposition, or the
gather fallback. Pure: nothing depends on the rank, so all ranks make the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from ..base.torch_internals import has_kernel
from ..errors import LayoutError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..redistribute import Plan as RedistributionPlan
from ..redistribute import plan as plan_redistribution
from ..rules.call import Call, Meta
from ..rules.disjoint_partial import NO_FACTS, OperandFacts
from ..rules.op_traits import element_rule_of
from ..rules.registry import lookup
from ..rules.rule import Rule
from .make_call import ArgumentSlot, make_call
from .op_schema import OperatorSchema
from .select_strategy import StrategySelector, select_strategies
from .shape_inference import ShapeInferenceError, infer_mismatched_outs, infer_results
from .strategy_table import StrategySelection


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan of one operator call, which dispatch executes.

    Attributes:
        how: ``"rule"``, ``"answer"`` (the value is known without running), ``"decompose"`` or ``"gather"``.
        call: the global call.
        redistributions: the redistributions of operands, by slot.
        operands: layouts of the local operands.
        results: for each return value a layout, a list of layouts, or None.
        write_back: redistributions of written values to the layouts of the arguments that they are written into.
        rule, chosen: the rule and its selected strategies. None unless ``how == "rule"`` on a single call.
        answer: the value, for ``"answer"``.
        by_numbers: the plan is valid only for numbers of the same :class:`~dtensor.rules.call.NumberKind`.
        starts: of views, the bytes from the beginning of the first operand to the beginning of each view.
    """

    how: Literal["rule", "answer", "decompose", "gather"]
    call: Call
    redistributions: tuple[tuple[ArgumentSlot, RedistributionPlan], ...] = ()
    operands: tuple[Layout, ...] = ()
    results: tuple[Any, ...] = ()
    write_back: tuple[tuple[ArgumentSlot, RedistributionPlan], ...] = ()
    rule: Rule | None = None
    chosen: StrategySelection | None = None
    answer: Any = None
    by_numbers: bool = False
    starts: tuple[int, ...] = ()

    @property
    def communicates(self) -> bool:
        """Return True if the plan issues a collective, those of a kernel included."""
        kernel = None if self.chosen is None else self.chosen.kernel_strategy
        if self.how == "gather" or (kernel is not None and kernel.kernel is not None and kernel.kernel.collectives > 0):
            return True
        redistributions = self.redistributions + self.write_back
        return any(redistribution.communicates for _, redistribution in redistributions)


def propagate_sharding(
    operator: OperatorSchema,
    mesh: DeviceMesh,
    bound: dict[str, Any],
    plain: frozenset[ArgumentSlot],
    choose: StrategySelector = select_strategies,
    known: Mapping[ArgumentSlot, OperandFacts] = NO_FACTS,
) -> CallPlan:
    """Return the plan of one operator call: by its rule, a decomposition, or the gather fallback.

    Args:
        bound: arguments by name, with layouts instead of tensors.
        plain: slots of plain tensors and numbers, which are equal on all ranks and never redistributed.
        choose: the function that selects strategies.
        known: facts of operands in addition to their layouts, by slot.
    """
    for check in operator.traits.checks:
        check(operator.name, bound)
    call, slots = make_call(operator, mesh, bound, plain, known)
    element_rule = element_rule_of(operator.func) if operator.traits.per_element else None
    rule = lookup(operator.func)
    if rule is not None and rule.answer is not None:
        answer = rule.answer(call)
        if answer is not NotImplemented:
            return CallPlan("answer", call, answer=answer)
    out_metas = (
        infer_mismatched_outs(operator, bound) if operator.outs and not (rule is None and is_composite(operator)) else None
    )
    if rule is not None and rule.decompose is not None and (rule.decomposes is None or rule.decomposes(call)):
        return CallPlan("decompose", call, rule=rule)
    if rule is None and element_rule is None and is_composite(operator):
        return CallPlan("decompose", call)
    try:
        metas = out_metas or (infer_results(operator, rule, call) if rule is None or rule.metas is None else rule.metas(call))
    except ShapeInferenceError:
        data_dependent = (
            _plan_by_rule(operator, rule, call, slots, (), choose)
            if rule is not None and rule.measured and not operator.outs
            else None
        )
        return data_dependent or make_gather_plan(operator, call, slots, None)
    if operator.fills_lists:
        return make_gather_plan(operator, call, slots, metas)
    call.results = tuple(chain.from_iterable([meta if isinstance(meta, list) else (meta,) for meta in metas]))
    if operator.traits.per_element and (rule is not None or element_rule is not None):
        plan = _plan_per_element(operator, rule or element_rule, call, slots, metas, choose)  # type: ignore[arg-type]  # one of them is a rule
        if plan is not None:
            return plan
    elif rule is not None:
        plan = _plan_by_rule(operator, rule, call, slots, metas, choose)
        if plan is not None:
            return plan
        if is_composite(operator):
            return CallPlan("decompose", call)
    return make_gather_plan(operator, call, slots, metas)


def is_composite(operator: OperatorSchema) -> bool:
    """Return True if torch implements the operator by other operators, which autograd records in its place."""
    return bool(has_kernel(operator.func.name(), "CompositeImplicitAutograd"))


def _plan_by_rule(
    operator: OperatorSchema,
    rule: Rule,
    call: Call,
    slots: tuple[ArgumentSlot, ...],
    metas: tuple[Any, ...],
    choose: StrategySelector,
) -> CallPlan | None:
    """Return the plan of the call by the operator's rule, or None if the rule does not apply or has no valid strategy."""
    factors = rule.factors(call)
    if factors is None:
        return None
    reshapes = operator.reshapes
    inplace_results = {} if reshapes else _find_inplace_results(operator, call, slots)
    preferred = call.with_preferred_layouts()
    selection = choose(rule, factors, preferred, inplace_results)
    if selection is None:
        return None
    if preferred is not call:
        selection = replace(selection, choice=replace(selection.choice, call=call))
    redistributions = tuple(
        (slot, plan_redistribution(current, required))
        for slot, current, required in zip(slots, call.operands, selection.operands, strict=True)
        if current is not required and not current.has_same_blocks(required)
    )
    results = _unflatten_results(metas, selection.results)
    redistributed = [slot[0] for slot, _ in redistributions] if redistributions else ()
    write_back = _plan_write_back(operator, call, results, redistributed, reshapes) + _plan_write_back_of_unreturned(
        operator, rule, call, slots, selection.operands
    )
    offsets = _view_offsets(operator, call)
    return CallPlan(
        "rule",
        call,
        redistributions,
        selection.operands,
        results,
        write_back,
        rule,
        selection,
        by_numbers=selection.by_numbers,
        starts=offsets,
    )


def _find_inplace_results(operator: OperatorSchema, call: Call, slots: tuple[ArgumentSlot, ...]) -> dict[int, int]:
    """Return a map from the flat index of each result to the index of the operand that it is written into.

    ``out=`` arguments are no operands.
    """
    inplace_results = {}
    for flat, owner in enumerate(operator.returns):
        if owner is not None and (owner, None) in slots:
            inplace_results[flat] = slots.index((owner, None))
    return inplace_results


def _plan_write_back(
    operator: OperatorSchema, call: Call, results: tuple[Any, ...], redistributed: Collection[str] = (), reshapes: bool = False
) -> tuple[tuple[ArgumentSlot, RedistributionPlan], ...]:
    """Return, by slot, the redistributions of written results to the layouts of the arguments that they are written into.

    ``redistributed``: arguments that the plan redistributes first. ``reshapes``: the operator changes the view of its argument,
    so the argument takes the layout of the result.
    """
    redistributions: list[tuple[ArgumentSlot, RedistributionPlan]] = []
    for owner, result in zip(operator.returns, results, strict=False):
        target = None if owner is None else call.arguments.get(owner)
        if not isinstance(target, Layout) or not isinstance(result, Layout):
            continue
        if reshapes and owner not in operator.outs:
            continue
        if target.shape != result.shape:
            if owner in operator.outs:
                continue  # the out= tensor takes the shape and the layout of the result
            raise LayoutError(
                f"{operator.name} would change the shape of the tensor it writes to from {tuple(target.shape)} to "
                f"{tuple(result.shape)}, which a DTensor cannot do in place; use the out-of-place operator"
            )
        if owner in operator.outs or owner in redistributed or not target.has_same_blocks(result):
            redistributions.append(((owner, None), plan_redistribution(_with_dtype_and_stride(result, target), target)))  # type: ignore[arg-type]
    return tuple(redistributions)


def _plan_write_back_of_unreturned(
    operator: OperatorSchema, rule: Rule, call: Call, slots: tuple[ArgumentSlot, ...], operands: tuple[Layout, ...]
) -> tuple[tuple[ArgumentSlot, RedistributionPlan], ...]:
    """Return the redistributions, back to their layouts, of arguments that are written but not returned.

    These are running statistics, if they were redistributed first.
    """
    unreturned = _mutated_arguments(operator, rule, call).difference(operator.returns)
    if not unreturned:
        return ()
    return tuple(
        [
            redistribution
            for redistribution in _plan_redistributions(slots, operands, call.operands)
            if redistribution[0][0] in unreturned
        ]
    )


def _plan_redistributions(
    slots: Sequence[ArgumentSlot], sources: Sequence[Layout], targets: Sequence[Layout]
) -> tuple[tuple[ArgumentSlot, RedistributionPlan], ...]:
    """Return the redistributions, by slot, from ``sources`` to ``targets`` where their blocks differ."""
    return tuple(
        [
            (slot, plan_redistribution(x, y))
            for slot, x, y in zip(slots, sources, targets, strict=True)
            if not x.has_same_blocks(y)
        ]
    )


def _mutated_arguments(operator: OperatorSchema, rule: Rule | None, call: Call) -> frozenset[str]:
    """Return the names of the arguments that a call writes to, including those that the schema does not declare."""
    return operator.mutated if rule is None or rule.writes is None else operator.mutated.union(rule.writes(call))


def _plan_per_element(
    operator: OperatorSchema,
    rule: Rule,
    call: Call,
    slots: tuple[ArgumentSlot, ...],
    metas: tuple[Any, ...],
    choose: StrategySelector,
) -> CallPlan | None:
    """Return the plan of a list operator, in which each element follows the rule and one local call computes all; else None.

    A tensor that all elements share (a step size) is replicated. An element for which only a kernel would do is replicated too.
    """
    arguments = {name: value for name, value in call.arguments.items() if name in operator.tensors}
    lists = {name: value for name, value in arguments.items() if isinstance(value, (list, tuple))}
    length = max((len(value) for value in lists.values()), default=0)
    operand_layouts: dict[ArgumentSlot, Layout] = {
        (name, None): value.to_replicated() for name, value in arguments.items() if isinstance(value, Layout)
    }
    results: list[list[Layout | None]] = [[] for _ in metas]
    write_back: list[tuple[ArgumentSlot, RedistributionPlan]] = []
    by_numbers = False
    for i in range(length):
        bound = {name: _element_argument(operator, name, value, i) for name, value in call.arguments.items()}
        element, element_slots = make_call(operator, call.mesh, bound)
        list_slots = [(name, i if lists.get(name) else None) for name, _ in element_slots]
        plain_slots = {slots[k] for k in call.plain}
        element.plain |= frozenset(k for k, slot in enumerate(list_slots) if slot in plain_slots or slot[1] is None)
        element.results = tuple(_element_of(meta, i) for meta in metas)
        if not element.results:  # written lists only
            first = element.operands[0]
            element.results = (Meta(tuple(first.shape), first.stride, first.dtype),)
        factors = rule.factors(element)
        if factors is None or rule.run is not None or rule.local is not None:
            return None
        factors = replace(factors, kernels={}, unsharded=factors.unsharded.union(factors.kernels))
        mutated = [k for k, (name, _) in enumerate(element_slots) if name in operator.mutated]
        selection = choose(rule, factors, element, dict(enumerate(mutated[:1])))
        if selection is None:
            return None
        by_numbers = by_numbers or selection.by_numbers
        operand_layouts.update(zip(list_slots, selection.operands, strict=True))
        for k in mutated:
            written_layout = selection.results[0] if k == mutated[0] else selection.operands[k]
            if written_layout is not None and not written_layout.has_same_blocks(element.operands[k]):
                write_back.append(
                    (
                        list_slots[k],
                        plan_redistribution(_with_dtype_and_stride(written_layout, element.operands[k]), element.operands[k]),
                    )
                )
        for layouts, meta, layout in zip(results, metas, selection.results, strict=False):
            if isinstance(meta, list) and i < len(meta):
                layouts.append(layout)
    operands = tuple(operand_layouts.get(slot, current) for slot, current in zip(slots, call.operands, strict=True))
    redistributions = _plan_redistributions(slots, call.operands, operands)
    result_lists = tuple(layouts if isinstance(meta, list) else None for layouts, meta in zip(results, metas, strict=True))
    return CallPlan("rule", call, redistributions, operands, result_lists, tuple(write_back), rule=rule, by_numbers=by_numbers)


def _with_dtype_and_stride(layout: Layout, like: Layout) -> Layout:
    return layout.replace(dtype=like.dtype, stride=like.stride)


def _element_of(meta: Any, i: int) -> Meta | None:
    """Return element ``i`` of a list (None if the list is shorter), or a value that is no list."""
    if isinstance(meta, list):
        return meta[i] if i < len(meta) else None
    return meta


def _element_argument(operator: OperatorSchema, name: str, value: Any, i: int) -> Any:
    """Return the value of an argument for the call on element ``i`` of a list operator."""
    if isinstance(value, Layout):
        return (
            value.to_replicated() if not value.shape else None
        )  # a number for all elements, or a tensor with one number for each
    if name in operator.tensors and isinstance(value, (list, tuple)):
        return value[i] if i < len(value) else None
    return value[i] if name == "scalars" and isinstance(value, (list, tuple)) else value


def make_gather_plan(
    operator: OperatorSchema, call: Call, slots: tuple[ArgumentSlot, ...], metas: tuple[Any, ...] | None
) -> CallPlan:
    """Return the gather fallback, which is right for every call: operands and results are replicated.

    Written values are redistributed to their layouts.
    """
    operands = tuple(layout if i in call.plain else layout.to_replicated() for i, layout in enumerate(call.operands))
    redistributions = _plan_redistributions(slots, call.operands, operands)
    results: tuple[Any, ...] = ()
    if metas is not None:
        results = tuple(_replicated_layouts(call.mesh, meta) for meta in metas)
    write_back = _plan_write_back(operator, call, results) if metas is not None else ()
    returned = {owner for owner in operator.returns if owner is not None}
    mutated = _mutated_arguments(operator, lookup(operator.func), call)
    for slot, current in zip(slots, call.operands, strict=True):
        if (
            slot[0] in mutated
            and slot[0] not in operator.outs
            and (slot[0] not in returned or slot[1] is not None or metas is None)
        ):
            write_back += ((slot, plan_redistribution(current.to_replicated(), current)),)
    for name in operator.outs if metas is None else ():
        target = call.arguments[name]
        if isinstance(target, Layout):  # data decide the shape, which must be that of the target
            write_back += (((name, None), plan_redistribution(target.to_replicated(), target)),)
    return CallPlan(
        "gather",
        call,
        redistributions,
        operands,
        results,
        write_back,
        starts=() if metas is None else _view_offsets(operator, call),
    )


def _view_offsets(operator: OperatorSchema, call: Call) -> tuple[int, ...]:
    """Return for each view the bytes from the beginning of the first operand to its own; () if the operator makes no view."""
    if not operator.is_view or operator.reshapes:
        return ()
    return tuple([meta.start for meta in call.results if meta is not None])


def _replicated_layouts(mesh: DeviceMesh, meta: Any) -> Any:
    """Return the replicated layout of a result with this metadata: a list of layouts for a list, None for None."""
    if isinstance(meta, list):
        return [_replicated_layouts(mesh, item) for item in meta]
    return None if meta is None else Layout.replicated(mesh, meta.shape, meta.stride, meta.dtype)


def _unflatten_results(metas: tuple[Any, ...], flat: tuple[Layout | None, ...]) -> tuple[Any, ...]:
    """Return the flat layouts of results, nested in lists as ``metas`` is."""
    items = iter(flat)
    return tuple([next(items) for _ in meta] if isinstance(meta, list) else next(items) for meta in metas)
