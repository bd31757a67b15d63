"""Copies and pickles of a DTensor: its local tensor, layout and flags, and attributes that the user set."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..base.mode_stack import ModeStack
from ..base.patches import patch_applied
from ..comm import PerRank, per_rank
from ..comm.map_ranks import communicator_of
from ..errors import DTensorError, UnsupportedOperationError
from ..layout.layout import Layout, restore_layout
from ..mesh.device_mesh import restore_mesh
from ..placement import Partial, Replicate, Shard
from ..state.functorch import below_transforms
from ..state.wrap import wrap_local
from .tensor_state import NOT_COPIED

_AS_RANK_SHARDS: ModeStack[None] = ModeStack("rank_shards_while_loading")


def shallow_copy(x: Any) -> Any:
    """Return a detached DTensor with the memory of ``x``, its flags and its user attributes, as ``copy.copy`` does."""
    result = x.detach()
    _copy_flags(result, x)
    result.__dict__.update(user_attributes(x))
    return result


def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a leaf with memory of its own, its gradient, flags and user attributes, as ``copy.deepcopy`` does."""
    if not x.is_leaf:
        raise UnsupportedOperationError("only leaf DTensors can be deep-copied; use x.detach().clone()")
    if id(x) in memo:
        return memo[id(x)]
    with torch.no_grad(), below_transforms():
        result = wrap_local(x._local.detach().clone(), x._layout)
    _copy_flags(result, x)
    memo[id(x)] = result
    result.__dict__.update(copy.deepcopy(user_attributes(x), memo))
    if x.grad is not None:
        if x.grad.dtype != x.dtype:
            result.grad_dtype = x.grad_dtype
        result.grad = copy.deepcopy(x.grad, memo)
    return result


def dense_copy(x: Any) -> Any:
    """Return a copy of ``x`` with local tensors that have the strides of the layout, not those of a view."""
    layout = x._layout
    local = communicator_of(layout.mesh).map(lambda member, shard: layout.new_local_like(shard, member).copy_(shard), x._local)
    return wrap_local(local, layout)


def reduce_for_pickle(x: Any, protocol: Any) -> Any:
    """Return the function and the arguments by which pickle restores ``x``: the local tensor, the layout and flags.

    It can be restored on the same rank, or, with all ranks in this process, in such a process.
    """
    flags = x.requires_grad, getattr(x, "_is_param", False)
    return restore_tensor, (
        x._local.detach(),
        x._layout,
        *flags,
        user_attributes(x) or None,
        *communicator_of(x._layout.mesh).held[:1],
    )


@dataclass(frozen=True, slots=True)
class RankShards:
    """The local tensors of a DTensor in a file, without a process group.

    Attributes:
        layout: the layout of the DTensor.
        locals: pairs of a position in the mesh and its local tensor. One pair, or all if the writing process had all ranks.
    """

    layout: Layout
    locals: tuple[tuple[int, torch.Tensor], ...]


def load_as_rank_shards() -> AbstractContextManager[None]:
    """Return a context in which unpickled DTensors become :class:`RankShards` values."""
    return _AS_RANK_SHARDS.entered(None)


def restore_tensor(
    local: Any, layout: Layout, requires_grad: bool, is_param: bool, marks: Any = None, member: int | None = None
) -> Any:
    """Return the unpickled DTensor with the local tensor of ``member``; raise on a rank that has another shard.

    ``member`` None: a rank outside the mesh, or a file that does not contain the position.
    """
    if _AS_RANK_SHARDS:
        indexed = enumerate(local.shards) if isinstance(local, PerRank) else [(member, local)] if member is not None else []
        return RankShards(layout, tuple(indexed))
    comm = communicator_of(layout.mesh)
    if isinstance(local, PerRank) != comm.holds_all:
        content = "the local tensors of all ranks" if isinstance(local, PerRank) else "one rank's local tensor"
        problem = f"the pickled DTensor has {content}, but {layout.mesh!r} has kind {layout.mesh.kind!r} here"
        raise DTensorError(
            f"{problem}: unpickle it in processes with the same ranks, send x.full_tensor(), "
            "or read the files of all ranks with dtensor.checkpoint.merge_rank_files(paths)"
        )
    if member is not None and comm.held and not _have_same_shard(layout, member, comm.held[0]):
        sent, own_rank = (layout.mesh.ranks[m] for m in (member, comm.held[0]))
        raise DTensorError(
            f"the local tensor of rank {sent} of a DTensor, {layout!r}, was unpickled on rank {own_rank}, which "
            "has another shard: send x.full_tensor(), or save with dtensor.checkpoint.save (torch.save "
            "stores one rank's shard)"
        )
    result: Any = wrap_local(local, layout)
    result.__dict__.update(marks or {})
    if is_param:
        result._is_param = True
    return result.requires_grad_() if requires_grad else result


def _have_same_shard(layout: Layout, one: int, other: int) -> bool:
    """Return True if two members have the same local tensor: they differ only along mesh dims of Replicate."""
    first_coordinate, second_coordinate = (layout.mesh.coordinates[member] for member in (one, other))
    return all(
        isinstance(p, Replicate) or a == b for p, a, b in zip(layout.placements, first_coordinate, second_coordinate, strict=True)
    )


def _copy_flags(leaf: Any, like: Any) -> None:
    """Make the new ``leaf`` a parameter, or one that requires grad, if ``like`` is."""
    if getattr(like, "_is_param", False):
        leaf._is_param = True
    if like.requires_grad:
        leaf.requires_grad_()


def user_attributes(x: Any) -> dict[str, Any]:
    """Return the attributes that users set on ``x``, which go with its copies as those of a plain tensor do."""
    return {name: value for name, value in x.__dict__.items() if name not in NOT_COPIED}


# A saved DTensor consists of values only, so that torch.load(weights_only=True) reads it.
torch.serialization.add_safe_globals([restore_tensor, restore_layout, restore_mesh, per_rank, Shard, Replicate, Partial])
patch_applied("torch._weights_only_unpickler._marked_safe_globals_set")
