"""Counts and tests over all elements: histograms, ``bincount``, ``isin``, ``hash_tensor``, ``allclose``.

Each rank counts its own block. Ends of a histogram that the data give, and the length of a ``bincount``, are one small reduction.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..kernels import KernelContext
from ..rule import Dims, Factors, Kernel
from ..verbs import broadcast_factors, kernel_rule, reduction_factors

aten = torch.ops.aten


# --- histograms ---
def histogram_of_blocks(at: KernelContext, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts of each block between the same ends; those of the data where none are given."""
    result = at.results[0]
    assert result is not None
    if min != max:
        return at.map(lambda _, block: aten.histc(block, bins, min, max), x)

    def ends_of(_: Any, block: torch.Tensor) -> torch.Tensor:
        wide = block.detach().to(torch.float64)
        return torch.stack([-wide.amin(), wide.amax()]) if block.numel() else wide.new_full((2,), -torch.inf)

    if not at.call.operands[0].numel:
        return at.map(lambda _, block: aten.histc(block, bins), x)
    ends = at.all_reduce(at.map(ends_of, x), "max")

    def count(_: Any, block: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        low, high = (-bounds[0]).item(), bounds[1].item()
        if low == high:  # as torch widens an interval of no length
            low, high = low - 1, high + 1
        return aten.histc(block, bins, low, high)

    return at.map(count, x, ends)


def histogram_factors(call: Call) -> Factors:
    dims: Dims = tuple((f"d{d}",) for d in range(len(call.shape(0))))
    sizes = {f"d{d}": size for d, size in enumerate(call.shape(0))}
    asked = int(call["min"] == call["max"] and call.operands[0].numel > 0)  # where the interval ends, two float64
    counted = Kernel(histogram_of_blocks, lacking=Partial("sum"), collectives=asked, nbytes=lambda call: 16 * asked, joint=True)
    return Factors((dims,), (((),),), sizes, kernels=dict.fromkeys(sizes, counted))


kernel_rule("histc", histogram_factors, floats_matter=True)


def bins_of_blocks(at: KernelContext, x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Counts (or summed weights) of each block, as many as the largest number of all asks for."""

    def ends_of(_: Any, block: torch.Tensor) -> torch.Tensor:
        wide = block.to(torch.int64)
        return torch.stack([-wide.amin(), wide.amax()]) if block.numel() else wide.new_tensor([0, -1])

    ends = at.all_reduce(at.map(ends_of, x), "max")

    def count(_: Any, block: torch.Tensor, weight: torch.Tensor | None, bounds: torch.Tensor) -> torch.Tensor:
        if bounds[0].item() > 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        length = max(int(bounds[1].item()) + 1, minlength)
        made = aten.bincount(block, weight, length)
        if block.numel() or weight is None or not at.call.shape(0)[0]:
            return made
        return made.to(weight.dtype if weight.dtype is torch.float32 else torch.float64)  # as where there is something to count

    return at.all_reduce(at.map(count, x, weights, ends), "sum")


def bincount_factors(call: Call) -> Factors | None:
    if len(call.shape(0)) != 1 or any(layout.shape != call.operands[0].shape for layout in call.operands):
        return None  # torch refuses them
    dims: Dims = (("n",),)
    number = 8 if len(call.operands) == 1 else max(4, call.operands[1].dtype.itemsize)
    counted = Kernel(bins_of_blocks, collectives=2, nbytes=lambda call: 16 + number * max(1, call["minlength"]))  # or more bins
    return Factors((dims,) * len(call.operands), (), {"n": call.shape(0)[0]}, kernels={"n": counted})


kernel_rule("bincount", bincount_factors, measured=True)


# --- isin ---
def found_among(call: Call) -> Factors:
    """Found among the elements of some block: ``or``; found in no block: ``and``."""
    given = {name: call.shape(i) for i, name in enumerate(call.names)}
    shapes = [given.get("elements", ()), given.get("test_elements", ())]  # either may be a number
    elements, tests = (f"e{d}" for d in range(len(shapes[0]))), (f"t{d}" for d in range(len(shapes[1])))
    own: Dims = tuple((name,) for name in elements)
    among: Dims = tuple((name,) for name in tests)
    sizes = {name[0]: size for name, size in zip((*own, *among), (*shapes[0], *shapes[1]), strict=True)}
    op = "min" if call["invert"] else "max"
    operands = tuple(own if name == "elements" else among for name in call.names)
    return Factors(operands, (own,), sizes, reduced={name[0]: op for name in among})


kernel_rule("isin", found_among, as_laid_out=True)


# --- hash_tensor ---
def hash_of_blocks(at: KernelContext, x: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0, **ignored: Any) -> Any:
    """Bits combine by exclusive or, in any order."""
    result = at.results[0]
    assert result is not None
    layout, coordinates = result, at.call.mesh.coordinates

    def one(here: Any, block: torch.Tensor) -> torch.Tensor:
        shape = layout.local_shape(coordinates[here.member])
        made = aten.hash_tensor(block, dim, keepdim=keepdim, mode=mode) if block.numel() else None
        return torch.zeros(shape, dtype=torch.int64, device=block.device) if made is None else made.view(torch.int64)

    parts = at.all_gather(at.map(one, x), lambda member: layout.local_shape(coordinates[member]))

    def combined(_: Any, hashes: list[torch.Tensor]) -> torch.Tensor:
        total = hashes[0]
        for other in hashes[1:]:
            total = total ^ other
        return total.view(torch.uint64)

    return at.map(combined, parts)


def hash_factors(call: Call) -> Factors:
    return reduction_factors(
        call, call.dims("dim", len(call.shape(0))), None, Kernel(hash_of_blocks, collectives=1, nbytes=hash_bytes, joint=True)
    )


def hash_bytes(call: Call) -> int:
    return sum(8 * math.prod(meta.shape) for meta in call.results if meta is not None)


kernel_rule("hash_tensor", hash_factors)


# --- allclose ---
def close_blocks(at: KernelContext, x: Any, y: Any, *args: Any, **kwargs: Any) -> bool:
    """All blocks are close."""
    same = at.map(lambda _, a, b: torch.tensor(torch.allclose(a, b, *args, **kwargs), device=a.device), x, y)
    return bool(at.all_reduce(same, "min").item())


def close_factors(call: Call) -> Factors | None:
    factors = broadcast_factors(call)
    close = Kernel(close_blocks, collectives=1, nbytes=lambda call: 1, joint=True)
    return factors and Factors(factors.operands, (), factors.sizes, kernels=dict.fromkeys(factors.sizes, close))


kernel_rule("allclose", close_factors)
