"""Steps: the passes that prepare the arguments of a local call, write results back, and wrap them.

Each function here is a pass of :data:`dtensor.dispatch.program.PASSES`: from the plan, the operator and the signature of the call
it makes one step, or None where nothing has to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base.modes import EXPLICIT
from ..base.tensor_tree import tensors
from ..comm import communicator_of
from ..errors import ImplicitCommunicationError, UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.op_schema import Form, Operator, Place
from ..propagation.propagate import Plan
from ..ranks.per_rank import shards_of
from ..ranks.write_result import assign
from ..redistribute import Plan as Move
from ..redistribute import execute as run_move
from ..redistribute import execute_many as run_moves
from ..redistribute import plan as plan_move
from ..rules.kernel_context import Measured
from .cached_redistribute import aliases_unseen, moved, moved_together, one_by_one, share_versions
from .comm_report import announce, describe
from .frame import Args, Frame, Keywords, Step, argument_at, results_of
from .local_call import has_own_function, is_kernel
from .local_indices import note_names
from .output_aliasing import apart, memory_of
from .version_counters import shared
from .wrap import wrap_local, wrap_view


# --- before the call ----------------------------------------------------------------------------------------------------
def order_arguments(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Put arguments that were given by name, and may stand by position, in their positions."""
    if not form.reordered:
        return None

    def step(frame: Frame) -> None:
        given, frame.kwargs = operator.in_order(frame.args, frame.kwargs)
        frame.args = tuple(given)
        frame.local_args, frame.local_kwargs = operator.in_order(frame.local_args, frame.local_kwargs)

    return step


def check_explicit(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Raise under ``explicit()`` if the plan communicates; warn, once for each operator, if it gathers all operands."""
    if not plan.communicates:
        return None

    def step(frame: Frame) -> None:
        if EXPLICIT.held and EXPLICIT:
            raise ImplicitCommunicationError(f"{operator.name} would communicate under explicit():\n{describe(plan)}")
        if plan.how == "gather":
            announce(plan, operator.name)

    return step


def split_aliased_lists(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Run a list operator one element at a time if elements share memory: an element must not be redistributed before an earlier
    element was written to it."""
    if not operator.mutated or all(index is None for (_, index), _ in plan.moves):
        return None

    def step(frame: Frame) -> bool:
        if not in_one_memory(operator, frame.args, frame.kwargs):
            return False
        in_turn(operator, frame.args, frame.kwargs)
        return True

    return step


def in_one_memory(operator: Operator, args: Args, kwargs: Keywords) -> bool:
    """Return True if two elements of a call's lists share memory, as a tensor and its view, and one of them is written to."""
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
    """Call a list operator that returns nothing once for each element, in order."""
    count = max(len(x) for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)))

    def of(index: int, x: Any) -> Any:
        return x[index : index + 1] if isinstance(x, (list, tuple)) and len(x) == count else x

    for k in range(count):
        operator.func(*[of(k, x) for x in args], **{name: of(k, x) for name, x in kwargs.items()})


def redistribute_inputs(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Redistribute operands to the layouts of the plan, several operands together.

    An operand that is written to, or that a view is taken of, is redistributed for this call alone; others through the cache.
    """
    if not plan.moves:
        return None
    places = [(form.place(name), index, move) for (name, index), move in plan.moves]
    written = operator.mutated.union(name for (name, _), _ in plan.write_back)
    own = {form.place(name) for (name, index), _ in plan.moves if index is not None or operator.is_view or name in written}
    if len(places) == 1 and isinstance(only := places[0][0], int) and places[0][1] is None:
        return _redistribute_one(only, places[0][2], cached=not own)
    if sum(index is not None for _, index, _ in places) > 1:
        together: Callable[..., list[Any]] = _redistribute_elements
    elif sum(move.communicates for *_, move in places) > 1:
        together = moved_together
    else:
        together = one_by_one

    def step(frame: Frame) -> None:
        asked = []
        for place, index, move in places:
            local = frame.local(place)
            x = None if place in own else frame.given(place)
            asked.append((x, move, local if index is None else local[index]))
        for (place, index, _), there in zip(places, together(asked), strict=True):
            if index is None:
                frame.put_local(place, there)
            else:
                frame.local(place)[index] = there

    return step


def _redistribute_one(place: int, move: Move, cached: bool) -> Step:
    """Make the step for the usual case: one positional operand."""

    def step(frame: Frame) -> None:
        local_args = frame.local_args
        local_args[place] = moved(frame.args[place] if cached else None, move, local_args[place])

    return step


def _redistribute_elements(asked: Sequence[tuple[Any, Move, Any]]) -> list[Any]:
    """Redistribute elements of lists, as foreach operators take them, in few collectives."""
    return run_moves([move for _, move, _ in asked], [local for *_, local in asked]).wait()


def allocate_outputs(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Allocate local tensors for ``out=`` results; a later step copies them to the user's tensors, in their layouts.

    Kernels and functions of rules return new tensors: for them the ``out=`` arguments are dropped.
    """
    if not operator.outs:
        return None
    if has_own_function(plan):

        def drop(frame: Frame) -> None:
            for name in operator.outs:
                frame.local_kwargs.pop(name, None)

        return drop
    layouts = {name: plan.results[operator.returns.index(name)] if plan.results else None for name in operator.outs}

    def allocate(frame: Frame) -> None:
        for name, layout in layouts.items():
            frame.local_kwargs[name] = _allocated(layout, frame.local_kwargs[name], operator.seeded)

    return allocate


def _allocated(layout: Layout | None, like: Any, seeded: bool) -> Any:
    """Return empty local tensors of ``layout``: row-major, since some kernels read their memory so, except for random numbers,
    whose values follow from the memory order."""
    if not isinstance(layout, Layout):
        return torch.empty_like(like).resize_(0)
    coordinates = layout.mesh.coordinates

    def empty(member: int, x: torch.Tensor) -> torch.Tensor:
        return layout.block_beside(x, member) if seeded else x.new_empty(layout.local_shape(coordinates[member]))

    return communicator_of(layout.mesh).map(empty, like)


# --- after the call -----------------------------------------------------------------------------------------------------
def copy_aliased_results(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Copy results that share memory with a redistributed operand: that copy may be cached, and users write to results."""
    moved = [(form.place(name), index) for (name, index), move in plan.moves if move.communicates]
    if not moved or operator.is_view or operator.mutated:
        return None

    def step(frame: Frame) -> None:
        given: set[int] = set()
        for place, index in moved:
            x = frame.local(place)
            given.update(memory_of(x if index is None else x[index]))
        given.discard(0)
        made = frame.made
        frame.made = type(made)(apart(x, given) for x in made) if isinstance(made, (tuple, list)) else apart(made, given)

    return step


def write_into_locals(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Write what a kernel returned for arguments that are written in place into their local tensors."""
    if not is_kernel(plan) or operator.facts.flat or not operator.mutated.difference(operator.outs):
        return None
    owners = [(k, form.place(name)) for k, name in enumerate(operator.returns) if name is not None and name not in operator.outs]

    def step(frame: Frame) -> None:
        produced = results_of(frame.made, operator)
        for k, place in owners:
            assign(frame.local(place), produced[k])

    return step


def write_back(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Redistribute what was written to the layouts of the user's tensors, and copy it into them.

    The value is a result where the operator returns what it writes to, and a kernel has not written it into the local tensor;
    else it is the local argument.
    """
    if not plan.write_back:
        return None
    kernel = is_kernel(plan) and not operator.facts.flat
    places = []
    for (name, index), move in plan.write_back:
        returned = index is None and name in operator.returns and not (kernel and name not in operator.outs)
        place = operator.returns.index(name) if returned else None
        places.append((form.place(name), index, place, not plan.results and name in operator.outs, move))

    def step(frame: Frame) -> None:
        produced = results_of(frame.made, operator)
        for place, index, k, shape_is_data, move in places:
            target, local = frame.given(place), frame.local(place) if k is None else produced[k]
            if index is not None:
                target, local = target[index], local[index]
            if not shape_is_data or local.shape == target.shape:  # else wrap_outputs gives the target the result's shape
                assign(target, run_move(move, local.to(move.src.dtype)))  # a rule's own function gives its own dtype

    return step


def bump_versions(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Count writes to the elements of lists: torch bumps version counters in the operators that it runs on each element."""
    if not (operator.facts.per_element and operator.mutated):
        return None
    places = [place for name in sorted(operator.mutated) if (place := form.given(name)) is not None]

    def step(frame: Frame) -> None:
        for place in places:
            written = frame.given(place)
            if isinstance(written, (list, tuple)):
                try:
                    increment_version(written)
                except RuntimeError:  # inference tensors have no version counter
                    increment_version([tensor for tensor in written if not tensor.is_inference()])

    return step


# --- results ------------------------------------------------------------------------------------------------------------
Finish = Callable[[Args, Keywords, Any], Any]


class WrapOutputs:
    """The step that turns the results of the local call into what the user gets.

    Attributes:
        layout: the layout of the result, if it is one tensor and wrapping it is all there is to do; else None.
        start: where that is a view of the first argument, its distance in bytes from the argument's first element.
        output: a function of the user's arguments, keywords and the local results.
    """

    __slots__ = ("layout", "output", "start")

    def __init__(self, output: Finish, layout: Layout | None = None, start: int | None = None) -> None:
        self.output, self.layout, self.start = output, layout, start

    @classmethod
    def of_one(cls, layout: Layout) -> WrapOutputs:
        """Wrap the only result, a new tensor."""
        return cls(lambda args, kwargs, made: wrap_local(made, layout), layout)

    @classmethod
    def of_view(cls, layout: Layout, start: int, shares: bool = False) -> WrapOutputs:
        """Wrap the only result, a view of the first argument; ``shares``: autograd does not record it as a view."""
        if not shares:
            return cls(lambda args, kwargs, made: wrap_view(made, layout, args[0], start), layout, start)

        def output(args: Args, kwargs: Keywords, made: Any) -> Any:
            view = wrap_view(made, layout, args[0], start)
            share_versions(view, args[0])
            return view

        return cls(output)

    def __call__(self, frame: Frame) -> None:
        frame.output = self.output(frame.args, frame.kwargs, frame.made)


def wrap_outputs(plan: Plan, operator: Operator, form: Form) -> WrapOutputs:
    """Wrap local results as DTensors, return written arguments, resize ``out=`` tensors."""
    shares = aliases_unseen(operator)
    if plan.starts and plan.how == "rule":
        layouts = plan.results[0]
        if isinstance(layouts, Layout):
            return WrapOutputs.of_view(layouts, plan.starts[0], shares)
        return WrapOutputs(_wrap_views(layouts, plan.starts))
    finish = _finish(plan, operator, form)
    if isinstance(finish, Layout):
        return WrapOutputs.of_view(finish, 0, shares) if shares else WrapOutputs.of_one(finish)
    return WrapOutputs(finish or (lambda args, kwargs, made: args[0]))


def _finish(plan: Plan, operator: Operator, form: Form) -> Layout | Finish | None:
    """Return the layout of the only new result, or a function that makes the output; None if that is the first argument."""
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


def _wrap_views(layouts: list[Layout], starts: tuple[int, ...]) -> Finish:
    """Wrap views of the first argument; ``starts``: bytes from the argument's first element to the first element of each."""
    return lambda args, kwargs, made: list(map(wrap_view, made, layouts, repeat(args[0]), starts))


def _one_result(plan: Plan, operator: Operator, form: Form, owner: str | None, layout: Any) -> Finish:
    if owner in operator.outs:
        return _given_out(plan, form.place(owner), layout)
    if owner is not None:
        place = form.place(owner)
        return lambda args, kwargs, value: argument_at(place, args, kwargs)
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
        target, have = argument_at(place, args, kwargs), layout or _whole(plan, value)
        if target.shape == have.shape:
            return target
        if hasattr(target, "_layout"):
            return resized_to(target, wrap_local(value, have.replace(dtype=target.dtype)))
        whole = Layout.replicated(have.mesh, have.shape, have.stride, have.dtype)
        return assign(target.resize_(have.shape), run_move(plan_move(have, whole), value))

    return finish
