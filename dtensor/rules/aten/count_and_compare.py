"""Counts and tests over all elements: histograms, ``bincount``, ``isin``, ``hash_tensor``, ``equal``, ``allclose``; and what asks
for a Python value, the same on every rank.

Each rank counts its own block between the same ends. Ends that the data give, and the length of a ``bincount``, are one small
reduction. A density divides by the number of all elements, so its counts are added first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...placement import Monoid, Partial
from ..call import Call, Meta
from ..declare import NOTHING, blockwise, fold
from ..folds import REDUCED
from ..kernel_context import KernelContext
from ..notation_rules import by
from ..registry import register
from ..rule import Kernel, R, Rule

aten = torch.ops.aten

# --- questions ----------------------------------------------------------------------------------------------------------
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
    Rule(NOTHING, answer=lambda call: call.shape(0) == call.shape(1), kind="answer", plain=("self", "other")),
)


def memory_of_one_length(call: Call) -> bool:
    """Whether two tensors span as many elements of memory (forward AD asks whether a tangent can lie as its primal does)."""
    spans = [1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride, strict=True)) for x in call.operands[:2] if x.numel]
    return len(spans) != 1 and len(set(spans)) <= 1


register("_has_same_storage_numel", Rule(NOTHING, answer=memory_of_one_length, kind="answer"))

# found among the elements of some block: or; found in no block: and
blockwise(
    "isin", "elements: e*, test_elements: t* -> e*", sums={"t*": by("invert", {False: "max", True: "min"})}, as_laid_out=True
)
fold(
    "hash_tensor",
    REDUCED,
    block=lambda part, x: aten.hash_tensor(x, part.dims, keepdim=True, mode=part["mode"]).view(torch.int64),
    monoid=Monoid("xor", torch.bitwise_xor, torch.zeros_like, elementwise=True),
    finish=lambda part, x, bits: bits.view(torch.uint64),
    dtype=torch.int64,
)


# --- histograms ---------------------------------------------------------------------------------------------------------
def ends(at: KernelContext, x: Any, dtype: torch.dtype = torch.float64, nothing: float = -torch.inf) -> Any:
    """The least and the largest element of all; ``nothing`` is less than any."""

    def own(_: Any, block: Tensor) -> Tensor:
        wide = block.detach().to(dtype)
        return torch.stack((-wide.amin(), wide.amax())) if block.numel() else wide.new_full((2,), nothing)

    return at.map(lambda _, found: torch.stack((-found[0], found[1])), at.all_reduce(at.map(own, x), "max"))


def counts_between(at: KernelContext, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts of each block between the same ends; those of the data where none are given."""
    if min != max or not at.call.operands[0].numel:
        return at.map(lambda _, block: aten.histc(block, bins, min, max), x)

    def count(_: Any, block: Tensor, bounds: Tensor) -> Tensor:
        low, high = bounds.tolist()
        if low == high:  # as torch widens an interval of no length
            low, high = low - 1, high + 1
        return aten.histc(block, bins, low, high)

    return at.map(count, x, ends(at, x))


def interval_of_data(call: Call) -> Kernel:
    asked = int(call["min"] == call["max"] and call.operands[0].numel > 0)  # where the interval ends, two float64
    return Kernel(counts_between, lacking=Partial("sum"), collectives=asked, nbytes=lambda call: 16 * asked, joint=True)


blockwise("histc", "[s*] -> []", kernel=interval_of_data, kind="kernel", floats_matter=True)


def bins_of_blocks(at: KernelContext, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Counts (or summed weights) of each block, as many as the largest number of all asks for."""

    def count(_: Any, block: Tensor, weight: Tensor | None, bounds: Tensor) -> Tensor:
        low, high = bounds.tolist()
        if low < 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        made = aten.bincount(block, weight, max(high + 1, minlength))
        if block.numel() or weight is None or not at.call.shape(0)[0]:
            return made
        return made.to(weight.dtype if weight.dtype is torch.float32 else torch.float64)  # as where there is something to count

    return at.all_reduce(at.map(count, x, weights, ends(at, x, torch.int64, -(2**62))), "sum")


def of_bins(call: Call) -> Kernel | None:
    """Two integers, then as many numbers as there are bins, or more."""
    number = 8 if len(call.operands) == 1 else max(4, call.operands[1].dtype.itemsize)
    taken = len({tuple(layout.shape) for layout in call.operands}) == 1 and call["minlength"] >= 0  # torch refuses others
    kernel = Kernel(bins_of_blocks, collectives=2, nbytes=lambda call: 16 + number * max(1, call["minlength"]))
    return kernel if taken else None


blockwise("bincount", "each: [n] ->", kernel=of_bins, kind="kernel", measured=True)


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
        counts = at.map(lambda _, sums, edges: sums / sums.sum() / edges.diff(), at.all_reduce(counts, "sum"), edges)
    return counts, edges


def of_histogram(call: Call) -> Kernel:
    found = isinstance(call["bins"], int) and call["range"] is None and call.operands[0].numel > 0
    counts = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in call.results[:1] if meta is not None)
    return Kernel(
        histogram_of_blocks,
        lacking=(R if call["density"] else Partial("sum"), R),
        collectives=found + bool(call["density"]),
        nbytes=lambda call: 16 * found + counts * bool(call["density"]),
        joint=True,
    )


def histogram_metas(call: Call) -> tuple[Meta, ...]:
    bins, dtype = call["bins"], call.operands[0].dtype
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return Meta((count,), (1,), dtype), Meta((count + 1,), (1,), dtype)


blockwise(  # weights lie as the elements do
    "histogram",
    "self: [s*], weight: [s*], bins: [] -> [], []",
    kernel=of_histogram,
    kind="kernel",
    metas=histogram_metas,
    floats_matter=True,
)
