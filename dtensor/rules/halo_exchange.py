"""Positions that are read by what slides over them: each rank computes the outputs that lie in its block, and asks its neighbours
for the inputs beyond its edges (a halo), which are few where windows are small.

Inputs and outputs of one dim are windows of one factor (``dim_windows.py``): an output stands where it is aligned to an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout.layout import Layout
from .kernel_context import At, KernelContext

Held = Callable[[int], range]  # the positions that a member has, or needs


@dataclass(frozen=True, slots=True)
class Reach:
    """Output ``o`` of one dim reads ``size`` of its inputs, ``dilation`` apart, from ``o * stride - padding`` on."""

    inputs: int
    outputs: int
    size: int
    stride: int
    padding: int
    dilation: int

    @property
    def width(self) -> int:
        """How far one output reads."""
        return (self.size - 1) * self.dilation + 1

    def read(self, outputs: range) -> range:
        """The positions that these outputs read, also those of the padding."""
        start = outputs.start * self.stride - self.padding
        return range(start, start + (len(outputs) - 1) * self.stride + self.width) if outputs else range(0)

    def inside(self, outputs: range) -> range:
        """The inputs that these outputs read."""
        read = self.read(outputs)
        start = min(max(read.start, 0), self.inputs)
        return range(start, max(start, min(read.stop, self.inputs)))

    def windows(self, cut: tuple[int, ...] | None) -> tuple[int, range, range]:
        """The size of the factor, and where inputs and outputs stand in it (inputs being ``cut``).

        With padding an output keeps to its number; without, to the first input that it reads, or to the last, where blocks are
        more even then.
        """
        beyond = self.width - 1
        later = cut is not None and not self.padding and max(cut[0] - beyond, *cut[1:]) < max(*cut[:-1], cut[-1] - beyond)
        first = beyond if later else 0
        stands = range(first, first + self.outputs * self.stride, self.stride)
        return max(self.inputs, stands.stop - self.stride + 1), range(self.inputs), stands

    @property
    def halo(self) -> int:
        """How many inputs of others a block reads."""
        return max(0, self.width - min(self.stride, self.width))


def span(layout: Layout | None, dim: int) -> Held:
    """The positions of a dim that a member holds."""
    assert layout is not None

    def held(member: int) -> range:
        coordinate = layout.mesh.coordinates[member]
        start = layout.local_offset(coordinate)[dim]
        return range(start, start + layout.local_shape(coordinate)[dim])

    return held


def common(one: range, other: range) -> range:
    """What two ranges of positions share."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def exchanged(at: KernelContext, x: Any, dim: int, layout: Layout, have: Held, need: Held) -> list[Any]:
    """By group position, what a rank needs of the block ``x`` that this position has (of ``layout``, but for ``dim``)."""
    mesh, mesh_dims = at.call.mesh, at.mesh_dims

    def chunks(here: At, block: Tensor) -> list[Tensor]:
        own = have(here.member)
        parts = [common(own, need(other)) for other in mesh.members_of(mesh_dims, here.member)]
        return [block.narrow(dim, part.start - own.start if part else 0, len(part)).contiguous() for part in parts]

    def shape_of(source: int, target: int) -> tuple[int, ...]:
        shape = list(layout.shape_of(source))
        shape[dim] = len(common(have(source), need(target)))
        return tuple(shape)

    return list(at.comm.all_to_all(at.map(chunks, x), mesh_dims, shape_of).wait())


def read_around(at: KernelContext, x: Any, dim: int, layout: Layout, reach: Reach, outputs: Held) -> Any:
    """The inputs that a rank's outputs read, zeros where they read padding."""
    have = span(layout, dim)

    def joined(here: At, *parts: Tensor) -> Tensor:
        made, read = torch.cat(parts, dim), reach.read(outputs(here.member))
        before = min(len(read), max(0, -read.start))
        around = before, len(read) - made.shape[dim] - before
        return torch.nn.functional.pad(made, [0, 0] * (made.ndim - 1 - dim) + [*around]) if any(around) else made

    return at.map(joined, *exchanged(at, x, dim, layout, have, lambda member: reach.inside(outputs(member))))


def added_around(at: KernelContext, grad: Any, dim: int, layout: Layout, reach: Reach, outputs: Held) -> Any:
    """From the gradient of what :func:`read_around` gave to that of a rank's own block."""
    have = span(layout, dim)

    def need(member: int) -> range:
        return reach.inside(outputs(member))

    def cropped(here: At, grad: Tensor) -> Tensor:
        inside = need(here.member)
        return grad.narrow(dim, inside.start - reach.read(outputs(here.member)).start if inside else 0, len(inside))

    def summed(here: At, *parts: Tensor) -> Tensor:
        own, mesh = have(here.member), at.call.mesh
        total = parts[0].new_zeros(layout.shape_of(here.member))
        for other, part in zip(mesh.members_of(at.mesh_dims, here.member), parts, strict=True):
            into = common(own, need(other))
            if into:
                total.narrow(dim, into.start - own.start, len(into)).add_(part)
        return total

    return at.map(summed, *exchanged(at, at.map(cropped, grad), dim, layout, need, have))
