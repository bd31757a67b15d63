"""Executor of redistribution plans: runs each kind of step on a communicator, for process groups, one process and dry runs.

A rank computes its regions from the layouts alone. Results of collectives are fresh memory. Local steps return views of their
input or the input itself, so the result of a plan without a collective may alias its source.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..base.caches import memoize
from ..base.memory_order import dims_outermost_first
from ..comm import Communicator, Pending
from ..comm.communicator import BoundCollective
from ..comm.compared_operations import count_as_operation
from ..comm.events import issue_for_cause
from ..comm.local_reduce import divide_in_place, reduction_identity
from ..comm.map_ranks import communicator_of
from ..comm.pack import Box, Scatter, SendRecvPlan, Transfer, view_region
from ..layout.layout import Layout
from ..placement import Monoid
from .partial_algebra import IDEMPOTENT_OPS
from .planner import plan as plan_of
from .send_recv_plan import exchange_route, exchange_traffic, gather_route, gather_traffic
from .step import (
    AllGather,
    AllReduce,
    Exchange,
    Once,
    Plan,
    ReduceScatter,
    Repeat,
    Slice,
    Spread,
    Step,
    describe_placements,
    layout_text,
)

LocalValue = Any  # local value: a torch.Tensor, or a PerRank of all ranks (docs/architecture.md)


def redistribute_local(local: LocalValue, src: Layout, dst: Layout) -> LocalValue:
    """Return the local value that ``local``, one under layout ``src``, becomes under ``dst``; waits for collectives.

    >>> mesh = dt.DeviceMesh("cpu", 2)
    >>> src, dst = (Layout.of(mesh, [p], (2, 3)) for p in (dt.Shard(0), dt.Shard(1)))
    >>> [x.tolist() for x in redistribute_local(dt.per_rank([torch.zeros(1, 3), torch.ones(1, 3)]), src, dst).shards]
    [[[0.0, 0.0], [1.0, 1.0]], [[0.0], [1.0]]]
    """
    return execute(plan_of(src, dst), local)


def execute(plan: Plan, local: LocalValue) -> LocalValue:
    """Run ``plan`` on a local value and return the new one. The source is never modified; ranks outside the mesh get it back."""
    return _run_steps(get_or_bind_steps(plan), local)


def _run_steps(steps: Sequence[BoundStep], local: LocalValue) -> LocalValue:
    """Run the bound steps of a redistribution plan in order, and return the last local value."""
    for step in steps:
        local = step.run(local)
    return local


class BoundRedistribution(NamedTuple):
    """Redistribution plan that is ready to run, for measurements (see ``commands.calibrate``)."""

    collectives: int
    bytes: int
    run: Callable[[LocalValue], LocalValue]


def redistribution_between(src: Layout, dst: Layout) -> BoundRedistribution:
    """Return the redistribution between two layouts as a function to be timed, with its collectives and bytes."""
    found_plan = plan_of(src, dst)
    return BoundRedistribution(found_plan.collectives, found_plan.bytes, functools.partial(execute, found_plan))


def start(plan: Plan, local: LocalValue) -> Pending[LocalValue]:
    """Start ``plan``: issue its first collective, and run all later steps in the first ``wait()`` of the result.

    All ranks must wait in the same order.
    """
    bound = get_or_bind_steps(plan)
    for k, step in enumerate(bound):
        if step.start is not None:
            return step.start(local).then(functools.partial(_run_steps, bound[k + 1 :]))
        local = step.run(local)
    return Pending.of(local)


class BoundStep(NamedTuple):
    """A step that is bound for this process and needs only the local value. ``start`` is set if the step communicates."""

    run: Callable[[LocalValue], LocalValue]
    start: Callable[[LocalValue], Pending[LocalValue]] | None = None


def get_or_bind_steps(plan: Plan) -> tuple[BoundStep, ...]:
    """Return the bound steps of ``plan`` for this process, with regions and groups computed once; () outside of its mesh."""
    bound: tuple[BoundStep, ...] | None = plan.bound
    if bound is None:
        bound = plan.bound = _bind_steps(plan)
    return bound


def _bind_steps(plan: Plan) -> tuple[BoundStep, ...]:
    """Return the bound steps of a plan, and one that restores the target's memory order; () on a rank outside the mesh."""
    comm = communicator_of(plan.src.mesh)
    if not plan.steps or not comm.held:
        return ()
    bound = tuple(_bind_step(comm, step) for step in plan.steps)
    if plan.dst.dense or not plan.communicates:
        return bound
    return (*bound, BoundStep(lambda x: comm.map(to_memory_order_of, x, plan.dst)))


def _bind_step(comm: Communicator, step: Step) -> BoundStep:
    """Return one step of a redistribution plan as functions of a local value, with regions of this process's ranks."""
    before, after, mesh_dims = step.before, step.after, step.mesh_dims
    match step:
        case Slice():
            return BoundStep(
                lambda x: comm.map(lambda member, part: view_region(part, box_inside(before, member, after, member)), x)
            )
        case Once(dims=dims):
            return BoundStep(lambda x: comm.map(lambda _, part: _first_along(part, dims), x))
        case Repeat():
            return BoundStep(lambda x: comm.map(lambda member, part: part.expand(after.shape_of(member)), x))
        case Spread():
            return BoundStep(lambda x: comm.map(_spread_local, x, step))
        case AllReduce(op=op):
            unfinished = dataclasses.replace(op, finalize=None) if isinstance(op, Monoid) else op
            return _bind_collective(comm, lambda x: comm.all_reduce(x, mesh_dims, unfinished), step)
        case ReduceScatter(op=op):

            def chunks_of(member: int) -> tuple[Box, ...]:
                """Return the boxes of a member's block that each rank of its group gets."""
                group = before.mesh.members_of(mesh_dims, member)
                return tuple(box_inside(before, member, after, other) for other in group)

            scatter = Scatter(
                chunks_of,
                op,
                before.shape_of,
                after.shape_of,
                before.dtype,
                _step_text(step),
            )
            return _bind_collective(comm, _tag_step(step, comm.bind_reduce_scatter(mesh_dims, scatter)), step)
        case AllGather() | Exchange():
            return _bind_collective(comm, _bind_transfer(comm, step), step)
        case _:
            raise TypeError(f"{step} is not a step of a redistribution plan")


def _bind_transfer(comm: Communicator, step: AllGather | Exchange) -> BoundCollective:
    """Return the function that issues an all-gather or exchange and is bound at its first call.

    If several plans advance together, the transfer is merged instead, and never bound.
    """
    bound: list[BoundCollective] = []

    def bind_and_issue(x: LocalValue) -> Pending[LocalValue]:
        """Issue the all-gather or exchange on a local value; bind it first at the first call."""
        if not bound:
            kind, find = ("all_gather", gather_traffic) if isinstance(step, AllGather) else ("all_to_all", exchange_traffic)
            traffic_of = functools.partial(find, step.before, step.after, step.mesh_dims)
            new_of, received = step.after.shape_of, step.bytes // step.before.dtype.itemsize
            find_route = functools.partial(route_of_step, step)
            transfer = Transfer(find_route, step.before.dtype, kind, traffic_of, _step_text(step), new_of, received)
            bound.append(_tag_step(step, comm.bind_transfer(step.mesh_dims, transfer)))
        return bound[0](x)

    return bind_and_issue


def _tag_step(step: Step, issue: BoundCollective) -> BoundCollective:
    """Set ``issue.step``, by which a recorder identifies the step that the function issues, and return ``issue``."""
    setattr(issue, "step", step)  # noqa: B010  no attribute of functions that types know
    return issue


def _step_text(step: Step) -> str:
    return f"{layout_text(step.before)} -> {describe_placements(step.after)}"


def route_of_step(step: AllGather | Exchange, member: int) -> SendRecvPlan:
    """Return what a member sends, receives and keeps in an all-gather or exchange step."""
    find = gather_route if isinstance(step, AllGather) else exchange_route
    return find(step.before, step.after, step.mesh_dims, member)


def _bind_collective(comm: Communicator, issue: BoundCollective, step: Step) -> BoundStep:
    """Return the bound step of a collective: ``issue``, then division or finalization of the result."""
    checked = count_as_operation([step.before], step.mesh_dims, _step_text(step), issue)
    start, finish = issue_for_cause((step,), checked), _make_finisher(comm, step)
    if finish is None:
        return BoundStep(lambda x: start(x).wait(), start)
    return BoundStep(lambda x: finish(start(x).wait()), lambda x: start(x).then(finish))


def _make_finisher(comm: Communicator, step: Step) -> Callable[[LocalValue], LocalValue] | None:
    """Return the function that finalizes or divides the result of a reduction, or None if neither is needed."""
    match step:
        case AllReduce(op=Monoid(finalize=finalize), finish=True) if finalize is not None:
            return lambda result: comm.map(lambda _, value: finalize(value), result)
        case AllReduce(divisor=divisor) | ReduceScatter(divisor=divisor) if divisor > 1:
            return lambda result: comm.map(lambda _, value: divide_in_place(value, divisor), result)
        case _:
            return None


# --- work of one member: coordinates and regions are integer arithmetic -----------------------------------------
def to_memory_order_of(member: int, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return ``x`` with dims in the memory order of ``layout``, copied if needed, so that views of both are the same."""
    major_first = sorted((d for d, step in enumerate(layout.stride) if step and x.shape[d] > 1), key=lambda d: -layout.stride[d])
    strides = [x.stride(d) for d in major_first]
    if strides == sorted(strides, reverse=True):
        return x
    return layout.new_local_like(x, member).copy_(x)


def _first_along(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return a view of ``x`` with only the first element along each of ``dims``."""
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


@memoize(8192)
def box_inside(outer: Layout, holder: int, inner: Layout, member: int) -> Box:
    """Return the box that ``member``'s block under ``inner`` takes in ``holder``'s block under ``outer``."""
    coordinates = outer.mesh.coordinates
    origin, offset = outer.local_offset(coordinates[holder]), inner.local_offset(coordinates[member])
    return Box(tuple(a - o for a, o in zip(offset, origin, strict=True)), inner.local_shape(coordinates[member]))


def _spread_local(member: int, x: torch.Tensor, step: Spread) -> torch.Tensor:
    """Return a member's addend of a value that becomes partial: the value on one rank, the identity on the others."""
    before, after = step.before, step.after
    coordinate = before.mesh.coordinates[member]
    split = {i for one in before.splits if one is not None for i in one.mesh_dims}
    new_partial_dims = [i for i, op in enumerate(after.partials) if op != before.partials[i] and i not in split]
    keeps_value = step.op in IDEMPOTENT_OPS or all(coordinate[i] == 0 for i in new_partial_dims)
    if before.splits == after.splits:
        return x if keeps_value else reduction_identity(step.op, x)
    shape, order = after.local_shape(coordinate), dims_outermost_first(after.stride)
    expanded = x.new_empty(()).expand([shape[d] for d in order])  # the shape of a block, without its memory
    result = reduction_identity(step.op, expanded).permute([order.index(d) for d in range(after.ndim)])
    if keeps_value:
        view_region(result, box_inside(after, member, before, member)).copy_(x)
    return result
