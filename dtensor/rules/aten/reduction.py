"""Reductions over whole dims whose shards combine by one named reduction: no communication here, the result is ``Partial``.

Means divide by the *global* count. Norms combine as norms: ``norm(x) = norm(norm(block) of every block)``, a reduction of its own
(``p_norm``), so that the norm of many parameters becomes one collective when its value is first needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...base.caches import remembered
from ...placement import Monoid, Partial
from ..call import Call
from ..kernels import KernelContext
from ..rule import LINEAR_PARTIAL, Choice, Factors, Kernel
from ..verbs import broadcast_factors, kernel_rule, reduce, reduction_factors


def no_empty_shard(choice: Choice) -> bool:
    """Every rank has elements to reduce: max and min of nothing do not exist."""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if choice.factors.reduced.get(name) in ("max", "min"))


def even_average(choice: Choice) -> bool:
    """A mean of means is the mean where all blocks have one size."""
    return all(len(set(choice.sizes(name))) == 1 for name in choice.splits if choice.factors.reduced.get(name) == "avg")


def reduced_dims(call: Call, name: str = "dim") -> tuple[int, ...]:
    """The dims that vanish (``any`` and ``all`` take an empty list to mean none of them)."""
    shape, result = call.shape(0), call.results[0]
    if isinstance(call.get(name), (list, tuple)) and not call[name] and result is not None and result.shape == shape:
        return ()
    return call.dims(name, len(shape))


# --- sums and truths ------------------------------------------------------------------------------------------------
reduce("sum", "sum", partials=LINEAR_PARTIAL)
reduce("nansum", "sum")  # where one term is NaN the element counts for nothing, the other terms' part included
reduce("_foreach_powsum", "sum")
reduce("prod", "product", partials=("product -> product",))
reduce("count_nonzero", "sum")
reduce("median mode nanmedian kthvalue", None)


def _truth(op: str) -> Any:
    def factors(call: Call) -> Factors:
        return reduction_factors(call, reduced_dims(call), op)

    def partials(call: Call) -> tuple[str, ...]:
        return (f"{op} -> {op}",) if call.operands[0].dtype is torch.bool else ()  # any(max(-1, 0)) is not any(-1)

    return {"factors": factors, "partials": partials}


kernel_rule("any _is_any_true", **_truth("max"))
kernel_rule("all _is_all_true", **_truth("min"))


# --- means ------------------------------------------------------------------------------------------------------------
def mean_of_blocks(at: KernelContext, x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Each rank's sum over the number of elements of the whole: terms of the mean, uneven and empty blocks included."""
    shape, result = at.call.shape(0), at.results[0]
    assert result is not None
    dims = at.call.dims("dim", len(shape))
    count = math.prod(shape[d] for d in dims)
    keepdim = bool(at.call.get("keepdim", False))
    wide = torch.promote_types(result.dtype, torch.float32)  # the sum may overflow where the mean does not
    return at.map(lambda _, block: (block.sum(dims, keepdim, dtype=wide) / count).to(result.dtype), x)


def mean_factors(call: Call) -> Factors:
    dims = call.dims("dim", len(call.shape(0)))
    if all(split is None or split.even for d, split in enumerate(call.operands[0].splits) if d in dims):
        return reduction_factors(call, dims, "avg")
    return reduction_factors(call, dims, None, Kernel(mean_of_blocks, lacking=Partial("sum"), joint=True))


kernel_rule("mean", mean_factors, partials=LINEAR_PARTIAL, when=even_average)


# --- norms ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _CombineAll:
    """The p-norm of norms, stacked along dim 0."""

    p: float

    def __call__(self, terms: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(terms.dtype, torch.float32)
        norm = torch.linalg.vector_norm(terms, self.p, dim=0, dtype=wide).to(terms.dtype)
        counts = terms != _nothing(self.p)
        alone = (terms if self.p > 0 else torch.where(counts, terms, 0)).sum(0)
        return torch.where(counts.sum(0) == 1, alone, norm)  # a number that was made a term keeps its sign


@dataclass(frozen=True, slots=True)
class _Combine:
    """The p-norm of two norms."""

    p: float

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _CombineAll(self.p)(torch.stack((a, b)))


def _nothing(p: float) -> float:
    return 0.0 if p > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _Nothing:
    """The norm of no elements: 0, or for negative p infinity."""

    p: float

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, _nothing(self.p), memory_format=torch.contiguous_format)


@remembered(256)
def p_norm(p: float) -> str | Monoid:
    """How the p-norms of blocks combine."""
    if p == math.inf:
        return "max"
    if p == -math.inf:
        return "min"
    if p in (0, 1):
        return "sum"
    return Monoid(f"norm{p:g}", _Combine(p), _Nothing(p), elementwise=True, combine_all=_CombineAll(p))


def norm_of_blocks(at: KernelContext, x: Any, ord: Any = 2, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Norms that nothing has (p infinite or negative) where some block is empty: it is as small, or as large, as can be."""
    result = at.results[0]
    assert result is not None
    dims = at.call.dims("dim", len(at.call.shape(0)))
    keepdim = bool(at.call.get("keepdim", False))
    nothing = 0.0 if ord > 0 else math.inf

    def one(here: Any, block: torch.Tensor) -> torch.Tensor:
        if block.numel():
            return torch.linalg.vector_norm(block, ord, dims, keepdim, dtype=dtype)
        return block.new_full(result.local_shape(at.call.mesh.coordinates[here.member]), nothing, dtype=result.dtype)

    return at.map(one, x)


def norm_order(call: Call) -> float:
    order = call.get("ord", call.get("p", 2))
    return 2.0 if order is None else float(order)


def norm_exists(choice: Choice) -> bool:
    """Norms of nothing exist for 0 <= p < infinity."""
    reduced = [name for name in choice.splits if name in choice.factors.reduced]
    return 0 <= norm_order(choice.call) < math.inf or all(min(choice.sizes(name)) > 0 for name in reduced)


def norm_factors(call: Call) -> Factors:
    dims, order = call.dims("dim", len(call.shape(0))), norm_order(call)
    op = p_norm(order)
    if not 0 <= order < math.inf and any(split is not None and 0 in split.sizes for split in call.operands[0].splits):
        return reduction_factors(call, dims, None, Kernel(norm_of_blocks, lacking=Partial(op), joint=True))
    return reduction_factors(call, dims, op)


kernel_rule("linalg_vector_norm norm", norm_factors, when=norm_exists, floats_matter=True)


def dist_factors(call: Call) -> Factors | None:
    """The p-norm of a difference."""
    factors = broadcast_factors(call)
    op = p_norm(norm_order(call))
    return factors and Factors(factors.operands, ((),), factors.sizes, reduced=dict.fromkeys(factors.sizes, op))


kernel_rule("dist", dist_factors, when=norm_exists, floats_matter=True)
