"""Running reductions along a sharded dim: each rank scans its block, then applies the total of the blocks before it.

One all-gather of the blocks' totals, a slice of the tensor each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..partial_rules import linear
from ..scans import Tensors, scan


def added(left: Tensor, right: Tensor) -> Tensor:
    """Complex numbers by their parts: torch's sum of two is ``left + 1 * right``, which makes NaN of infinity."""
    if right.is_complex():
        return torch.view_as_complex(torch.view_as_real(left) + torch.view_as_real(right))
    return left + right


scan("cumsum", lambda x, dim, start: torch.cumsum(x, dim), added, partials=linear())
scan("cumprod", lambda x, dim, start: torch.cumprod(x, dim), torch.mul)
scan("logcumsumexp", lambda x, dim, start: torch.logcumsumexp(x, dim), torch.logaddexp)


def last_best(wins: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    """Of equal values the last index, the last NaN before everything."""

    def join(left: Tensors, right: Tensors) -> Tensors:
        later = wins(right[0], left[0])
        if right[0].is_floating_point():
            later = right[0].isnan() | (later & ~left[0].isnan())
        return torch.where(later, right[0], left[0]), torch.where(later, right[1], left[1])

    return join


def with_index(best: Callable[[Tensor, int], Tensors]) -> Callable[[Tensor, int, int], Tensors]:
    def block(x: Tensor, dim: int, start: int) -> Tensors:
        values, indices = best(x, dim)
        return values, indices + start

    return block


scan("cummax", with_index(torch.cummax), last_best(torch.ge), parts=2)
scan("cummin", with_index(torch.cummin), last_best(torch.le), parts=2)
