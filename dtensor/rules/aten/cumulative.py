"""Cumulative operators: running reductions along a sharded dim. A rank scans its block, then applies the total of those before.

They take one all-gather of the blocks' totals, a slice of the tensor each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..declare import along
from ..kernel_context import KernelContext
from ..partial_rules import linear
from ..rule import Declaration, Kernel, Rule

Tensors = tuple[Tensor, ...]
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True)
class Scan(Declaration):
    """A kernel that applies ``block(x, dim, start)`` to each block, and joins it with the last slices of the blocks before it."""

    block: Callable[[Tensor, int, int], Any]
    join: Callable[..., Any]
    parts: int

    def __call__(self, at: KernelContext, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        layout, ndim = at.operands[0], len(at.call.shape(0))
        dim = dim % ndim
        dtypes = [meta.dtype for meta in at.results if meta is not None]
        sum_dtypes = [_SUM_DTYPES.get(dtype, dtype) for dtype in dtypes]

        def scan_block(here: Any, own: Tensor) -> Tensors:
            scanned = self.block(own if own.dtype is sum_dtypes[0] else own.to(sum_dtypes[0]), dim, here.offset)
            if self.parts == 1:
                return (scanned if scanned.dtype is sum_dtypes[0] else scanned.to(sum_dtypes[0]),)
            return tuple([part.to(dtype) for part, dtype in zip(scanned, sum_dtypes, strict=True)])

        def last_slices(_: Any, own: Tensors) -> Tensors:
            return tuple(part.narrow(dim, max(part.shape[dim] - 1, 0), min(1, part.shape[dim])) for part in own)

        def shape_of(member: int) -> tuple[int, ...]:
            shape = list(layout.shape_of(member))
            shape[dim] = min(1, shape[dim])
            return tuple(shape)

        def continue_block(here: Any, own: Tensors, ends: Sequence[Sequence[Tensor]]) -> Any:
            prefix: Tensors | None = None
            for position in range(here.index):
                if at.sizes[position]:
                    end = tuple(part[position] for part in ends)
                    prefix = end if prefix is None else self.join_parts(prefix, end)
            scanned = own if prefix is None else self.join_parts(prefix, own)
            results = [part if part.dtype is dtype else part.to(dtype) for part, dtype in zip(scanned, dtypes, strict=True)]
            return tuple(results) if self.parts > 1 else results[0]

        blocks = at.map(scan_block, x)
        lasts = at.map(last_slices, blocks)
        ends = [at.all_gather(part, shape_of) for part in lasts]  # for each part, by group position
        return at.map(continue_block, blocks, ends)

    def join_parts(self, left: Tensors, right: Tensors) -> Tensors:
        return self.join(left, right) if self.parts > 1 else (self.join(left[0], right[0]),)

    def nbytes(self, call: Call) -> int:
        """Return the bytes of one slice of each result, in the dtype of the computation."""
        shape, dtypes = call.shape(0), [meta.dtype for meta in call.results if meta is not None]
        rows = math.prod(shape) // max(1, shape[call.dims("dim", len(shape))[0]]) if shape else 0
        return rows * sum(_SUM_DTYPES.get(dtype, dtype).itemsize for dtype in dtypes)


def scan(names: str, block: Callable[..., Any], join: Callable[..., Any], *, parts: int = 1, **options: Any) -> Rule:
    """Declare a running operation along the dim of argument ``dim``: one all-gather for each result, of one slice of each block.

    Args:
        block: ``block(x, dim, start)`` scans a block that begins at position ``start``. Half precision is converted to float32.
        join: ``join(left, right)`` continues ``right`` from the last slice before it. Tuples if there are several ``parts``.
    """
    scan_kernel = Scan(block, join, parts)
    return along(names, kernel=Kernel(scan_kernel, collectives=parts, nbytes=scan_kernel.nbytes), **options)


def add_parts(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum, complex numbers by their parts: torch's complex sum is ``left + 1 * right``, which makes NaN of
    infinity."""
    if right.is_complex():
        return torch.view_as_complex(torch.view_as_real(left) + torch.view_as_real(right))
    return left + right


scan("cumsum", lambda x, dim, start: torch.cumsum(x, dim), add_parts, partials=linear())
scan("cumprod", lambda x, dim, start: torch.cumprod(x, dim), torch.mul)
scan("logcumsumexp", lambda x, dim, start: torch.logcumsumexp(x, dim), torch.logaddexp)


def keep_later_best(wins: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    """Return a join that keeps the last index of equal values, and the last NaN before everything."""

    def join(left: Tensors, right: Tensors) -> Tensors:
        later = wins(right[0], left[0])
        if right[0].is_floating_point():
            later = right[0].isnan() | (later & ~left[0].isnan())
        return torch.where(later, right[0], left[0]), torch.where(later, right[1], left[1])

    return join


def add_block_offset(best: Callable[[Tensor, int], Tensors]) -> Callable[[Tensor, int, int], Tensors]:
    """Wrap a scan so that its indices are those in the global tensor."""

    def scan_block(x: Tensor, dim: int, start: int) -> Tensors:
        values, indices = best(x, dim)
        return values, indices + start

    return scan_block


scan("cummax", add_block_offset(torch.cummax), keep_later_best(torch.ge), parts=2)
scan("cummin", add_block_offset(torch.cummin), keep_later_best(torch.le), parts=2)
