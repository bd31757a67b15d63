"""Indices into a dim that is sharded: which of them a rank's block holds, and where in it."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_internals import assert_async


def located(
    index: torch.Tensor, offset: int, size: int, total: int, *, negative: bool, error: type[Exception]
) -> tuple[Any, Any]:
    """(whether the block ``offset .. offset + size`` of ``total`` holds each index, its position there, any valid one elsewhere).

    Raises:
        error: an index is out of range, as the operator does on plain tensors (on an accelerator a device-side assertion).
    """
    index = index.long()
    _check_range(index, total, negative, error)
    position = (torch.where(index < 0, index + total, index) if negative else index) - offset
    return (position >= 0) & (position < size), position.clamp(0, max(0, size - 1))


def _check_range(index: torch.Tensor, total: int, negative: bool, error: type[Exception]) -> None:
    if index.is_meta or not index.numel():
        return
    fits = ((index >= (-total if negative else 0)) & (index < total)).all()
    if index.device.type != "cpu" or type(fits) is not torch.Tensor:  # nobody can look into a FakeTensor
        assert_async(fits)
    elif not fits:
        raise error(f"index out of range: found one outside [{-total if negative else 0}, {total - 1}]")


def along_dim(mask: torch.Tensor, dim: int, ndim: int) -> torch.Tensor:
    """A mask over one dim in a shape that broadcasts with a tensor of ``ndim`` dims."""
    return mask.reshape([-1 if d == dim else 1 for d in range(ndim)])


def with_scratch(block: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy with one more element along ``dim``, for what belongs to other ranks to be written to."""
    shape = list(block.shape)
    shape[dim] += 1
    made = block.new_empty(shape)
    made.narrow(dim, 0, block.shape[dim]).copy_(block)
    made.select(dim, block.shape[dim]).zero_()
    return made
