"""The steps of a bound plan, and what runs them: Move and Rewrite, Call, WriteBack, Wrap.

Calls that find a plan have the form of the one that it was bound for: as many arguments by position, the same by name. So a
step knows where its argument stands (a :data:`Place`), and what was left out is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base.modes import EXPLICIT
from ..base.nested import tensors
from ..errors import ImplicitCommunicationError, UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import Form, Operator, Place
from ..ranks.assign import assign
from ..ranks.per_rank import shards_of
from ..redistribute import Plan as Move
from ..redistribute import execute as run_move
from ..redistribute import execute_many as run_moves
from ..redistribute import plan as plan_move
from ..rules.kernels import Measured
from .own_names import note_names
from .report import announce, describe
from .settled import moved_together, one_by_one
from .versions import shared
from .wrapping import wrap_local, wrap_view

Args = tuple[Any, ...]
Keywords = dict[str, Any]
Runner = Callable[[Args, Keywords, list[Any], Keywords], Any]  # the user's arguments, then the same with locals for DTensors
Before = Callable[[Args, Keywords, list[Any], Keywords], None]
After = Callable[[Args, Keywords, list[Any], Keywords, Any], None]
Finish = Callable[[Args, Keywords, Any], Any]
Given = Sequence[tuple[Any, Any]]  # places (slices of them) and the constants that stand there


def running(
    before: Sequence[Before], given: Given, call: Callable[..., Any], after: Sequence[After], finish: Layout | Finish | None
) -> Runner:
    """What runs a bound plan. ``finish``: the layout of the one new tensor that comes out; None where the first argument does."""
    only, other = (finish, None) if isinstance(finish, Layout) else (None, finish)

    def straight(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        for where, value in given:
            local_args[where] = value
        made = call(*local_args, **local_kwargs)
        if only is not None:
            return wrap_local(made, only)
        return args[0] if other is None else other(args, kwargs, made)

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        for step in before:
            step(args, kwargs, local_args, local_kwargs)
        for where, value in given:
            local_args[where] = value
        made = call(*local_args, **local_kwargs)
        for write in after:
            write(args, kwargs, local_args, local_kwargs, made)
        if only is not None:
            return wrap_local(made, only)
        return args[0] if other is None else other(args, kwargs, made)

    return run if before or after else straight


def viewing(given: Given, call: Callable[..., Any], layout: Layout, start: int) -> Runner:
    """The same of a call that gives one view of the first argument's local, which begins so many bytes after that does."""

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        for where, value in given:
            local_args[where] = value
        return wrap_view(call(*local_args, **local_kwargs), layout, args[0], start)

    return run


def at(place: Place, positional: Any, keywords: Keywords) -> Any:
    """The argument at a place."""
    return positional[place] if isinstance(place, int) else keywords[place]


def put(place: Place, local_args: list[Any], local_kwargs: Keywords, value: Any) -> None:
    if isinstance(place, int):
        local_args[place] = value
    else:
        local_kwargs[place] = value


# --- before the call ----------------------------------------------------------------------------------------------------
def refusing(plan: Plan, operator: Operator) -> Before:
    """Under ``explicit()`` nothing is communicated; an operator that gathers says so, once."""

    def step(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> None:
        if EXPLICIT.held and EXPLICIT:
            raise ImplicitCommunicationError(f"{operator.name} would communicate under explicit():\n{describe(plan)}")
        if plan.how == "gather":
            announce(plan, operator.name)

    return step


def moving(plan: Plan, operator: Operator, form: Form) -> Before:
    """Operands redistributed: where several move, together.

    What is written to, or seen by a view, is moved for this call alone.
    """
    places = [(form.place(name), index, move) for (name, index), move in plan.moves]
    written = operator.mutated.union(name for (name, _), _ in plan.write_back)
    own = {form.place(name) for (name, index), _ in plan.moves if index is not None or operator.is_view or name in written}
    if sum(index is not None for _, index, _ in places) > 1:
        together: Callable[..., list[Any]] = _of_lists
    elif sum(move.communicates for *_, move in places) > 1:
        together = moved_together
    else:
        together = one_by_one

    def step(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> None:
        asked = []
        for place, index, move in places:
            local = at(place, local_args, local_kwargs)
            x = None if place in own else at(place, args, kwargs)
            asked.append((x, move, local if index is None else local[index]))
        for (place, index, _), there in zip(places, together(asked), strict=True):
            if index is None:
                put(place, local_args, local_kwargs, there)
            else:
                at(place, local_args, local_kwargs)[index] = there

    return step


def taking_turns(operator: Operator, together: Runner) -> Runner:
    """What ``together`` does with lists, one element after the other where it has to be: a later one would be moved before an
    earlier one wrote to it."""

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        if in_one_memory(operator, args, kwargs):
            return in_turn(operator, args, kwargs)
        return together(args, kwargs, local_args, local_kwargs)

    return run


def in_one_memory(operator: Operator, args: Args, kwargs: Keywords) -> bool:
    """Whether two elements of a call's lists are views of one tensor, or it, and one of them is written to."""
    first: dict[int, int] = {}
    written: set[int] = set()
    several: set[int] = set()
    for name, values in operator.bind(args, kwargs).items():
        for index, x in enumerate(values if isinstance(values, (list, tuple)) else ()):
            if isinstance(x, torch.Tensor):
                memory = id(shared(x))
                if first.setdefault(memory, index) != index:
                    several.add(memory)
                if name in operator.mutated:
                    written.add(memory)
    return not written.isdisjoint(several)


def in_turn(operator: Operator, args: Args, kwargs: Keywords) -> None:
    """A call that takes lists and gives nothing, for one element after the other."""
    count = max(len(x) for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)))

    def of(index: int, x: Any) -> Any:
        return x[index : index + 1] if isinstance(x, (list, tuple)) and len(x) == count else x

    for k in range(count):
        operator.func(*[of(k, x) for x in args], **{name: of(k, x) for name, x in kwargs.items()})


def _of_lists(asked: Sequence[tuple[Any, Move, Any]]) -> list[Any]:
    """Elements of lists, as of foreach operators, in few collectives."""
    return run_moves([move for _, move, _ in asked], [local for *_, local in asked]).wait()


# --- after the call -----------------------------------------------------------------------------------------------------
def into_locals(operator: Operator, form: Form) -> After:
    """What a kernel computed for arguments written in place, written there (kernels return new locals)."""
    owners = [(k, form.place(name)) for k, name in enumerate(operator.returns) if name is not None and name not in operator.outs]

    def step(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords, made: Any) -> None:
        produced = as_tuple(made, operator)
        for k, place in owners:
            assign(at(place, local_args, local_kwargs), produced[k])

    return step


def written_back(plan: Plan, operator: Operator, form: Form, kernel: bool) -> After:
    """What was written, in the layout of the user's tensors and in them.

    It is a result where the operator returns what it writes to (what a kernel returns lies in its local by now), else a local.
    """
    places = []
    for (name, index), move in plan.write_back:
        returned = index is None and name in operator.returns and not (kernel and name not in operator.outs)
        place = operator.returns.index(name) if returned else None
        places.append((form.place(name), index, place, not plan.results and name in operator.outs, move))

    def step(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords, made: Any) -> None:
        produced = as_tuple(made, operator)
        for place, index, k, shape_is_data, move in places:
            target, local = at(place, args, kwargs), at(place, local_args, local_kwargs) if k is None else produced[k]
            if index is not None:
                target, local = target[index], local[index]
            if not shape_is_data or local.shape == target.shape:  # else it takes the shape, in the end
                assign(target, run_move(move, local.to(move.src.dtype)))  # a rule's own function gives its own dtype

    return step


def counted(operator: Operator, form: Form) -> After:
    """Writes to lists are counted here: torch's own count comes from the operators that it runs on each element."""
    places = [place for name in sorted(operator.mutated) if (place := form.given(name)) is not None]

    def step(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords, made: Any) -> None:
        for place in places:
            written = at(place, args, kwargs)
            if isinstance(written, (list, tuple)):
                try:
                    increment_version(written)
                except RuntimeError:  # nobody counts for inference tensors
                    increment_version([tensor for tensor in written if not tensor.is_inference()])

    return step


# --- what comes out -----------------------------------------------------------------------------------------------------
def as_tuple(made: Any, operator: Operator) -> tuple[Any, ...]:
    """The results one by one."""
    count = len(operator.returns)
    return () if count == 0 else (made,) if count == 1 else tuple(made)


def finishing(plan: Plan, operator: Operator, form: Form) -> Layout | Finish | None:
    """From what the call gave to what the user gets; see :func:`running`."""
    returns = operator.returns
    if not returns:
        return lambda args, kwargs, made: None
    layouts: tuple[Any, ...] = plan.results or (None,) * len(returns)
    if plan.how == "rule" and returns == (None,) and isinstance(layouts[0], Layout):
        return layouts[0]
    if plan.how == "rule" and not any(returns) and all(isinstance(x, Layout) for x in layouts):
        return lambda args, kwargs, made: tuple(map(wrap_local, made, layouts))
    if len(returns) == 1 and returns[0] not in (None, *operator.outs) and form.place(str(returns[0])) == 0:
        return None
    each = [_one_result(plan, operator, form, owner, layout) for owner, layout in zip(returns, layouts, strict=True)]
    if len(each) == 1:
        return each[0]
    return lambda args, kwargs, made: tuple([one(args, kwargs, value) for one, value in zip(each, made, strict=True)])


def finishing_views(layouts: Layout | list[Layout], starts: tuple[int, ...]) -> Finish:
    """The same for views of the first argument's local, which begin so many bytes after that does."""
    if isinstance(layouts, Layout):
        layout, start = layouts, starts[0]
        return lambda args, kwargs, made: wrap_view(made, layout, args[0], start)
    return lambda args, kwargs, made: list(map(wrap_view, made, layouts, repeat(args[0]), starts))


def _one_result(plan: Plan, operator: Operator, form: Form, owner: str | None, layout: Any) -> Finish:
    if owner in operator.outs:
        return _given_out(plan, form.place(owner), layout)
    if owner is not None:
        place = form.place(owner)
        return lambda args, kwargs, value: at(place, args, kwargs)
    if plan.how == "rule" and isinstance(layout, list) and all(isinstance(item, Layout) for item in layout):
        return lambda args, kwargs, value: list(map(wrap_local, value, layout))
    if plan.how == "rule" and plan.results and layout is None:  # some kernels give gradients that nobody asked for, on some ranks
        return lambda args, kwargs, value: None if value is None or tensors(value) else _as_made(plan, None, value)
    if plan.how == "rule" and isinstance(layout, Layout):
        return lambda args, kwargs, value: wrap_local(value, layout)
    return lambda args, kwargs, value: _as_made(plan, layout, value)


def _as_made(plan: Plan, layout: Any, value: Any) -> Any:
    if isinstance(value, Measured):
        made = wrap_local(value.local, _measured(plan, value))
        note_names(made, value.names)
        return made
    if isinstance(value, (list, tuple)) and not hasattr(value, "common"):
        layouts = layout if isinstance(layout, list) else [None] * len(value)
        return [_as_made(plan, own, item) for own, item in zip(layouts, value, strict=True)]
    if not isinstance(value, torch.Tensor):
        return value[0] if isinstance(value, tuple) else value
    if plan.how == "gather" and (value.is_nested or value.layout is not torch.strided):
        kind, other = (
            ("nested", "keep the padding (enable_nested_tensor=False)") if value.is_nested else ("sparse", "pass sparse=False")
        )
        raise UnsupportedOperationError(
            f"{plan.call.func} would return a {kind} tensor, which is not supported as a DTensor; {other}, or use x.full_tensor()"
        )
    if plan.how == "gather" or layout is None:
        layout = _whole(plan, value)  # the local is the global one, whatever planning knew of it
    return wrap_local(value, layout)


def _measured(plan: Plan, found: Measured) -> Layout:
    """The layout of what is cut along its first dim alone."""
    block = shards_of(found.local)[0]
    shape = (sum(found.split.sizes), *block.shape[1:])
    splits, terms = (found.split, *[None] * (len(shape) - 1)), (None,) * plan.call.mesh.ndim
    return Layout.from_splits(plan.call.mesh, splits, terms, shape, found.stride, block.dtype)


def _whole(plan: Plan, value: Any) -> Layout:
    return Layout.replicated(plan.call.mesh, value.shape, value.stride(), value.dtype)


def resized_to(target: Any, value: Any) -> Any:
    """``target`` with the shape, the layout and the elements of ``value``, in memory of its own.

    Raises:
        UnsupportedOperationError: it is a view, whose base would not be written to.
    """
    if target._base is not None and target.numel():
        raise UnsupportedOperationError(
            f"out= is a view of shape {tuple(target.shape)}, the result has shape {tuple(value.shape)}, and a "
            "view cannot be resized; pass an out= of the shape of the result, or one that is not a view"
        )
    target.data = value
    return target


def _given_out(plan: Plan, place: Place, layout: Layout | None) -> Finish:
    """An ``out=`` tensor of another shape than the result becomes what the result is, as in torch."""

    def finish(args: Args, kwargs: Keywords, value: Any) -> Any:
        target, have = at(place, args, kwargs), layout or _whole(plan, value)
        if target.shape == have.shape:
            return target
        if hasattr(target, "_layout"):
            return resized_to(target, wrap_local(value, have.replace(dtype=target.dtype)))
        whole = Layout.replicated(have.mesh, have.shape, have.stride, have.dtype)
        return assign(target.resize_(have.shape), run_move(plan_move(have, whole), value))

    return finish
