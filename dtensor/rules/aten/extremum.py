"""Extrema: largest and smallest elements (``amax``, ``max``, ``max.dim``, ``argmax``, ``aminmax`` and their mirror images).

Values alone combine as ``Partial("max")``. With an index, each rank's best (value, index) pair goes through one small collective.
Of equal values the first index wins, and NaN wins over everything, as on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm.local_reduce import max_min_identities
from ...placement import Monoid
from ..call import Call
from ..declare import fold, reduce
from ..folds import REDUCED_PATTERN, FoldContext, ReduceInPairs

reduce("amax max", "max", partials="max -> max", refuses_nothing=True)
reduce("amin min", "min", partials="min -> min", refuses_nothing=True)
reduce("aminmax", ("min", "max"), refuses_nothing=True)


# --- value and index ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BestWithIndex:
    """The best of (value, index) pairs: the better value, of equal values the smaller index; NaN is best.

    A state is int64 of shape ``(2, ...)``. Floats are the bits of a float64, which represents every narrower one exactly.
    """

    op: str  # "max" or "min"

    def block(self, part: FoldContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best value of one rank's block as int64 bits, and its global row-major index in the folded dims."""
        rest = [d for d in range(x.ndim) if d not in part.dims]
        value, local = getattr(x.permute(*rest, *part.dims).flatten(len(rest)), self.op)(-1)
        index, step, local_step = torch.zeros_like(local), 1, 1
        for d in reversed(part.dims):
            index += (local // local_step % x.shape[d] + part.offsets[d]) * step
            step, local_step = step * part.shape[d], local_step * x.shape[d]
        state_shape = [1 if d in part.dims else size for d, size in enumerate(x.shape)]
        return to_int64_bits(value).reshape(state_shape), index.reshape(state_shape)

    def monoid(self, call: Call) -> Monoid:
        """Return the reduction of (value, index) pairs that keeps the better one."""
        is_float = call.operands[0].dtype.is_floating_point
        better = _BetterPair(self.op, is_float)
        return Monoid(f"arg{self.op}", better, _WorstPair(self.op, is_float), combine_all=ReduceInPairs(better))


@dataclass(frozen=True, slots=True)
class _BetterPair:
    """The better of two pairs of value and index: of equal values the first, NaN before all."""

    op: str
    is_float: bool

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the better of two (value, index) pairs at each position."""
        x, y = (pair[0].contiguous().view(torch.float64) if self.is_float else pair[0] for pair in (a, b))
        wins = y > x if self.op == "max" else y < x
        ties = y == x
        if self.is_float:
            wins = (wins & ~x.isnan()) | (y.isnan() & ~x.isnan())
            ties = ties | (x.isnan() & y.isnan())
        return torch.where(wins | (ties & (b[1] < a[1])), b, a)


@dataclass(frozen=True, slots=True)
class _WorstPair:
    """The identity: no value is worse, and no index is larger."""

    op: str
    is_float: bool

    def __call__(self, like: Tensor) -> Tensor:
        """Return pairs of the worst value and the largest index, for ``like``."""
        dtype = torch.float64 if self.is_float else torch.int64
        worst = torch.full(like.shape[1:], max_min_identities(dtype)[self.op == "min"], dtype=dtype, device=like.device)
        return torch.stack([to_int64_bits(worst), torch.full_like(like[1], torch.iinfo(torch.int64).max)])


def to_int64_bits(values: Tensor) -> Tensor:
    return values.to(torch.float64).contiguous().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def finish_value_and_index(part: FoldContext, x: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return (value.contiguous().view(torch.float64) if x.is_floating_point() else value).to(x.dtype), index


def finish_index(part: FoldContext, x: Tensor, value: Tensor, index: Tensor) -> Tensor:
    return index


for _best in (BestWithIndex("max"), BestWithIndex("min")):
    _pair: dict[str, Any] = {"block": _best.block, "monoid": _best.monoid, "numbers": 2, "dtype": torch.int64}
    fold(f"{_best.op}.dim {_best.op}.dim_{_best.op}", REDUCED_PATTERN, finish=finish_value_and_index, **_pair)
    fold(f"arg{_best.op}", REDUCED_PATTERN, finish=finish_index, takes="numbers", **_pair)
