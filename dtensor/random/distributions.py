"""Distributions of the counter mode: an element is a function of the call's key, its global index and the distribution alone.

A rank generates only its block. Blocks agree on every mesh and under all placements. Philox's counter consists of the row (all
dims but the last) and the column of the *global* tensor. A group of four words serves four adjacent columns, or two in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .philox import generate_words

Arguments = dict[str, Any]
_MANTISSA_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class RandomBlock:
    """Block of a global tensor to generate: its offset and size, and the key of the call."""

    key: int
    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def uniform(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Generate the block with uniform numbers on [0, 1): multiples of 2**-digits of ``dtype`` (default: the block's)."""
        dtype = self.dtype if dtype is None else dtype
        return self._fill_from_words(dtype, dtype == torch.float64, lambda w: _to_fraction(w, dtype))

    def open_uniform(self) -> torch.Tensor:
        """Generate the block with uniform numbers on (0, 1), in float32 or float64, so that their logarithm is finite."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        digits = 53 if dtype == torch.float64 else 23
        half_step = 2.0 ** -(digits + 1)
        return self._fill_from_words(dtype, dtype == torch.float64, lambda w: _to_fraction(w, dtype, digits) + half_step)

    def normal(self) -> torch.Tensor:
        """Generate the block with standard normal numbers, pairs of adjacent columns from pairs of uniform numbers."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self._fill_from_words(dtype, dtype == torch.float64, lambda w: _box_muller(_to_fraction(w, dtype)))

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Generate the block with uniform integers from low to high - 1, as int64.

        They are exactly uniform only over powers of two, as in torch.
        """
        span = high - low
        if span <= 1 << 31:
            return self._fill_from_words(torch.int64, False, lambda w: ((w * span) >> 32).add_(low))
        narrowed = (1 << 63) - 1

        def to_range(words: torch.Tensor) -> torch.Tensor:
            """Convert pairs of 32-bit words to integers in the range, by the remainder of 63 bits."""
            return ((words[:, 0::2] << 32 | words[:, 1::2]) & narrowed).remainder_(span).add_(low)

        return self._fill_from_words(torch.int64, True, to_range)

    def _fill_from_words(self, dtype: torch.dtype, wide: bool, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Generate the block's random words, and convert them to elements by ``make``: one word each, or two if ``wide``."""
        per_group = 2 if wide else 4
        width, start = (self.size[-1], self.offset[-1]) if self.size else (1, 0)
        first, last = start // per_group, -(-(start + width) // per_group)
        rows = self._global_rows()
        result = torch.empty(len(rows), width, dtype=dtype, device=self.device)
        for down, across, generated in generate_words(self.key, rows, first, last - first):
            elements = make(generated)
            # column of the block at which these elements begin
            first_column = across.start * per_group // 4 + first * per_group - start
            columns = slice(max(first_column, 0), min(first_column + elements.shape[1], width))
            result[down, columns] = elements[:, columns.start - first_column : columns.stop - first_column]
        return result.reshape(self.size)

    def _global_rows(self) -> torch.Tensor:
        """Return the row number, in the global tensor, of every row of the block."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        for full, start, size in zip(self.shape[:-1], self.offset[:-1], self.size[:-1], strict=True):
            numbers = torch.arange(start, start + size, device=self.device)
            rows = (rows[:, None] * full + numbers).flatten()
        return rows


def _to_fraction(words: torch.Tensor, dtype: torch.dtype, digits: int | None = None) -> torch.Tensor:
    """Convert random 32-bit words to fractions in [0, 1) with ``digits`` bits; float64 takes two words for each."""
    digits = digits or _MANTISSA_DIGITS[dtype]
    if dtype == torch.float64:
        return ((words[:, 0::2] << 21) | (words[:, 1::2] >> 11)).to(dtype) * 2.0**-53
    return (words >> (32 - digits)).to(dtype) * 2.0**-digits


def _box_muller(uniform: torch.Tensor) -> torch.Tensor:
    """Convert pairs of uniform values in [0, 1) to pairs of standard normal values."""
    radius = (1 - uniform[:, 0::2]).log_().mul_(-2).sqrt_()
    angle = uniform[:, 1::2] * (2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(1)


# --- samplers: values of a block by the name of the distribution, in any dtype ------------------------------------------
def _sample_uniform(block: RandomBlock, arguments: Arguments) -> torch.Tensor:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return block.uniform().mul_(high - low).add_(low)


def _sample_normal(block: RandomBlock, arguments: Arguments) -> torch.Tensor:
    return block.normal().mul_(arguments.get("std", 1.0)).add_(arguments.get("mean", 0.0))


def _sample_geometric(block: RandomBlock, arguments: Arguments) -> torch.Tensor:
    scale = math.log1p(-arguments["p"]) if arguments["p"] < 1 else -math.inf
    return block.open_uniform().log_().div_(scale).ceil_().clamp_(min=1)


def _sample_bernoulli(block: RandomBlock, arguments: Arguments) -> torch.Tensor:
    return block.uniform(torch.float64 if block.dtype == torch.float64 else torch.float32) < arguments["p"]


def _sample_integers(block: RandomBlock, arguments: Arguments) -> torch.Tensor:
    """Sample a block of integers in the range of the arguments, by default from 0 up to the largest of the dtype."""
    low = arguments.get("from", arguments.get("low"))
    high = arguments.get("to", arguments.get("high"))
    if high is None:
        high = _max_random_integer(block.dtype) + 1
    return block.integers(0 if low is None else int(low), int(high))


def _max_random_integer(dtype: torch.dtype) -> int:
    """Return the largest integer that ``random_()`` generates: for a floating dtype the last one up to which all are exact."""
    if dtype == torch.bool:
        return 1
    return 2 ** _MANTISSA_DIGITS[dtype] if dtype in _MANTISSA_DIGITS else min(torch.iinfo(dtype).max, 2**63 - 2)


Sampler = Callable[[RandomBlock, Arguments], torch.Tensor]
SAMPLERS: dict[str, Sampler] = {
    "uniform": _sample_uniform,
    "rand_like": _sample_uniform,
    "normal": _sample_normal,
    "randn_like": _sample_normal,
    "exponential": lambda block, arguments: block.open_uniform().log_().div_(-arguments["lambd"]),
    "log_normal": lambda block, arguments: _sample_normal(block, arguments).exp_(),
    "cauchy": lambda block, args: block.open_uniform().sub_(0.5).mul_(math.pi).tan_().mul_(args["sigma"]).add_(args["median"]),
    "geometric": _sample_geometric,
    "bernoulli": _sample_bernoulli,
    "random": _sample_integers,
    "randint_like": _sample_integers,
}


def find_sampler(name: str) -> Sampler | None:
    """Return the counter-mode sampler of a random operator by its base name, or None if only the exact mode supports it."""
    return SAMPLERS.get(name.removesuffix("_"))


def sample_block(
    sampler: Sampler, arguments: Arguments, key: int, shape: Sequence[int], offset: Any, size: Any, like: Any
) -> torch.Tensor:
    """Generate one block of a global random tensor in counter mode, in the dtype and on the device of ``like``."""
    dtype: torch.dtype = like[0]
    if dtype.is_complex:
        real = torch.empty((), dtype=dtype, device="cpu").real.dtype
        parts = sample_block(sampler, arguments, key, (*shape, 2), (*offset, 0), (*size, 2), (real, like[1]))
        numbers = torch.view_as_complex(parts.contiguous())
        return numbers.mul_(math.sqrt(0.5)) if sampler is _sample_normal else numbers
    block = RandomBlock(key, tuple(shape), tuple(offset), tuple(size), dtype, like[1])
    return sampler(block, arguments).to(dtype)
