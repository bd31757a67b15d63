"""Across meshes: redistribution to another mesh, which may have all, some or none of the ranks of the first.

A tensor on a submesh has one local tensor on every rank of the root mesh, so a mesh counts as all ranks of its root. Ranks with
equal blocks are replicas. Each part of a new block is sent by exactly one replica: by the receiver itself if it is one, else by
the one with the fewest elements to send so far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..base.caches import memoize
from ..base.units import bytes_text, seconds_text
from ..comm import Pending
from ..comm.communicator import BoundCollective
from ..comm.map_ranks import communicator_of
from ..comm.pack import Box, SendRecvPlan, Transfer
from ..cost.link import get_link, local_seconds
from ..errors import MeshError
from ..layout.layout import Layout
from ..placement import Monoid, Partial, Replicate, Shard
from .executor import LocalValue, execute
from .intervals import block_intervals, distinct_blocks
from .planner import plan
from .step import Plan, describe_placements, layout_text


@dataclass(eq=False)
class CrossMeshExchange:
    """Exchange of the blocks of ``before`` for those of ``after``. The layouts are not partial and have different meshes.

    Attributes:
        ranks: the ranks of both meshes, ascending. A position is an index into them.
    """

    before: Layout
    after: Layout

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.before.mesh.ranks, *self.after.mesh.ranks}))

    def route_of(self, position: int) -> SendRecvPlan:
        """Return what the rank at ``position`` of :attr:`ranks` sends, receives and keeps."""
        return self._routes[position]

    @cached_property
    def bytes(self) -> int:
        """Return the bytes that one rank receives, the most over ranks."""
        received = [sum(box.numel for box in route.receives if box is not None) for route in self._routes]
        return max(received) * self.before.dtype.itemsize

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Return the bytes that each rank of both meshes sends."""
        size = self.before.dtype.itemsize
        return tuple(sum(box.numel for box in route.sends if box is not None) * size for route in self._routes)

    @cached_property
    def seconds(self) -> float:
        """Return the estimated seconds of the transfer: the exchange, and local copies of the target block."""
        rate = get_link(self.after.mesh).exchange
        return rate.seconds(len(self.ranks), max(self.bytes, *self.sent)) + local_seconds(
            self.after.mesh, self.after.max_local_nbytes
        )

    @cached_property
    def bound(self) -> BoundCollective:
        """Return the exchange as a function that this process calls with its local value."""
        transfer = Transfer(
            self.route_of,
            self.before.dtype,
            description=f"{describe_placements(self.before)} -> {describe_placements(self.after)}",
        )
        return communicator_of(self.before.mesh).bind_transfer_to(self.after.mesh, self.ranks, transfer)

    def __str__(self) -> str:
        return (
            f"exchange among {len(self.ranks)} ranks: {describe_placements(self.before)} -> {describe_placements(self.after)}, "
            f"{bytes_text(self.bytes)}/rank, {seconds_text(self.seconds)}"
        )

    @cached_property
    def _routes(self) -> list[SendRecvPlan]:
        """Return what each rank of both meshes sends, receives and keeps, by position."""
        count = len(self.ranks)
        sends: list[list[Box | None]] = [[None] * count for _ in range(count)]
        receives: list[list[Box | None]] = [[None] * count for _ in range(count)]
        kept: list[tuple[Box, Box] | None] = [None] * count
        for sender, receiver, old, new in self._parts():
            if sender == receiver:
                kept[sender] = old, new
            else:
                sends[sender][receiver], receives[receiver][sender] = old, new
        shapes = [_local_shapes(layout, self.ranks) for layout in (self.before, self.after)]
        rows = zip(*shapes, map(tuple, sends), map(tuple, receives), kept, strict=True)
        return [SendRecvPlan(*row) for row in rows]

    def _parts(self) -> Iterator[tuple[int, int, Box, Box]]:
        """Yield each part that a rank gets: positions of sender and receiver, its box in the old and in the new block."""
        (lo, size), (new_lo, new_size) = block_intervals(self.before), block_intervals(self.after)
        blocks, ranks = distinct_blocks(self.before), self.before.mesh.ranks
        members = np.asarray([holders[0] for holders in blocks.values()], dtype=np.int64)
        positions = [[self.ranks.index(ranks[member]) for member in holders] for holders in blocks.values()]
        load = [0] * len(self.ranks)
        for member, rank in enumerate(self.after.mesh.ranks):
            receiver = self.ranks.index(rank)
            start = np.maximum(lo[members], new_lo[member])
            length = np.minimum(lo[members] + size[members], new_lo[member] + new_size[member]) - start
            for k in np.flatnonzero((length > 0).all(axis=1)).tolist():
                sender = receiver if receiver in positions[k] else min(positions[k], key=lambda at: (load[at], at))
                part = tuple(length[k].tolist())
                if sender != receiver:
                    load[sender] += math.prod(part)
                old = Box(tuple((start[k] - lo[members[k]]).tolist()), part)
                yield sender, receiver, old, Box(tuple((start[k] - new_lo[member]).tolist()), part)


def _local_shapes(layout: Layout, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the local shapes of ``layout`` on ``ranks``; ranks outside of its mesh have an empty one."""
    sizes = block_intervals(layout)[1].tolist()
    shapes = {rank: tuple(size) for rank, size in zip(layout.mesh.ranks, sizes, strict=True)}
    return [shapes.get(rank, layout.local_shape(None)) for rank in ranks]


@dataclass(eq=False)
class Transit:
    """Plan between two meshes: partial values are reduced on the first mesh and made on the second."""

    src: Layout
    dst: Layout
    leaving: Plan
    crossing: CrossMeshExchange
    entering: Plan

    @property
    def cost(self) -> float:
        """Return the estimated seconds of all steps on both meshes."""
        return self.leaving.cost + self.crossing.seconds + self.entering.cost

    @property
    def bytes(self) -> int:
        """Return the bytes that one rank receives, summed over the steps."""
        return self.leaving.bytes + self.crossing.bytes + self.entering.bytes

    def __str__(self) -> str:
        steps = [*self.leaving.steps, self.crossing, *self.entering.steps]
        cost = f"{bytes_text(self.bytes)} received per rank, {seconds_text(self.cost)}"
        head = f"{layout_text(self.src)} -> {describe_placements(self.dst)}, another mesh: {cost}"
        return "\n".join([head, *(f"  {k}. {step}" for k, step in enumerate(steps, 1))])

    __repr__ = __str__


@memoize(4096)
def plan_between(src: Layout, dst: Layout) -> Transit:
    """Return the plan between layouts on different meshes: reduce on the first, exchange, become partial on the second.

    Raises:
        MeshError: the ranks of only one mesh are processes, or the device types differ.

    >>> a, b = dt.DeviceMesh("cpu", [0, 1]), dt.DeviceMesh("cpu", [1, 2, 3])
    >>> src, dst = Layout.of(a, [dt.Shard(0)], (6, 2)), Layout.of(b, [dt.Shard(0)], (6, 2))
    >>> [route.kept for route in map(plan_between(src, dst).crossing.route_of, range(4))]
    [None, None, None, None]
    """
    for what in ("kind", "device_type"):
        a, b = getattr(src.mesh, what), getattr(dst.mesh, what)
        if a != b:
            raise MeshError(f"cannot redistribute {src!r} to {dst.mesh!r}: the {what} differs ({a} and {b})")
    before, after = _shard_partial_dims(src), dst.reduced()
    return Transit(src, dst, plan(src, before), CrossMeshExchange(before, after), plan(after, dst))


def _shard_partial_dims(layout: Layout) -> Layout:
    """Return ``layout`` reduced: its partial mesh dims shard a free tensor dim, which sends less, or are replicated."""
    free = [dim for dim, split in enumerate(layout.splits) if split is None and layout.shape[dim] > 1]
    has_monoid = any(isinstance(op, Monoid) for op in layout.partials)  # a monoid may need complete addends
    target = Replicate() if has_monoid or not free else Shard(max(free, key=lambda dim: layout.shape[dim]))
    return layout.replace(placements=[target if isinstance(p, Partial) else p for p in layout.placements])


def move_between(local: LocalValue, src: Layout, dst: Layout) -> Pending[LocalValue]:
    """Start to redistribute ``local``, a local value under ``src``, to ``dst`` on another mesh, and return the pending result.

    A rank outside of the mesh of ``src`` passes an empty tensor (any tensor, for a 0-d tensor). A rank outside of the mesh of
    ``dst`` gets an empty one (zero, for a 0-d tensor).
    """
    transit = plan_between(src, dst)
    return transit.crossing.bound(execute(transit.leaving, local)).then(functools.partial(_finish_transit, transit))


def _finish_transit(transit: Transit, local: LocalValue) -> LocalValue:
    """Make the received value of a redistribution to another mesh partial if needed; ranks outside get empty zeros."""
    if not communicator_of(transit.dst.mesh).held:
        return local.new_zeros(transit.dst.local_shape(None))
    return execute(transit.entering, local)
