"""From an operator and global arguments to a :class:`Plan`: what to move, what to run on locals, what comes out.

In this order: the rule of the operator, with the cheapest row per mesh dim; its decomposition; gathering every operand
(announced, see :func:`gather`). Pure: nothing here depends on the rank, so all ranks plan alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from ..base.torch_internals import has_kernel
from ..errors import LayoutError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..redistribute import Plan as Move
from ..redistribute import plan as plan_move
from ..rules.call import Call, Meta
from ..rules.disjoint_partial import NOTHING, Known
from ..rules.op_traits import rule_of_each
from ..rules.registry import lookup
from ..rules.rule import Rule
from .make_call import Slot, make_call
from .op_schema import Operator
from .select_strategy import Chooser, choose
from .shape_inference import NotInferable, asked_with_outs, results_of
from .strategy_choice import Chosen


@dataclass(frozen=True, slots=True)
class Plan:
    """What dispatch executes.

    Attributes:
        how: ``"rule"``, ``"answer"`` (known without running anything), ``"decompose"`` or ``"gather"``.
        call: the global call.
        moves: argument slots to redistribute first.
        operands: layouts of the locals as the local op gets them.
        results: per return value a layout, a list of layouts, or None.
        write_back: return value -> the move that brings it to the layout of the argument that it is written into.
        rule, chosen: what the rule said; None unless ``how == "rule"`` on a single call.
        answer: the value itself, for ``"answer"``.
        by_numbers: the plan holds for numbers of the same :class:`~dtensor.rules.call.Kind` only.
        starts: of views the bytes from where the first operand begins to where each of them does.
    """

    how: Literal["rule", "answer", "decompose", "gather"]
    call: Call
    moves: tuple[tuple[Slot, Move], ...] = ()
    operands: tuple[Layout, ...] = ()
    results: tuple[Any, ...] = ()
    write_back: tuple[tuple[Slot, Move], ...] = ()
    rule: Rule | None = None
    chosen: Chosen | None = None
    answer: Any = None
    by_numbers: bool = False
    starts: tuple[int, ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether running it issues a collective (a kernel's own included)."""
        kernel = None if self.chosen is None else self.chosen.kernel_row
        if self.how == "gather" or (kernel is not None and kernel.kernel is not None and kernel.kernel.collectives > 0):
            return True
        moves = self.moves + self.write_back
        return bool(moves) and any(move.communicates for _, move in moves)


def propagate(
    operator: Operator,
    mesh: DeviceMesh,
    bound: dict[str, Any],
    plain: frozenset[Slot],
    choose: Chooser = choose,
    known: Mapping[Slot, Known] = NOTHING,
) -> Plan:
    """The plan of one operator call.

    Args:
        bound: arguments by name, tensors as their layouts.
        plain: slots that hold plain tensors or numbers, the same on all ranks (they are never moved).
        choose: which rows a rule's call follows.
        known: of slots of operands what is known beside their layouts.
    """
    for check in operator.facts.refuses:
        check(operator.name, bound)
    call, slots = make_call(operator, mesh, bound, plain, known)
    base = rule_of_each(operator.func) if operator.facts.per_element else None
    rule = lookup(operator.func)
    if rule is not None and rule.answer is not None:
        answer = rule.answer(call)
        if answer is not NotImplemented:
            return Plan("answer", call, answer=answer)
    asked = asked_with_outs(operator, bound) if operator.outs and not (rule is None and composite(operator)) else None
    if rule is not None and rule.decompose is not None and (rule.decomposes is None or rule.decomposes(call)):
        return Plan("decompose", call, rule=rule)
    if rule is None and base is None and composite(operator):
        return Plan("decompose", call)
    try:
        metas = asked or (results_of(operator, rule, call) if rule is None or rule.metas is None else rule.metas(call))
    except NotInferable:
        measured = (
            _by_rule(operator, rule, call, slots, (), choose)
            if rule is not None and rule.measured and not operator.outs
            else None
        )
        return measured or gather(operator, call, slots, None)
    if operator.fills_lists:
        return gather(operator, call, slots, metas)
    call.results = _flat(metas)
    if operator.facts.per_element and (rule is not None or base is not None):
        plan = _per_element(operator, rule or base, call, slots, metas, choose)  # type: ignore[arg-type]  # one of them is a rule
        if plan is not None:
            return plan
    elif rule is not None:
        plan = _by_rule(operator, rule, call, slots, metas, choose)
        if plan is not None:
            return plan
        if composite(operator):
            return Plan("decompose", call)
    return gather(operator, call, slots, metas)


def composite(operator: Operator) -> bool:
    """Whether torch has the operator as a composition of others, which autograd sees instead."""
    return bool(has_kernel(operator.func.name(), "CompositeImplicitAutograd"))


def _by_rule(
    operator: Operator, rule: Rule, call: Call, slots: tuple[Slot, ...], metas: tuple[Any, ...], choose: Chooser
) -> Plan | None:
    factors = rule.factors(call)
    if factors is None:
        return None
    reshapes = operator.reshapes
    kept = {} if reshapes else _kept(operator, call, slots)
    planned = call.as_wanted()
    chosen = choose(rule, factors, planned, kept)
    if chosen is None:
        return None
    if planned is not call:
        chosen = replace(chosen, choice=replace(chosen.choice, call=call))
    moves = tuple(
        (slot, plan_move(have, need))
        for slot, have, need in zip(slots, call.operands, chosen.operands, strict=True)
        if have is not need and not have.same_data(need)
    )
    results = _like(metas, chosen.results)
    moved = [slot[0] for slot, _ in moves] if moves else ()
    back = _write_back(operator, call, results, moved, reshapes) + _written_aside(operator, rule, call, slots, chosen.operands)
    starts = _starts(operator, call)
    return Plan("rule", call, moves, chosen.operands, results, back, rule, chosen, by_numbers=chosen.by_numbers, starts=starts)


def _kept(operator: Operator, call: Call, slots: tuple[Slot, ...]) -> dict[int, int]:
    """Flat result -> operand written in place (``out=`` arguments are no operands and constrain nothing)."""
    kept = {}
    for flat, owner in enumerate(operator.returns):
        if owner is not None and (owner, None) in slots:
            kept[flat] = slots.index((owner, None))
    return kept


def _write_back(
    operator: Operator, call: Call, results: tuple[Any, ...], moved: Collection[str] = (), reshapes: bool = False
) -> tuple[tuple[Slot, Move], ...]:
    """Moves from what the local op wrote to the layout of the tensor that the user passed to be written, where those differ.

    ``moved``: arguments that were redistributed first. ``reshapes``: the operator changes how its argument is seen,
    so the argument takes the result's layout.
    """
    moves: list[tuple[Slot, Move]] = []
    for owner, result in zip(operator.returns, results, strict=False):
        target = None if owner is None else call.arguments.get(owner)
        if not isinstance(target, Layout) or not isinstance(result, Layout):
            continue
        if reshapes and owner not in operator.outs:
            continue
        if target.shape != result.shape:
            if owner in operator.outs:
                continue  # it takes the result's shape, and with it the result's layout
            raise LayoutError(
                f"{operator.name} would change the shape of the tensor it writes to from {tuple(target.shape)} to "
                f"{tuple(result.shape)}, which a DTensor cannot do in place; use the out-of-place operator"
            )
        if owner in operator.outs or owner in moved or not target.same_data(result):
            moves.append(((owner, None), plan_move(result.replace(dtype=target.dtype, stride=target.stride), target)))  # type: ignore[arg-type]
    return tuple(moves)


def _written_aside(
    operator: Operator, rule: Rule, call: Call, slots: tuple[Slot, ...], operands: tuple[Layout, ...]
) -> tuple[tuple[Slot, Move], ...]:
    """Moves back for arguments that are written to but not returned (running statistics), where they were moved first."""
    written = _written(operator, rule, call).difference(operator.returns)
    if not written:
        return ()
    return tuple([back for back in _moves(slots, operands, call.operands) if back[0][0] in written])


def _moves(slots: Sequence[Slot], have: Sequence[Layout], need: Sequence[Layout]) -> tuple[tuple[Slot, Move], ...]:
    """What brings operands from where they are to where they are needed."""
    return tuple([(slot, plan_move(x, y)) for slot, x, y in zip(slots, have, need, strict=True) if not x.same_data(y)])


def _written(operator: Operator, rule: Rule | None, call: Call) -> frozenset[str]:
    """The arguments that a call writes to, said by its schema or not."""
    return operator.mutated if rule is None or rule.writes is None else operator.mutated.union(rule.writes(call))


def _per_element(
    operator: Operator, rule: Rule, call: Call, slots: tuple[Slot, ...], metas: tuple[Any, ...], choose: Chooser
) -> Plan | None:
    """A list operator: element i of every list follows the rule by itself, one local call does them all.

    A tensor that all elements share (a step size) is whole on every rank. Elements for which only a kernel would do are
    made whole.
    """
    arguments = {name: value for name, value in call.arguments.items() if name in operator.tensors}
    lists = {name: value for name, value in arguments.items() if isinstance(value, (list, tuple))}
    length = max((len(value) for value in lists.values()), default=0)
    placed: dict[Slot, Layout] = {(name, None): value.whole() for name, value in arguments.items() if isinstance(value, Layout)}
    results: list[list[Layout | None]] = [[] for _ in metas]
    back: list[tuple[Slot, Move]] = []
    by_numbers = False
    for i in range(length):
        bound = {name: _element(operator, name, value, i) for name, value in call.arguments.items()}
        element, own = make_call(operator, call.mesh, bound)
        where = [(name, i if lists.get(name) else None) for name, _ in own]
        fixed = {slots[k] for k in call.plain}
        element.plain |= frozenset(k for k, slot in enumerate(where) if slot in fixed or slot[1] is None)
        element.results = tuple(_item(meta, i) for meta in metas) or (_same_as(element),)
        factors = rule.factors(element)
        if factors is None or rule.run is not None or rule.local is not None:
            return None
        factors = replace(factors, kernels={}, whole=factors.whole.union(factors.kernels))
        written = [k for k, (name, _) in enumerate(own) if name in operator.mutated]
        chosen = choose(rule, factors, element, dict(enumerate(written[:1])))
        if chosen is None:
            return None
        by_numbers = by_numbers or chosen.by_numbers
        placed.update(zip(where, chosen.operands, strict=True))
        for k in written:
            after = chosen.results[0] if k == written[0] else chosen.operands[k]
            if after is not None and not after.same_data(element.operands[k]):
                back.append((where[k], plan_move(_cast(after, element.operands[k]), element.operands[k])))
        for made, meta, layout in zip(results, metas, chosen.results, strict=False):
            if isinstance(meta, list) and i < len(meta):
                made.append(layout)
    operands = tuple(placed.get(slot, have) for slot, have in zip(slots, call.operands, strict=True))
    moves = _moves(slots, call.operands, operands)
    listed = tuple(made if isinstance(meta, list) else None for made, meta in zip(results, metas, strict=True))
    return Plan("rule", call, moves, operands, listed, tuple(back), rule=rule, by_numbers=by_numbers)


def _cast(layout: Layout, like: Layout) -> Layout:
    return layout.replace(dtype=like.dtype, stride=like.stride)


def _item(meta: Any, i: int) -> Meta | None:
    """Element ``i`` of a list (some lists may be empty), or what is no list."""
    if isinstance(meta, list):
        return meta[i] if i < len(meta) else None
    return meta


def _same_as(element: Call) -> Meta:
    first = element.operands[0]
    return Meta(tuple(first.shape), first.stride, first.dtype)


def _element(operator: Operator, name: str, value: Any, i: int) -> Any:
    if isinstance(value, Layout):
        return value.whole() if not value.shape else None  # a number for all, or a tensor of numbers, one for each
    if name in operator.tensors and isinstance(value, (list, tuple)):
        return value[i] if i < len(value) else None
    return value[i] if name == "scalars" and isinstance(value, (list, tuple)) else value


def gather(operator: Operator, call: Call, slots: tuple[Slot, ...], metas: tuple[Any, ...] | None) -> Plan:
    """The plan that is always right: every operand whole on every rank, results replicated, writes cut back into place."""
    operands = tuple(layout if i in call.plain else layout.whole() for i, layout in enumerate(call.operands))
    moves = _moves(slots, call.operands, operands)
    results: tuple[Any, ...] = ()
    if metas is not None:
        results = tuple(_map_meta(lambda m: Layout.replicated(call.mesh, m.shape, m.stride, m.dtype), meta) for meta in metas)
    back = _write_back(operator, call, results) if metas is not None else ()
    returned = {owner for owner in operator.returns if owner is not None}
    written = _written(operator, lookup(operator.func), call)
    for slot, have in zip(slots, call.operands, strict=True):
        if (
            slot[0] in written
            and slot[0] not in operator.outs
            and (slot[0] not in returned or slot[1] is not None or metas is None)
        ):
            back += ((slot, plan_move(have.whole(), have)),)
    for name in operator.outs if metas is None else ():
        target = call.arguments[name]
        if isinstance(target, Layout):  # the data decide the shape: it must turn out to be this one
            back += (((name, None), plan_move(target.whole(), target)),)
    return Plan("gather", call, moves, operands, results, back, starts=() if metas is None else _starts(operator, call))


def _starts(operator: Operator, call: Call) -> tuple[int, ...]:
    """Of views the bytes from where the first operand begins to where each of them does."""
    if not operator.is_view or operator.reshapes:
        return ()
    return tuple([meta.start for meta in call.results if meta is not None])


def _map_meta(fn: Callable[[Meta], Layout], value: Any) -> Any:
    if isinstance(value, list):
        return [fn(item) if item is not None else None for item in value]
    return fn(value) if value is not None else None


def _flat(metas: tuple[Any, ...]) -> tuple[Meta | None, ...]:
    return tuple(chain.from_iterable([meta if isinstance(meta, list) else (meta,) for meta in metas]))


def _like(metas: tuple[Any, ...], flat: tuple[Layout | None, ...]) -> tuple[Any, ...]:
    """``flat`` nested as ``metas`` is."""
    items = iter(flat)
    return tuple([next(items) for _ in meta] if isinstance(meta, list) else next(items) for meta in metas)
