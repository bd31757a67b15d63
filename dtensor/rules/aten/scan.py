"""Running reductions along a sharded dim: each rank scans its block, then applies the total of the blocks before it.

One all-gather of the blocks' totals, a slice of the tensor each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call import Call
from ..kernels import KernelContext
from ..rule import LINEAR_PARTIAL, Kernel
from ..verbs import along

Tensors = tuple[torch.Tensor, ...]
_NARROW = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _scanned(
    at: KernelContext, x: Any, scan: Callable[[int, torch.Tensor], Tensors], join: Callable[[Tensors, Tensors], Tensors]
) -> Any:
    """``scan(offset, block)`` of every block, with the last slices of the blocks before it joined to it from the left."""
    layout, dim = at.operands[0], at.call.dims("dim", len(at.call.shape(0)))[0]

    def last(_: Any, block: Tensors) -> Tensors:
        return tuple(part.narrow(dim, max(part.shape[dim] - 1, 0), min(1, part.shape[dim])) for part in block)

    def shape_of(member: int) -> tuple[int, ...]:
        shape = list(layout.local_shape(at.call.mesh.coordinates[member]))
        shape[dim] = min(1, shape[dim])
        return tuple(shape)

    scanned = at.map(lambda here, block: scan(here.offset, block), x)
    ends = [at.all_gather(part, shape_of) for part in at.map(last, scanned)]  # per part, by group position

    def with_prefix(here: Any, block: Tensors, ends: Sequence[Sequence[torch.Tensor]]) -> Tensors:
        prefix: Tensors | None = None
        for position in range(here.index):
            if at.sizes[position]:
                end = tuple(part[position] for part in ends)
                prefix = end if prefix is None else join(prefix, end)
        return block if prefix is None else join(prefix, block)

    return at.map(with_prefix, scanned, ends)


def running(
    scan: Callable[..., torch.Tensor], combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """The kernel of a running reduction of values; ``scan(block, dim, dtype)``."""

    def run(at: KernelContext, x: Any, dim: int, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        result = at.results[0]
        assert result is not None
        wide = _NARROW.get(result.dtype, result.dtype)
        scanned = _scanned(at, x, lambda _, block: (scan(block, dim, wide),), lambda a, b: (combine(a[0], b[0]),))
        return at.map(lambda _, parts: parts[0].to(result.dtype), scanned)

    return run


def running_extreme(op: Any, best: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The kernel of ``cummax`` and ``cummin``: of equal values the last index, the last NaN before everything."""

    def scan(dim: int) -> Callable[[int, torch.Tensor], Tensors]:
        def one(offset: int, block: torch.Tensor) -> Tensors:
            values, indices = op(block, dim)
            return values, indices + offset

        return one

    def join(left: Tensors, right: Tensors) -> Tensors:
        wins = best(right[0], left[0])
        if right[0].is_floating_point():
            wins = right[0].isnan() | (wins & ~left[0].isnan())
        return torch.where(wins, right[0], left[0]), torch.where(wins, right[1], left[1])

    def run(at: KernelContext, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        return _scanned(at, x, scan(dim), join)

    return run


def slice_bytes(call: Call) -> int:
    """Bytes of one slice of each result, as the kernel computes it."""
    shape, dtypes = call.shape(0), [meta.dtype for meta in call.results if meta is not None]
    rows = math.prod(shape) // max(1, shape[call.dims("dim", len(shape))[0]]) if shape else 0
    return rows * sum(_NARROW.get(dtype, dtype).itemsize for dtype in dtypes)


def scans(name: str, run: Callable[..., Any], parts: int = 1, **options: Any) -> None:
    along(name, kernel=Kernel(run, collectives=parts, nbytes=slice_bytes), **options)


scans("cumsum", running(lambda x, dim, dtype: torch.cumsum(x, dim, dtype=dtype), torch.add), partials=LINEAR_PARTIAL)
scans("cumprod", running(lambda x, dim, dtype: torch.cumprod(x, dim, dtype=dtype), torch.mul))
scans("logcumsumexp", running(lambda x, dim, dtype: torch.logcumsumexp(x.to(dtype), dim), torch.logaddexp))
scans("cummax", running_extreme(torch.cummax, torch.ge), parts=2)
scans("cummin", running_extreme(torch.cummin, torch.le), parts=2)
