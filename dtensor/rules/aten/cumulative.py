"""Cumulative operators: running reductions along a sharded dim. A rank scans its block, then applies the total of those before.

They take one all-gather of the blocks' totals, a slice of the tensor each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.scans import Tensors, scan
from ..partial_rules import linear


def add_parts(left: Tensor, right: Tensor) -> Tensor:
    """Add tensors, complex ones by real and imaginary parts: torch's own sum makes NaN of infinite complex numbers."""
    if right.is_complex():
        return torch.view_as_complex(torch.view_as_real(left) + torch.view_as_real(right))
    return left + right


scan("cumsum", lambda x, dim, start: torch.cumsum(x, dim), add_parts, partials=linear())
scan("cumprod", lambda x, dim, start: torch.cumprod(x, dim), torch.mul)
scan("logcumsumexp", lambda x, dim, start: torch.logcumsumexp(x, dim), torch.logaddexp)


def make_later_best_join(wins: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    """Return the join of ``cummax`` and ``cummin``: of equal values the last index is kept, and NaN is best."""

    def join(left: Tensors, right: Tensors) -> Tensors:
        """Return for each position the better (value, index) of both parts, the later one if equal."""
        later = wins(right[0], left[0])
        if right[0].is_floating_point():
            later = right[0].isnan() | (later & ~left[0].isnan())
        return torch.where(later, right[0], left[0]), torch.where(later, right[1], left[1])

    return join


def add_block_offset(best: Callable[[Tensor, int], Tensors]) -> Callable[[Tensor, int, int], Tensors]:
    """Wrap the scan of a block (``torch.cummax``) so that its indices are positions in the global tensor."""

    def scan_block(x: Tensor, dim: int, start: int) -> Tensors:
        values, indices = best(x, dim)
        return values, indices + start

    return scan_block


scan("cummax", add_block_offset(torch.cummax), make_later_best_join(torch.ge), parts=2)
scan("cummin", add_block_offset(torch.cummin), make_later_best_join(torch.le), parts=2)
