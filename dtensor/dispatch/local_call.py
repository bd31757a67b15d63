"""Local call: the function that runs on the local tensors of a planned call, and the arguments that differ on each rank.

It is the operator itself, a function of the operator's rule, a kernel with collectives of its own, or a form of these that skips
ranks whose results have no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..base.memory_order import memory_order
from ..base.tracing import REFUSED
from ..comm import communicator_of
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from ..random.draw import from_one_state
from ..ranks.rank_values import RankValues, agreed
from ..rules.call import Call
from ..rules.kernel_context import KernelContext, run_operator
from ..rules.rule import LocalView
from .empty_shards import as_all_ranks_do, idle_of
from .foreach_scalars import with_numbers_once
from .frame import Frame
from .fused_list_ops import through_memory
from .local_op import local_function

Constants = dict[str, Any]  # arguments by name that a rank gets in place of the user's
Filled = Sequence[tuple[Any, Any]]  # positions (slices of them) and the constants to put there


class LocalCall:
    """The step that calls the local function.

    Attributes:
        func: the function; it gets local tensors.
        constants: positions, or slices of positions, of local arguments that are replaced first.
        keywords: keyword arguments that are replaced first.
    """

    __slots__ = ("constants", "func", "keywords")

    def __init__(self, func: Callable[..., Any], constants: Filled = (), keywords: Constants | None = None) -> None:
        self.func, self.constants, self.keywords = func, constants, keywords or {}

    def __call__(self, frame: Frame) -> None:
        local_args, local_kwargs = frame.local_args, frame.local_kwargs
        for where, value in self.constants:
            local_args[where] = value
        if self.keywords:
            local_kwargs.update(self.keywords)
        frame.made = self.func(*local_args, **local_kwargs)


def call_local_function(plan: Plan, operator: Operator, form: Form) -> LocalCall:
    """Call the local function on the local tensors that this process holds."""
    rule = plan.rule
    if operator.facts.flat:
        return LocalCall(through_memory(operator))
    if plan.how == "gather":
        return LocalCall(_draw_on_whole_operands(plan, operator) if operator.seeded else operator.func)
    if is_kernel(plan):
        tail = [(slice(form.count, form.count), form.tail)] if form.tail else []
        kernel = kernel_of(plan)
        nothing = idle_of(plan, operator) if _runs_alone(plan) else None
        return LocalCall(partial(nothing.without(kernel) if nothing else kernel, **_but_for(form.lacking, operator.outs)), tail)
    own = None if rule is None or rule.local is None else _of_those_here(plan, rule.local)
    by_member = _constants(plan)
    if by_member:
        return _with_rank_constants(plan, operator, form, by_member)
    if own:
        nothing = idle_of(plan, operator)
        return LocalCall(own if nothing is None else nothing.without(getattr(own, "of_one_rank", own)))
    func = with_numbers_once(plan, operator, local_function(operator.func))
    if operator.mutated and not operator.outs and not operator.facts.per_element and _may_share_memory(plan):
        return LocalCall(_clone_if_refused(plan, func))
    return LocalCall(as_all_ranks_do(plan, operator, func))


def _draw_on_whole_operands(plan: Plan, operator: Operator) -> Callable[..., Any]:
    """Return the operator on gathered operands, run by every rank from the same generator state, which advances once.

    Numbers that the operator returns must be the same on all ranks.
    """

    def one(member: int | None, positional: Sequence[Any], keywords: Constants) -> Any:
        return operator.func(*positional, **keywords)

    def run(*local_args: Any, **local_kwargs: Any) -> Any:
        made = from_one_state(plan.call.mesh, local_kwargs.get("generator"), one, local_args, local_kwargs)
        if not isinstance(made, tuple):
            return made
        return tuple(agreed([*value], operator.name) if isinstance(value, RankValues) else value for value in made)

    return run


def _of_those_here(plan: Plan, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule's function for the ranks of this process: the version for one rank if this process is one rank."""
    return own if communicator_of(plan.call.mesh).holds_all else getattr(own, "of_one_rank", own)


def _but_for(values: Constants, names: Sequence[str]) -> Constants:
    return {name: value for name, value in values.items() if name not in names}


def is_kernel(plan: Plan) -> bool:
    """Return True if a kernel of the rule, which may communicate and knows its rank, runs in place of the operator."""
    return (plan.rule is not None and plan.rule.run is not None) or (
        plan.chosen is not None and plan.chosen.kernel_row is not None
    )


def has_own_function(plan: Plan) -> bool:
    """Return True if a kernel or a function of the rule runs in place of the operator."""
    return is_kernel(plan) or (plan.rule is not None and plan.rule.local is not None)


def _runs_alone(plan: Plan) -> bool:
    """Return True if the kernel is the operator itself, without collectives: ranks with nothing to compute may skip it."""
    row = None if plan.chosen is None else plan.chosen.kernel_row
    return row is not None and row.kernel is not None and row.kernel.run is run_operator


def kernel_of(plan: Plan) -> Callable[..., Any]:
    """Return the kernel of a plan with its context bound."""
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
    """Return the call without the values of numbers that calls with the same plan may differ in."""
    return plan.call if plan.rule is not None and plan.rule.floats_matter else plan.call.for_all_numbers()


# --- arguments that differ from rank to rank ----------------------------------------------------------------------------
def _constants(plan: Plan) -> dict[int, Constants]:
    """Return for each member in this process the arguments that the rule's ``local_args`` replaces; {} if it replaces none."""
    rewrite = None if plan.rule is None else plan.rule.local_args
    if rewrite is None or plan.chosen is None:
        return {}
    mesh, chosen, call = plan.call.mesh, plan.chosen, _served(plan)
    layouts = [layout for layout in chosen.results if layout is not None]
    held = communicator_of(mesh).held
    found = {member: rewrite(call, LocalView(chosen.operands, layouts, mesh.coordinates[member])) for member in held}
    return found if any(found.values()) else {}


def _with_rank_constants(plan: Plan, operator: Operator, form: Form, by_member: dict[int, Constants]) -> LocalCall:
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
        return LocalCall(func, given[member], named[member]) if nothing is None else LocalCall(nothing.without(func))

    def one(member: int, *local_args: Any, **local_kwargs: Any) -> Any:
        filled = list(local_args)
        for where, value in given[member]:
            filled[where] = value
        return func(*filled, **{**local_kwargs, **named[member]})

    return LocalCall(partial(comm.map, one if nothing is None else nothing.or_nothing(one)))


def _dense_if_refused(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func``, a view operator; it copies a redistributed operand if its strides do not allow the view."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(x, *args, **kwargs)
        except REFUSED:
            return func(x.contiguous(), *args, **kwargs)

    return run


def _filled(form: Form, values: Constants) -> Filled:
    """Return positions and values for ``values``; arguments that the call left out get their defaults as far as needed."""
    names = form.operator.names[: form.operator.positional]
    last = max((k for k, name in enumerate(names) if name in values), default=-1)
    late = [values.get(name, default) for name, default in zip(names[form.count : last + 1], form.tail, strict=False)]
    given: list[tuple[Any, Any]] = [(k, values[name]) for k, name in enumerate(names[: form.count]) if name in values]
    return [*given, (slice(form.count, form.count), late)] if late else given


# --- operands that share memory with the one written to --------------------------------------------------------------------
def _may_share_memory(plan: Plan) -> bool:
    """Return True if torch may refuse overlapping operands on some ranks and not on others.

    Torch refuses operands that share memory if both are dense or their strides differ. A shard with one row may be dense where
    the global tensor is not, and a shard with no rows is never refused.
    """
    layouts = plan.call.operands
    gaps = any(memory_order(tuple(layout.shape), layout.stride) is None for layout in layouts)
    return gaps or any(one is not None and min(one.sizes) < 2 for layout in layouts if not layout.sized for one in layout.splits)


def _clone_if_refused(plan: Plan, func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``func``; on a rank where it refuses operands that share memory, it gets copies of all operands but the first."""
    comm = communicator_of(plan.call.mesh)

    def one(member: int, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        try:
            return func(*local_args, **local_kwargs)
        except REFUSED:
            first, *others = local_args
            return func(first, *map(_cloned, others), **{name: _cloned(value) for name, value in local_kwargs.items()})

    return lambda *local_args, **local_kwargs: comm.map(one, local_args, local_kwargs)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
