"""Redistribution to another mesh, which may share ranks with the first or have none in common.

A tensor on a submesh has one piece on every rank of the root mesh, so a mesh counts as all ranks of its root; ranks that hold one
same block are its replicas. Each part of a new block comes from exactly one replica: the receiver itself if it is one, else the
one that has least to send so far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..base.caches import remembered
from ..base.units import bytes_text, seconds_text
from ..comm import Pending, communicator_of
from ..comm.backend_base import Run
from ..comm.pack import Box, Route, Transfer
from ..cost.link import link_of, local_seconds
from ..errors import MeshError
from ..layout.layout import Layout
from ..mesh.coordinate_tables import Table
from ..placement import Monoid, Partial, Placement, Replicate, Shard
from .executor import Local, execute
from .intervals import blocks
from .planner import plan
from .step import Plan, described, place


@dataclass(eq=False)
class Crossing:
    """The exchange of the blocks of ``before`` for those of ``after``, layouts without terms on two meshes.

    Attributes:
        ranks: those of both meshes, ascending; a position is an index here.
    """

    before: Layout
    after: Layout

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.before.mesh.ranks, *self.after.mesh.ranks}))

    def route_of(self, position: int) -> Route:
        """What the rank at ``position`` sends, receives and keeps."""
        return self._routes[position]

    @cached_property
    def bytes(self) -> int:
        """Received by one rank, the most over ranks."""
        received = [sum(box.numel for box in route.receives if box is not None) for route in self._routes]
        return max(received) * self.before.dtype.itemsize

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends."""
        size = self.before.dtype.itemsize
        return tuple(sum(box.numel for box in route.sends if box is not None) * size for route in self._routes)

    @cached_property
    def seconds(self) -> float:
        rate = link_of(self.after.mesh).exchange
        return rate.seconds(len(self.ranks), max(self.bytes, *self.sent)) + local_seconds(
            self.after.mesh, self.after.max_local_nbytes
        )

    @cached_property
    def bound(self) -> Run:
        """The transfer, for this process."""
        transfer = Transfer(self.route_of, self.before.dtype, said=f"{place(self.before)} -> {place(self.after)}")
        return communicator_of(self.before.mesh).bind_transfer_to(self.after.mesh, self.ranks, transfer)

    def __str__(self) -> str:
        return (
            f"exchange among {len(self.ranks)} ranks: {place(self.before)} -> {place(self.after)}, "
            f"{bytes_text(self.bytes)}/rank, {seconds_text(self.seconds)}"
        )

    @cached_property
    def _routes(self) -> list[Route]:
        count = len(self.ranks)
        sends: list[list[Box | None]] = [[None] * count for _ in range(count)]
        receives: list[list[Box | None]] = [[None] * count for _ in range(count)]
        kept: list[tuple[Box, Box] | None] = [None] * count
        for sender, receiver, old, new in self._parts():
            if sender == receiver:
                kept[sender] = old, new
            else:
                sends[sender][receiver], receives[receiver][sender] = old, new
        shapes = [_shapes(layout, self.ranks) for layout in (self.before, self.after)]
        rows = zip(*shapes, map(tuple, sends), map(tuple, receives), kept, strict=True)
        return [Route(*row) for row in rows]

    def _parts(self) -> Iterator[tuple[int, int, Box, Box]]:
        """Every part: who sends it to whom, where it lies in the old block and in the new one."""
        (lo, size), (new_lo, new_size) = blocks(self.before), blocks(self.after)
        held, holders = _distinct(self.before, self.ranks)
        load = [0] * len(self.ranks)
        for member, rank in enumerate(self.after.mesh.ranks):
            receiver = self.ranks.index(rank)
            start = np.maximum(lo[held], new_lo[member])
            length = np.minimum(lo[held] + size[held], new_lo[member] + new_size[member]) - start
            for k in np.flatnonzero((length > 0).all(axis=1)).tolist():
                sender = receiver if receiver in holders[k] else min(holders[k], key=lambda at: (load[at], at))
                part = tuple(length[k].tolist())
                if sender != receiver:
                    load[sender] += math.prod(part)
                old = Box(tuple((start[k] - lo[held[k]]).tolist()), part)
                yield sender, receiver, old, Box(tuple((start[k] - new_lo[member]).tolist()), part)


def _shapes(layout: Layout, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    sizes = blocks(layout)[1].tolist()
    shapes = {rank: tuple(size) for rank, size in zip(layout.mesh.ranks, sizes, strict=True)}
    return [shapes.get(rank, layout.local_shape(None)) for rank in ranks]


def _distinct(layout: Layout, ranks: tuple[int, ...]) -> tuple[Table, list[list[int]]]:
    """One member for each block that is not empty, and the positions of all that hold it."""
    offsets, sizes = blocks(layout)
    found: dict[Any, tuple[int, list[int]]] = {}
    for member, rank in enumerate(layout.mesh.ranks):
        if (sizes[member] > 0).all():
            key = (*offsets[member].tolist(), *sizes[member].tolist())
            found.setdefault(key, (member, []))[1].append(ranks.index(rank))
    members = np.asarray([member for member, _ in found.values()], dtype=np.int64)
    return members, [positions for _, positions in found.values()]


@dataclass(eq=False)
class Transit:
    """All that happens between two meshes: terms are reduced on the first, made on the second."""

    src: Layout
    dst: Layout
    leaving: Plan
    crossing: Crossing
    entering: Plan

    @property
    def cost(self) -> float:
        """Estimated seconds."""
        return self.leaving.cost + self.crossing.seconds + self.entering.cost

    @property
    def bytes(self) -> int:
        """Received by one rank, summed over the steps."""
        return self.leaving.bytes + self.crossing.bytes + self.entering.bytes

    def __str__(self) -> str:
        steps = [*self.leaving.steps, self.crossing, *self.entering.steps]
        cost = f"{bytes_text(self.bytes)} received per rank, {seconds_text(self.cost)}"
        head = f"{described(self.src)} -> {place(self.dst)}, another mesh: {cost}"
        return "\n".join([head, *(f"  {k}. {step}" for k, step in enumerate(steps, 1))])

    __repr__ = __str__


@remembered(4096)
def plan_between(src: Layout, dst: Layout) -> Transit:
    """What moves a tensor from ``src`` to ``dst``, layouts on different meshes; cached.

    Raises:
        MeshError: one mesh's ranks are processes and the other's are not, or their devices differ.

    >>> a, b = dt.DeviceMesh("cpu", [0, 1]), dt.DeviceMesh("cpu", [1, 2, 3])
    >>> src, dst = Layout.of(a, [dt.Shard(0)], (6, 2)), Layout.of(b, [dt.Shard(0)], (6, 2))
    >>> [route.kept for route in map(plan_between(src, dst).crossing.route_of, range(4))]
    [None, None, None, None]
    """
    for what in ("kind", "device_type"):
        a, b = getattr(src.mesh, what), getattr(dst.mesh, what)
        if a != b:
            raise MeshError(f"cannot redistribute {src!r} to {dst.mesh!r}: the {what} differs ({a} and {b})")
    before, after = _without_terms(src), dst.replace(placements=[_plain(p) for p in dst.placements])
    return Transit(src, dst, plan(src, before), Crossing(before, after), plan(after, dst))


def _plain(placement: Placement) -> Placement:
    return Replicate() if isinstance(placement, Partial) else placement


def _without_terms(layout: Layout) -> Layout:
    """``layout`` with its terms reduced, and scattered where a tensor dim is free: fewer bytes then, more senders."""
    free = [dim for dim, split in enumerate(layout.splits) if split is None and layout.shape[dim] > 1]
    folds = any(isinstance(op, Monoid) for op in layout.partials)  # terms of a monoid stay whole until they are reduced
    target = Replicate() if folds or not free else Shard(max(free, key=lambda dim: layout.shape[dim]))
    return layout.replace(placements=[target if isinstance(p, Partial) else p for p in layout.placements])


def move_between(local: Local, src: Layout, dst: Layout) -> Pending[Local]:
    """``local``, a local value under ``src``, as one under ``dst`` on another mesh.

    A rank outside the mesh of ``src`` gives an empty tensor (a number: any), one outside that of ``dst`` gets one (zero).
    """
    transit = plan_between(src, dst)
    return transit.crossing.bound(execute(transit.leaving, local)).then(functools.partial(_arrived, transit))


def _arrived(transit: Transit, local: Local) -> Local:
    if not communicator_of(transit.dst.mesh).held:
        return local.new_zeros(transit.dst.local_shape(None))
    return execute(transit.entering, local)
