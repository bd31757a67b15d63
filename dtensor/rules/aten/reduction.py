"""Reductions over dims: sums, truth values, means and norms leave ``Partial``; variances and log-sums are one small collective.

Means divide by the *global* count. Norms combine as norms: ``norm(x) = norm(norm(block) of every block)``. This is a reduction of
its own (``p_norm``), so the norms of many parameters take one collective when a value is first needed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.caches import memoize
from ...placement import Monoid
from ..call import Call
from ..declare import blockwise, fold, reduce
from ..folds import REDUCED_PATTERN, FoldContext, ReduceInPairs
from ..partial_rules import linear, on_bools

reduce("sum", "sum", partials=linear())
reduce("nansum", "sum")  # if one addend is NaN the element counts as 0, with all its addends
reduce("linalg__powsum _foreach_powsum", "sum")
reduce("count_nonzero", "sum")
reduce("prod", "product", partials="product -> product")
reduce("mean", "avg", partials=linear())
reduce("any _is_any_true", "max", "dim!", partials=on_bools("max -> max"))  # any(max(-1, 0)) is not any(-1)
reduce("all _is_all_true", "min", "dim!", partials=on_bools("min -> min"))
reduce("median mode nanmedian kthvalue", None)


# --- variances: (count, mean, sum of squared deviations) of blocks combine as Chan, Golub and LeVeque (1979) have it, which does
# not cancel as sums of squares do
def block_count_and_moments(part: FoldContext, x: Tensor) -> tuple[Tensor, ...]:
    """Return count, mean and sum of squared deviations of one rank's block, over the folded dims."""
    count = math.prod(x.shape[d] for d in part.dims)
    variance, mean = torch.var_mean(x, part.dims, correction=0, keepdim=True)
    return torch.full_like(mean, count), mean, variance * count


def _combine_moments(a: Tensor, b: Tensor) -> Tensor:
    """Combine count, mean and sum of squared deviations of two blocks into those of both together."""
    count = a[0] + b[0]
    delta = b[1] - a[1]
    share = b[0] / count.clamp(min=1)
    return torch.stack([count, a[1] + delta * share, a[2] + b[2] + delta * delta * a[0] * share])


MOMENTS = Monoid("moments", _combine_moments, torch.zeros_like, combine_all=ReduceInPairs(_combine_moments))


def finish_variance(part: FoldContext, squares: Tensor) -> Tensor:
    correction = part["correction"]
    return squares / max(0.0, part.count - (1 if correction is None else float(correction)))


VARIANCES: dict[str, Any] = {
    "var": lambda part, x, count, mean, squares: finish_variance(part, squares),
    "std": lambda part, x, count, mean, squares: finish_variance(part, squares).sqrt(),
    "var_mean": lambda part, x, count, mean, squares: (finish_variance(part, squares), mean),
    "std_mean": lambda part, x, count, mean, squares: (finish_variance(part, squares).sqrt(), mean),
}
for _name, _finish in VARIANCES.items():  # complex numbers have one variance for both parts
    fold(_name, REDUCED_PATTERN, block=block_count_and_moments, monoid=MOMENTS, numbers=3, finish=_finish, takes="floating")


# --- norms ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _CombineAllNorms:
    """The p-norm of norms, stacked along dim 0."""

    p: float

    def __call__(self, terms: Tensor) -> Tensor:
        """Return the p-norm over dim 0 of stacked norms. If all but one are empty, return that one with its sign."""
        wide = torch.promote_types(terms.dtype, torch.float32)
        norm = torch.linalg.vector_norm(terms, self.p, dim=0, dtype=wide).to(terms.dtype)
        counts = terms != _empty_norm(self.p)
        alone = (terms if self.p > 0 else torch.where(counts, terms, 0)).sum(0)
        return torch.where(counts.sum(0) == 1, alone, norm)  # a number that became a partial value keeps its sign


@dataclass(frozen=True, slots=True)
class _CombineNorms:
    """The p-norm of two norms."""

    p: float

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return _CombineAllNorms(self.p)(torch.stack((a, b)))


def _empty_norm(p: float) -> float:
    return 0.0 if p > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _EmptyNorm:
    """The norm of no elements: 0, or infinity for negative p."""

    p: float

    def __call__(self, like: Tensor) -> Tensor:
        return torch.full_like(like, _empty_norm(self.p), memory_format=torch.contiguous_format)


@memoize(256)
def p_norm(p: float) -> str | Monoid:
    """Return the reduction that combines the p-norms of blocks: "max", "min", "sum" or a monoid ``norm<p>``."""
    if p == math.inf:
        return "max"
    if p == -math.inf:
        return "min"
    if p in (0, 1):
        return "sum"
    return Monoid(f"norm{p:g}", _CombineNorms(p), _EmptyNorm(p), elementwise=True, combine_all=_CombineAllNorms(p))


def library_monoid(name: str) -> Monoid | None:
    """Parse the name of a norm's monoid (``norm2``) and return the monoid; None for other names."""
    if (match := re.fullmatch(r"norm(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)", name)) is None:
        return None
    monoid = p_norm(float(match[1]))
    return monoid if isinstance(monoid, Monoid) and monoid.name == name else None


def norm_monoid(call: Call) -> str | Monoid:
    """Return the reduction that combines the norms of blocks, for the order in the call's arguments."""
    order = call.get("ord", call.get("p", 2))
    return p_norm(2.0 if order is None else float(order))


reduce("linalg_vector_norm norm", norm_monoid, refuses_nothing=True, floats_matter=True)
blockwise("dist", "each: s* ->", sums="*", reduce=norm_monoid, refuses_nothing=True, floats_matter=True)
