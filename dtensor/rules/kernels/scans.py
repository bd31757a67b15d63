"""Scans: running operations along a dim, block by block, each block continuing those before it."""

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
        """Scan each rank's block, all-gather the last slices, and continue each block from those before it."""
        layout, ndim = at.operands[0], len(at.call.shape(0))
        dim = dim % ndim
        dtypes = [meta.dtype for meta in at.results if meta is not None]
        sum_dtypes = [_SUM_DTYPES.get(dtype, dtype) for dtype in dtypes]

        def scan_block(here: Any, own: Tensor) -> Tensors:
            """Scan one rank's block by itself (without the blocks before it), in the dtype of sums."""
            scanned = self.block(own if own.dtype is sum_dtypes[0] else own.to(sum_dtypes[0]), dim, here.offset)
            if self.parts == 1:
                return (scanned if scanned.dtype is sum_dtypes[0] else scanned.to(sum_dtypes[0]),)
            return tuple([part.to(dtype) for part, dtype in zip(scanned, sum_dtypes, strict=True)])

        def last_slices(_: Any, own: Tensors) -> Tensors:
            return tuple(part.narrow(dim, max(part.shape[dim] - 1, 0), min(1, part.shape[dim])) for part in own)

        def shape_of_last_slice(member: int) -> tuple[int, ...]:
            """Return the shape of the last slice of one rank's block."""
            shape = list(layout.shape_of(member))
            shape[dim] = min(1, shape[dim])
            return tuple(shape)

        def continue_block(here: Any, own: Tensors, ends: Sequence[Sequence[Tensor]]) -> Any:
            """Join the last slices of all earlier blocks, and continue this block's scan from them."""
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
        ends = [at.all_gather(part, shape_of_last_slice) for part in lasts]  # for each part, by group position
        return at.map(continue_block, blocks, ends)

    def join_parts(self, left: Tensors, right: Tensors) -> Tensors:
        return self.join(left, right) if self.parts > 1 else (self.join(left[0], right[0]),)

    def nbytes(self, call: Call) -> int:
        """Return the bytes that a rank sends: one slice of each result, in the dtype of the computation."""
        shape, dtypes = call.shape(0), [meta.dtype for meta in call.results if meta is not None]
        rows = math.prod(shape) // max(1, shape[call.dims("dim", len(shape))[0]]) if shape else 0
        return rows * sum(_SUM_DTYPES.get(dtype, dtype).itemsize for dtype in dtypes)


def scan(names: str, block: Callable[..., Any], join: Callable[..., Any], *, parts: int = 1, **options: Any) -> Rule:
    """Declare running operations along argument ``dim``, which all-gather one slice of each block for each result.

    Args:
        block: ``block(x, dim, start)`` scans a block that begins at position ``start``. Half precision is converted to float32.
        join: ``join(left, right)`` continues ``right`` from the last slice before it. Tuples if there are several ``parts``.
    """
    scan_kernel = Scan(block, join, parts)
    return along(names, kernel=Kernel(scan_kernel, collectives=parts, nbytes=scan_kernel.nbytes), **options)
