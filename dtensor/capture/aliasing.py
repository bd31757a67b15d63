"""Tensors with the memory of others, and where that lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..comm import PerRank
from ..dispatch.wrap import wrap_local
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from .object_ownership import attributes_of, bare
from .program import joined


def stand_in(x: Any, locals_: tuple[torch.Tensor, ...], replaced: bool) -> Any:
    """A leaf with the memory of an argument."""
    if isinstance(x, DTensor):
        made: Any = wrap_local(joined(locals_, x._layout)._local if replaced else x._local, x._layout)
    else:
        made = locals_[0].detach()
    if x.requires_grad:
        torch.Tensor.requires_grad_(made)  # not DTensor's, which brings gradients to the leaf's layout
    if not bare(x):
        made.__dict__.update(attributes_of(x))
    return made


def detached(x: Any) -> Any:
    """``x`` without history, in its very layout: ``detach`` may name the placement on a mesh dim of one rank otherwise."""
    made = x.detach()
    if isinstance(made, DTensor):
        made._layout = x._layout
    return made


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as ``x`` does, also where elements are repeated."""
    once = x.detach()
    for d, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        once = once.narrow(d, 0, 1) if step == 0 and size > 1 else once
    fresh = torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=x.device).copy_(once)
    return fresh.as_strided(x.shape, x.stride())


def own(gradient: Any, copies: Iterator[bool]) -> Any:
    """A gradient that nobody else holds."""
    locals_ = [copied(local) if next(copies) else local.detach() for local in locals_of(gradient)]
    return joined(tuple(locals_), gradient._layout if isinstance(gradient, DTensor) else None)


def apart(x: Any, y: Any) -> bool:
    """Whether two tensors have no element in common: between the first and the last of one is none of the other."""
    pairs = zip(map(_bounds, locals_of(x)), map(_bounds, locals_of(y)), strict=False)
    return not any(a < d and c < b for (a, b), (c, d) in pairs)


def _bounds(x: torch.Tensor) -> tuple[int, int]:
    """The first address of its elements, and the one after the last."""
    count = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + count * x.itemsize


def counts(x: Any) -> bool:
    """Whether writes to it are counted."""
    return isinstance(x, torch.Tensor) and not isinstance(x, PerRank) and not x.is_inference()
