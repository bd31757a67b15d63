"""Philox 4x32-10: random words that are a function of a key and a counter alone, in torch integer operations, on any device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Words are int64 values in [0,
2**32), because torch has no unsigned multiplication. Products of two of them wrap around in 64 bits with the right bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

MASK_32 = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL_CONSTANTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CHUNK = 1 << 15  # counters at a time: the working set of the rounds fits a core's cache


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Return four random words for each counter and key: int64 tensors with values in [0, 2**32), which broadcast.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0 = (odd >> 32).bitwise_and_(MASK_32).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (even >> 32).bitwise_and_(MASK_32).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = odd.bitwise_and_(MASK_32), even.bitwise_and_(MASK_32)
        k0, k1 = (k0 + _WEYL_CONSTANTS[0]) & MASK_32, (k1 + _WEYL_CONSTANTS[1]) & MASK_32
    return c0, c1, c2, c3


def generate_words(key: int, rows: torch.Tensor, first: int, count: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield the random words of ``count`` counters from column ``first`` on, for each of the given rows, in chunks.

    Args:
        key: 64 bits.
        rows: int64, one row number for each row of the result.

    Yields:
        parts of an array of shape (rows, 4 * count): a slice of rows, a slice of columns, and their words.
    """
    halves = (key & MASK_32, (key >> 32) & MASK_32)
    height = max(1, _CHUNK // max(count, 1))
    width = max(1, min(count, _CHUNK))
    for row in range(0, len(rows), height):
        part = rows[row : row + height, None]
        for left in range(0, count, width):
            right = min(left + width, count)
            column = torch.arange(first + left, first + right, device=rows.device)[None, :].expand(len(part), -1)
            counter = (column & MASK_32, column >> 32, (part & MASK_32).expand_as(column), (part >> 32).expand_as(column))
            block = torch.stack(philox(counter, halves), -1).flatten(1)
            yield slice(row, row + len(part)), slice(4 * left, 4 * right), block
