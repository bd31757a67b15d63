"""Packing: the regions of blocks that ranks send and receive, and how regions are packed into one row of memory and back.

A block is a row-major local tensor. Packing and unpacking take one torch operation if the regions are regular, as those of even
shards are, and none if the row *is* the block's memory.
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
    """A region of a local block: its start offsets and its size."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class SendRecvPlan:
    """The part of one member in a transfer: its send/receive plan.

    Tuples have one entry per group position; None if nothing is sent or received, as for the member itself.
    """

    old: tuple[int, ...]  # shape of the member's block before the transfer
    new: tuple[int, ...]  # shape after it
    sends: tuple[Box | None, ...]  # regions of the old block
    receives: tuple[Box | None, ...]  # regions of the new block
    kept: tuple[Box, Box] | None  # region of the old block that is copied to a region of the new block


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages between the members of one group, as far as all members know them.

    Attributes:
        largest: elements of the largest message.
        partners: number of ranks to which one rank sends, the mean over the group, rounded up.
        alike: whether all blocks before the transfer have one shape.
        joined: that shape and a tensor dim, if the new block of each member is the concatenation of all blocks along that dim.
    """

    largest: int
    partners: int
    alike: bool
    joined: tuple[tuple[int, ...], int] | None = None

    @staticmethod
    def of(routes: Sequence[SendRecvPlan]) -> Traffic:
        """Return the traffic of a group from the routes of all its members."""
        return Traffic(
            max((box.numel for route in routes for box in route.sends if box is not None), default=0),
            -(-sum(box is not None for route in routes for box in route.sends) // len(routes)),
            len({route.old for route in routes}) == 1,
        )

    @staticmethod
    def of_gather(route: SendRecvPlan) -> Traffic:
        """Return the traffic of an all-gather from the route of one member."""
        received = [box for box in route.receives if box is not None]
        sizes = [math.prod(route.old), *(box.numel for box in received)]
        alike = len(received) == len(route.receives) - 1 and all(box.size == route.old for box in received)
        return Traffic(max(sizes), len(route.receives) - 1 if any(sizes) else 0, alike)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A collective in which each member gets a new block, made of regions that other members send and regions that it keeps.

    Attributes:
        route_of: gives each member's part.
        kind: ``"all_gather"`` (each member gets the blocks of all), ``"broadcast"``, ``"scatter"`` or ``"all_to_all"``.
        traffic_of: gives the :class:`Traffic` of a member's group, if it is found faster than from all routes; None if only the
            routes determine it.
        description: text that is equal on all ranks of the group, which they compare.
        new_of: gives the shape of a member's new block, if it is known without the member's route.
        max_received: elements that a rank receives, the maximum over ranks, if it is known without all routes.
        blocking: whether each rank waits right after it issues the transfer, so that the transfer may take rounds.
    """

    route_of: Callable[[int], SendRecvPlan]
    dtype: torch.dtype
    kind: str = "all_to_all"
    traffic_of: Callable[[int], Traffic | None] | None = None
    description: str = ""
    new_of: Callable[[int], tuple[int, ...]] | None = None
    max_received: int | None = None
    blocking: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """A reduce-scatter: position k gets region ``chunks_of(member)[k]`` of the blocks of a group, reduced by ``op``.

    ``old(member)`` is the shape of a member's block, ``new(member)`` that of its result. The regions of one position have one
    shape on all ranks. ``description``: as for :class:`Transfer`.
    """

    chunks_of: Callable[[int], tuple[Box, ...]]
    op: str | Monoid
    old: Callable[[int], tuple[int, ...]]
    new: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    description: str = ""


def view_region(x: Tensor, box: Box) -> Tensor:
    """Return a view of a region of ``x``; ``x`` itself if the region is all of it."""
    if 0 in box.size:  # the offset of an empty box may be past the end of the block
        return x if x.shape == box.size else x.new_empty(box.size)
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if size != x.shape[dim]:
            x = x.narrow(dim, start, size)
    return x


def contiguous_run(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return offset and length of ``box`` in the memory of a block of ``shape`` if it is contiguous, else None."""
    inner = next((dim for dim, size in enumerate(box.size) if size > 1), len(shape))
    if box.size[inner + 1 :] != tuple(shape[inner + 1 :]):
        return None
    return _box_offset(box, shape), box.numel


def _box_offset(box: Box, shape: Sequence[int]) -> int:
    return sum(map(mul, box.start, contiguous_stride(tuple(shape))))


class RegularGrid(NamedTuple):
    """Equal boxes at regular distances, as one strided view of the block; the first dims count the boxes.

    It is not used for a traced block: the compiler may choose other strides for it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, block: Tensor) -> Tensor:
        """Return the view of ``block`` with all boxes."""
        return block.as_strided(self.shape, self.stride, block.storage_offset() + self.offset)


@dataclass(frozen=True)
class Packing:
    """The layout of a row with the elements of ``boxes``, one box after the other, of a block of ``shape``.

    None and empty boxes take no space in the row.
    """

    boxes: tuple[Box | None, ...]
    shape: tuple[int, ...]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of elements of each box."""
        return [0 if box is None else box.numel for box in self.boxes]

    @cached_property
    def total(self) -> int:
        return sum(self.lengths)

    @cached_property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    @cached_property
    def nonempty_boxes(self) -> tuple[Box, ...]:
        return tuple(box for box in self.boxes if box is not None and box.numel)

    @cached_property
    def is_block(self) -> bool:
        """Whether the row is the block's memory, with the boxes in order."""
        at = 0
        for box in self.nonempty_boxes:
            if contiguous_run(box, self.shape) != (at, box.numel):
                return False
            at += box.numel
        return at == math.prod(self.shape)

    @cached_property
    def grid(self) -> RegularGrid | None:
        """Return the regular grid that the boxes form, or None if they differ in size or place."""
        if not self.nonempty_boxes or not self.is_even or len({box.size for box in self.nonempty_boxes}) > 1:
            return None
        found = _find_grid([_box_offset(box, self.shape) for box in self.nonempty_boxes])
        if found is None:
            return None
        counts, steps, first = found
        return RegularGrid(counts + self.nonempty_boxes[0].size, steps + contiguous_stride(self.shape), first)

    @cached_property
    def concat_dim(self) -> int | None:
        """The tensor dim along which the concatenated boxes make up the block, None if there is none."""
        for dim in range(len(self.shape)):
            at = 0
            for box in self.nonempty_boxes:
                others = (box.size[:dim] + box.size[dim + 1 :]) == (self.shape[:dim] + self.shape[dim + 1 :])
                if not others or box.start[dim] != at:
                    break
                at += box.size[dim]
            else:
                if at == self.shape[dim]:
                    return dim
        return None

    def pack(self, block: Tensor) -> Tensor:
        """Return the row with the boxes of ``block``. It shares the block's memory if possible."""
        if not self.nonempty_boxes:
            return block.new_empty(0)  # new memory: a view would keep the lazy conjugate bit
        if self.is_block:
            return block if block.ndim == 1 else block.view(-1)
        if self.grid is not None and not is_traced(block):
            return self.grid.of(block).contiguous().view(-1)  # reshape could return a strided view
        if self.concat_dim is not None:
            parts = block.split([box.size[self.concat_dim] for box in self.nonempty_boxes], self.concat_dim)
            return torch.cat([part.reshape(-1) for part in parts])
        return torch.cat([view_region(block, box).reshape(-1) for box in self.nonempty_boxes])

    def unpack(self, row: Tensor) -> Tensor:
        """Return the block with the boxes in ``row``. The boxes must make up the whole block.

        It has new memory unless the row is the block.
        """
        if self.is_block:
            return row.view(self.shape)
        if (self.grid is None or is_traced(row)) and self.concat_dim is not None:
            parts = row.split([box.numel for box in self.nonempty_boxes])
            return torch.cat([part.view(box.size) for part, box in zip(parts, self.nonempty_boxes, strict=True)], self.concat_dim)
        block = row.new_empty(self.shape)
        if self.grid is not None and not is_traced(row):
            self.grid.of(block).copy_(row.view(self.grid.shape))
            return block
        for part, box in zip(row.split([box.numel for box in self.nonempty_boxes]), self.nonempty_boxes, strict=True):
            view_region(block, box).copy_(part.view(box.size))
        return block


def _find_grid(offsets: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return counts, strides and start of the row-major grid that has ``offsets`` as its points; None if there is none."""
    counts: list[int] = []
    steps: list[int] = []
    while len(offsets) > 1:
        step, run_length = offsets[1] - offsets[0], 2
        while run_length < len(offsets) and offsets[run_length] - offsets[run_length - 1] == step:
            run_length += 1
        while len(offsets) % run_length:
            run_length -= 1
        rows = [offsets[k : k + run_length] for k in range(0, len(offsets), run_length)]
        if run_length == 1 or step < 0 or any(row != [row[0] + k * step for k in range(run_length)] for row in rows):
            return None
        counts.insert(0, run_length)
        steps.insert(0, step)
        offsets = [row[0] for row in rows]
    return tuple(counts), tuple(steps), offsets[0]
