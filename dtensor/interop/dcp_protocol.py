"""What ``torch.distributed.checkpoint`` asks of a tensor (its ``_Checkpointable`` protocol): its own functions take DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import CheckpointError
from ..tensor.views.blocks import Held, held_here, piece_of, stack_of
from ..tensor.views.remote_view import RemoteView


def chunks(x: Any) -> list[ChunkStorageMetadata]:
    """The blocks that are to be filled.

    Raises:
        CheckpointError: the tensor is a view that is computed when it is read: what torch writes to its blocks would be lost.
    """
    if isinstance(x, RemoteView) and stack_of(x) is None:
        raise CheckpointError(
            f"{x._layout!r} is a view with elements on other ranks than those of its base, and "
            "torch.distributed.checkpoint loads into local tensors; load into the base, or use "
            "dtensor.checkpoint.load"
        )
    return _chunks(x)


def _chunks(x: Any) -> list[ChunkStorageMetadata]:
    """The blocks that this process holds: one with process groups, each rank's in one process."""
    if x.numel() == 0:  # it has no blocks, but torch knows a tensor by its blocks
        return [ChunkStorageMetadata(torch.Size((0,) * x.ndim), x.size())]
    return [ChunkStorageMetadata(torch.Size(held.offset), torch.Size(held.shape)) for held in _held(x)]


def write_items(x: Any, fqn: str) -> list[WriteItem]:
    """One item to be written per block; torch removes replicas."""
    properties = TensorProperties(dtype=x.dtype)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets, i),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.size()),
        )
        for i, chunk in enumerate(_chunks(x))
    ]


def shard_at(x: Any, index: MetadataIndex) -> torch.Tensor:
    """The local tensor of the block that starts at ``index.offset``."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu")
    for held in _held(x):
        if index.offset is None or held.offset == tuple(index.offset):
            return piece_of(x, held).detach()
    raise CheckpointError(f"this rank has no shard of {index.fqn!r} at offset {index.offset}")


def _held(x: Any) -> list[Held]:
    """The blocks here, of replicas the first.

    Raises:
        CheckpointError: the tensor is not reduced, so that no rank holds its value.
    """
    if x._layout.is_partial:
        raise CheckpointError(
            f"{x._layout!r} is Partial; call x.redistribute(placements=...) before you pass it to "
            "torch.distributed.checkpoint, or use dtensor.checkpoint, which reduces it"
        )
    ((_, held),) = held_here({"": x}, 0)
    return list({piece.offset: piece for piece in reversed(held)}.values())[::-1]
