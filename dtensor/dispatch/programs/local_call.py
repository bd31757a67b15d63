"""Local call: the function that runs on the local tensors of a planned call, and the arguments that differ on each rank.

It is the operator itself, a function of the operator's rule, a kernel with collectives of its own, or one of these that skips
ranks whose results have no elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...base.memory_order import memory_order
from ...base.tensor_tree import tensor_leaves
from ...base.torch_internals import tree_map
from ...base.tracing import KERNEL_ERRORS
from ...comm.map_ranks import communicator_of
from ...layout.layout import Layout
from ...mesh.device_mesh import DeviceMesh
from ...propagation.op_schema import CallSignature, OperatorSchema
from ...propagation.propagate import CallPlan
from ...random.draw import map_from_one_state
from ...ranks.rank_values import RankValues, require_equal
from ...rules.call import Call
from ...rules.kernel_context import KernelContext, run_operator
from ...rules.rule import LocalView
from .frame import Frame
from .list_ops import convert_scalars_once, match_list_strides
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
        """Replace the arguments that differ on each rank, and call the function with the frame's local arguments."""
        local_args, local_kwargs = frame.local_args, frame.local_kwargs
        for position, value in self.constants:
            local_args[position] = value
        if self.keywords:
            local_kwargs.update(self.keywords)
        frame.local_result = self.func(*local_args, **local_kwargs)


def call_local_function(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> LocalCall:
    """Make the step that calls, on the ranks of this process, a kernel, a function of the rule, or the operator itself."""
    rule = plan.rule
    if operator.traits.reads_flat:
        return LocalCall(match_list_strides(operator))
    if plan.how == "gather":
        return LocalCall(_draw_on_gathered(plan, operator) if operator.seeded else operator.func)
    if runs_kernel(plan):
        defaults = (
            [(slice(signature.count, signature.count), signature.omitted_positional)] if signature.omitted_positional else []
        )
        kernel = bind_kernel(plan)
        strategy = None if plan.chosen is None else plan.chosen.kernel_strategy
        runs_operator = strategy is not None and strategy.kernel is not None and strategy.kernel.run is run_operator
        empty = find_empty_ranks(plan, operator) if runs_operator else None  # without collectives, these ranks may skip it
        lacking = {name: value for name, value in signature.omitted_by_name.items() if name not in operator.outs}
        return LocalCall(partial(empty.skip_empty_ranks(kernel) if empty else kernel, **lacking), defaults)
    rule_function = None if rule is None or rule.local is None else _function_for_ranks_here(plan, rule.local)
    by_member = _rank_constants(plan)
    if by_member:
        return _call_with_rank_constants(plan, operator, signature, by_member)
    if rule_function:
        empty = find_empty_ranks(plan, operator)
        one_rank_function = getattr(rule_function, "of_one_rank", rule_function)
        return LocalCall(rule_function if empty is None else empty.skip_empty_ranks(one_rank_function))
    func = convert_scalars_once(plan, operator, local_function(operator.func))
    if operator.mutated and not operator.outs and not operator.traits.per_element and _may_refuse_shared_memory(plan):
        return LocalCall(_clone_if_refused(plan, func))
    return LocalCall(with_uniform_errors(plan, operator, func))


def _draw_on_gathered(plan: CallPlan, operator: OperatorSchema) -> Callable[..., Any]:
    """Return a random operator for gathered operands: every rank runs it from the same generator state, which advances once.

    Numbers that the operator returns must be the same on all ranks.
    """

    def run_one(member: int | None, positional: Sequence[Any], keywords: Constants) -> Any:
        return operator.func(*positional, **keywords)

    def run_all_ranks(*local_args: Any, **local_kwargs: Any) -> Any:
        """Run all ranks from one state of the random generator, and return values that do not differ between ranks as one."""
        result = map_from_one_state(plan.call.mesh, local_kwargs.get("generator"), run_one, local_args, local_kwargs)
        if not isinstance(result, tuple):
            return result
        return tuple(require_equal([*value], operator.name) if isinstance(value, RankValues) else value for value in result)

    return run_all_ranks


def _function_for_ranks_here(plan: CallPlan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule's function for the ranks of this process: the version for one rank if this process is one rank."""
    return function if communicator_of(plan.call.mesh).holds_all else getattr(function, "of_one_rank", function)


def runs_kernel(plan: CallPlan) -> bool:
    """Return True if a kernel of the rule, which may communicate and knows its rank, runs in place of the operator."""
    return (plan.rule is not None and plan.rule.run is not None) or (
        plan.chosen is not None and plan.chosen.kernel_strategy is not None
    )


def replaces_operator(plan: CallPlan) -> bool:
    """Return True if a kernel or a function of the rule runs in place of the operator."""
    return runs_kernel(plan) or (plan.rule is not None and plan.rule.local is not None)


def bind_kernel(plan: CallPlan) -> Callable[..., Any]:
    """Return the kernel of a plan with its :class:`KernelContext` bound as first argument."""
    assert plan.rule is not None
    chosen, strategy = plan.chosen, None if plan.chosen is None else plan.chosen.kernel_strategy
    assert chosen is not None
    if strategy is None or strategy.kernel is None:
        assert plan.rule.run is not None
        return partial(plan.rule.run, KernelContext(_hide_unkeyed_numbers(plan), chosen.operands, chosen.results, (), (1,)))
    splits = chosen.kernel_splits
    mesh_dims = tuple(mesh_dim for split in splits.values() for mesh_dim in split.mesh_dims)
    sizes = next(iter(splits.values())).sizes if len(splits) == 1 else ()
    context = KernelContext(_hide_unkeyed_numbers(plan), chosen.operands, chosen.results, mesh_dims, sizes, splits)
    return partial(strategy.kernel.run, context)


def _hide_unkeyed_numbers(plan: CallPlan) -> Call:
    """Return the call of a plan without the values of numbers in which calls with the same plan may differ."""
    return plan.call if plan.rule is not None and plan.rule.floats_matter else plan.call.forbid_number_reads()


# --- arguments that differ from rank to rank ----------------------------------------------------------------------------
def _rank_constants(plan: CallPlan) -> dict[int, Constants]:
    """Return for each member in this process the arguments that the rule's ``local_args`` replaces; {} if it replaces none."""
    rewrite = None if plan.rule is None else plan.rule.local_args
    if rewrite is None or plan.chosen is None:
        return {}
    mesh, chosen, call = plan.call.mesh, plan.chosen, _hide_unkeyed_numbers(plan)
    layouts = [layout for layout in chosen.results if layout is not None]
    held = communicator_of(mesh).held
    constants = {member: rewrite(call, LocalView(chosen.operands, layouts, mesh.coordinates[member])) for member in held}
    return constants if any(constants.values()) else {}


def _call_with_rank_constants(
    plan: CallPlan, operator: OperatorSchema, signature: CallSignature, by_member: dict[int, Constants]
) -> LocalCall:
    """Make the local call that fills in, for each member, the argument values that the rule computed for it."""
    rule_function = None if plan.rule is None or plan.rule.local is None else _function_for_ranks_here(plan, plan.rule.local)
    accepted = {*operator.names}
    if rule_function is not None:
        accepted.update(name for values in by_member.values() for name in values)
    positional, func = operator.names[: operator.positional], rule_function or local_function(operator.func)
    if plan.redistributions and operator.traits.needs_strides:
        func = _make_contiguous_if_refused(func)
    by_position = {member: _fill_positions(signature, values) for member, values in by_member.items()}
    by_name = {
        member: {name: value for name, value in values.items() if name in accepted and name not in positional}
        for member, values in by_member.items()
    }
    comm, empty = communicator_of(plan.call.mesh), find_empty_ranks(plan, operator)
    if not comm.holds_all:
        (member,) = by_member
        return LocalCall(func, by_position[member], by_name[member]) if empty is None else LocalCall(empty.skip_empty_ranks(func))

    def run_one(member: int, *local_args: Any, **local_kwargs: Any) -> Any:
        """Run the function of one rank, with the arguments that differ on each rank filled in."""
        filled = list(local_args)
        for position, value in by_position[member]:
            filled[position] = value
        return func(*filled, **{**local_kwargs, **by_name[member]})

    return LocalCall(partial(comm.map, run_one if empty is None else empty.skip_empty_member(run_one)))


def _make_contiguous_if_refused(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``func``, a view operator, to run on a contiguous copy if the operand's strides do not allow the view."""

    def run_or_copy(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the view operator; run it again on a contiguous copy if it refuses the strides."""
        try:
            return func(x, *args, **kwargs)
        except KERNEL_ERRORS:
            return func(x.contiguous(), *args, **kwargs)

    return run_or_copy


def _fill_positions(signature: CallSignature, values: Constants) -> Filled:
    """Return positions of local arguments with constants to put there; omitted ones before the last get defaults."""
    names = signature.operator.names[: signature.operator.positional]
    last = max((k for k, name in enumerate(names) if name in values), default=-1)
    appended = [
        values.get(name, default)
        for name, default in zip(names[signature.count : last + 1], signature.omitted_positional, strict=False)
    ]
    filled: list[tuple[Any, Any]] = [(k, values[name]) for k, name in enumerate(names[: signature.count]) if name in values]
    return [*filled, (slice(signature.count, signature.count), appended)] if appended else filled


# --- operands that share memory with the one written to --------------------------------------------------------------------
def _may_refuse_shared_memory(plan: CallPlan) -> bool:
    """Return True if torch may refuse overlapping operands on some ranks and not on others.

    Torch refuses operands that share memory if both are dense or their strides differ. A shard with one row may be dense where
    the global tensor is not, and a shard with no rows is never refused.
    """
    layouts = plan.call.operands
    have_gaps = any(memory_order(tuple(layout.shape), layout.stride) is None for layout in layouts)
    splits = [split for layout in layouts if not layout.has_symbols for split in layout.splits if split is not None]
    return have_gaps or any(min(split.sizes) < 2 for split in splits)


def _clone_if_refused(plan: CallPlan, func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``func`` to run, on a rank where it refuses operands that share memory, on clones of all operands but the first."""
    comm = communicator_of(plan.call.mesh)

    def clone_tensor(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def run_one(member: int, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        """Run the function of one rank; run it again on copies if the kernel refuses operands that share memory."""
        try:
            return func(*local_args, **local_kwargs)
        except KERNEL_ERRORS:
            first, *others = local_args
            return func(first, *map(clone_tensor, others), **{name: clone_tensor(x) for name, x in local_kwargs.items()})

    return lambda *local_args, **local_kwargs: comm.map(run_one, local_args, local_kwargs)


# --- empty shards -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EmptyRanks:
    """The ranks of this process whose results have no elements: they skip the kernel, which many accelerators do not start.

    Attributes:
        members: these ranks.
        mesh: the mesh of the call.
        layouts: the layouts of the results; None for a result that was not requested.
        outs: the names of ``out=`` arguments.
    """

    members: frozenset[int]
    mesh: DeviceMesh
    layouts: tuple[Layout | None, ...]
    outs: tuple[str, ...]

    def make_results(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate the empty results of one rank, on the device of its first tensor argument, else of the mesh.

        ``out=`` tensors are returned as they are.
        """
        like = next(iter(tensor_leaves((args, kwargs))), None)
        like = torch.empty(0, device=self.mesh.device_type) if like is None else like
        blocks = [kwargs[out] for out in self.outs if out in kwargs] or [
            None if layout is None else layout.new_local_like(like, member) for layout in self.layouts
        ]
        return blocks[0] if len(blocks) == 1 else tuple(blocks)

    def skip_empty_member(self, run_one: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``run_one(member, *locals)`` so that empty ranks get empty results without running it."""

        def run_unless_empty(member: int, *args: Any, **kwargs: Any) -> Any:
            """Run the function of one rank, or make its empty results if it has no elements to compute on."""
            is_empty = member in self.members
            result = self.make_results(member, args, kwargs) if is_empty else run_one(member, *args, **kwargs)
            return tuple(result) if isinstance(result, tuple) else result  # equal types on all ranks, not torch's named tuples

        return run_unless_empty

    def skip_empty_ranks(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``func`` on each rank of this process, except on empty ranks, which get empty results."""
        run_one = self.skip_empty_member(lambda member, *args, **kwargs: func(*args, **kwargs))
        comm = communicator_of(self.mesh)
        return partial(comm.map, run_one) if comm.holds_all else partial(run_one, *self.members)


def find_empty_ranks(plan: CallPlan, operator: OperatorSchema) -> EmptyRanks | None:
    """Return the ranks of this process whose results have no elements; None if there are none, or results are not known."""
    if plan.chosen is None or operator.is_view or operator.seeded or operator.mutated.difference(operator.outs):
        return None
    if "device" in operator.names:  # its results may be on another device than the mesh's, as in forward mode
        return None
    mesh, results, returns = plan.call.mesh, plan.chosen.results, operator.func._schema.returns
    layouts = [layout for layout in results if layout is not None]
    if len(results) != len(returns) or any(not _may_have_empty_shard(layout) or layout.has_symbols for layout in layouts):
        return None
    if any(str(one.type) != "Tensor" for one in returns) or not any(layout.numel for layout in layouts):  # empty on all ranks
        return None
    held = communicator_of(mesh).held
    members = frozenset(m for m in held if not any(math.prod(layout.shape_of(m)) for layout in layouts))
    return EmptyRanks(members, mesh, results, operator.outs) if members else None


def _may_have_empty_shard(layout: Layout) -> bool:
    """Return True if the local tensor of a rank has no elements, or if symbolic sizes leave that open."""
    return layout.has_symbols or not layout.numel or any(split is not None and 0 in split.sizes for split in layout.splits)


def with_uniform_errors(plan: CallPlan, operator: OperatorSchema, func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``func`` so that ranks with empty shards raise the errors of ranks with elements, and skip empty results.

    A rank with empty results skips the kernel (:class:`EmptyRanks`). A rank with an empty operand first calls it once with one
    element in place of none: kernels refuse a dtype only if they have something to do.
    """
    empty = find_empty_ranks(plan, operator)
    compute = func if empty is None else empty.skip_empty_ranks(func)
    comm, operands = communicator_of(plan.call.mesh), plan.call.operands if plan.chosen is None else plan.chosen.operands
    never_raises = operator.is_view or operator.mutated or operator.seeded
    if never_raises or comm.holds_all or not any(map(_may_have_empty_shard, operands)) or not all(x.numel for x in operands):
        return compute
    coordinate = plan.call.mesh.coordinates[comm.held[0]]
    if all(math.prod(x.local_shape(coordinate)) for x in operands):
        return compute

    def with_one_element(x: Any) -> Any:
        is_empty = isinstance(x, torch.Tensor) and not x.numel()
        return torch.ones([n or 1 for n in x.shape], dtype=x.dtype, device=x.device) if is_empty else x

    was_tried = False

    def run_after_trial(*args: Any, **kwargs: Any) -> Any:
        """Compute, after a first try of the operator on tensors of one element, which raises as torch does."""
        nonlocal was_tried
        if not was_tried:
            try:
                func(*tree_map(with_one_element, args), **tree_map(with_one_element, kwargs))
            except NotImplementedError:
                raise
            except Exception:  # it is about the ones, which are not this rank's values
                pass
            was_tried = True
        return compute(*args, **kwargs)

    return run_after_trial
