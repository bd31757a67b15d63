"""Random numbers by counting: an element is a function of the call's key, its global index and the distribution alone.

A rank draws its block and nothing else; blocks agree on every mesh and under all placements. Rows (all dims but the last)
and columns of the *global* tensor are Philox's counter; a group of four words serves four neighbouring columns, two in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .philox import words

Arguments = dict[str, Any]
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a global tensor to fill: where it starts, its shape, and the call's key."""

    key: int
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def uniform(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uniform on [0, 1), a multiple of 2**-digits of ``dtype`` (of the block, if it is a floating one)."""
        dtype = self.dtype if dtype is None else dtype
        return self._fill(dtype, dtype == torch.float64, lambda w: _fraction(w, dtype))

    def inside(self) -> torch.Tensor:
        """Uniform on (0, 1): half a step above :meth:`uniform`, in float32 or float64, so that its logarithm is finite."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        digits = 53 if dtype == torch.float64 else 23
        return self._fill(dtype, dtype == torch.float64, lambda w: _fraction(w, dtype, digits) + 2.0 ** -(digits + 1))

    def normal(self) -> torch.Tensor:
        """Standard normal (Box and Muller), pairs of neighbouring columns from pairs of uniform numbers."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self._fill(dtype, dtype == torch.float64, lambda w: _pairs(_fraction(w, dtype)))

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Uniform on low, ..., high - 1, as int64 (as torch's own, not exactly so where the range is no power of two)."""
        span = high - low
        if span <= 1 << 31:
            return self._fill(torch.int64, False, lambda w: ((w * span) >> 32).add_(low))
        narrowed = (1 << 63) - 1
        return self._fill(torch.int64, True, lambda w: ((w[:, 0::2] << 32 | w[:, 1::2]) & narrowed).remainder_(span).add_(low))

    def _fill(self, dtype: torch.dtype, wide: bool, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The block, ``make`` turning words into elements: one word for each, two if ``wide``."""
        per_group = 2 if wide else 4
        width, start = (self.size[-1], self.offset[-1]) if self.size else (1, 0)
        first, last = start // per_group, -(-(start + width) // per_group)
        rows = self._rows()
        made = torch.empty(len(rows), width, dtype=dtype, device=self.device)
        for down, across, drawn in words(self.key, rows, first, last - first):
            elements = make(drawn)
            begin = across.start * per_group // 4 + first * per_group - start  # of these elements, in columns of the block
            kept = slice(max(begin, 0), min(begin + elements.shape[1], width))
            made[down, kept] = elements[:, kept.start - begin : kept.stop - begin]
        return made.reshape(self.size)

    def _rows(self) -> torch.Tensor:
        """The global row number of every row of the block."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for whole, start, size in zip(self.shape[:-1], self.offset[:-1], self.size[:-1], strict=True):
            here = torch.arange(start, start + size, device=self.device)
            rows = (rows[:, None] * whole + here).flatten()
        return rows


def _fraction(drawn: torch.Tensor, dtype: torch.dtype, digits: int | None = None) -> torch.Tensor:
    digits = digits or _DIGITS[dtype]
    if dtype == torch.float64:
        return ((drawn[:, 0::2] << 21) | (drawn[:, 1::2] >> 11)).to(dtype) * 2.0**-53
    return (drawn >> (32 - digits)).to(dtype) * 2.0**-digits


def _pairs(uniform: torch.Tensor) -> torch.Tensor:
    radius = (1 - uniform[:, 0::2]).log_().mul_(-2).sqrt_()
    angle = uniform[:, 1::2] * (2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(1)


# --- distributions: name -> the block's values, in any dtype ------------------------------------------------------------
def _uniform(block: Block, given: Arguments) -> torch.Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return block.uniform().mul_(high - low).add_(low)


def _normal(block: Block, given: Arguments) -> torch.Tensor:
    return block.normal().mul_(given.get("std", 1.0)).add_(given.get("mean", 0.0))


def _geometric(block: Block, given: Arguments) -> torch.Tensor:
    scale = math.log1p(-given["p"]) if given["p"] < 1 else -math.inf
    return block.inside().log_().div_(scale).ceil_().clamp_(min=1)


def _bernoulli(block: Block, given: Arguments) -> torch.Tensor:
    return block.uniform(torch.float64 if block.dtype == torch.float64 else torch.float32) < given["p"]


def _integers(block: Block, given: Arguments) -> torch.Tensor:
    low = given.get("from", given.get("low"))
    high = given.get("to", given.get("high"))
    if high is None:
        high = _limit(block.dtype) + 1
    return block.integers(0 if low is None else int(low), int(high))


def _limit(dtype: torch.dtype) -> int:
    """The largest integer that ``random_()`` draws: the largest one, or the last that all smaller ones are exact up to."""
    if dtype == torch.bool:
        return 1
    return 2 ** _DIGITS[dtype] if dtype in _DIGITS else min(torch.iinfo(dtype).max, 2**63 - 2)


Sampler = Callable[[Block, Arguments], torch.Tensor]
SAMPLERS: dict[str, Sampler] = {
    "uniform": _uniform,
    "rand_like": _uniform,
    "normal": _normal,
    "randn_like": _normal,
    "exponential": lambda block, given: block.inside().log_().div_(-given["lambd"]),
    "log_normal": lambda block, given: _normal(block, given).exp_(),
    "cauchy": lambda block, given: block.inside().sub_(0.5).mul_(math.pi).tan_().mul_(given["sigma"]).add_(given["median"]),
    "geometric": _geometric,
    "bernoulli": _bernoulli,
    "random": _integers,
    "randint_like": _integers,
}


def sampler_of(name: str) -> Sampler | None:
    """The sampler of an operator by its base name; None where only the exact mode can draw."""
    return SAMPLERS.get(name.removesuffix("_"))


def sample(sampler: Sampler, given: Arguments, key: int, shape: Sequence[int], offset: Any, size: Any, like: Any) -> torch.Tensor:
    """One block, in the dtype and on the device of ``like``; complex numbers are pairs of real ones."""
    dtype: torch.dtype = like[0]
    if dtype.is_complex:
        real = torch.empty((), dtype=dtype, device="cpu").real.dtype
        parts = sample(sampler, given, key, (*shape, 2), (*offset, 0), (*size, 2), (real, like[1]))
        made = torch.view_as_complex(parts.contiguous())
        return made.mul_(math.sqrt(0.5)) if sampler is _normal else made
    block = Block(key, tuple(shape), tuple(offset), tuple(size), dtype, like[1])
    return sampler(block, given).to(dtype)
