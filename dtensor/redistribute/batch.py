"""Several redistributions at once: what their plans have to send at the same time goes in one collective per group.

Plans advance in rounds: local steps up to the next collective of each, then these collectives, merged where kind, mesh dims and
(for reductions) op and dtype agree. All of a round are issued before any is waited for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.caches import remembered
from ..comm import Communicator, Pending, communicator_of
from ..comm.fold import divided
from ..comm.regions import Box, region
from ..comm.rows import flat_bytes, from_bytes
from ..layout.layout import Layout
from ..placement import Monoid
from .executor import Local, bound_of, inside, route
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


@dataclass(frozen=True, slots=True)
class Rows:
    """What one member of a group sends and gets when blocks of many tensors become whole, or whole ones are reduced to blocks:
    for each group position a row, in which its blocks stand one behind the other.

    Attributes:
        cut: of which tensors positions have different blocks; the others are whole everywhere.
        dtypes: when gathered.
        shapes: of what positions have together, as this member holds it.
        boxes: by position, by tensor, where its block lies in that.
        mine: this member's position.
        nbytes: of this member's row.
    """

    cut: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[Box, ...], ...]
    mine: int
    nbytes: int

    @staticmethod
    def of(
        pairs: Sequence[tuple[Layout, Layout]],
        dtypes: Sequence[torch.dtype],
        cut: Sequence[bool],
        member: int,
        group: Sequence[int],
        alignment: int = 1,
    ) -> Rows:
        """Of tensors by their layouts, cut and whole over ``group``; rows are padded to ``alignment`` bytes."""
        shapes = tuple(whole.local_shape(whole.mesh.coordinates[member]) for _, whole in pairs)
        boxes = tuple(tuple(inside(whole, member, part, other) for part, whole in pairs) for other in group)
        mine = list(group).index(member)
        filled = sum(_sections(cut, dtypes, boxes[mine]))
        return Rows(tuple(cut), tuple(dtypes), shapes, boxes, mine, -(-filled // alignment) * alignment)

    # --- blocks become whole -----------------------------------------------------------------------------------------
    def pack(
        self, locals_: Sequence[Tensor], device: str | torch.device, join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> Tensor:
        """This member's row of bytes. ``join`` puts blocks behind one another, in memory that nobody writes to later."""
        triples = zip(locals_, self.cut, self.dtypes, strict=True)
        parts = [flat_bytes(local.detach().to(dtype)) for local, cut, dtype in triples if cut]
        filled = sum(part.numel() for part in parts)
        if filled < self.nbytes:
            parts.append(torch.zeros(self.nbytes - filled, dtype=torch.uint8, device=locals_[0].device))
        return join(parts).to(device, non_blocking=True) if parts else torch.zeros(0, dtype=torch.uint8, device=device)

    def buffer(self, device: str) -> list[Tensor]:
        """A buffer of bytes, then each whole tensor as a view of it."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        made = torch.empty(max(1, sum(sizes)), dtype=torch.uint8, device=device)
        views, start = [], 0
        for size, shape, dtype in zip(sizes, self.shapes, self.dtypes, strict=True):
            views.append(made[start : start + size].view(dtype).view(shape))
            start += size
        return [made, *views]

    def targets(self, full: Sequence[Tensor]) -> list[Tensor]:
        """The regions of whole tensors that rows are copied to: by position those of what is cut, then what is not."""
        regions = [region(x, box) for boxes in self.boxes for x, box, cut in zip(full, boxes, self.cut, strict=True) if cut]
        return regions + [x for x, cut in zip(full, self.cut, strict=True) if not cut]

    def unpack(self, rows: Sequence[Tensor], locals_: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy rows, by position, to the regions; what is not cut from ``locals_``."""
        sources: list[Tensor] = []
        for row, boxes in zip(rows, self.boxes, strict=False):  # no rows where nothing is cut
            sections = _sections(self.cut, self.dtypes, boxes)
            pieces = row.split([*sections, row.numel() - sum(sections)])
            kinds = [(box.size, dtype) for box, dtype, cut in zip(boxes, self.dtypes, self.cut, strict=True) if cut]
            sources += [
                _aligned(piece, dtype.itemsize).view(dtype).view(size)
                for piece, (size, dtype) in zip(pieces, kinds, strict=False)
            ]
        sources += [local.detach() for local, cut in zip(locals_, self.cut, strict=bool(locals_)) if not cut]
        torch._foreach_copy_(list(targets), sources)

    # --- the mirror: whole ones are reduced to blocks ----------------------------------------------------------------
    def chunks(
        self,
        chosen: Sequence[int],
        wholes: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """By position what it shall reduce: its block of each of the chosen tensors (None: zeros), and then what stands behind.

        What is not cut stands in every chunk, so every rank gets its reduction.
        """
        result = []
        for boxes in self.boxes:
            parts = [
                torch.zeros(boxes[i].numel, dtype=dtype, device=device)
                if whole is None
                else region(whole, boxes[i]).to(dtype).reshape(-1)
                for i, whole in zip(chosen, wholes, strict=True)
            ]
            result.append(torch.cat([*parts, *behind]))
        return result

    def bucket(self, chosen: Sequence[int], dtype: torch.dtype, device: torch.device, behind: int) -> list[Tensor]:
        """Memory for this member's chunk, and its parts: a view for each tensor, one for the ``behind`` elements after."""
        flat = torch.empty(sum(self.boxes[self.mine][i].numel for i in chosen) + behind, dtype=dtype, device=device)
        return [flat, *self.split(chosen, flat)]

    def split(self, chosen: Sequence[int], flat: Tensor) -> list[Tensor]:
        """This member's reduced chunk as blocks, and what stands behind them."""
        boxes = [self.boxes[self.mine][i] for i in chosen]
        filled = [box.numel for box in boxes]
        pieces = flat.split([*filled, flat.numel() - sum(filled)])
        return [*(piece.view(box.size) for piece, box in zip(pieces, boxes, strict=False)), pieces[-1]]


def _sections(cut: Sequence[bool], dtypes: Sequence[torch.dtype], boxes: Sequence[Box]) -> list[int]:
    """Bytes of each block in a row."""
    return [box.numel * dtype.itemsize for box, dtype, is_cut in zip(boxes, dtypes, cut, strict=True) if is_cut]


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
                region(result, box).copy_(_aligned(row, result.itemsize).view(result.dtype).view(box.size))
                offsets[k] += length
        results.append(result)
    return results


def _aligned(row: Tensor, itemsize: int) -> Tensor:
    """Bytes of other dtypes may stand before these."""
    return row.clone() if row.storage_offset() % itemsize else row
