"""Runs plans: each kind of step against the communicator, once for process groups, one process and dry runs.

A rank computes its regions from the layouts alone. Results of collectives are fresh memory; local steps give views of their
input or the input itself, so a plan without a collective may alias its source.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch

from ..comm import Communicator, Pending, communicator_of
from ..layout import Layout
from ..placement import Monoid
from .blocks import leaves
from .exchange import Box, routes
from .planner import plan as plan_of
from .reduction import KEEPING, identity
from .step import AllGather, AllReduce, Exchange, Plan, ReduceScatter, Slice, Spread, Step

Local = Any  # a torch.Tensor, or a PerRank of them (docs/design.md)


def redistribute_local(local: Local, src: Layout, dst: Layout) -> Local:
    """``local``, a local value under ``src``, as one under ``dst``.

    >>> mesh = dt.DeviceMesh("cpu", 2)
    >>> src, dst = (Layout.of(mesh, [p], (2, 3)) for p in (dt.Shard(0), dt.Shard(1)))
    >>> [x.tolist() for x in redistribute_local(dt.per_rank([torch.zeros(1, 3), torch.ones(1, 3)]), src, dst).shards]
    [[[0.0, 0.0], [1.0, 1.0]], [[0.0], [1.0]]]
    """
    return execute(plan_of(src, dst), local)


def execute(plan: Plan, local: Local, async_op: bool = False) -> Local:
    """The local value after ``plan``; the source is never modified.

    With ``async_op`` a ``Pending``: the plan has run up to its first collective, which is issued; the steps after it run in
    the first ``wait()``, so all ranks must wait in the same order. A rank outside the mesh gets ``local`` back.
    """
    if not plan.steps or plan.src.mesh.current_member() is None:
        return Pending.of(local) if async_op else local
    comm = communicator_of(plan.src.mesh)
    if async_op:
        return _issue(comm, plan.steps, local)
    for step in plan.steps:
        local = _run(comm, step, local)
    return _ordered(comm, plan.dst, local)


def _issue(comm: Communicator, steps: tuple[Step, ...], local: Local) -> Pending[Local]:
    for k, step in enumerate(steps):
        if step.communicates:
            return _continued(comm, steps[k:], local, _start(comm, step, local, async_op=True))
        local = _run(comm, step, local)
    return Pending.of(_ordered(comm, steps[-1].after, local))


def _continued(comm: Communicator, steps: tuple[Step, ...], local: Local, pending: Any) -> Pending[Local]:
    def finish() -> Local:
        value = _finish(comm, steps[0], local, pending.wait())
        for step in steps[1:]:
            value = _run(comm, step, value)
        return _ordered(comm, steps[-1].after, value)

    return Pending(finish)


def _ordered(comm: Communicator, layout: Layout, local: Local) -> Local:
    """``local`` with its dims ordered in memory as in the global tensor: what can be viewed there can then be viewed here."""
    return local if layout.dense else comm.map(_in_order, local, layout)


def _run(comm: Communicator, step: Step, x: Local) -> Local:
    match step:
        case Slice():
            return comm.map(_slice, x, step)
        case Spread():
            return comm.map(_spread, x, step)
        case _:
            return _finish(comm, step, x, _start(comm, step, x))


def _start(comm: Communicator, step: Step, x: Local, async_op: bool = False) -> Any:
    """Issues the collective of ``step``."""
    before, after, mesh_dims = step.before, step.after, step.mesh_dims
    match step:
        case AllReduce(op=Monoid() as op):
            return comm.all_reduce(x, mesh_dims, dataclasses.replace(op, finalize=None), async_op=async_op)
        case AllReduce(op=op):
            return comm.all_reduce(x, mesh_dims, op, async_op=async_op)
        case ReduceScatter(op=op):
            return comm.reduce_scatter(comm.map(_chunks, x, step), mesh_dims, op, async_op=async_op)
        case AllGather():
            return comm.all_gather(x, mesh_dims, lambda member: _local_shape(before, member), async_op=async_op)
        case Exchange():

            def shape_of(source: int, target: int) -> tuple[int, ...]:
                box = routes(before, after, mesh_dims, source).sends[int(leaves(before.mesh, mesh_dims)[target])]
                return (0,) if box is None else box.size

            return comm.all_to_all(comm.map(_parts, x, step), mesh_dims, shape_of, async_op=async_op)
        case _:
            raise TypeError(f"{step} does not communicate")


def _finish(comm: Communicator, step: Step, x: Local, result: Any) -> Local:
    """The local value after ``step``, from what its collective returned."""
    match step:
        case AllReduce(op=Monoid(finalize=finalize), finish=True) if finalize is not None:
            return comm.map(lambda _, value: finalize(value), result)
        case AllReduce(divisor=divisor) | ReduceScatter(divisor=divisor):
            return result if divisor == 1 else comm.map(lambda _, value: value.div_(divisor), result)
        case AllGather():
            return comm.map(_assemble, result, step)
        case _:
            return comm.map(_place, x, result, step)


# --- what one member does; coordinates and regions are integer maths --------------------------------------------
def _local_shape(layout: Layout, member: int) -> tuple[int, ...]:
    return layout.local_shape(layout.mesh.coordinates[member])


@lru_cache(maxsize=8192)
def _inside(outer: Layout, holder: int, inner: Layout, member: int) -> Box:
    """Where the block of ``member`` under ``inner`` lies in that of ``holder`` under ``outer``, which contains it."""
    coordinates = outer.mesh.coordinates
    origin, at = outer.local_offset(coordinates[holder]), inner.local_offset(coordinates[member])
    return Box(tuple(a - o for a, o in zip(at, origin, strict=True)), inner.local_shape(coordinates[member]))


def _region(x: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a part of ``x``; ``x`` itself for all of it."""
    if 0 in box.size:  # an empty block has no place: its offset may lie past the end
        return x if x.shape == box.size else x.new_empty(box.size)
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if size != x.shape[dim]:
            x = x.narrow(dim, start, size)
    return x


def _in_order(member: int, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    major_first = sorted((d for d, step in enumerate(layout.stride) if step and x.shape[d] > 1), key=lambda d: -layout.stride[d])
    strides = [x.stride(d) for d in major_first]
    if strides == sorted(strides, reverse=True):
        return x
    return x.new_empty_strided(x.shape, layout.local_stride(layout.mesh.coordinates[member])).copy_(x)


def _slice(member: int, x: torch.Tensor, step: Step) -> torch.Tensor:
    return _region(x, _inside(step.before, member, step.after, member))


def _spread(member: int, x: torch.Tensor, step: Spread) -> torch.Tensor:
    before, after = step.before, step.after
    coordinate = before.mesh.coordinates[member]
    split = {i for one in before.splits if one is not None for i in one.mesh_dims}
    sharing = [i for i, op in enumerate(after.partials) if op != before.partials[i] and i not in split]
    holds = step.op in KEEPING or all(coordinate[i] == 0 for i in sharing)
    if before.splits == after.splits:
        return x if holds else identity(step.op, x)
    result = identity(step.op, x.new_empty(after.local_shape(coordinate)))
    if holds:
        _region(result, _inside(after, member, before, member)).copy_(x)
    return result


def _chunks(member: int, x: torch.Tensor, step: Step) -> list[torch.Tensor]:
    group = step.before.mesh.members_of(step.mesh_dims, member)
    return [_region(x, _inside(step.before, member, step.after, other)) for other in group]


def _assemble(member: int, pieces: list[torch.Tensor], step: Step) -> torch.Tensor:
    before, after = step.before, step.after
    boxes = [_inside(after, member, before, other) for other in before.mesh.members_of(step.mesh_dims, member)]
    cut = [dim for dim, (a, b) in enumerate(zip(before.splits, after.splits, strict=True)) if a != b]
    if len(cut) == 1:
        order = sorted(range(len(boxes)), key=lambda k: boxes[k].start[cut[0]])
        return torch.cat([pieces[k] for k in order], dim=cut[0])
    result = pieces[0].new_empty(_local_shape(after, member))
    for piece, box in zip(pieces, boxes, strict=True):
        _region(result, box).copy_(piece)
    return result


def _parts(member: int, x: torch.Tensor, step: Step) -> list[torch.Tensor]:
    sends = routes(step.before, step.after, step.mesh_dims, member).sends
    return [x.new_empty(0) if box is None else _region(x, box) for box in sends]


def _place(member: int, x: torch.Tensor, received: list[torch.Tensor], step: Step) -> torch.Tensor:
    route = routes(step.before, step.after, step.mesh_dims, member)
    shape = _local_shape(step.after, member)
    arrived = [(piece, box) for piece, box in zip(received, route.receives, strict=True) if box is not None]
    if len(arrived) == 1 and arrived[0][1].size == shape:
        return arrived[0][0]
    result = x.new_empty(shape)
    if route.kept is not None:
        old, new = route.kept
        _region(result, new).copy_(_region(x, old))
    for piece, box in arrived:
        _region(result, box).copy_(piece)
    return result
