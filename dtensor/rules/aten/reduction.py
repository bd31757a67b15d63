"""Reductions over dims: sums, truths, means and norms leave ``Partial``; variances and log-sums are one small collective.

Means divide by the *global* count. Norms combine as norms: ``norm(x) = norm(norm(block) of every block)``, a reduction of its own
(``p_norm``), so that the norm of many parameters becomes one collective when its value is first needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.caches import remembered
from ...placement import Monoid
from ..call import Call
from ..declare import blockwise, fold, reduce
from ..folds import REDUCED, InPairs, Part
from ..partial_rules import linear, on_bools

reduce("sum", "sum", partials=linear())
reduce("nansum", "sum")  # where one term is NaN the element counts for nothing, the other terms' part included
reduce("linalg__powsum _foreach_powsum", "sum")
reduce("count_nonzero", "sum")
reduce("prod", "product", partials="product -> product")
reduce("mean", "avg", partials=linear())
reduce("any _is_any_true", "max", "dim!", partials=on_bools("max -> max"))  # any(max(-1, 0)) is not any(-1)
reduce("all _is_all_true", "min", "dim!", partials=on_bools("min -> min"))
reduce("median mode nanmedian kthvalue", None)


# --- variances: (count, mean, sum of squared deviations) of blocks combine as Chan, Golub and LeVeque (1979) have it, which does
# not cancel as sums of squares do
def deviations(part: Part, x: Tensor) -> tuple[Tensor, ...]:
    count = math.prod(x.shape[d] for d in part.dims)
    variance, mean = torch.var_mean(x, part.dims, correction=0, keepdim=True)
    return torch.full_like(mean, count), mean, variance * count


def _combine(a: Tensor, b: Tensor) -> Tensor:
    count = a[0] + b[0]
    delta = b[1] - a[1]
    share = b[0] / count.clamp(min=1)
    return torch.stack([count, a[1] + delta * share, a[2] + b[2] + delta * delta * a[0] * share])


MOMENTS = Monoid("moments", _combine, torch.zeros_like, combine_all=InPairs(_combine))


def variance(part: Part, squares: Tensor) -> Tensor:
    correction = part["correction"]
    return squares / max(0.0, part.count - (1 if correction is None else float(correction)))


SPREADS: dict[str, Any] = {
    "var": lambda part, x, count, mean, squares: variance(part, squares),
    "std": lambda part, x, count, mean, squares: variance(part, squares).sqrt(),
    "var_mean": lambda part, x, count, mean, squares: (variance(part, squares), mean),
    "std_mean": lambda part, x, count, mean, squares: (variance(part, squares).sqrt(), mean),
}
for _name, _finish in SPREADS.items():  # of complex numbers the real and the imaginary part vary together
    fold(_name, REDUCED, block=deviations, monoid=MOMENTS, numbers=3, finish=_finish, takes="floating")


# --- norms ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _CombineAll:
    """The p-norm of norms, stacked along dim 0."""

    p: float

    def __call__(self, terms: Tensor) -> Tensor:
        wide = torch.promote_types(terms.dtype, torch.float32)
        norm = torch.linalg.vector_norm(terms, self.p, dim=0, dtype=wide).to(terms.dtype)
        counts = terms != _nothing(self.p)
        alone = (terms if self.p > 0 else torch.where(counts, terms, 0)).sum(0)
        return torch.where(counts.sum(0) == 1, alone, norm)  # a number that was made a term keeps its sign


@dataclass(frozen=True, slots=True)
class _Combine:
    """The p-norm of two norms."""

    p: float

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return _CombineAll(self.p)(torch.stack((a, b)))


def _nothing(p: float) -> float:
    return 0.0 if p > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _Nothing:
    """The norm of no elements: 0, or for negative p infinity."""

    p: float

    def __call__(self, like: Tensor) -> Tensor:
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


def by_order(call: Call) -> str | Monoid:
    order = call.get("ord", call.get("p", 2))
    return p_norm(2.0 if order is None else float(order))


reduce("linalg_vector_norm norm", by_order, refuses_nothing=True, floats_matter=True)
blockwise("dist", "each: s* ->", sums="*", reduce=by_order, refuses_nothing=True, floats_matter=True)
