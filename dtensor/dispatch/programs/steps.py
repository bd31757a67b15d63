"""Steps: the passes that prepare the arguments of a local call, write results back, and wrap them.

A pass makes from the plan, the operator and the signature of a call one step, or None if it has nothing to do. :data:`PASSES`, at
the end of this module, is the table of all passes in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.memory_order import Stride, dense_stride
from ...base.modes import EXPLICIT
from ...base.tensor_tree import tensor_leaves
from ...comm import PerRank
from ...comm.map_ranks import communicator_of
from ...errors import ImplicitCommunicationError, UnsupportedOperationError
from ...layout.layout import Layout
from ...propagation.op_schema import ArgumentPosition, CallSignature, OperatorSchema
from ...propagation.propagate import CallPlan
from ...ranks.per_rank import shards_of
from ...redistribute import Plan as RedistributionPlan
from ...redistribute import execute, execute_many
from ...redistribute import plan as plan_redistribution
from ...rules.kernel_context import DataDependentResult
from ...state.shared_memory import clone_if_aliased, share_versions, storage_addresses
from ...state.wrap import wrap_local, wrap_view, write_value
from .comm_report import describe_plan, warn_of_gather
from .facts import FACT_PASSES, note_local_indices, read_row_ownership
from .frame import Args, Frame, Keywords, Pass, Step, argument_at, results_as_tuple
from .list_ops import has_aliased_elements, run_per_element
from .local_call import call_local_function, replaces_operator, runs_kernel
from .redistribution_cache import Request, redistribute_cached, redistribute_cached_each, redistribute_cached_many


# --- before the call ----------------------------------------------------------------------------------------------------
def order_arguments(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that moves arguments given by keyword to their positions."""
    if not signature.reordered:
        return None

    def move_keywords(frame: Frame) -> None:
        """Move keyword arguments to their positions, so that later steps find all arguments by position."""
        args, frame.kwargs = operator.move_to_positions(frame.args, frame.kwargs)
        frame.args = tuple(args)
        frame.local_args, frame.local_kwargs = operator.move_to_positions(frame.local_args, frame.local_kwargs)

    return move_keywords


def check_explicit(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that raises under ``explicit()`` if the plan communicates, and warns once if it gathers all operands."""
    if not plan.communicates:
        return None

    def check_explicit_mode(frame: Frame) -> None:
        """Raise under ``explicit()``, because the plan communicates; else warn if it gathers."""
        if EXPLICIT.held and EXPLICIT:
            raise ImplicitCommunicationError(f"{operator.name} would communicate under explicit():\n{describe_plan(plan)}")
        if plan.how == "gather":
            warn_of_gather(plan, operator.name)

    return check_explicit_mode


def split_aliased_lists(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that runs a list operator one element at a time if elements share memory.

    An element must not be redistributed before an earlier element was written to it.
    """
    if not operator.mutated or all(index is None for (_, index), _ in plan.redistributions):
        return None

    def run_elements(frame: Frame) -> bool:
        """Run list elements one after the other if some share memory. Return True if that was the complete call."""
        if not has_aliased_elements(operator, frame.args, frame.kwargs):
            return False
        run_per_element(operator, frame.args, frame.kwargs)
        return True

    return run_elements


def redistribute_inputs(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that redistributes operands to the layouts of the plan, several operands together.

    An operand that is written to, or that a view is taken of, is redistributed for this call alone; others through the cache.
    """
    if not plan.redistributions:
        return None
    places = [(signature.place(name), index, redistribution) for (name, index), redistribution in plan.redistributions]
    written = operator.mutated.union(name for (name, _), _ in plan.write_back)
    uncached = {
        signature.place(name)
        for (name, index), _ in plan.redistributions
        if index is not None or operator.is_view or name in written
    }
    if len(places) == 1 and isinstance(only := places[0][0], int) and places[0][1] is None:
        return _make_one_redistribution(only, places[0][2], cached=not uncached)
    if sum(index is not None for _, index, _ in places) > 1:
        redistribute_all: Callable[..., list[Any]] = _redistribute_elements
    elif sum(redistribution.communicates for *_, redistribution in places) > 1:
        redistribute_all = redistribute_cached_many
    else:
        redistribute_all = redistribute_cached_each

    def redistribute_operands(frame: Frame) -> None:
        """Redistribute several operands together, so that their collectives can be joined."""
        requests: list[Request] = []
        for place, index, redistribution in places:
            local = frame.local(place)
            x = None if place in uncached else frame.given(place)
            requests.append((x, redistribution, local if index is None else local[index]))
        for (place, index, _), value in zip(places, redistribute_all(requests), strict=True):
            if index is None:
                frame.put_local(place, value)
            else:
                frame.local(place)[index] = value

    return redistribute_operands


def _make_one_redistribution(place: int, redistribution: RedistributionPlan, cached: bool) -> Step:
    """Make the step that redistributes one positional operand, the usual case, through the cache or for this call alone."""

    def redistribute_operand(frame: Frame) -> None:
        local_args = frame.local_args
        local_args[place] = redistribute_cached(frame.args[place] if cached else None, redistribution, local_args[place])

    return redistribute_operand


def _redistribute_elements(requests: Sequence[Request]) -> list[Any]:
    """Redistribute elements of lists, as foreach operators take them, in few collectives."""
    return execute_many([redistribution for _, redistribution, _ in requests], [local for *_, local in requests]).wait()


def order_inputs_in_memory(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that copies local operands into the memory order of their layouts, for rules that ask for it.

    The strides of a DTensor are those of the global tensor, but a local tensor may have others (``from_local``, results of local
    operators). Some operators choose by strides, raise because of them, or read memory without a look at them. These operands
    are slices or redistributed.
    """
    if plan.rule is None or not plan.rule.as_laid_out:
        return None
    redistributed = {slot for slot, _ in plan.redistributions}
    layouts = {name: x for name, x in plan.call.arguments.items() if isinstance(x, Layout) and name not in operator.mutated}
    layouts |= {name: x for name, x in zip(plan.call.names, plan.operands, strict=True) if (name, None) in redistributed}
    places = [(signature.place(name), _local_strides(layout)) for name, layout in layouts.items() if layout.ndim > 1]
    if not places:
        return None

    def copy_to_memory_order(frame: Frame) -> None:
        """Copy local tensors that do not have the strides which the local call needs."""
        for place, strides in places:
            local = frame.local(place)
            if type(local) is not torch.Tensor or local.stride() != strides[0]:
                frame.put_local(place, _with_strides(local, strides))

    return copy_to_memory_order


def _local_strides(layout: Layout) -> list[Stride]:
    """Return the dense strides of the local tensors of this process, in the memory order of ``layout``.

    Dims that the global tensor repeats (stride 0) are outermost: their place is not known, and operators that read rows need
    these dims unsharded.
    """
    order = sorted(range(layout.ndim), key=lambda d: (layout.stride[d] != 0, -layout.stride[d]))
    return [dense_stride(layout.shape_of(member), order) for member in communicator_of(layout.mesh).held]


def _with_strides(local: Any, strides: list[Stride]) -> Any:
    """Return the local value with these strides on each rank; tensors that have them are not copied."""
    if not isinstance(local, PerRank):
        return _copy_to_strides(local, strides[0])
    shards = [_copy_to_strides(shard, stride) for shard, stride in zip(local.shards, strides, strict=True)]
    return local if all(map(is_, shards, local.shards)) else PerRank(shards)


def _copy_to_strides(x: torch.Tensor, stride: Stride) -> torch.Tensor:
    """Return ``x`` with these strides, itself if it has them; strides of dims with one element or stride 0 do not count."""
    own = x.stride()
    if own == stride or not x.numel():
        return x
    if all(a in (b, 0) or size == 1 for a, b, size in zip(own, stride, x.shape, strict=True)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def allocate_outputs(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that allocates local ``out=`` tensors; a later step copies them to the user's tensors, in their layouts.

    Kernels and functions of rules return new tensors: for them the ``out=`` arguments are dropped.
    """
    if not operator.outs:
        return None
    if replaces_operator(plan):

        def drop(frame: Frame) -> None:
            for name in operator.outs:
                frame.local_kwargs.pop(name, None)

        return drop
    layouts = {name: plan.results[operator.returns.index(name)] if plan.results else None for name in operator.outs}

    def allocate(frame: Frame) -> None:
        for name, layout in layouts.items():
            frame.local_kwargs[name] = _allocate_output(layout, frame.local_kwargs[name], operator.seeded)

    return allocate


def _allocate_output(layout: Layout | None, like: Any, seeded: bool) -> Any:
    """Return uninitialized local tensors of ``layout``: row-major, or in its memory order if ``seeded``; empty without a layout.

    Some kernels read an output's memory as row-major. Random numbers depend on the memory order of the output.
    """
    if not isinstance(layout, Layout):
        return torch.empty_like(like).resize_(0)
    coordinates = layout.mesh.coordinates

    def empty(member: int, x: torch.Tensor) -> torch.Tensor:
        return layout.new_local_like(x, member) if seeded else x.new_empty(layout.local_shape(coordinates[member]))

    return communicator_of(layout.mesh).map(empty, like)


# --- after the call -----------------------------------------------------------------------------------------------------
def copy_aliased_results(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that copies results which share memory with a redistributed operand: that may be cached, and users write."""
    redistributed = [
        (signature.place(name), index) for (name, index), redistribution in plan.redistributions if redistribution.communicates
    ]
    if not redistributed or operator.is_view or operator.mutated:
        return None

    def copy_aliased(frame: Frame) -> None:
        """Copy results that share memory with a redistributed operand, which plain torch's result does not."""
        addresses: set[int] = set()
        for place, index in redistributed:
            x = frame.local(place)
            addresses.update(storage_addresses(x if index is None else x[index]))
        addresses.discard(0)
        result = frame.local_result
        is_list = isinstance(result, (tuple, list))
        frame.local_result = (
            type(result)(clone_if_aliased(x, addresses) for x in result) if is_list else clone_if_aliased(result, addresses)
        )

    return copy_aliased


def write_into_locals(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that copies what a kernel returned for arguments written in place into their local tensors."""
    if not runs_kernel(plan) or operator.traits.reads_flat or not operator.mutated.difference(operator.outs):
        return None
    places = [
        (k, signature.place(name)) for k, name in enumerate(operator.returns) if name is not None and name not in operator.outs
    ]

    def write_results(frame: Frame) -> None:
        """Write results to the local tensors of the operands that the operator changes in place."""
        results = results_as_tuple(frame.local_result, operator)
        for k, place in places:
            write_value(frame.local(place), results[k])

    return write_results


def write_back(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that redistributes what was written to the layouts of the user's tensors, and copies it into them.

    The value is a result where the operator returns what it writes to, and a kernel has not written it into the local tensor;
    else it is the local argument.
    """
    if not plan.write_back:
        return None
    kernel = runs_kernel(plan) and not operator.traits.reads_flat
    places = []
    for (name, index), redistribution in plan.write_back:
        is_returned = index is None and name in operator.returns and not (kernel and name not in operator.outs)
        result_index = operator.returns.index(name) if is_returned else None
        places.append((signature.place(name), index, result_index, not plan.results and name in operator.outs, redistribution))

    def copy_back(frame: Frame) -> None:
        """Redistribute results to the layouts of the written operands, and write them there."""
        results = results_as_tuple(frame.local_result, operator)
        for place, index, k, shape_is_data, redistribution in places:
            target, local = frame.given(place), frame.local(place) if k is None else results[k]
            if index is not None:
                target, local = target[index], local[index]
            if not shape_is_data or local.shape == target.shape:  # else wrap_outputs gives the target the result's shape
                write_value(
                    target, execute(redistribution, local.to(redistribution.src.dtype))
                )  # a rule's function may return another dtype

    return copy_back


def bump_versions(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that counts writes to elements of lists; torch counts only those of operators that it runs."""
    if not (operator.traits.per_element and operator.mutated):
        return None
    places = [place for name in sorted(operator.mutated) if (place := signature.given(name)) is not None]

    def count_writes(frame: Frame) -> None:
        """Increment the version counters of the operands that the operator wrote."""
        for place in places:
            written = frame.given(place)
            if isinstance(written, (list, tuple)):
                try:
                    increment_version(written)
                except RuntimeError:  # inference tensors have no version counter
                    increment_version([tensor for tensor in written if not tensor.is_inference()])

    return count_writes


# --- results ------------------------------------------------------------------------------------------------------------
MakeOutput = Callable[[Args, Keywords, Any], Any]  # from the user's arguments and keywords, and the local result


class WrapOutputs:
    """The step that turns the local results into the output of the call.

    Attributes:
        layout: the layout of the result, if it is one tensor and wrapping it is all there is to do; else None.
        start: if that is a view of the first argument, its distance in bytes from the argument's first element.
        output: makes the output from the user's arguments, keywords and the local result.
    """

    __slots__ = ("layout", "output", "start")

    def __init__(self, output: MakeOutput, layout: Layout | None = None, start: int | None = None) -> None:
        self.output, self.layout, self.start = output, layout, start

    @classmethod
    def of_one(cls, layout: Layout) -> WrapOutputs:
        """Return the step that wraps the only result, a new tensor."""
        return cls(lambda args, kwargs, result: wrap_local(result, layout), layout)

    @classmethod
    def of_view(cls, layout: Layout, start: int, shares: bool = False) -> WrapOutputs:
        """Return the step that wraps the only result, a view of the first argument.

        Args:
            shares: autograd does not record the result as a view.
        """
        if not shares:
            return cls(lambda args, kwargs, result: wrap_view(result, layout, args[0], start), layout, start)

        def output(args: Args, kwargs: Keywords, result: Any) -> Any:
            """Wrap a local view as a view of the first argument, and share its version counter."""
            view = wrap_view(result, layout, args[0], start)
            share_versions(view, args[0])
            return view

        return cls(output)

    def __call__(self, frame: Frame) -> None:
        frame.output = self.output(frame.args, frame.kwargs, frame.local_result)


def wrap_outputs(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> WrapOutputs:
    """Make the step that wraps local results as DTensors, returns written arguments, and resizes ``out=`` tensors."""
    shares = operator.is_unrecorded_alias
    if plan.starts and plan.how == "rule":
        layouts = plan.results[0]
        if isinstance(layouts, Layout):
            return WrapOutputs.of_view(layouts, plan.starts[0], shares)
        starts = plan.starts
        return WrapOutputs(lambda args, kwargs, result: list(map(wrap_view, result, layouts, repeat(args[0]), starts)))
    output = _make_output(plan, operator, signature)
    if isinstance(output, Layout):
        return WrapOutputs.of_view(output, 0, shares) if shares else WrapOutputs.of_one(output)
    return WrapOutputs(output or (lambda args, kwargs, result: args[0]))


def _make_output(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Layout | MakeOutput | None:
    """Return the layout of the only new result, or a function that makes the output; None if that is the first argument."""
    returns = operator.returns
    if not returns:
        return lambda args, kwargs, result: None
    layouts: tuple[Any, ...] = plan.results or (None,) * len(returns)
    if plan.how == "rule" and returns == (None,) and isinstance(layouts[0], Layout):
        return layouts[0]
    if plan.how == "rule" and not any(returns) and all(isinstance(x, Layout) for x in layouts):
        return lambda args, kwargs, result: tuple(map(wrap_local, result, layouts))
    if len(returns) == 1 and returns[0] not in (None, *operator.outs) and signature.place(str(returns[0])) == 0:
        return None
    parts = [_make_output_part(plan, operator, signature, owner, layout) for owner, layout in zip(returns, layouts, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return lambda args, kwargs, result: tuple([part(args, kwargs, value) for part, value in zip(parts, result, strict=True)])


def _make_output_part(
    plan: CallPlan, operator: OperatorSchema, signature: CallSignature, owner: str | None, layout: Any
) -> MakeOutput:
    """Return the function that makes one return value: the argument named ``owner``, or a new tensor (None)."""
    if owner in operator.outs:
        return _return_out_argument(plan, signature.place(owner), layout)
    if owner is not None:
        place = signature.place(owner)
        return lambda args, kwargs, value: argument_at(place, args, kwargs)
    if plan.how == "rule" and isinstance(layout, list) and all(isinstance(item, Layout) for item in layout):
        return lambda args, kwargs, value: list(map(wrap_local, value, layout))
    if plan.how == "rule" and plan.results and layout is None:  # on some ranks some kernels return gradients not asked for
        return lambda args, kwargs, value: None if value is None or tensor_leaves(value) else _wrap_unplanned(plan, None, value)
    if plan.how == "rule" and isinstance(layout, Layout):
        return lambda args, kwargs, value: wrap_local(value, layout)
    return lambda args, kwargs, value: _wrap_unplanned(plan, layout, value)


def _wrap_unplanned(plan: CallPlan, layout: Any, value: Any) -> Any:
    """Wrap a local result with a layout that follows from its value, since the plan does not say all of it."""
    if isinstance(value, DataDependentResult):
        x = wrap_local(value.local, _layout_of_data_dependent(plan, value))
        note_local_indices(x, value.names)
        return x
    if isinstance(value, (list, tuple)) and not hasattr(value, "common"):
        layouts = layout if isinstance(layout, list) else [None] * len(value)
        return [_wrap_unplanned(plan, own, item) for own, item in zip(layouts, value, strict=True)]
    if not isinstance(value, torch.Tensor):
        return value[0] if isinstance(value, tuple) else value
    if plan.how == "gather" and (value.is_nested or value.layout is not torch.strided):
        kind, instead = (
            ("nested", "keep the padding (enable_nested_tensor=False)") if value.is_nested else ("sparse", "pass sparse=False")
        )
        raise UnsupportedOperationError(
            f"{plan.call.func} would return a {kind} tensor, which is not supported as a DTensor; {instead}, "
            "or use x.full_tensor()"
        )
    if plan.how == "gather" or layout is None:
        layout = _replicated_layout(plan, value)  # the local tensor is the global one, whatever the plan expected
    return wrap_local(value, layout)


def _layout_of_data_dependent(plan: CallPlan, value: DataDependentResult) -> Layout:
    """Return the layout of a data-dependent result, which is sharded along its first dim with sizes that its data decide."""
    local = shards_of(value.local)[0]
    shape = (sum(value.split.sizes), *local.shape[1:])
    splits, partials = (value.split, *[None] * (len(shape) - 1)), (None,) * plan.call.mesh.ndim
    return Layout.from_splits(plan.call.mesh, splits, partials, shape, value.stride, local.dtype)


def _replicated_layout(plan: CallPlan, value: Any) -> Layout:
    return Layout.replicated(plan.call.mesh, value.shape, value.stride(), value.dtype)


def resize_to(target: Any, value: Any) -> Any:
    """Replace the memory of ``target`` to give it the shape, layout and elements of ``value``, and return it.

    Raises:
        UnsupportedOperationError: ``target`` is a view, whose base would not be written to.
    """
    if target._base is not None and target.numel():
        raise UnsupportedOperationError(
            f"out= is a view of shape {tuple(target.shape)}, the result has shape {tuple(value.shape)}, and a "
            "view cannot be resized; pass an out= of the shape of the result, or one that is not a view"
        )
    target.data = value
    return target


def _return_out_argument(plan: CallPlan, place: ArgumentPosition, layout: Layout | None) -> MakeOutput:
    """Return the function that returns the user's ``out=`` tensor; it resizes the tensor for a result of another shape."""

    def return_target(args: Args, kwargs: Keywords, value: Any) -> Any:
        """Return the ``out=`` tensor that was written, resized if the result has another shape."""
        target, own = argument_at(place, args, kwargs), layout or _replicated_layout(plan, value)
        if target.shape == own.shape:
            return target
        if hasattr(target, "_layout"):
            return resize_to(target, wrap_local(value, own.replace(dtype=target.dtype)))
        full = Layout.replicated(own.mesh, own.shape, own.stride, own.dtype)
        return write_value(target.resize_(own.shape), execute(plan_redistribution(own, full), value))

    return return_target


# --- the table of passes ------------------------------------------------------------------------------------------------
BEFORE: tuple[Pass, ...] = (  # a step of these ends the call if it returns True
    order_arguments,  # moves arguments given by keyword to their positions
    split_aliased_lists,  # runs a list operator element by element if elements share memory
    read_row_ownership,  # reads facts of operands before anything is written
)
LOCAL: tuple[Pass, ...] = (
    check_explicit,  # raises under explicit(); warns before an operator gathers
    redistribute_inputs,  # issues the collectives that operands need
    order_inputs_in_memory,  # copies operands for operators that read strides
    allocate_outputs,  # makes local tensors for out= results
    call_local_function,  # calls the operator, a function of its rule, or a kernel with collectives of its own
    copy_aliased_results,  # copies results that share memory with a redistributed operand, which may be cached
    write_into_locals,  # writes the results of a kernel into the local tensors of arguments written in place
    write_back,  # copies what was written into the user's tensors, in their layouts
    bump_versions,  # counts writes to elements of lists
    wrap_outputs,  # makes DTensors of the local results
)
AFTER: tuple[Pass, ...] = FACT_PASSES  # attach facts to the results
PASSES = BEFORE + LOCAL + AFTER
