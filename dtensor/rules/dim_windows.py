"""Windows: a tensor that holds only some positions of a factor, as a slice does.

A window is a ``range`` of positions of the factor. Each rank keeps the part of the window that lies in its block, so slicing,
splitting and joining along a sharded dim move nothing; the pieces are as uneven as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def count_below(window: range, bound: int) -> int:
    """How many positions of the window are less than ``bound``.

    >>> count_below(range(1, 9, 3), 5)
    2
    """
    return max(0, min(len(window), -((window.start - bound) // window.step)))


def windowed(sizes: Sequence[int], window: range) -> tuple[int, ...]:
    """How many positions of the window each block holds.

    >>> windowed((4, 0, 3), range(1, 7, 2))
    (2, 0, 1)
    """
    counts = [0, *(count_below(window, end) for end in accumulate(sizes))]
    return tuple(after - before for before, after in pairwise(counts))


def covering(default: Sequence[int], pieces: Iterable[tuple[Sequence[int], range]]) -> tuple[int, ...]:
    """Block sizes of a factor under which its windows have the given block sizes: the most like ``default`` of them.

    ``default`` itself where no cut gives those sizes, or only a lopsided one.

    >>> covering((4, 3), [((2, 0), range(0, 2)), ((2, 3), range(2, 7))])
    (4, 3)
    >>> covering((4, 3), [((1, 1), range(5, 7))]), covering((2, 2), [((2, 0), range(2, 4)), ((0, 2), range(0, 2))])
    ((6, 1), (2, 2))
    """
    total, ranks = sum(default), len(default)
    start, end = [total] * ranks, [0] * ranks  # of what each rank must hold
    for sizes, window in pieces:
        done = 0
        for r, size in enumerate(sizes):
            if size:
                start[r], end[r] = min(start[r], window[done]), max(end[r], window[done + size - 1] + 1)
            done += size
    first = list(accumulate(end, max))[:-1]  # where the boundary after each rank may lie
    last = list(accumulate(reversed(start), min))[-2::-1]
    if any(low > high for low, high in zip(first, last, strict=True)):
        return tuple(default)
    wanted = list(accumulate(default))[:-1]
    ends = [0, *(min(max(end, low), high) for end, low, high in zip(wanted, first, last, strict=True)), total]
    found = tuple(after - before for before, after in pairwise(ends))
    return found if max(found) <= 2 * max(default) else tuple(default)
