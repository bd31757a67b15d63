"""Who holds which block of a tensor, and which of the holders answers for it: pure maths on layouts, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...comm import PerRank, communicator_of, shards_of
from ...errors import CheckpointError
from ...layout.layout import Layout
from ...redistribute.intervals import blocks
from ..dtensor import DTensor
from .flattened_sharded_dims import find_flattened_dim

Offset = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A block that this process holds of a tensor.

    Attributes:
        member: whose it is, a position in the mesh; None for a plain tensor.
        answers: this one, of all replicas, writes the block and vouches for it.
        part: which part of the member's piece it is, where that has several (:class:`Stacked`).
    """

    member: int | None
    offset: Offset
    shape: Shape
    answers: bool
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor whose dim ``dim`` is folded of a stack, ``parts`` of one size, each of which is cut: a piece has a block of each.

    Attributes:
        layout: of the stack, which has ``dim`` for its parts and a dim behind it for what is in one.
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
        """Where a block of the stack has its parts in the tensor."""
        dim, inside = self.dim, self.layout.shape[self.dim + 1]
        for part in range(self.parts):
            start = part * inside + offset[dim + 1]
            yield (*offset[:dim], start, *offset[dim + 2 :]), (*shape[:dim], *shape[dim + 1 :])


def locals_of(x: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in this process that ``x`` is made of, distributed or not."""
    return shards_of(x._local if isinstance(x, DTensor) else x)


def stack_of(x: Any) -> tuple[DTensor, Stacked] | None:
    """The stack that ``x`` is a view of, and how ``x`` lies by it; None where it lies as its layout says."""
    found = find_flattened_dim(x)
    if found is None or len(found[1]) != 2 or found[2][0] is not None or type(stack := x._origin.base) is not DTensor:
        return None
    return stack, Stacked(stack._layout, found[0])


def distinct_blocks(layout: Layout) -> dict[tuple[Offset, Shape], list[int]]:
    """Every block that is not empty, and the members that hold it, in order; all ranks of the root mesh count."""
    offsets, sizes = blocks(layout.reduced())
    found: dict[tuple[Offset, Shape], list[int]] = {}
    for member, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
        if all(size):
            found.setdefault((tuple(offset), tuple(size)), []).append(member)
    return found


def members_here(layout: Layout) -> list[int]:
    """The members whose pieces are in this process."""
    return list(communicator_of(layout.mesh).held)


def held_here(tensors: Mapping[str, Any], rank: int, among: Collection[int] | None = None) -> Iterator[tuple[str, list[Held]]]:
    """Yield for each name the blocks that this process holds of its tensor.

    Args:
        tensors: name -> tensor, or layout (:class:`Stacked` too), or plain shape. Replicas take turns in answering, so that each
            rank writes about as many bytes; of plain tensors it is the first rank's value that counts.
        rank: this process's place among those that make the checkpoint.
        among: the world's ranks that make the checkpoint; None: all. Replicas on other ranks are not asked.

    Raises:
        CheckpointError: a ``per_rank`` tensor, one without data, or a block that only ranks outside ``among`` have.
    """
    load: dict[int, int] = {}
    for name, tensor in tensors.items():
        found = stack_of(tensor)
        stacked = tensor if isinstance(tensor, Stacked) else None if found is None else found[1]
        layout = tensor._layout if isinstance(tensor, DTensor) else tensor
        if stacked is not None:
            layout = stacked.layout
        if not isinstance(layout, Layout):
            shape = _plain_shape(name, tensor)
            yield name, [Held(None, (0,) * len(shape), shape, rank == 0)] if 0 not in shape else []
            continue
        here, held = members_here(layout), []
        for (offset, shape), holders in distinct_blocks(layout).items():
            ranks = layout.mesh.ranks
            if among is not None:
                holders = [member for member in holders if ranks[member] in among]
                if not holders:
                    raise CheckpointError(
                        f"{name or 'a tensor'} ({layout!r}): no rank of process_group= has its block at {offset}; "
                        "make the checkpoint with a group of all ranks of the tensor's mesh"
                    )
            answering = min(holders, key=lambda member: (load.get(ranks[member], 0), ranks[member]))
            load[ranks[answering]] = load.get(ranks[answering], 0) + math.prod(shape) * layout.dtype.itemsize
            for member in holders:
                if member not in here:
                    continue
                if stacked is None:
                    held.append(Held(member, offset, shape, member == answering))
                else:
                    own = enumerate(stacked.blocks(offset, shape))
                    held += [Held(member, start, size, member == answering, part) for part, (start, size) in own]
        yield name, held


def _plain_shape(name: str, tensor: Any) -> Shape:
    if isinstance(tensor, PerRank):
        raise CheckpointError(
            f"{name!r} is a PerRank tensor with values that differ between ranks, so there is no single value "
            "to save; make a DTensor with DTensor.from_local(x, mesh, placements)"
        )
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tuple(tensor)


def piece_of(tensor: Any, held: Held) -> torch.Tensor:
    """The block itself, which lives here: of a local tensor, or a plain tensor."""
    if held.member is None:
        return tensor
    found = stack_of(tensor)
    x = tensor if found is None else found[0]
    piece: torch.Tensor = communicator_of(x._layout.mesh).pieces(x._local)[held.member]
    return piece if found is None or held.part is None else piece.select(found[1].dim, held.part)
