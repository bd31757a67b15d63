"""Samples of the operations that keep some elements of a dim, and of their inverses."""

from __future__ import annotations

from .sample import Builder, Sample, Samples
from .views import each_dtype, with_copy, x


def slices() -> list[Builder]:
    bounds = ((0, 1, 4), (1, -4, -1), (0, None, 3), (-1, 2), (0, 4, 2), (0, 9, 12), (0, -9, 2), (1, 0, 6))
    return [
        *each_dtype((7, 5), 0, 1, 6, 2),
        Sample((x(7, 5),)),
        *(Sample((x(5, 6), *bound), {}, str(bound)) for bound in bounds),
        Sample((x(7), 0, 1, 7, 3)),
        Sample((x(0, 3), 0, 0, 2)),
    ]


def splits() -> list[Builder]:
    return [*each_dtype((7, 5), 3), Sample((x(5, 6), 4, 1)), Sample((x(5, 6), 5)), Sample((x(5, 6), 1, -1)), Sample((x(0, 3), 2))]


def splits_with_sizes() -> list[Builder]:
    return [
        *each_dtype((7, 5), [3, 0, 4]),
        Sample((x(5, 6), [1, 2, 3], 1)),
        Sample((x(5, 6), [5])),
        Sample((x(0, 3), [0, 0], -2)),
    ]


def selections() -> list[Builder]:
    return [
        *each_dtype((5, 6), 0, 3),
        Sample((x(5, 6), -1, -2)),
        Sample((x(5), 0, 4)),
        Sample((x(5, 1, 6), 1, 0)),
        Sample((x(2, 0), 0, 1)),
    ]


def diagonals() -> list[Builder]:
    offsets = ((0,), (2,), (-1,), (4, 1, 0), (9,), (-7,))
    return [
        *each_dtype((5, 6)),
        *(Sample((x(5, 6), *given), {}, str(given)) for given in offsets),
        Sample((x(5, 6, 7), 1, 2, 0)),
        Sample((x(5, 6, 7), -1, -1, 1)),
    ]


def sliding() -> list[Builder]:
    return [*each_dtype((7, 5), 0, 3, 2), Sample((x(5, 6), -1, 2, 2)), Sample((x(5, 6), 1, 6, 1)), Sample((x(), 0, 1, 1))]


SAMPLES: Samples = with_copy(
    slice=slices(),
    split=splits(),
    split_with_sizes=splits_with_sizes(),
    select=selections(),
    unbind=[*each_dtype((5, 6)), Sample((x(5, 6), 1)), Sample((x(5, 3, 6), -2)), Sample((x(2, 0),))],
    diagonal=diagonals(),
    unfold=sliding(),
) | {
    "unsafe_split": splits(),
    "unsafe_split_with_sizes": splits_with_sizes(),
    "narrow_copy": [*each_dtype((7, 5), 0, 2, 4), Sample((x(5, 6), -1, -3, 2)), Sample((x(5, 6), 0, 5, 0))],
    "slice_scatter": [
        *(Sample((x(7, 5), x(3, 5, seed=1), 0, 1, 6, 2)),),
        Sample((x(7, 5), x(7, 2, seed=1), -1, -3, -1)),
        Sample((x(7, 5), x(7, 5, seed=1))),
        Sample((x(7, 5), x(0, 5, seed=1), 0, 4, 2)),
    ],
    "slice_backward": [
        *each_dtype((3, 5), [7, 5], 0, 1, 6, 2),
        Sample((x(7, 2), [7, 5], -1, -3, -1, 1)),
        Sample((x(0, 5), [7, 5], 0, 4, 2, 1)),
        Sample((x(2, 5), [7, 5], 0, 5, 2**63 - 1, 1)),
    ],
    "select_scatter": [
        Sample((x(5, 6), x(6, seed=1), 0, 3)),
        Sample((x(5, 6), x(5, seed=1), -1, -2)),
        Sample((x(5), x(seed=1), 0, 1)),
    ],
    "select_backward": [*each_dtype((6,), [5, 6], 0, 3), Sample((x(5), [5, 6], -1, -2)), Sample((x(), [5], 0, 4))],
    "diagonal_scatter": [Sample((x(5, 6), x(4, seed=1), 2)), Sample((x(5, 6, 7), x(6, 5, seed=1), -1, 2, 0))],
    "diagonal_backward": [
        *each_dtype((4,), [5, 6], 2, 0, 1),
        Sample((x(6, 5), [5, 6, 7], -1, 2, 0)),
        Sample((x(0), [5, 6], 9, 0, 1)),
    ],
    "unfold_backward": [Sample((x(3, 5, 3), [7, 5], 0, 3, 2)), Sample((x(5, 3, 2), [5, 6], -1, 2, 2))],
}
