"""Regions of blocks: what one rank sends and receives, and how regions become one row of memory and back.

A block is a row-major local tensor. Packing and unpacking cost one torch operation where the regions are regular, as those of
even splits are, and none where the row *is* the block's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.memory_order import contiguous_stride
from ..base.tracing import is_traced
from ..placement import Monoid


class Box(NamedTuple):
    """A region of a local block: where it starts in it, and its size."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Route:
    """One member's part in a transfer; tuples have one entry per group position, None for nothing (as for itself)."""

    old: tuple[int, ...]  # shape of its block before
    new: tuple[int, ...]  # and after
    sends: tuple[Box | None, ...]  # regions of the old block
    receives: tuple[Box | None, ...]  # regions of the new block
    kept: tuple[Box, Box] | None  # the same elements in the old and in the new block


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the members of one group have for each other; all of them know it alike.

    Attributes:
        largest: elements of the largest message.
        partners: ranks that one rank sends to, the mean of the group, rounded up.
        alike: all blocks before the transfer have one shape.
        joined: that shape and a tensor dim, where along it the blocks, by group position, make up the new one of every member.
    """

    largest: int
    partners: int
    alike: bool
    joined: tuple[tuple[int, ...], int] | None = None

    @staticmethod
    def of(routes: Sequence[Route]) -> Traffic:
        return Traffic(
            max((box.numel for route in routes for box in route.sends if box is not None), default=0),
            -(-sum(box is not None for route in routes for box in route.sends) // len(routes)),
            len({route.old for route in routes}) == 1,
        )

    @staticmethod
    def of_gather(route: Route) -> Traffic:
        """What one member's part tells: it gets the blocks of all."""
        others = [box for box in route.receives if box is not None]
        sizes = [math.prod(route.old), *(box.numel for box in others)]
        alike = len(others) == len(route.receives) - 1 and all(box.size == route.old for box in others)
        return Traffic(max(sizes), len(route.receives) - 1 if any(sizes) else 0, alike)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Every member's new block, made of regions that others send and that it keeps.

    Attributes:
        route_of: each member's part.
        kind: what it amounts to: ``"all_gather"`` (every member gets the blocks of all), ``"broadcast"``, ``"scatter"`` or
            ``"all_to_all"``.
        traffic_of: a member's group's :class:`Traffic`, where that is found sooner than by all routes; None where only they tell.
        said: what it is, in words that are the same on all ranks of the group: they compare them.
        new_of: the shape of a member's new block, where it is known without the member's part.
        brings: elements that it brings to a rank, the most over ranks, where that is known without all parts.
        blocking: every rank waits for it where it issues it, so that it may go in rounds that wait for each other.
    """

    route_of: Callable[[int], Route]
    dtype: torch.dtype
    kind: str = "all_to_all"
    traffic_of: Callable[[int], Traffic | None] | None = None
    said: str = ""
    new_of: Callable[[int], tuple[int, ...]] | None = None
    brings: int | None = None
    blocking: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Region ``chunks_of(member)[k]`` of the blocks of a group, reduced by ``op``, for position k.

    ``old(member)`` is the shape of its block, ``new(member)`` that of what it gets: regions of one position are of one shape on
    all ranks. ``said``: as of a transfer.
    """

    chunks_of: Callable[[int], tuple[Box, ...]]
    op: str | Monoid
    old: Callable[[int], tuple[int, ...]]
    new: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    said: str = ""


def region(x: Tensor, box: Box) -> Tensor:
    """A view of a part of ``x``; ``x`` itself for all of it."""
    if 0 in box.size:  # an empty block has no place: its offset may lie past the end
        return x if x.shape == box.size else x.new_empty(box.size)
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if size != x.shape[dim]:
            x = x.narrow(dim, start, size)
    return x


def run_of(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Offset and length of ``box`` in the memory of a block of ``shape``, if it is one run."""
    inner = next((dim for dim, size in enumerate(box.size) if size > 1), len(shape))
    if box.size[inner + 1 :] != tuple(shape[inner + 1 :]):
        return None
    return _offset(box, shape), box.numel


def _offset(box: Box, shape: Sequence[int]) -> int:
    return sum(map(mul, box.start, contiguous_stride(tuple(shape))))


class Grid(NamedTuple):
    """Equal boxes at regular distances: all of them as one view of the block, positions first.

    Not of a block that is traced: memory is the compiler's business, and inductor may lay the block otherwise.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, block: Tensor) -> Tensor:
        return block.as_strided(self.shape, self.stride, block.storage_offset() + self.offset)


@dataclass(frozen=True)
class Packing:
    """``boxes`` of a block of ``shape``, one after the other in a row (None and empty boxes take no room)."""

    boxes: tuple[Box | None, ...]
    shape: tuple[int, ...]

    @cached_property
    def lengths(self) -> list[int]:
        """Elements of each box."""
        return [0 if box is None else box.numel for box in self.boxes]

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def even(self) -> bool:
        return len(set(self.lengths)) == 1

    @cached_property
    def filled(self) -> tuple[Box, ...]:
        return tuple(box for box in self.boxes if box is not None and box.numel)

    @cached_property
    def whole(self) -> bool:
        """The row is the block's memory as it is."""
        at = 0
        for box in self.filled:
            if run_of(box, self.shape) != (at, box.numel):
                return False
            at += box.numel
        return at == math.prod(self.shape)

    @cached_property
    def grid(self) -> Grid | None:
        if not self.filled or not self.even or len({box.size for box in self.filled}) > 1:
            return None
        found = _regular([_offset(box, self.shape) for box in self.filled])
        if found is None:
            return None
        counts, steps, first = found
        return Grid(counts + self.filled[0].size, steps + contiguous_stride(self.shape), first)

    @cached_property
    def joint(self) -> int | None:
        """The tensor dim along which the boxes, in order, make up the block."""
        for dim in range(len(self.shape)):
            at = 0
            for box in self.filled:
                others = (box.size[:dim] + box.size[dim + 1 :]) == (self.shape[:dim] + self.shape[dim + 1 :])
                if not others or box.start[dim] != at:
                    break
                at += box.size[dim]
            else:
                if at == self.shape[dim]:
                    return dim
        return None

    def pack(self, block: Tensor) -> Tensor:
        """The row; shares the block's memory where it can."""
        if not self.filled:
            return block.new_empty(0)  # not a view: a lazy conjugate would stay one
        if self.whole:
            return block if block.ndim == 1 else block.view(-1)
        if self.grid is not None and not is_traced(block):
            return self.grid.of(block).contiguous().view(-1)  # reshape might give a strided view
        if self.joint is not None:
            parts = block.split([box.size[self.joint] for box in self.filled], self.joint)
            return torch.cat([part.reshape(-1) for part in parts])
        return torch.cat([region(block, box).reshape(-1) for box in self.filled])

    def unpack(self, row: Tensor) -> Tensor:
        """The block whose boxes ``row`` holds, in new memory unless the row is the block; the boxes must make up the block."""
        if self.whole:
            return row.view(self.shape)
        if (self.grid is None or is_traced(row)) and self.joint is not None:
            parts = row.split([box.numel for box in self.filled])
            return torch.cat([part.view(box.size) for part, box in zip(parts, self.filled, strict=True)], self.joint)
        block = row.new_empty(self.shape)
        if self.grid is not None and not is_traced(row):
            self.grid.of(block).copy_(row.view(self.grid.shape))
            return block
        for part, box in zip(row.split([box.numel for box in self.filled]), self.filled, strict=True):
            region(block, box).copy_(part.view(box.size))
        return block


def _regular(offsets: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Counts, steps and start of a grid of which ``offsets`` are the points, row-major; None if they are none."""
    counts: list[int] = []
    steps: list[int] = []
    while len(offsets) > 1:
        step, run = offsets[1] - offsets[0], 2
        while run < len(offsets) and offsets[run] - offsets[run - 1] == step:
            run += 1
        while len(offsets) % run:
            run -= 1
        lines = [offsets[k : k + run] for k in range(0, len(offsets), run)]
        if run == 1 or step < 0 or any(line != [line[0] + k * step for k in range(run)] for line in lines):
            return None
        counts.insert(0, run)
        steps.insert(0, step)
        offsets = [line[0] for line in lines]
    return tuple(counts), tuple(steps), offsets[0]
