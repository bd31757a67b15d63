"""Halo exchange: a rank computes the outputs of its block, and receives the inputs beyond its edges from its neighbors.

Inputs and outputs of one dim are windows of one factor (``dim_windows.py``). An output's position is the input position that it
is aligned to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layout.layout import Layout
from ..kernel_context import At, KernelContext

PositionsOf = Callable[[int], range]  # rank -> the positions that it has, or needs


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Output ``o`` of one dim reads ``size`` inputs, ``dilation`` positions apart, from ``o * stride - padding`` on."""

    inputs: int
    outputs: int
    size: int
    stride: int
    padding: int
    dilation: int

    @property
    def width(self) -> int:
        """The distance from the first to the last input of one output, plus one."""
        return (self.size - 1) * self.dilation + 1

    def positions_read(self, outputs: range) -> range:
        """Return the range of input positions that these outputs read, including positions in the padding."""
        start = outputs.start * self.stride - self.padding
        return range(start, start + (len(outputs) - 1) * self.stride + self.width) if outputs else range(0)

    def inputs_read(self, outputs: range) -> range:
        """Return the range of inputs that these outputs read, without padding."""
        read = self.positions_read(outputs)
        start = min(max(read.start, 0), self.inputs)
        return range(start, max(start, min(read.stop, self.inputs)))

    def factor_windows(self, input_blocks: tuple[int, ...] | None) -> tuple[int, range, range]:
        """Return the size of the common factor of inputs and outputs, and the positions of each in it.

        With padding an output is aligned to the input of its number. Without padding it is aligned to the first input that it
        reads, or to the last, if blocks of the outputs are then more even.
        """
        beyond = self.width - 1
        later = (
            input_blocks is not None
            and not self.padding
            and max(input_blocks[0] - beyond, *input_blocks[1:]) < max(*input_blocks[:-1], input_blocks[-1] - beyond)
        )
        first = beyond if later else 0
        outputs = range(first, first + self.outputs * self.stride, self.stride)
        return max(self.inputs, outputs.stop - self.stride + 1), range(self.inputs), outputs

    @property
    def halo(self) -> int:
        """The number of inputs that a block reads beyond its edge."""
        return max(0, self.width - min(self.stride, self.width))


def make_range_lookup(layout: Layout | None, dim: int) -> PositionsOf:
    """Return a function from a rank to the range of positions that its block has along a tensor dim."""
    assert layout is not None

    def positions_of(member: int) -> range:
        """Return the range of positions of the dim in one rank's block."""
        coordinate = layout.mesh.coordinates[member]
        start = layout.local_offset(coordinate)[dim]
        return range(start, start + layout.local_shape(coordinate)[dim])

    return positions_of


def intersect_ranges(one: range, other: range) -> range:
    """Return the range of positions that are in both ranges."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def exchange_halos(at: KernelContext, x: Any, dim: int, layout: Layout, held: PositionsOf, needed: PositionsOf) -> list[Any]:
    """Exchange the parts of blocks ``x`` that ranks need along ``dim``; return those received, by group position."""
    mesh, mesh_dims = at.call.mesh, at.mesh_dims

    def make_chunks(here: At, block: Tensor) -> list[Tensor]:
        """Return, for each rank of the group, the part of this rank's block that it needs."""
        own = held(here.member)
        overlaps = [intersect_ranges(own, needed(other)) for other in mesh.members_of(mesh_dims, here.member)]
        return [block.narrow(dim, overlap.start - own.start if overlap else 0, len(overlap)).contiguous() for overlap in overlaps]

    def shape_between(source: int, target: int) -> tuple[int, ...]:
        """Return the shape of the part that one rank sends to another."""
        shape = list(layout.shape_of(source))
        shape[dim] = len(intersect_ranges(held(source), needed(target)))
        return tuple(shape)

    return list(at.comm.all_to_all(at.map(make_chunks, x), mesh_dims, shape_between).wait())


def read_with_halo(at: KernelContext, x: Any, dim: int, layout: Layout, reach: SlidingWindow, outputs: PositionsOf) -> Any:
    """Return each rank's block with its halo: all inputs that the rank's outputs read, and zeros for padding."""
    held = make_range_lookup(layout, dim)

    def join_and_pad(here: At, *parts: Tensor) -> Tensor:
        """Concatenate the parts received from all ranks, and pad them with zeros at the ends of the global dim."""
        block, read = torch.cat(parts, dim), reach.positions_read(outputs(here.member))
        before = min(len(read), max(0, -read.start))
        around = before, len(read) - block.shape[dim] - before
        return torch.nn.functional.pad(block, [0, 0] * (block.ndim - 1 - dim) + [*around]) if any(around) else block

    return at.map(join_and_pad, *exchange_halos(at, x, dim, layout, held, lambda member: reach.inputs_read(outputs(member))))


def add_halo_gradients(at: KernelContext, grad: Any, dim: int, layout: Layout, reach: SlidingWindow, outputs: PositionsOf) -> Any:
    """Return the gradient of each rank's block: send gradients of halo positions back to their owners and add them."""
    held = make_range_lookup(layout, dim)

    def needed(member: int) -> range:
        return reach.inputs_read(outputs(member))

    def crop(here: At, grad: Tensor) -> Tensor:
        inside = needed(here.member)
        return grad.narrow(dim, inside.start - reach.positions_read(outputs(here.member)).start if inside else 0, len(inside))

    def sum_parts(here: At, *parts: Tensor) -> Tensor:
        """Add the gradients received from all ranks to the positions of this rank's block."""
        own, mesh = held(here.member), at.call.mesh
        total = parts[0].new_zeros(layout.shape_of(here.member))
        for other, part in zip(mesh.members_of(at.mesh_dims, here.member), parts, strict=True):
            into = intersect_ranges(own, needed(other))
            if into:
                total.narrow(dim, into.start - own.start, len(into)).add_(part)
        return total

    return at.map(sum_parts, *exchange_halos(at, at.map(crop, grad), dim, layout, needed, held))
