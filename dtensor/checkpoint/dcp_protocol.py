"""DCP protocol: describe the blocks of a DTensor to ``torch.distributed.checkpoint`` (its ``_Checkpointable`` protocol)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import CheckpointError
from ..tensor.views.lazy_view import LazyView
from .local_blocks import LocalBlock, block_tensor, find_stack, iter_local_blocks


def chunks(x: Any) -> list[ChunkStorageMetadata]:
    """Return offset and shape of the blocks of ``x`` that torch's DCP load is to fill in this process.

    Replicated blocks are listed once for each rank in this process, so that a load fills all of them.

    Raises:
        CheckpointError: the tensor is a view that is computed when it is read: what torch writes to its blocks would be lost.
    """
    if isinstance(x, LazyView) and find_stack(x) is None:
        raise CheckpointError(
            f"{x._layout!r} is a view with elements on other ranks than those of its base, and "
            "torch.distributed.checkpoint loads into local tensors; load into the base, or use "
            "dtensor.checkpoint.load"
        )
    if x.numel() == 0:  # no rank has a block, but torch finds a tensor by its blocks
        return [ChunkStorageMetadata(torch.Size((0,) * x.ndim), x.size())]
    if not x.is_inference():  # torch writes to the local tensors: copies in other layouts that are cached become stale
        torch.autograd.graph.increment_version(x)
    return [_make_chunk_metadata(block) for block in _local_blocks(x)]


def write_items(x: Any, fqn: str) -> list[WriteItem]:
    """Return one DCP write item for each distinct block of ``x`` in this process; torch removes replicas on other processes."""
    properties = TensorProperties(dtype=x.dtype)
    if x.numel() == 0:
        distinct = [ChunkStorageMetadata(torch.Size((0,) * x.ndim), x.size())]
    else:
        distinct = list({block.offset: _make_chunk_metadata(block) for block in _local_blocks(x)}.values())
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets, i),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.size()),
        )
        for i, chunk in enumerate(distinct)
    ]


def shard_at(x: Any, index: MetadataIndex) -> torch.Tensor:
    """Return the local tensor of the block of ``x`` that starts at ``index.offset``, for torch's DCP to read or fill.

    ``index.index`` chooses among replicas. It counts the blocks of :func:`chunks` in a load, and other blocks in a save, where
    any replica serves.
    """
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu")
    blocks = _local_blocks(x)
    if index.index is not None and index.index < len(blocks):
        blocks = [blocks[index.index], *blocks]
    for block in blocks:
        if index.offset is None or block.offset == tuple(index.offset):
            return block_tensor(x, block).detach()
    raise CheckpointError(f"this rank has no shard of {index.fqn!r} at offset {index.offset}")


def _make_chunk_metadata(block: LocalBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.shape))


def _local_blocks(x: Any) -> list[LocalBlock]:
    """Return the blocks of ``x`` in this process, replicas included, in the order of their offsets.

    Raises:
        CheckpointError: the tensor is partial, so that no rank holds its value.
    """
    if x._layout.is_partial:
        raise CheckpointError(
            f"{x._layout!r} is Partial; call x.redistribute(placements=...) before you pass it to "
            "torch.distributed.checkpoint, or use dtensor.checkpoint, which reduces it"
        )
    ((_, blocks),) = iter_local_blocks({"": x}, 0)
    return blocks
