"""Histograms with their edges (``histc``, without them: see ``counting``). Each rank counts its own block between the same edges.

Edges that the data give are one small reduction. A density divides by the number of all elements, so its counts are added first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call, Meta
from ..kernels import KernelContext
from ..rule import Dims, Factors, Kernel, R
from ..verbs import kernel_rule

aten = torch.ops.aten


def ends(at: KernelContext, x: Any) -> Any:
    """The least and the largest element of all, float64."""

    def own(_: Any, block: Tensor) -> Tensor:
        wide = block.detach().to(torch.float64)
        return torch.stack((-wide.amin(), wide.amax())) if block.numel() else wide.new_full((2,), -torch.inf)

    return at.map(lambda _, found: torch.stack((-found[0], found[1])), at.all_reduce(at.map(own, x), "max"))


def density_of(_: Any, counts: Tensor, edges: Tensor) -> Tensor:
    return counts / counts.sum() / edges.diff()


def histogram_of_blocks(
    at: KernelContext, x: Any, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """Counts, and the edges."""
    given = not isinstance(bins, int)
    found = ends(at, x) if not given and range is None and at.call.operands[0].numel else None

    def own(_: Any, block: Tensor, edges: Any, weights: Tensor | None, bounds: Tensor | None) -> list[Tensor]:
        between = range if bounds is None else bounds.tolist()
        if given:
            made = aten.histogram.bins_tensor(block, edges, weight=weights)
        elif block.numel():
            made = aten.histogram.bin_ct(block, bins, range=between, weight=weights)
        else:  # of nothing it would choose ends of its own
            made = aten.histogram.bin_ct(block.new_zeros(1), bins, range=between or [0.0, 1.0])
            made = made[0].zero_(), made[1]
        return list(made)

    counts, edges = at.map(own, x, bins if given else None, weight, found)
    if density:
        counts = at.map(density_of, at.all_reduce(counts, "sum"), edges)
    return counts, edges


def histogram_factors(call: Call) -> Factors:
    """Weights lie as the elements do."""
    shape = call.shape(0)
    dims: Dims = tuple((f"d{d}",) for d in range(len(shape)))
    sizes = {f"d{d}": size for d, size in enumerate(shape)}
    operands = tuple(((),) if name == "bins" else dims for name in call.names)
    found = isinstance(call["bins"], int) and call["range"] is None and call.operands[0].numel > 0
    counts = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in call.results[:1] if meta is not None)
    counted = Kernel(
        histogram_of_blocks,
        lacking=(R if call["density"] else Partial("sum"), R),
        collectives=found + bool(call["density"]),
        nbytes=lambda call: 16 * found + counts * bool(call["density"]),
        joint=True,
    )
    return Factors(operands, (((),), ((),)), sizes, kernels=dict.fromkeys(sizes, counted))


def histogram_metas(call: Call) -> tuple[Meta, ...]:
    bins, dtype = call["bins"], call.operands[0].dtype
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return Meta((count,), (1,), dtype), Meta((count + 1,), (1,), dtype)


kernel_rule("histogram", histogram_factors, metas=histogram_metas, floats_matter=True)
