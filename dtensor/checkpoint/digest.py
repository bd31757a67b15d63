"""A digest of a tensor's values that does not depend on how the tensor is cut.

Each 32-bit word of the data is multiplied by an odd pseudo-random factor of its place in the *global* tensor, and all products
are added modulo 2^64. So digests of disjoint blocks add up to the digest of the tensor: ranks that read any parts of a stored
block, in runs however short, verify it together with one sum, and nobody reads a byte more than it needs. (Multilinear hashing;
Carter and Wegman, "Universal classes of hash functions", 1979.) A factor is the product of one number per tensor dim, so that a
block costs one matrix-vector product.

Laws: a change of one word always changes the digest (odd factors are invertible); any other change is missed with a probability
of about 2^-32. It guards against accidents, not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.caches import remembered
from ..comm.flat_rows import flat_bytes

Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
_ROWS = 1 << 16  # words handled at a time: what is converted to 64 bits stays in the cache


def digest(block: torch.Tensor, offset: Sequence[int]) -> int:
    """The digest of a block that starts at ``offset`` in its tensor; 0 for an empty one.

    Args:
        block: values on the CPU, of any strides and dtype.

    >>> x = torch.arange(12.0).reshape(3, 4)
    >>> digest(x, (0, 0)) == (digest(x[:, :3], (0, 0)) + digest(x[:, 3:], (0, 3))) & MASK
    True
    """
    if block.numel() == 0:
        return 0
    if block.ndim and block.shape[0] > 4 * _ROWS:  # the factors of a long dim would fill the memory: bit by bit
        parts = enumerate(block.split(4 * _ROWS))
        return sum(digest(part, (offset[0] + k * 4 * _ROWS, *offset[1:])) for k, part in parts) & MASK
    block = block.detach().resolve_conj().resolve_neg().contiguous()
    words, per_element = _words(block)
    shape, start = tuple(block.shape) or (1,), tuple(offset) or (0,)
    inner = _factors(len(shape) - 1, start[-1] * per_element, shape[-1] * per_element)
    outer = np.ones(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for dim in range(len(shape) - 1):
            outer = (outer[:, None] * _factors(dim, start[dim], shape[dim])[None, :]).reshape(-1)
    return _contract(words.reshape(len(outer), len(inner)), outer, inner)


def _contract(words: NDArray[np.generic], outer: Words, inner: Words) -> int:
    """``outer @ words @ inner``, modulo 2^64."""
    total, columns = 0, len(inner)
    rows = max(1, _ROWS // columns)
    for row in range(0, len(outer), rows):
        for column in range(0, columns, _ROWS):
            block = words[row : row + rows, column : column + _ROWS].astype(np.uint64)
            lines = np.einsum("ij,j->i", block, inner[column : column + _ROWS])  # twice as fast as a product of matrices
            total += int(np.dot(lines, outer[row : row + rows]))
    return total & MASK


def _words(block: torch.Tensor) -> tuple[NDArray[np.generic], int]:
    """The data as unsigned words of at most 32 bits, and how many of them make an element.

    Words of 64 bits would not do: two changes of a top bit could cancel, whatever the factors.
    """
    size = block.element_size()
    width = math.gcd(size, 4)
    data = flat_bytes(block).numpy()
    return data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]), size // width


def _factors(dim: int, start: int, count: int) -> Words:
    """Odd pseudo-random numbers for places ``start ..`` along a tensor dim."""
    first, last = start // _ROWS, -(-(start + count) // _ROWS)
    inner, outer, start = _random(2 * dim, 0, _ROWS), _random(2 * dim + 1, first, last), start - first * _ROWS
    with np.errstate(over="ignore"):
        if len(outer) == 1:
            return inner[start : start + count] * outer
        return (inner * outer[:, None]).reshape(-1)[start : start + count]


@remembered(64)
def _random(stream: int, start: int, stop: int) -> Words:
    """splitmix64 of ``start .. stop``, made odd (Steele and others, "Fast splittable pseudorandom number generators", 2014)."""
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        x = np.arange(start, stop, dtype=np.uint64) * np.uint64(golden) + np.uint64((stream + 1) * 0xD1B54A32D192ED03 & MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
