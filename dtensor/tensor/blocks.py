"""Who holds which block of a tensor, and which of the holders answers for it: pure maths on layouts, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import PerRank, communicator_of
from ..errors import CheckpointError
from ..layout.layout import Layout
from ..redistribute.intervals import blocks
from .dtensor import DTensor

Offset = tuple[int, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A block that this process holds of a tensor.

    Attributes:
        member: whose it is, a position in the mesh; None for a plain tensor.
        answers: this one, of all replicas, writes the block and vouches for it.
    """

    member: int | None
    offset: Offset
    shape: Shape
    answers: bool


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


def held_here(tensors: Mapping[str, Any], rank: int) -> Iterator[tuple[str, list[Held]]]:
    """For each name the blocks that this process holds of its tensor.

    Args:
        tensors: name -> tensor, or layout, or plain shape. Replicas take turns in answering, so that each rank writes about as
            many bytes; of plain tensors it is the first rank's value that counts.
        rank: this process's place among those that make the checkpoint.

    Raises:
        CheckpointError: a ``per_rank`` tensor, or one without data.
    """
    load: dict[int, int] = {}
    for name, tensor in tensors.items():
        layout = tensor._layout if isinstance(tensor, DTensor) else tensor
        if not isinstance(layout, Layout):
            shape = _plain_shape(name, tensor)
            yield name, [Held(None, (0,) * len(shape), shape, rank == 0)] if 0 not in shape else []
            continue
        here, held = members_here(layout), []
        for (offset, shape), holders in distinct_blocks(layout).items():
            ranks = layout.mesh.ranks
            answering = min(holders, key=lambda member: (load.get(ranks[member], 0), ranks[member]))
            load[ranks[answering]] = load.get(ranks[answering], 0) + math.prod(shape) * layout.dtype.itemsize
            held += [Held(member, offset, shape, member == answering) for member in holders if member in here]
        yield name, held


def _plain_shape(name: str, tensor: Any) -> Shape:
    if isinstance(tensor, PerRank):
        raise CheckpointError(
            f"{name!r} is a per_rank tensor, whose values differ between ranks: there is no one value to save; "
            "make it distributed first with DTensor.from_local(x, mesh, placements)"
        )
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tuple(tensor)


def piece_of(tensor: Any, member: int | None) -> torch.Tensor:
    """The local tensor of one member that lives here, or a plain tensor itself."""
    if member is None:
        return tensor
    return communicator_of(tensor._layout.mesh).pieces(tensor._local)[member]
