"""Checkpoint blocks: the ranks that hold each block of a tensor, and the rank that writes it. Pure functions of layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import PerRank
from ..comm.map_ranks import communicator_of
from ..errors import CheckpointError
from ..layout.layout import Layout
from ..redistribute.intervals import distinct_blocks
from ..tensor.dtensor import DTensor
from ..tensor.views.flattened_sharded_dims import find_flattened_dim

Offset = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """Block of a tensor that this process has: its rank, offset and shape, and whether it is the replica that is written.

    Attributes:
        member: the position in the mesh of the rank that holds it; None for a plain tensor.
        is_primary: True for the one replica of the block that is written, and that adds its digest in a load.
        part: the index along the stacked dim of the local tensor, if that has one (:class:`StackedLayout`).
    """

    member: int | None
    offset: Offset
    shape: Shape
    is_primary: bool
    part: int | None = None


@dataclass(frozen=True, slots=True)
class StackedLayout:
    """Layout of a tensor with dim ``dim`` flattened from a stack of ``parts`` parts of one size, each of which is sharded.

    A local tensor has a block of each part.

    Attributes:
        layout: of the stack, with ``dim`` for the parts and the next dim for the elements of a part.
    """

    layout: Layout
    dim: int

    @property
    def parts(self) -> int:
        return self.layout.shape[self.dim]

    @property
    def shape(self) -> Shape:
        shape, dim = self.layout.shape, self.dim
        return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])

    def blocks(self, offset: Offset, shape: Shape) -> Iterator[tuple[Offset, Shape]]:
        """Yield offset and shape, in the flattened tensor, of each part of one block of the stack."""
        dim, inside = self.dim, self.layout.shape[self.dim + 1]
        for part in range(self.parts):
            start = part * inside + offset[dim + 1]
            yield (*offset[:dim], start, *offset[dim + 2 :]), (*shape[:dim], *shape[dim + 1 :])


def find_stack(x: Any) -> tuple[DTensor, StackedLayout] | None:
    """Return the stack of which ``x`` is a flattened view, and its stacked layout; None if ``x`` is no such view."""
    flattened = find_flattened_dim(x)
    if flattened is None or len(flattened[1]) != 2 or flattened[2][0] is not None or type(stack := x._origin.base) is not DTensor:
        return None
    return stack, StackedLayout(stack._layout, flattened[0])


def local_members(layout: Layout) -> list[int]:
    """Return the mesh members (positions of ranks in the mesh) that have local tensors in this process."""
    return list(communicator_of(layout.mesh).held)


def iter_local_blocks(
    tensors: Mapping[str, Any], rank: int, among: Collection[int] | None = None
) -> Iterator[tuple[str, list[LocalBlock]]]:
    """Yield each tensor's name with the blocks of it in this process, one replica of each block marked as primary.

    Args:
        tensors: name -> tensor, or layout (:class:`StackedLayout` too), or plain shape. The ranks with replicas take turns in
        writing, so that each rank writes about as many bytes. Of a plain tensor the value of the first rank is written.
        rank: the position of this process among those that make the checkpoint.
        among: the world's ranks that make the checkpoint; None: all. Other ranks do not write.

    Raises:
        CheckpointError: a ``per_rank`` tensor, one without data, or a block that only ranks outside ``among`` have.
    """
    bytes_by_rank: dict[int, int] = {}
    for name, tensor in tensors.items():
        view_of_stack = find_stack(tensor)
        stacked = tensor if isinstance(tensor, StackedLayout) else None if view_of_stack is None else view_of_stack[1]
        layout = tensor._layout if isinstance(tensor, DTensor) else tensor
        if stacked is not None:
            layout = stacked.layout
        if not isinstance(layout, Layout):
            shape = _plain_shape(name, tensor)
            yield name, [LocalBlock(None, (0,) * len(shape), shape, rank == 0)] if 0 not in shape else []
            continue
        members, held_blocks = local_members(layout), []
        for (offset, shape), holders in distinct_blocks(layout).items():
            ranks = layout.mesh.ranks
            if among is not None:
                holders = [member for member in holders if ranks[member] in among]
                if not holders:
                    raise CheckpointError(
                        f"{name or 'a tensor'} ({layout!r}): no rank of process_group= has its block at {offset}; "
                        "make the checkpoint with a group of all ranks of the tensor's mesh"
                    )
            writer = min(holders, key=lambda member: (bytes_by_rank.get(ranks[member], 0), ranks[member]))
            bytes_by_rank[ranks[writer]] = bytes_by_rank.get(ranks[writer], 0) + math.prod(shape) * layout.dtype.itemsize
            for member in holders:
                if member not in members:
                    continue
                if stacked is None:
                    held_blocks.append(LocalBlock(member, offset, shape, member == writer))
                else:
                    parts = enumerate(stacked.blocks(offset, shape))
                    held_blocks += [LocalBlock(member, start, size, member == writer, part) for part, (start, size) in parts]
        yield name, held_blocks


def _plain_shape(name: str, tensor: Any) -> Shape:
    """Return the shape of a plain tensor; raise for a ``PerRank`` tensor, which has no single value."""
    if isinstance(tensor, PerRank):
        raise CheckpointError(
            f"{name!r} is a PerRank tensor with values that differ between ranks, so there is no single value "
            "to save; make a DTensor with DTensor.from_local(x, mesh, placements)"
        )
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tuple(tensor)


def block_tensor(tensor: Any, held: LocalBlock) -> torch.Tensor:
    """Return the values of a local block: a local tensor, the selected part of a stacked one, or a plain tensor."""
    if held.member is None:
        return tensor
    view_of_stack = find_stack(tensor)
    x = tensor if view_of_stack is None else view_of_stack[0]
    local: torch.Tensor = communicator_of(x._layout.mesh).shards_by_member(x._local)[held.member]
    return local if view_of_stack is None or held.part is None else local.select(view_of_stack[1].dim, held.part)
