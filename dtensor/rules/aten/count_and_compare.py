"""Count and compare all elements: histograms, ``bincount``, ``isin``, ``hash_tensor``, ``equal``, ``allclose``, Python values.

Each rank counts its own block between the same bounds. Bounds from data, and the length of a ``bincount``, are one small
reduction. A density divides by the number of all elements, so its counts are reduced first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...placement import Monoid, Partial
from ..call import Call, Meta
from ..declare import NO_FACTORS, blockwise, fold
from ..declared_factors import by
from ..folds import REDUCED_PATTERN
from ..kernel_context import KernelContext
from ..registry import register
from ..rule import Kernel, R, Rule

aten = torch.ops.aten

# --- Python values ------------------------------------------------------------------------------------------------------
blockwise("_local_scalar_dense", "[s*] ->", kind="whole")
fold(
    "equal",
    "each: [s*] ->",
    block=lambda part, x, y: torch.tensor(torch.equal(x, y), device=x.device),
    monoid="min",
    finish=bool,
    dtype=torch.bool,
    answer=lambda call: NotImplemented if call.shape(0) == call.shape(1) else False,
    absent=True,
    plain=("other",),
)
fold(
    "allclose",
    "each: [s*] ->",
    block=lambda part, x, y: torch.tensor(torch.allclose(x, y, part["rtol"], part["atol"], part["equal_nan"]), device=x.device),
    monoid="min",
    finish=bool,
    dtype=torch.bool,
    plain=("other",),
)
register(
    "is_same_size",
    Rule(NO_FACTORS, answer=lambda call: call.shape(0) == call.shape(1), kind="answer", plain=("self", "other")),
)


def have_equal_storage_spans(call: Call) -> bool:
    """Return True if two tensors span equally many elements of memory, as forward AD requires of a tangent and its primal."""
    spans = [1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride, strict=True)) for x in call.operands[:2] if x.numel]
    return len(spans) != 1 and len(set(spans)) <= 1


register("_has_same_storage_numel", Rule(NO_FACTORS, answer=have_equal_storage_spans, kind="answer"))

# found in some block: max; found in no block: min
blockwise(
    "isin", "elements: e*, test_elements: t* -> e*", sums={"t*": by("invert", {False: "max", True: "min"})}, as_laid_out=True
)
fold(
    "hash_tensor",
    REDUCED_PATTERN,
    block=lambda part, x: aten.hash_tensor(x, part.dims, keepdim=True, mode=part["mode"]).view(torch.int64),
    monoid=Monoid("xor", torch.bitwise_xor, torch.zeros_like, elementwise=True),
    finish=lambda part, x, bits: bits.view(torch.uint64),
    dtype=torch.int64,
)


# --- histograms ---------------------------------------------------------------------------------------------------------
def find_min_max(at: KernelContext, x: Any, dtype: torch.dtype = torch.float64, nothing: float = -torch.inf) -> Any:
    """All-reduce the smallest and the largest of all elements into one tensor. ``nothing``: both for empty blocks."""

    def min_max_of_block(_: Any, block: Tensor) -> Tensor:
        wide = block.detach().to(dtype)
        return torch.stack((-wide.amin(), wide.amax())) if block.numel() else wide.new_full((2,), nothing)

    return at.map(lambda _, extremes: torch.stack((-extremes[0], extremes[1])), at.all_reduce(at.map(min_max_of_block, x), "max"))


def histc_of_blocks(at: KernelContext, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Count the elements of each rank's block in bins between the same bounds, those of all data if none are given (a kernel)."""
    if min != max or not at.call.operands[0].numel:
        return at.map(lambda _, block: aten.histc(block, bins, min, max), x)

    def count_in_bins(_: Any, block: Tensor, bounds: Tensor) -> Tensor:
        """Count the elements of one rank's block in bins between the global bounds."""
        low, high = bounds.tolist()
        if low == high:  # torch widens an empty interval like this
            low, high = low - 1, high + 1
        return aten.histc(block, bins, low, high)

    return at.map(count_in_bins, x, find_min_max(at, x))


def histc_kernel(call: Call) -> Kernel:
    """Return the kernel of ``histc``, which has a collective only if the call gives no bounds."""
    needs_interval = int(call["min"] == call["max"] and call.operands[0].numel > 0)  # the bounds of the interval: two float64
    return Kernel(
        histc_of_blocks, lacking=Partial("sum"), collectives=needs_interval, nbytes=lambda call: 16 * needs_interval, joint=True
    )


blockwise("histc", "[s*] -> []", kernel=histc_kernel, kind="kernel", floats_matter=True)


def bincount_of_blocks(at: KernelContext, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count the values of all ranks, up to the global maximum, and all-reduce the counts or summed weights (a kernel)."""

    def count_values(_: Any, block: Tensor, weight: Tensor | None, bounds: Tensor) -> Tensor:
        """Count the values of one rank's block up to the global maximum. Raise if some value is negative."""
        low, high = bounds.tolist()
        if low < 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        counts = aten.bincount(block, weight, max(high + 1, minlength))
        if block.numel() or weight is None or not at.call.shape(0)[0]:
            return counts
        return counts.to(weight.dtype if weight.dtype is torch.float32 else torch.float64)  # the dtype of a non-empty count

    return at.all_reduce(at.map(count_values, x, weights, find_min_max(at, x, torch.int64, -(2**62))), "sum")


def bincount_kernel(call: Call) -> Kernel | None:
    """Return the kernel of ``bincount``, or None for operands that torch refuses."""
    number = 8 if len(call.operands) == 1 else max(4, call.operands[1].dtype.itemsize)
    is_valid = len({tuple(layout.shape) for layout in call.operands}) == 1 and call["minlength"] >= 0  # torch refuses others
    kernel = Kernel(bincount_of_blocks, collectives=2, nbytes=lambda call: 16 + number * max(1, call["minlength"]))
    return kernel if is_valid else None


blockwise("bincount", "each: [n] ->", kernel=bincount_kernel, kind="kernel", measured=True)


def histogram_of_blocks(
    at: KernelContext, x: Any, bins: Any = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    """Return each rank's counts and the bin edges, which are equal on all ranks. A density all-reduces the counts (a kernel)."""
    has_edges = not isinstance(bins, int)
    interval = find_min_max(at, x) if not has_edges and range is None and at.call.operands[0].numel else None

    def histogram_of_block(_: Any, block: Tensor, edges: Any, weights: Tensor | None, bounds: Tensor | None) -> list[Tensor]:
        """Count the elements of one rank's block in bins between the global bounds; return counts and edges."""
        between = range if bounds is None else bounds.tolist()
        if has_edges:
            counts_and_edges = aten.histogram.bins_tensor(block, edges, weight=weights)
        elif block.numel():
            counts_and_edges = aten.histogram.bin_ct(block, bins, range=between, weight=weights)
        else:  # for an empty block torch would choose other bounds
            counts_and_edges = aten.histogram.bin_ct(block.new_zeros(1), bins, range=between or [0.0, 1.0])
            counts_and_edges = counts_and_edges[0].zero_(), counts_and_edges[1]
        return list(counts_and_edges)

    counts, edges = at.map(histogram_of_block, x, bins if has_edges else None, weight, interval)
    if density:
        counts = at.map(lambda _, sums, edges: sums / sums.sum() / edges.diff(), at.all_reduce(counts, "sum"), edges)
    return counts, edges


def histogram_kernel(call: Call) -> Kernel:
    """Return the kernel of ``histogram``, with the collectives that bounds from data and a density need."""
    needs_interval = isinstance(call["bins"], int) and call["range"] is None and call.operands[0].numel > 0
    counts = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in call.results[:1] if meta is not None)
    return Kernel(
        histogram_of_blocks,
        lacking=(R if call["density"] else Partial("sum"), R),
        collectives=needs_interval + bool(call["density"]),
        nbytes=lambda call: 16 * needs_interval + counts * bool(call["density"]),
        joint=True,
    )


def histogram_metas(call: Call) -> tuple[Meta, ...]:
    """Return the metas of the counts and of the edges of ``histogram``."""
    bins, dtype = call["bins"], call.operands[0].dtype
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return Meta((count,), (1,), dtype), Meta((count + 1,), (1,), dtype)


blockwise(  # weights are sharded as the elements
    "histogram",
    "self: [s*], weight: [s*], bins: [] -> [], []",
    kernel=histogram_kernel,
    kind="kernel",
    metas=histogram_metas,
    floats_matter=True,
)
