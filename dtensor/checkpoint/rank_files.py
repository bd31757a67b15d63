"""Rank files: merge files that each rank wrote with ``torch.save``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CheckpointError
from ..redistribute.intervals import distinct_blocks
from ..tensor.copies import RankShards, load_as_rank_shards
from .tree import TreePath, map_tree, name_of


def merge_rank_files(paths: Sequence[str | os.PathLike[str]], *, weights_only: bool = True) -> Any:
    """Return the state that ranks wrote in parts with ``torch.save``, with plain global tensors in place of DTensors.

    One process calls it, without a process group. Files of replicas may be missing.

    Args:
        paths: a file of each rank, in any order, as ``torch.save(model.state_dict(), f"rank_{rank}.pt")`` wrote them.
        weights_only: as for ``torch.load``.

    Raises:
        CheckpointError: a block is in none of the files, files do not match, or a tensor is partial.

    Cost: memory for all files and for the global tensors; no communication.

    >>> import tempfile, torch, dtensor as dt
    >>> file = tempfile.mktemp()  # written by a program whose ranks all were in one process
    >>> x = dt.distribute_tensor(torch.arange(3.0), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
    >>> torch.save({"x": x, "step": 7}, file)
    >>> dt.checkpoint.merge_rank_files([file])
    {'x': tensor([0., 1., 2.]), 'step': 7}
    """
    if not paths:
        raise CheckpointError("merge_rank_files takes a file of each rank, got none")
    with load_as_rank_shards():
        states = [torch.load(path, map_location="cpu", weights_only=weights_only) for path in paths]
    shards_by_path: dict[TreePath, list[RankShards]] = {}
    for state in states:
        map_tree(
            lambda leaf, path: shards_by_path.setdefault(path, []).append(leaf) if isinstance(leaf, RankShards) else None, state
        )

    def merged(leaf: Any, path: TreePath) -> Any:
        return _merge_tensor(name_of(path), shards_by_path[path]) if isinstance(leaf, RankShards) else leaf

    result = map_tree(merged, states[0])
    incomplete = sorted({name_of(path) for path, rank_shards in shards_by_path.items() if len(rank_shards) < len(states)})
    if incomplete:
        raise CheckpointError(f"{incomplete[:4]} are distributed in some of the files only: give files of one save")
    return result


def _merge_tensor(name: str, rank_shards: list[RankShards]) -> torch.Tensor:
    """Return the global tensor that is assembled from the ranks' shards of it; raise if a block is missing."""
    layout = rank_shards[0].layout
    if any(part.layout != layout for part in rank_shards):
        raise CheckpointError(
            f"{name!r} is laid out as {sorted({repr(p.layout) for p in rank_shards})} in the files: give files of one save"
        )
    if layout.is_partial:
        raise CheckpointError(f"{name!r} is partial, {layout!r}: call x.redistribute(placements=...) before torch.save")
    locals_ = {member: local for part in rank_shards for member, local in part.locals}
    result = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    for (offset, shape), holders in distinct_blocks(layout).items():
        local = next((locals_[member] for member in holders if member in locals_), None)
        if local is None:
            ranks = [layout.mesh.ranks[member] for member in holders]
            raise CheckpointError(
                f"the block of {name!r} at {offset} is in none of the files: add the file of one of the ranks {ranks}"
            )
        result[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))] = local
    return result
