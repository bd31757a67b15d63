"""Philox 4x32-10: random words that are a function of a key and a counter alone, in torch integer operations, on any device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Words are held as int64 in
[0, 2**32), since torch has no unsigned multiplication; products of two of them wrap around in 64 bits with the right bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CHUNK = 1 << 15  # counters at a time: what the rounds work on stays in a core's cache


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Four words for each counter (four int64 tensors that broadcast, values in [0, 2**32)).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (odd >> 32).bitwise_and_(MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (even >> 32).bitwise_and_(MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = odd.bitwise_and_(MASK), even.bitwise_and_(MASK)
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1, c2, c3


def words(key: int, rows: torch.Tensor, first: int, count: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The words of the counters (column, row): ``count`` columns from ``first``, at the given rows.

    Args:
        key: 64 bits.
        rows: int64, one row number for each row of the result.

    Yields:
        parts of an array of shape (rows, 4 * count): which rows, which columns, and their words.
    """
    halves = (key & MASK, (key >> 32) & MASK)
    height = max(1, _CHUNK // max(count, 1))
    width = max(1, min(count, _CHUNK))
    for top in range(0, len(rows), height):
        chosen = rows[top : top + height, None]
        for left in range(0, count, width):
            right = min(left + width, count)
            column = torch.arange(first + left, first + right, device=rows.device)[None, :].expand(len(chosen), -1)
            counter = (column & MASK, column >> 32, (chosen & MASK).expand_as(column), (chosen >> 32).expand_as(column))
            made = torch.stack(philox(counter, halves), -1).flatten(1)
            yield slice(top, top + len(chosen)), slice(4 * left, 4 * right), made
