"""Several redistributions at once: what their plans have to send at the same time goes in one collective per group.

Plans advance in rounds: local steps up to the next collective of each, then these collectives, merged where kind, mesh dims and
(for reductions) op and dtype agree. All of a round are issued before any is waited for.

Here alone several tensors become what one collective carries; what data parallelism gathers and reduces are :class:`.rows.Rows`
too.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.caches import remembered
from ..comm import Communicator, Pending, communicator_of
from ..comm.fold import divided
from ..comm.regions import region
from ..comm.rows import flat_bytes, from_bytes
from ..placement import Monoid
from .executor import Local, bound_of, route
from .rows import Rows, aligned
from .step import AllGather, AllReduce, Plan, ReduceScatter, Step

Merged = Pending[list[Local]]


def execute_many(plans: Sequence[Plan], locals_: Sequence[Local], *, out: Sequence[Local] | None = None) -> Pending[list[Local]]:
    """The local values after ``plans``. As :func:`.executor.start` for each.

    Args:
        out: memory for them, which autograd is not told of; gathered blocks arrive in it.
    """
    run = _Run(list(plans), list(locals_), [None] * len(plans) if out is None else list(out))
    pending = run.issue()
    return Pending(lambda: run.finish(pending))


class _Run:
    """How far each plan has come."""

    def __init__(self, plans: list[Plan], values: list[Local], out: list[Local | None]) -> None:
        self.plans, self.values, self.out = plans, values, out
        self.bound = [bound_of(plan) for plan in plans]  # empty outside a plan's mesh
        self.at = [0] * len(plans)

    def issue(self) -> list[tuple[list[int], Merged]]:
        """Starts the next round; empty if there is none."""
        groups: dict[Hashable, list[int]] = {}
        for i, bound in enumerate(self.bound):
            while self.at[i] < len(bound) and bound[self.at[i]].start is None:
                self.values[i] = bound[self.at[i]].run(self.values[i])
                self.at[i] += 1
            if self.at[i] < len(bound):
                groups.setdefault(_kind(self.plans[i].steps[self.at[i]], i), []).append(i)
        return [(group, self._start(group)) for group in groups.values()]

    def _start(self, group: list[int]) -> Merged:
        if len(group) == 1:
            start = self.bound[group[0]][self.at[group[0]]].start
            assert start is not None
            return start(self.values[group[0]]).then(lambda value: [value])
        steps = [self.plans[i].steps[self.at[i]] for i in group]
        last = [self.at[i] + 1 == len(self.bound[i]) for i in group]
        out = [self.out[i] if ends else None for i, ends in zip(group, last, strict=True)]
        return _merged(communicator_of(steps[0].before.mesh), steps, [self.values[i] for i in group], out)

    def finish(self, pending: list[tuple[list[int], Merged]]) -> list[Local]:
        while pending:
            for group, merged in pending:
                for i, value in zip(group, merged.wait(), strict=True):
                    self.values[i] = value
                    self.at[i] += 1
            pending = self.issue()
        for i, target in enumerate(self.out):
            if target is not None and target is not self.values[i]:
                communicator_of(self.plans[i].dst.mesh).map(lambda _, to, x: to.data.copy_(x.detach()), target, self.values[i])
                self.values[i] = target
        return self.values


def _kind(step: Step, index: int) -> Hashable:
    """Steps of one kind go in one collective; terms of a monoid stay whole, so each of them alone."""
    over = (step.before.mesh, step.mesh_dims)
    match step:
        case AllReduce(op=Monoid()):
            return index
        case AllReduce(op=op, divisor=divisor) | ReduceScatter(op=op, divisor=divisor):
            return (type(step), *over, op, divisor, step.before.dtype)
        case _:
            return over


def _merged(comm: Communicator, steps: list[Any], values: list[Local], out: list[Local | None]) -> Merged:
    match steps[0]:
        case AllReduce():
            return _all_reduce(comm, steps, values)
        case ReduceScatter():
            return _reduce_scatter(comm, steps, values)
        case _ if all(isinstance(step, AllGather) for step in steps):
            return _all_gather(comm, steps, values, out)
        case _:
            return _exchange(comm, steps, values)


# --- reductions: the elements of all tensors in one row -------------------------------------------------------------------
def _all_reduce(comm: Communicator, steps: list[AllReduce], values: list[Local]) -> Merged:
    row = comm.map(lambda _, *parts: torch.cat([part.reshape(-1) for part in parts]), *values)
    pending = comm.all_reduce(row, steps[0].mesh_dims, steps[0].op)

    def apart(member: int, reduced: Tensor, *parts: Tensor) -> list[Tensor]:
        reduced = divided(reduced, steps[0].divisor) if steps[0].divisor > 1 else reduced
        rows = reduced.split([part.numel() for part in parts])
        return [row.view(part.shape) for row, part in zip(rows, parts, strict=True)]

    return pending.then(lambda reduced: comm.map(apart, reduced, *values))


def _reduce_scatter(comm: Communicator, steps: list[ReduceScatter], values: list[Local]) -> Merged:
    together, every = tuple(steps), range(len(steps))

    def chunks(member: int, *parts: Tensor) -> list[Tensor]:
        return _rows_of(together, member).chunks(every, parts, parts[0].dtype, parts[0].device)

    pending = comm.reduce_scatter(comm.map(chunks, *values), steps[0].mesh_dims, steps[0].op)

    def apart(member: int, reduced: Tensor) -> list[Tensor]:
        reduced = divided(reduced, steps[0].divisor) if steps[0].divisor > 1 else reduced
        return _rows_of(together, member).split(every, reduced)[:-1]

    return pending.then(lambda reduced: comm.map(apart, reduced))


# --- transfers: the bytes of all tensors in one row per rank, so dtypes may differ ----------------------------------------
def _all_gather(comm: Communicator, steps: list[AllGather], values: list[Local], out: list[Local | None]) -> Merged:
    together = tuple(steps)
    row = comm.map(lambda member, *parts: _rows_of(together, member).pack(parts, parts[0].device), *values)
    pending = comm.all_gather(row, steps[0].mesh_dims, lambda member: (_rows_of(together, member).nbytes,))

    def joined(member: int, arrived: list[Tensor], *targets: Tensor | None) -> list[Tensor]:
        rows = _rows_of(together, member)
        made = [
            arrived[0].new_empty(shape, dtype=dtype) if target is None else target
            for target, shape, dtype in zip(targets, rows.shapes, rows.dtypes, strict=True)
        ]
        rows.unpack(arrived, (), rows.targets([x.data for x in made]))
        return made

    return pending.then(lambda arrived: comm.map(joined, arrived, *out))


def broadcast_many(comm: Communicator, values: Sequence[Local], mesh_dims: Sequence[int]) -> list[Local]:
    """The first group position's values everywhere, in new memory: one broadcast of bytes, wider dtypes first."""
    order = sorted(range(len(values)), key=lambda i: -values[i].dtype.itemsize)

    def packed(member: int, *parts: Tensor) -> Tensor:
        return torch.cat([flat_bytes(x) for x in parts])

    def apart(member: int, row: Tensor, *parts: Tensor) -> list[Tensor]:
        pieces = row.split([x.numel() * x.itemsize for x in parts])
        return [torch.empty_like(x).copy_(from_bytes(piece, x.shape, x.dtype)) for x, piece in zip(parts, pieces, strict=True)]

    sent = [values[i] for i in order]
    arrived = comm.map(apart, comm.broadcast(comm.map(packed, *sent), mesh_dims).wait(), *sent)
    return [arrived[order.index(i)] for i in range(len(values))]


@remembered(1024)
def _rows_of(steps: tuple[Any, ...], member: int) -> Rows:
    """The rows of steps that gather, or (mirrored) that reduce."""
    gathers = isinstance(steps[0], AllGather)
    pairs = [(step.before, step.after) if gathers else (step.after, step.before) for step in steps]
    group = steps[0].before.mesh.members_of(steps[0].mesh_dims, member)
    return Rows.of(pairs, [step.before.dtype for step in steps], [True] * len(steps), member, group)


def _exchange(comm: Communicator, steps: list[Any], values: list[Local]) -> Merged:
    mesh, mesh_dims = steps[0].before.mesh, steps[0].mesh_dims

    def rows(member: int, *parts: Tensor) -> list[Tensor]:
        sent = [route(step, member).sends for step in steps]
        empty = parts[0].new_empty(0, dtype=torch.uint8)
        return [
            torch.cat(
                [empty, *(flat_bytes(region(part, box)) for part, box in zip(parts, boxes, strict=True) if box is not None)]
            )
            for boxes in zip(*sent, strict=True)
        ]

    @functools.cache
    def lengths(member: int, side: str) -> list[int]:
        boxes = zip(*(getattr(route(step, member), side) for step in steps), strict=True)
        sizes = [step.before.dtype.itemsize for step in steps]
        return [sum(box.numel * size for box, size in zip(row, sizes, strict=True) if box is not None) for row in boxes]

    def shape_of(source: int, target: int) -> tuple[int, ...]:
        if target == mesh.current_member():  # one's own part tells what comes, too
            return (lengths(target, "receives")[mesh.members_of(mesh_dims, target).index(source)],)
        return (lengths(source, "sends")[mesh.members_of(mesh_dims, source).index(target)],)

    pending = comm.all_to_all(comm.map(rows, *values), mesh_dims, shape_of)
    return pending.then(lambda arrived: comm.map(_place, arrived, steps, *values))


def _place(member: int, arrived: list[Tensor], steps: list[Any], *parts: Tensor) -> list[Tensor]:
    """The new blocks, from one row per group position that holds what it has for each tensor, in order."""
    offsets = [0] * len(arrived)
    results = []
    mine = steps[0].before.mesh.members_of(steps[0].mesh_dims, member).index(member)
    for step, part in zip(steps, parts, strict=True):
        own = route(step, member)
        result = part.new_empty(own.new)
        if own.kept is not None:
            old, new = own.kept
            region(result, new).copy_(region(part.detach(), old))
        for k, box in enumerate(own.receives):
            if box is not None and k != mine:
                length = box.numel * result.itemsize
                row = arrived[k][offsets[k] : offsets[k] + length]
                region(result, box).copy_(aligned(row, result.itemsize).view(result.dtype).view(box.size))
                offsets[k] += length
        results.append(result)
    return results
