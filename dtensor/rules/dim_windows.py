"""Dim windows: tensors that have only some positions of a factor, as a slice does.

A window is a ``range`` of positions of the factor. Each rank keeps the part of the window in its block, so slicing, splitting and
concatenating along a sharded dim move nothing. The resulting shards may be uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def count_below(window: range, bound: int) -> int:
    """Return how many positions of a window are less than ``bound``.

    >>> count_below(range(1, 9, 3), 5)
    2
    """
    return max(0, min(len(window), -((window.start - bound) // window.step)))


def window_block_sizes(sizes: Sequence[int], window: range) -> tuple[int, ...]:
    """Return how many positions of a window are in each block of its factor.

    >>> window_block_sizes((4, 0, 3), range(1, 7, 2))
    (2, 0, 1)
    """
    counts = [0, *(count_below(window, end) for end in accumulate(sizes))]
    return tuple(after - before for before, after in pairwise(counts))


def cover_window_sizes(default: Sequence[int], pieces: Iterable[tuple[Sequence[int], range]]) -> tuple[int, ...]:
    """Return block sizes of a factor, close to ``default``, with which windows of it have the given block sizes.

    Return ``default`` if no split gives those sizes, or only one with a block more than twice as large.

    >>> cover_window_sizes((4, 3), [((2, 0), range(0, 2)), ((2, 3), range(2, 7))])
    (4, 3)
    >>> cover_window_sizes((4, 3), [((1, 1), range(5, 7))])
    (6, 1)
    >>> cover_window_sizes((2, 2), [((2, 0), range(2, 4)), ((0, 2), range(0, 2))])
    (2, 2)
    """
    total, ranks = sum(default), len(default)
    start, end = [total] * ranks, [0] * ranks  # the range of positions that each rank must have
    for sizes, window in pieces:
        done = 0
        for r, size in enumerate(sizes):
            if size:
                start[r], end[r] = min(start[r], window[done]), max(end[r], window[done + size - 1] + 1)
            done += size
    first = list(accumulate(end, max))[:-1]  # bounds for the boundary after each rank
    last = list(accumulate(reversed(start), min))[-2::-1]
    if any(low > high for low, high in zip(first, last, strict=True)):
        return tuple(default)
    default_ends = list(accumulate(default))[:-1]
    ends = [0, *(min(max(end, low), high) for end, low, high in zip(default_ends, first, last, strict=True)), total]
    sizes_of_factor = tuple(after - before for before, after in pairwise(ends))
    return sizes_of_factor if max(sizes_of_factor) <= 2 * max(default) else tuple(default)
