"""Digest of a tensor's values that does not depend on how the tensor is sharded.

[Note: Additive digest]
Each 32-bit word of the data is multiplied by an odd pseudo-random factor of its position in the *global* tensor, and all
products are added modulo 2^64. So digests of disjoint blocks add up to the digest of the tensor. Ranks that read any parts of a
stored block, in runs of any length, verify it together with one sum, and no rank reads more bytes than it needs. (Multilinear
hashing; Carter and Wegman, "Universal classes of hash functions", 1979.) A factor is the product of one number per tensor dim,
so a block costs one matrix-vector product.

A change of one word always changes the digest, because odd factors are invertible. Any other change is missed with a
probability of about 2^-32. The digest protects against accidents, not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.caches import memoize
from ..comm.flat_rows import flatten_to_bytes

Words = NDArray[np.uint64]
MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 16  # words at a time, so that their 64-bit conversion stays in the cache


def block_digest(block: torch.Tensor, offset: Sequence[int]) -> int:
    """Return the 64-bit digest of a block that starts at ``offset`` in its tensor; 0 for an empty block.

    Args:
        block: values on the CPU, of any strides and dtype.

    >>> x = torch.arange(12.0).reshape(3, 4)
    >>> block_digest(x, (0, 0)) == (block_digest(x[:, :3], (0, 0)) + block_digest(x[:, 3:], (0, 3))) & MASK
    True
    """
    if block.numel() == 0:
        return 0
    if block.ndim and block.shape[0] > 4 * _CHUNK_WORDS:  # in parts, because the factors of a long dim would need much memory
        parts = enumerate(block.split(4 * _CHUNK_WORDS))
        return sum(block_digest(part, (offset[0] + k * 4 * _CHUNK_WORDS, *offset[1:])) for k, part in parts) & MASK
    block = block.detach().resolve_conj().resolve_neg().contiguous()
    words, per_element = _to_words(block)
    shape, start = tuple(block.shape) or (1,), tuple(offset) or (0,)
    inner = _position_factors(len(shape) - 1, start[-1] * per_element, shape[-1] * per_element)
    outer = np.ones(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for dim in range(len(shape) - 1):
            outer = (outer[:, None] * _position_factors(dim, start[dim], shape[dim])[None, :]).reshape(-1)
    return _weighted_sum(words.reshape(len(outer), len(inner)), outer, inner)


def _weighted_sum(words: NDArray[np.generic], outer: Words, inner: Words) -> int:
    """Return ``outer @ words @ inner``, modulo 2^64."""
    total, columns = 0, len(inner)
    rows = max(1, _CHUNK_WORDS // columns)
    for row in range(0, len(outer), rows):
        for column in range(0, columns, _CHUNK_WORDS):
            block = words[row : row + rows, column : column + _CHUNK_WORDS].astype(np.uint64)
            row_sums = np.einsum("ij,j->i", block, inner[column : column + _CHUNK_WORDS])  # twice as fast as a matrix product
            total += int(np.dot(row_sums, outer[row : row + rows]))
    return total & MASK


def _to_words(block: torch.Tensor) -> tuple[NDArray[np.generic], int]:
    """Return the data of a tensor as a flat array of unsigned words of at most 32 bits, and the words per element.

    Words of 64 bits would not do: two changes of a top bit could cancel, whatever the factors.
    """
    size = block.element_size()
    width = math.gcd(size, 4)
    data = flatten_to_bytes(block).numpy()
    return data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width]), size // width


def _position_factors(dim: int, start: int, count: int) -> Words:
    """Return odd pseudo-random factors for the positions ``start .. start + count`` along a tensor dim."""
    first, last = start // _CHUNK_WORDS, -(-(start + count) // _CHUNK_WORDS)
    inner = _odd_random(2 * dim, 0, _CHUNK_WORDS)
    outer = _odd_random(2 * dim + 1, first, last)
    start = start - first * _CHUNK_WORDS
    with np.errstate(over="ignore"):
        if len(outer) == 1:
            return inner[start : start + count] * outer
        return (inner * outer[:, None]).reshape(-1)[start : start + count]


@memoize(64)
def _odd_random(stream: int, start: int, stop: int) -> Words:
    """Return odd pseudo-random numbers for the counters ``start .. stop``: splitmix64 with its lowest bit set (Steele et al.
    2014)."""
    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        x = np.arange(start, stop, dtype=np.uint64) * np.uint64(golden) + np.uint64((stream + 1) * 0xD1B54A32D192ED03 & MASK)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
