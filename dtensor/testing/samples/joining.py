"""Samples of the operations that join, repeat, move and pad."""

from __future__ import annotations

import torch

from .sample import Builder, Sample, Samples
from .views import INT, each_dtype, x


def joins() -> list[Builder]:
    return [
        Sample(([x(5, 6), x(3, 6, seed=1)],)),
        Sample(([x(5, 6), x(5, 2, seed=1), x(5, 7, seed=2)], 1)),
        Sample(([x(5, 6, dtype=INT), x(1, 6, dtype=INT, seed=1)], -2), {}, "integers"),
        Sample(([x(5, 6), x(2, 6, dtype=INT, seed=1)],), {}, "promotes"),
        Sample(([x(4), x(0), x(3, seed=1)],), {}, "one empty"),
        Sample(([x(2, 3), x(0), x(5, 3, seed=1)],), {}, "the empty one joins with anything"),
        Sample(([x(5, 6)],), {}, "one"),
    ]


def stacks() -> list[Builder]:
    return [
        Sample(([x(5, 6), x(5, 6, seed=1)],)),
        Sample(([x(5, 6), x(5, 6, seed=1), x(5, 6, seed=2)], -1)),
        Sample(([x(5, 6, dtype=INT), x(5, 6, dtype=INT, seed=1)], 1), {}, "integers"),
        Sample(([x(), x(seed=1)],), {}, "0-d"),
    ]


def paddings() -> list[Builder]:
    given = ([1, 2], [0, 0, 3, 1], [-1, 2], [2, -3, -1, 0], [0, -6], [-7, 9], [4, 0, -5, 5])
    return [
        *(Sample((x(5, 6), pad), {}, str(pad)) for pad in given),
        Sample((x(5, 6), [1, 1], 2.5), {}, "value"),
        Sample((x(5, 6), [1, 1], 1), {}, "one"),
        Sample((x(5, 6, dtype=INT), [2, 1, 1, 0], -3), {}, "integers"),
        Sample((x(0, 6), [0, 0, 2, 1])),
    ]


def triangles() -> list[Builder]:
    return [*each_dtype((5, 6)), *(Sample((x(6, 5), k)) for k in (-2, 1, 7, -9)), Sample((x(3, 5, 4), 1)), Sample((x(0, 3),))]


SAMPLES: Samples = {
    "cat": joins(),
    "stack": stacks(),
    "repeat": [
        *each_dtype((5, 6), [1, 2]),
        Sample((x(5, 6), [3, 1, 1])),
        Sample((x(5), [2])),
        Sample((x(5), [0])),
        Sample((x(), [2, 3])),
    ],
    "roll": [
        *each_dtype((5, 6), [2], [0]),
        Sample((x(5, 6), [1, -2], [0, 1])),
        Sample((x(5, 6), [4])),
        Sample((x(5, 6), [7], [-1])),
    ],
    "flip": [*each_dtype((5, 6), [0]), Sample((x(5, 6), [0, -1])), Sample((x(5, 6), []))],
    "rot90": [Sample((x(5, 6),)), Sample((x(5, 6, 7), 2, [0, 2])), Sample((x(5, 6, 7), 3, [1, -1])), Sample((x(5, 6), 4))],
    "pixel_shuffle": [Sample((x(3, 8, 2, 5), 2)), Sample((x(8, 3, 2), 2))],
    "pixel_unshuffle": [Sample((x(3, 2, 4, 6), 2)), Sample((x(2, 6, 4), 2))],
    "channel_shuffle": [Sample((x(3, 6, 2, 2), 2))],
    "constant_pad_nd": paddings(),
    "tril": triangles(),
    "triu": triangles(),
    "diag_embed": [*each_dtype((5,)), Sample((x(3, 5), 1)), Sample((x(3, 5), -2, 0, 2))],
    "trace": [Sample((x(5, 6),)), Sample((x(6, 5, dtype=INT),)), Sample((x(5, 5, dtype=torch.complex128),))],
}
