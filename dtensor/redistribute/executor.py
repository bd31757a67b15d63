"""Runs plans: each kind of step against the communicator, once for process groups, one process and dry runs.

A rank computes its regions from the layouts alone. Results of collectives are fresh memory; local steps give views of their
input or the input itself, so a plan without a collective may alias its source.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..base.caches import remembered
from ..base.memory_order import outermost_first
from ..comm import Communicator, Pending, communicator_of
from ..comm.backend_base import Run
from ..comm.checked_collectives import counted_with
from ..comm.events import because
from ..comm.local_reduce import divided, identity
from ..comm.pack import Box, Route, Scatter, Transfer, region
from ..layout.layout import Layout
from ..placement import Monoid
from .partial_algebra import KEEPING
from .planner import plan as plan_of
from .send_recv_plan import gather_traffic, gathered, routes, traffic
from .step import AllGather, AllReduce, Exchange, Once, Plan, ReduceScatter, Repeat, Slice, Spread, Step, described, place

Local = Any  # a torch.Tensor, or a PerRank of them (docs/architecture.md)


def redistribute_local(local: Local, src: Layout, dst: Layout) -> Local:
    """``local``, a local value under ``src``, as one under ``dst``.

    >>> mesh = dt.DeviceMesh("cpu", 2)
    >>> src, dst = (Layout.of(mesh, [p], (2, 3)) for p in (dt.Shard(0), dt.Shard(1)))
    >>> [x.tolist() for x in redistribute_local(dt.per_rank([torch.zeros(1, 3), torch.ones(1, 3)]), src, dst).shards]
    [[[0.0, 0.0], [1.0, 1.0]], [[0.0], [1.0]]]
    """
    return execute(plan_of(src, dst), local)


def execute(plan: Plan, local: Local) -> Local:
    """The local value after ``plan``; the source is never modified. A rank outside the mesh gets ``local`` back."""
    return _run(bound_of(plan), local)


def _run(steps: Sequence[Bound], local: Local) -> Local:
    for step in steps:
        local = step.run(local)
    return local


class Ready(NamedTuple):
    """A plan and what runs it; see ``cost.calibrate``."""

    collectives: int
    bytes: int
    run: Callable[[Local], Local]


def moves(src: Layout, dst: Layout) -> Ready:
    """The redistribution between two layouts, ready to run."""
    found = plan_of(src, dst)
    return Ready(found.collectives, found.bytes, functools.partial(execute, found))


def start(plan: Plan, local: Local) -> Pending[Local]:
    """As :func:`execute`: the plan has run up to its first collective, which is issued; the steps after it run in the first
    ``wait()``, so all ranks must wait in the same order.
    """
    bound = bound_of(plan)
    for k, step in enumerate(bound):
        if step.start is not None:
            return step.start(local).then(functools.partial(_run, bound[k + 1 :]))
        local = step.run(local)
    return Pending.of(local)


class Bound(NamedTuple):
    """A step of which only the local is missing; ``start`` where it communicates."""

    run: Callable[[Local], Local]
    start: Callable[[Local], Pending[Local]] | None = None


def bound_of(plan: Plan) -> tuple[Bound, ...]:
    """What this process does for each step of ``plan``, regions and groups worked out once; nothing outside its mesh."""
    bound: tuple[Bound, ...] | None = plan.bound
    if bound is None:
        bound = plan.bound = _bind_all(plan)
    return bound


def _bind_all(plan: Plan) -> tuple[Bound, ...]:
    comm = communicator_of(plan.src.mesh)
    if not plan.steps or not comm.held:
        return ()
    bound = tuple(_bind(comm, step) for step in plan.steps)
    if plan.dst.dense or not plan.communicates:
        return bound
    return (*bound, Bound(lambda x: comm.map(in_order, x, plan.dst)))


def _bind(comm: Communicator, step: Step) -> Bound:
    before, after, mesh_dims = step.before, step.after, step.mesh_dims
    match step:
        case Slice():
            return Bound(lambda x: comm.map(lambda member, part: region(part, inside(before, member, after, member)), x))
        case Once(dims=dims):
            return Bound(lambda x: comm.map(lambda _, part: _first(part, dims), x))
        case Repeat():
            return Bound(lambda x: comm.map(lambda member, part: part.expand(after.shape_of(member)), x))
        case Spread():
            return Bound(lambda x: comm.map(_spread, x, step))
        case AllReduce(op=op):
            unfinished = dataclasses.replace(op, finalize=None) if isinstance(op, Monoid) else op
            return _collective(comm, lambda x: comm.all_reduce(x, mesh_dims, unfinished), step)
        case ReduceScatter(op=op):

            def chunks_of(member: int) -> tuple[Box, ...]:
                group = before.mesh.members_of(mesh_dims, member)
                return tuple(inside(before, member, after, other) for other in group)

            scatter = Scatter(
                chunks_of,
                op,
                before.shape_of,
                after.shape_of,
                before.dtype,
                _said(step),
            )
            return _collective(comm, _known_as(step, comm.bind_reduce_scatter(mesh_dims, scatter)), step)
        case AllGather() | Exchange():
            return _collective(comm, _transfer(comm, step), step)
        case _:
            raise TypeError(f"{step} is not a step of a redistribution plan")


def _transfer(comm: Communicator, step: AllGather | Exchange) -> Run:
    """Bound at its first use: where several plans advance together, their transfers are merged."""
    bound: list[Run] = []

    def issue(x: Local) -> Pending[Local]:
        if not bound:
            kind, find = ("all_gather", gather_traffic) if isinstance(step, AllGather) else ("all_to_all", traffic)
            traffic_of = functools.partial(find, step.before, step.after, step.mesh_dims)
            new_of, brings = step.after.shape_of, step.bytes // step.before.dtype.itemsize
            find_route = functools.partial(route, step)
            transfer = Transfer(find_route, step.before.dtype, kind, traffic_of, _said(step), new_of, brings)
            bound.append(_known_as(step, comm.bind_transfer(step.mesh_dims, transfer)))
        return bound[0](x)

    return issue


def _known_as(step: Step, issue: Run) -> Run:
    """``issue``; a recorder that keeps it can tell which step it is."""
    setattr(issue, "step", step)  # noqa: B010  no attribute of functions that types know
    return issue


def _said(step: Step) -> str:
    return f"{described(step.before)} -> {place(step.after)}"


def route(step: AllGather | Exchange, member: int) -> Route:
    """One member's part in a step."""
    find = gathered if isinstance(step, AllGather) else routes
    return find(step.before, step.after, step.mesh_dims, member)


def _collective(comm: Communicator, issue: Run, step: Step) -> Bound:
    """``issue``, and what is done with its result."""
    counted = counted_with([step.before], step.mesh_dims, _said(step), issue)
    start, finish = because((step,), counted), _finish(comm, step)
    if finish is None:
        return Bound(lambda x: start(x).wait(), start)
    return Bound(lambda x: finish(start(x).wait()), lambda x: start(x).then(finish))


def _finish(comm: Communicator, step: Step) -> Callable[[Local], Local] | None:
    match step:
        case AllReduce(op=Monoid(finalize=finalize), finish=True) if finalize is not None:
            return lambda result: comm.map(lambda _, value: finalize(value), result)
        case AllReduce(divisor=divisor) | ReduceScatter(divisor=divisor) if divisor > 1:
            return lambda result: comm.map(lambda _, value: divided(value, divisor), result)
        case _:
            return None


# --- what one member does; coordinates and regions are integer maths --------------------------------------------
def in_order(member: int, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``x`` with its dims ordered in memory as in the global tensor: what can be viewed there can then be viewed here."""
    major_first = sorted((d for d, step in enumerate(layout.stride) if step and x.shape[d] > 1), key=lambda d: -layout.stride[d])
    strides = [x.stride(d) for d in major_first]
    if strides == sorted(strides, reverse=True):
        return x
    return layout.block_beside(x, member).copy_(x)


def _first(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """``x`` with one element along each of ``dims``."""
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


@remembered(8192)
def inside(outer: Layout, holder: int, inner: Layout, member: int) -> Box:
    """Where the block of ``member`` under ``inner`` lies in that of ``holder`` under ``outer``, which contains it."""
    coordinates = outer.mesh.coordinates
    origin, at = outer.local_offset(coordinates[holder]), inner.local_offset(coordinates[member])
    return Box(tuple(a - o for a, o in zip(at, origin, strict=True)), inner.local_shape(coordinates[member]))


def _spread(member: int, x: torch.Tensor, step: Spread) -> torch.Tensor:
    before, after = step.before, step.after
    coordinate = before.mesh.coordinates[member]
    split = {i for one in before.splits if one is not None for i in one.mesh_dims}
    sharing = [i for i, op in enumerate(after.partials) if op != before.partials[i] and i not in split]
    holds = step.op in KEEPING or all(coordinate[i] == 0 for i in sharing)
    if before.splits == after.splits:
        return x if holds else identity(step.op, x)
    shape, order = after.local_shape(coordinate), outermost_first(after.stride)
    like = x.new_empty(()).expand([shape[d] for d in order])  # the shape of a block, without its memory
    result = identity(step.op, like).permute([order.index(d) for d in range(after.ndim)])
    if holds:
        region(result, inside(after, member, before, member)).copy_(x)
    return result
