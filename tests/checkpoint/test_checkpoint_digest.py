"""Checkpoint digest: the digest of a tensor is the sum of its blocks' digests, and changes with the tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor.checkpoint.digest import MASK, block_digest

SHAPES = [(), (1,), (700,), (7, 5), (3, 600), (600, 3), (4, 3, 5), (270_000,), (2, 0)]
DTYPES = [torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.complex128, torch.bool]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_of_tensor_is_the_sum_of_its_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    zero = (0,) * len(shape)
    for dim, size in enumerate(shape):
        for cut in {0, size // 3, size}:
            offset = tuple(cut if d == dim else 0 for d in range(len(shape)))
            parts = block_digest(x.narrow(dim, 0, cut), zero) + block_digest(x.narrow(dim, cut, size - cut), offset)
            assert parts & MASK == block_digest(x, zero)
    assert block_digest(x.t().contiguous().t() if x.ndim == 2 else x, zero) == block_digest(x, zero)


@given(st.integers(0, 34), st.integers(0, 34), st.integers(0, 63), st.integers(0, 63))
def test_digest_changes_with_flipped_bits(a: int, b: int, first: int, second: int) -> None:
    x = torch.arange(35).reshape(5, 7)
    y = x.clone()
    y.view(-1)[a] ^= torch.tensor(1).bitwise_left_shift(first)
    y.view(-1)[b] ^= torch.tensor(1).bitwise_left_shift(second)
    assert (block_digest(x, (0, 0)) == block_digest(y, (0, 0))) == torch.equal(x, y)


def test_digest_changes_with_moved_values() -> None:
    x = torch.randn(6, 6)
    assert len({block_digest(y, (0, 0)) for y in (x, x.t(), x.flip(0), x.flip(1), x.roll(1, 0), torch.zeros(6, 6))}) == 6
    assert block_digest(x, (0, 0)) != block_digest(x, (1, 0))
