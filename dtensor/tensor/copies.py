"""Copies of a DTensor, and what it is in a file: its local, its layout, its flags, and what users hung on it."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..base.mode_stack import Scoped
from ..base.patches import changed
from ..comm import PerRank, communicator_of, per_rank
from ..dispatch.functorch import below_transforms
from ..dispatch.tensor_state import NOT_COPIED
from ..dispatch.wrap import wrap_local
from ..errors import DTensorError, UnsupportedOperationError
from ..layout.layout import Layout, restore_layout
from ..mesh.device_mesh import restore_mesh
from ..placement import Partial, Replicate, Shard

_AS_PIECES: Scoped[None] = Scoped("pieces_while_loading")


def shallow(x: Any) -> Any:
    """Another tensor of the same memory."""
    made = x.detach()
    _dress(made, x)
    made.__dict__.update(user_attributes(x))
    return made


def deep(x: Any, memo: dict[int, Any]) -> Any:
    """A leaf with memory of its own."""
    if not x.is_leaf:
        raise UnsupportedOperationError("only leaf DTensors can be deep-copied; use x.detach().clone()")
    if id(x) in memo:
        return memo[id(x)]
    with torch.no_grad(), below_transforms():
        made = wrap_local(x._local.detach().clone(), x._layout)
    _dress(made, x)
    memo[id(x)] = made
    made.__dict__.update(copy.deepcopy(user_attributes(x), memo))
    if x.grad is not None:
        if x.grad.dtype != x.dtype:
            made.grad_dtype = x.grad_dtype
        made.grad = copy.deepcopy(x.grad, memo)
    return made


def dense(x: Any) -> Any:
    """One whose blocks lie in memory as the layout says."""
    layout = x._layout
    local = communicator_of(layout.mesh).map(lambda member, block: layout.block_beside(block, member).copy_(block), x._local)
    return wrap_local(local, layout)


def reduced(x: Any, protocol: Any) -> Any:
    """Pickles this rank's piece and the layout, without process groups; restored where a rank, or all of them, are again."""
    flags = x.requires_grad, getattr(x, "_is_param", False)
    return restore_tensor, (
        x._local.detach(),
        x._layout,
        *flags,
        user_attributes(x) or None,
        *communicator_of(x._layout.mesh).held[:1],
    )


@dataclass(frozen=True, slots=True)
class RankPiece:
    """A DTensor as a file has it, apart from any process group.

    Attributes:
        layout: the layout of the DTensor.
        locals: pairs of a position in the mesh and its local tensor; one, or all where all ranks lived in the writing process.
    """

    layout: Layout
    locals: tuple[tuple[int, torch.Tensor], ...]


def pieces_while_loading() -> AbstractContextManager[None]:
    """Have DTensors that are unpickled inside of the block become :class:`RankPiece` values."""
    return _AS_PIECES.entered(None)


def restore_tensor(
    local: Any, layout: Layout, requires_grad: bool, is_param: bool, marks: Any = None, member: int | None = None
) -> Any:
    """A DTensor of what ``member`` had (None: a rank outside of the mesh, or a file that does not say)."""
    if _AS_PIECES:
        numbered = enumerate(local.shards) if isinstance(local, PerRank) else [(member, local)] if member is not None else []
        return RankPiece(layout, tuple(numbered))
    comm = communicator_of(layout.mesh)
    if isinstance(local, PerRank) != comm.holds_all:
        held = "the local tensors of all ranks" if isinstance(local, PerRank) else "one rank's local tensor"
        where = f"the pickled DTensor has {held}, but {layout.mesh!r} has kind {layout.mesh.kind!r} here"
        raise DTensorError(
            f"{where}: unpickle it in processes with the same ranks, send x.full_tensor(), "
            "or read the files of all ranks with dtensor.checkpoint.merge_rank_files(paths)"
        )
    if member is not None and comm.held and not _same_piece(layout, member, comm.held[0]):
        sent, here = (layout.mesh.ranks[each] for each in (member, comm.held[0]))
        raise DTensorError(
            f"the local tensor of rank {sent} of a DTensor, {layout!r}, was unpickled on rank {here}, which "
            "has another shard: send x.full_tensor(), or save with dtensor.checkpoint.save (torch.save "
            "stores one rank's shard)"
        )
    made: Any = wrap_local(local, layout)
    made.__dict__.update(marks or {})
    if is_param:
        made._is_param = True
    return made.requires_grad_() if requires_grad else made


def _same_piece(layout: Layout, one: int, other: int) -> bool:
    """Whether two members have the same of a value: they differ along mesh dims over which it is whole."""
    at, there = (layout.mesh.coordinates[member] for member in (one, other))
    return all(isinstance(p, Replicate) or a == b for p, a, b in zip(layout.placements, at, there, strict=True))


def _dress(made: Any, like: Any) -> None:
    """Give a new leaf the flags of another."""
    if getattr(like, "_is_param", False):
        made._is_param = True
    if like.requires_grad:
        made.requires_grad_()


def user_attributes(x: Any) -> dict[str, Any]:
    """Return the attributes that users set on ``x``, which go with its copies as those of a plain tensor do."""
    return {name: value for name, value in x.__dict__.items() if name not in NOT_COPIED}


# What a saved DTensor is made of: values only, so that torch.load(weights_only=True) reads it.
torch.serialization.add_safe_globals([restore_tensor, restore_layout, restore_mesh, per_rank, Shard, Replicate, Partial])
changed("torch._weights_only_unpickler._marked_safe_globals_set")
