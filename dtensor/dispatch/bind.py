"""Bind a plan: everything known at planning time is worked out once, and what a call has to do are steps (:mod:`.steps`).

The call that misses its plan runs the same steps as those that find it. Where the local operator and one wrapper are all there
is, a bound plan is the result's layout alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..base.memory_order import memory_order
from ..base.tracing import REFUSED
from ..comm import communicator_of
from ..comm.events import because
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import Form, Operator
from ..rules.call import Call
from ..rules.kernels import KernelContext, plain_op
from ..rules.rule import LocalView
from .apart import kept_apart
from .conjugation import carried_out, is_complex
from .flat_lists import through_memory
from .idle import as_all_ranks_do, idle_of
from .laid_out import in_memory_order
from .list_numbers import with_numbers_once
from .local_op import local_function
from .report import Cause
from .steps import (
    After,
    Before,
    Given,
    Runner,
    counted,
    finishing,
    finishing_views,
    into_locals,
    moving,
    refusing,
    running,
    taking_turns,
    viewing,
    written_back,
)
from .unbound import absent, decomposed, drawn_alike
from .wrapping import wrap_local

Constants = dict[str, Any]  # arguments by name that a rank gets otherwise than the user gave them


def bind(plan: Plan, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout | Runner:
    """How to run ``plan`` for calls of the form that these arguments have."""
    if kwargs and any(name in kwargs for name in operator.names[len(args) : operator.positional]):
        return _in_order(operator, runner_of(bind(plan, operator, *operator.in_order(args, kwargs)), operator))
    found = _bound(plan, operator, Form(operator, len(args), frozenset(kwargs)))
    return carried_out(runner_of(found, operator)) if is_complex(plan) else found


def runner_of(found: Layout | Runner, operator: Operator) -> Runner:
    """``found`` as a function."""
    if not isinstance(found, Layout):
        return found
    func, layout = local_function(operator.func), found
    if operator.is_view:
        return viewing([], func, layout, 0)
    return lambda args, kwargs, local_args, local_kwargs: wrap_local(func(*local_args, **local_kwargs), layout)


def _in_order(operator: Operator, runner: Runner) -> Runner:
    """``runner`` for calls that give by name what can stand by position."""

    def run(args: Any, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        given, named = operator.in_order(args, kwargs)
        return runner(tuple(given), named, *operator.in_order(local_args, local_kwargs))

    return run


def _bound(plan: Plan, operator: Operator, form: Form) -> Layout | Runner:
    if plan.how == "answer":
        answer = plan.answer
        return lambda args, kwargs, local_args, local_kwargs: answer
    if plan.how == "decompose":
        return decomposed(plan, operator, form)
    before: list[Before] = [refusing(plan, operator)] if plan.communicates else []
    if not communicator_of(plan.call.mesh).held:
        random = plan.rule is not None and plan.rule.kind == "random"
        in_step = running([], *_call(plan, operator, form, []), [], lambda *_: None) if random else None
        return absent(plan, operator, form, before, in_step)
    before += _arranging(plan, operator, form)
    given, call = _call(plan, operator, form, before)
    if any(move.communicates for _, move in plan.moves) and not (operator.is_view or operator.mutated):
        call = kept_apart(call, [(form.place(name), index) for (name, index), move in plan.moves if move.communicates])
    after, finish = _writing(plan, operator, form), finishing(plan, operator, form)
    if (
        isinstance(finish, Layout)
        and not (before or given or after or finish.is_complex)
        and call is local_function(operator.func)
        and not any(plan.starts)
    ):
        return finish  # of complex numbers the wrapper shows a lazy conjugation
    if plan.starts and plan.how == "rule":
        if isinstance(plan.results[0], Layout) and not (before or after):
            return viewing(given, call, plan.results[0], plan.starts[0])
        finish = finishing_views(plan.results[0], plan.starts)
    run = running(before, given, call, after, finish)
    if operator.mutated and any(index is not None for (_, index), _ in plan.moves):
        run = taking_turns(operator, run)
    return because(Cause(operator, plan), run) if plan.communicates or is_kernel(plan) else run


def _arranging(plan: Plan, operator: Operator, form: Form) -> list[Before]:
    """Operands brought to where and how the local operator wants them; room for ``out=`` results."""
    before = [moving(plan, operator, form)] if plan.moves else []
    if plan.rule is not None and plan.rule.as_laid_out:
        before += in_memory_order(plan, operator, form)
    if operator.outs:
        before.append(_omitting(operator.outs) if _is_own(plan) else _making_room(plan, operator))
    return before


def _writing(plan: Plan, operator: Operator, form: Form) -> list[After]:
    kernel = is_kernel(plan) and not operator.facts.flat
    after = [into_locals(operator, form)] if kernel and operator.mutated.difference(operator.outs) else []
    if plan.write_back:
        after.append(written_back(plan, operator, form, kernel))
    return [*after, counted(operator, form)] if operator.facts.per_element and operator.mutated else after


# --- out= ---------------------------------------------------------------------------------------------------------------
def _omitting(names: tuple[str, ...]) -> Before:
    """Kernels and functions of rules give new results."""

    def step(args: Any, kwargs: Any, local_args: list[Any], local_kwargs: dict[str, Any]) -> None:
        for name in names:
            local_kwargs.pop(name, None)

    return step


def _making_room(plan: Plan, operator: Operator) -> Before:
    """Fresh tensors to compute ``out=`` results in, of their local shapes; they are copied to the user's in their layouts."""
    layouts = {name: plan.results[operator.returns.index(name)] if plan.results else None for name in operator.outs}

    def step(args: Any, kwargs: Any, local_args: list[Any], local_kwargs: dict[str, Any]) -> None:
        for name, layout in layouts.items():
            local_kwargs[name] = _room(layout, local_kwargs[name], operator.seeded)

    return step


def _room(layout: Layout | None, like: Any, drawn: bool) -> Any:
    """Row-major, since some kernels take ``out=`` for that; what is drawn follows from where it lies."""
    if not isinstance(layout, Layout):
        return torch.empty_like(like).resize_(0)
    coordinates = layout.mesh.coordinates

    def empty(member: int, x: torch.Tensor) -> torch.Tensor:
        return layout.block_beside(x, member) if drawn else x.new_empty(layout.local_shape(coordinates[member]))

    return communicator_of(layout.mesh).map(empty, like)


# --- what is called -----------------------------------------------------------------------------------------------------
def _call(plan: Plan, operator: Operator, form: Form, before: list[Before]) -> tuple[Given, Callable[..., Any]]:
    """The function that locals are given to, and the arguments that it gets otherwise than the user gave them."""
    rule = plan.rule
    if operator.facts.flat:
        return [], through_memory(operator)
    if plan.how == "gather":
        return [], drawn_alike(plan, operator) if operator.seeded else operator.func
    if is_kernel(plan):
        tail = [(slice(form.count, form.count), form.tail)] if form.tail else []
        kernel = kernel_of(plan)
        nothing = idle_of(plan, operator) if _runs_alone(plan) else None
        return tail, partial(nothing.without(kernel) if nothing else kernel, **_but_for(form.lacking, operator.outs))
    own = None if rule is None or rule.local is None else _of_those_here(plan, rule.local)
    by_member = _constants(plan)
    if by_member:
        return _rewritten(plan, operator, form, by_member, before)
    func = own or with_numbers_once(plan, operator, local_function(operator.func))
    if not own and operator.mutated and not operator.outs and not operator.facts.per_element and _may_share_memory(plan):
        return [], _apart_if_refused(plan, func)
    if own:
        nothing = idle_of(plan, operator)
        return [], own if nothing is None else nothing.without(getattr(own, "of_one_rank", own))
    return [], as_all_ranks_do(plan, operator, func)


def _of_those_here(plan: Plan, own: Callable[..., Any]) -> Callable[..., Any]:
    """A rule's function for the ranks that live in this process: of one alone, as it was written, without a look for others."""
    return own if communicator_of(plan.call.mesh).holds_all else getattr(own, "of_one_rank", own)


def _but_for(values: Constants, names: Sequence[str]) -> Constants:
    return {name: value for name, value in values.items() if name not in names}


def is_kernel(plan: Plan) -> bool:
    """Whether a function of the rule that communicates, or asks where it is, runs instead of the operator."""
    return (plan.rule is not None and plan.rule.run is not None) or (
        plan.chosen is not None and plan.chosen.kernel_row is not None
    )


def _is_own(plan: Plan) -> bool:
    return is_kernel(plan) or (plan.rule is not None and plan.rule.local is not None)


def _runs_alone(plan: Plan) -> bool:
    """Whether a kernel is the operator itself: in others ranks meet in collectives."""
    row = None if plan.chosen is None else plan.chosen.kernel_row
    return row is not None and row.kernel is not None and row.kernel.run is plain_op


def kernel_of(plan: Plan) -> Callable[..., Any]:
    """The function that a plan runs instead of the operator, its context bound."""
    assert plan.rule is not None
    chosen, row = plan.chosen, None if plan.chosen is None else plan.chosen.kernel_row
    assert chosen is not None
    if row is None or row.kernel is None:
        assert plan.rule.run is not None
        return partial(plan.rule.run, KernelContext(_served(plan), chosen.operands, chosen.results, (), (1,)))
    splits = chosen.kernel_splits
    mesh_dims = tuple(mesh_dim for split in splits.values() for mesh_dim in split.mesh_dims)
    sizes = next(iter(splits.values())).sizes if len(splits) == 1 else ()
    return partial(row.kernel.run, KernelContext(_served(plan), chosen.operands, chosen.results, mesh_dims, sizes, splits))


def _served(plan: Plan) -> Call:
    """The call as all that the plan serves have it."""
    return plan.call if plan.rule is not None and plan.rule.floats_matter else plan.call.for_all_numbers()


# --- arguments that differ from rank to rank ----------------------------------------------------------------------------
def _constants(plan: Plan) -> dict[int, Constants]:
    """By member held here, what its rule's ``local_args`` say; nothing if that is nothing for any."""
    rewrite = None if plan.rule is None else plan.rule.local_args
    if rewrite is None or plan.chosen is None:
        return {}
    mesh, chosen, call = plan.call.mesh, plan.chosen, _served(plan)
    layouts = [layout for layout in chosen.results if layout is not None]
    held = communicator_of(mesh).held
    found = {member: rewrite(call, LocalView(chosen.operands, layouts, mesh.coordinates[member])) for member in held}
    return found if any(found.values()) else {}


def _rewritten(
    plan: Plan, operator: Operator, form: Form, by_member: dict[int, Constants], before: list[Before]
) -> tuple[Given, Callable[..., Any]]:
    own = None if plan.rule is None or plan.rule.local is None else _of_those_here(plan, plan.rule.local)
    known = operator.names if own is None else (*operator.names, *{name for values in by_member.values() for name in values})
    positional, func = operator.names[: operator.positional], own or local_function(operator.func)
    if plan.moves and operator.facts.needs_strides:
        func = _dense_if_refused(func)
    given = {member: _filled(form, values) for member, values in by_member.items()}
    named = {
        member: {name: value for name, value in values.items() if name in known and name not in positional}
        for member, values in by_member.items()
    }
    comm, nothing = communicator_of(plan.call.mesh), idle_of(plan, operator)
    if not comm.holds_all:
        (member,) = by_member
        if nothing is not None:
            return [], nothing.without(func)
        if keywords := named[member]:
            before.append(lambda args, kwargs, local_args, local_kwargs: local_kwargs.update(keywords))
        return given[member], func

    def one(member: int, *local_args: Any, **local_kwargs: Any) -> Any:
        filled = list(local_args)
        for where, value in given[member]:
            filled[where] = value
        return func(*filled, **{**local_kwargs, **named[member]})

    return [], partial(comm.map, one if nothing is None else nothing.or_nothing(one))


def _dense_if_refused(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, a view of what was moved here, which may lie otherwise in memory than the whole did that allows it."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(x, *args, **kwargs)
        except REFUSED:
            return func(x.contiguous(), *args, **kwargs)

    return run


def _filled(form: Form, values: Constants) -> Given:
    """These values where they stand; of what was left out, defaults as far as needed."""
    names = form.operator.names[: form.operator.positional]
    last = max((k for k, name in enumerate(names) if name in values), default=-1)
    late = [values.get(name, default) for name, default in zip(names[form.count : last + 1], form.tail, strict=False)]
    given: list[tuple[Any, Any]] = [(k, values[name]) for k, name in enumerate(names[: form.count]) if name in values]
    return [*given, (slice(form.count, form.count), late)] if late else given


# --- operands that share memory with what is written --------------------------------------------------------------------
def _may_share_memory(plan: Plan) -> bool:
    """Whether torch lets the operands overlap: it refuses where both have no gaps, which a block of one row is sooner than the
    whole, or where their strides differ, which those of one row may; one of none it always lets pass. So ranks would differ.
    """
    layouts = plan.call.operands
    gaps = any(memory_order(tuple(layout.shape), layout.stride) is None for layout in layouts)
    return gaps or any(one is not None and min(one.sizes) < 2 for layout in layouts if not layout.sized for one in layout.splits)


def _apart_if_refused(plan: Plan, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, on the ranks where it refuses operands with copies of all but the first."""
    comm = communicator_of(plan.call.mesh)

    def one(member: int, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        try:
            return func(*local_args, **local_kwargs)
        except REFUSED:
            first, *others = local_args
            return func(first, *map(_apart, others), **{name: _apart(value) for name, value in local_kwargs.items()})

    return lambda *local_args, **local_kwargs: comm.map(one, local_args, local_kwargs)


def _apart(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
