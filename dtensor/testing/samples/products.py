"""Samples of products beyond those of two matrices: linear, einsum, distances, low precision."""

from __future__ import annotations

import math

import torch

from .of_schema import tensor
from .sample import Sample, Samples

LONG, I8 = torch.int64, torch.int8


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return tensor(shape, dtype, seed)


SAMPLES: Samples = {
    "_addmm_activation": [
        Sample((x(7), x(5, 6, seed=1), x(6, 7, seed=2)), {"use_gelu": True}),
        Sample((x(5, 7), x(5, 6, seed=1), x(6, 7, seed=2))),
    ],
    "linear": [
        Sample((x(5, 2, 6), x(7, 6, seed=1), x(7, seed=2))),
        Sample((x(5, 6, dtype=LONG), x(7, 6, seed=1, dtype=LONG))),
        Sample((x(6), x(7, 6, seed=1), x(7, seed=2)), {}, "vector"),
        Sample((x(5, 6), x(6, seed=1)), {}, "one output"),
    ],
    "matmul": [
        Sample((x(3, 5, 2, 6), x(5, 6, 7, seed=1)), {}, "batch dims broadcast"),
        Sample((x(5, 1, 2, 6), x(3, 6, 7, seed=1)), {}, "batch dims of size one"),
        *(Sample((x(*a), x(*b, seed=1))) for a, b in (((6,), (6,)), ((5, 6), (6,)))),
        Sample((x(5, 6, dtype=LONG), x(6, 7, seed=1, dtype=LONG))),
    ],
    "einsum": [
        Sample(("bij, bjk -> bik", [x(5, 2, 6), x(5, 6, 3, seed=1)])),
        Sample(("bsd,dhe->bhse", [x(5, 2, 6), x(6, 3, 7, seed=1)])),
        Sample(("...ij,jk->...ik", [x(5, 2, 6), x(6, 7, seed=1)])),
        Sample(("ij,jk", [x(5, 6), x(6, 7, seed=1)]), {}, "implicit"),
        Sample(("ij->j", [x(5, 6)])),
        Sample(("ii->i", [x(5, 5)]), {}, "diagonal"),
        Sample(("i,j,k->kij", [x(5), x(6, seed=1), x(7, seed=2)])),
        Sample(("...a,...a->...", [x(5, 1, 6), x(7, 6, seed=1)]), {}, "broadcast"),
    ],
    "_trilinear": [
        Sample((x(5, 6), x(7, 6, 3, seed=1), x(5, 3, seed=2), [1, 3], [0], [1, 2], [2, 3]), {}, "bilinear"),
        Sample((x(5, 6), x(5, 6, seed=1), x(5, 6, seed=2), [], [], [], [1]), {}, "one summed"),
    ],
    "_cdist_forward": [
        Sample((x(5, 3), x(6, 3, seed=1), 2.0, None)),
        Sample((x(2, 5, 3), x(2, 6, 3, seed=1), 1.0, None), {}, "batched"),
        *(Sample((x(5, 3), x(6, 3, seed=1), p, None), {}, f"p = {p}") for p in (0.0, 1.0, 2.5, math.inf)),
        Sample((x(30, 3), x(6, 3, seed=1), 2.0, None), {}, "by matrix product"),
    ],
    "_euclidean_dist": [Sample((x(5, 3), x(6, 3, seed=1)))],
    "_cdist_backward": [
        Sample((x(5, 6), x(5, 3, seed=1), x(6, 3, seed=2), 2.0, torch.cdist(x(5, 3, seed=1), x(6, 3, seed=2))), gradients=False)
    ],
    "_pdist_forward": [Sample((x(5, 3), 2.0))],
    "_pdist_backward": [Sample((x(10), x(5, 3, seed=1), 2.0, torch.pdist(x(5, 3, seed=1))), gradients=False)],
    "_int_mm": [Sample((x(5, 6, dtype=I8), x(6, 7, seed=1, dtype=I8)))],
    "linear_backward": [],
    "_scaled_mm": [],
}
