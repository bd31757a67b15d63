"""Scans: what runs along a dim, block by block, each block continuing what the blocks before it made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .declare import along
from .kernel_context import KernelContext
from .rule import Kernel, Rule, Word

Tensors = tuple[Tensor, ...]
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True)
class Scan(Word):
    """A kernel: ``block(x, dim, start)`` of each block, with the last slices of the blocks before it joined from the left."""

    block: Callable[[Tensor, int, int], Any]
    join: Callable[..., Any]
    parts: int

    def __call__(self, at: KernelContext, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        layout, ndim = at.operands[0], len(at.call.shape(0))
        dim = dim % ndim
        dtypes = [meta.dtype for meta in at.results if meta is not None]
        wide = [_WIDE.get(dtype, dtype) for dtype in dtypes]

        def scanned(here: Any, own: Tensor) -> Tensors:
            made = self.block(own if own.dtype is wide[0] else own.to(wide[0]), dim, here.offset)
            if self.parts == 1:
                return (made if made.dtype is wide[0] else made.to(wide[0]),)
            return tuple([part.to(dtype) for part, dtype in zip(made, wide, strict=True)])

        def last(_: Any, own: Tensors) -> Tensors:
            return tuple(part.narrow(dim, max(part.shape[dim] - 1, 0), min(1, part.shape[dim])) for part in own)

        def shape_of(member: int) -> tuple[int, ...]:
            shape = list(layout.shape_of(member))
            shape[dim] = min(1, shape[dim])
            return tuple(shape)

        def continued(here: Any, own: Tensors, ends: Sequence[Sequence[Tensor]]) -> Any:
            prefix: Tensors | None = None
            for position in range(here.index):
                if at.sizes[position]:
                    end = tuple(part[position] for part in ends)
                    prefix = end if prefix is None else self.joined(prefix, end)
            made = own if prefix is None else self.joined(prefix, own)
            results = [part if part.dtype is dtype else part.to(dtype) for part, dtype in zip(made, dtypes, strict=True)]
            return tuple(results) if self.parts > 1 else results[0]

        blocks = at.map(scanned, x)
        lasts = at.map(last, blocks)
        ends = [at.all_gather(part, shape_of) for part in lasts]  # per part, by group position
        return at.map(continued, blocks, ends)

    def joined(self, left: Tensors, right: Tensors) -> Tensors:
        return self.join(left, right) if self.parts > 1 else (self.join(left[0], right[0]),)

    def nbytes(self, call: Call) -> int:
        """Bytes of one slice of each result, as it is computed."""
        shape, dtypes = call.shape(0), [meta.dtype for meta in call.results if meta is not None]
        rows = math.prod(shape) // max(1, shape[call.dims("dim", len(shape))[0]]) if shape else 0
        return rows * sum(_WIDE.get(dtype, dtype).itemsize for dtype in dtypes)


def scan(names: str, block: Callable[..., Any], join: Callable[..., Any], *, parts: int = 1, **options: Any) -> Rule:
    """A rule for what runs along the dim of argument ``dim``: one all-gather for each result, a slice of a block each.

    Args:
        block: ``block(x, dim, start)`` scans a block that begins at position ``start``; half precision comes as float32.
        join: ``join(left, right)`` continues ``right`` from the last slice of what is left of it; tuples where there are
            several ``parts``.
    """
    made = Scan(block, join, parts)
    return along(names, kernel=Kernel(made, collectives=parts, nbytes=made.nbytes), **options)
