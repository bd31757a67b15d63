"""Samples of the operations that read and write by index."""

from __future__ import annotations

import torch

from .sample import Builder, Sample, Samples
from .views import INT, x

MASK = torch.tensor([True, False, True, True, False])


def ids(high: int, *shape: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def distinct(high: int, count: int) -> torch.Tensor:
    return torch.randperm(high, generator=torch.Generator().manual_seed(3))[:count]


def embeddings() -> list[Builder]:
    return [
        Sample((x(7, 3), ids(7, 5, 2))),
        Sample((x(7, 3), ids(7, 5)), {"padding_idx": 2}, "padding"),
        Sample((x(7, 3), ids(7, 5, 4)), {"scale_grad_by_freq": True}, "frequencies"),
        Sample((x(7, 3), ids(7))),
        Sample((x(7, 3), ids(7, 0))),
        Sample((x(7, 3), torch.tensor([0, 7])), {}, "out of range"),
        Sample((x(7, 3), ids(7, 5).int()), {}, "int32"),
    ]


def selected_rows() -> list[Builder]:
    return [
        Sample((x(5, 6), 0, ids(5, 7))),
        Sample((x(5, 6), -1, ids(6, 3))),
        Sample((x(5, 6, dtype=INT), 1, ids(6, 4))),
        Sample((x(5, 6, dtype=torch.bool), 0, ids(5, 4))),
        Sample((x(5, 6), 0, ids(5))),
        Sample((x(), 0, ids(1, 1))),
        Sample((x(5, 6), 0, ids(5, 0))),
        Sample((x(5, 6), 0, torch.tensor([5])), {}, "out of range"),
        Sample((x(5) / 0.0, 0, ids(5, 4)), {}, "infinities"),
    ]


def gathers() -> list[Builder]:
    return [
        Sample((x(5, 6), 0, ids(5, 7, 6))),
        Sample((x(5, 6), -1, ids(6, 5, 3))),
        Sample((x(5, 6), 1, ids(6, 3, 7))),
        Sample((x(5, 6, dtype=INT), 0, ids(5, 2, 4))),
        Sample((x(5, 6, 3), 1, ids(6, 5, 2, 2))),
        Sample((x(), 0, ids(1))),
        Sample((x(5, 6), 0, ids(5, 0, 6))),
        Sample((x(5), 0, torch.tensor([1, 5])), {}, "out of range"),
    ]


def reads() -> list[Builder]:
    a, b = ids(5, 7, low=-5), ids(6, 7, seed=1)
    return [
        Sample((x(5, 6), [a])),
        Sample((x(5, 6), [None, b])),
        Sample((x(5, 6), [a, b])),
        Sample((x(5, 6, 3), [a, None, ids(3, 7)]), {}, "scattered dims"),
        Sample((x(5, 6, 3), [None, b, ids(3, 2, 1)]), {}, "broadcast"),
        Sample((x(5, 6, dtype=INT), [ids(5, 2, 3)])),
        Sample((x(5, 6), [ids(5)]), {}, "0-d index"),
        Sample((x(5, 6), [ids(5, 0)])),
        Sample((x(5, 6), [torch.tensor([0, 5])]), {}, "out of range"),
        Sample((x(5, 6), [MASK]), {}, "mask"),
    ]


def scatters(name: str) -> list[Builder]:
    rows = torch.stack([distinct(5, 3) for _ in range(6)], 1)
    extra = {"scatter_reduce": ("sum",)}.get(name, ())
    return [
        Sample((x(5, 6), 0, rows, x(3, 6, seed=1), *extra)),
        Sample((x(5, 6), 1, rows.t()[:5], x(5, 4, seed=1), *extra), {}, "longer source"),
        Sample((x(5, 6, dtype=INT), 0, rows[:2, :4], x(2, 4, dtype=INT, seed=1), *extra), {}, "shorter index"),
        Sample((x(5, 6), 0, rows[:0], x(0, 6), *extra)),
        Sample((x(), 0, torch.tensor(0), x(seed=1), *extra)),
    ]


def additions() -> list[Builder]:
    return [Sample((x(5, 6), 0, ids(5, 7, 6), x(7, 6, seed=1))), Sample((x(5, 6), 1, ids(6, 5, 9), x(5, 9, seed=1)))]


def reductions() -> list[Builder]:
    index, source = ids(5, 7, 6), x(7, 6, seed=1)
    ways = [(how, given) for how in ("sum", "prod", "mean", "amax", "amin") for given in (True, False)]
    return [Sample((x(5, 6), 0, index, source, how), {"include_self": given}, f"{how} {given}") for how, given in ways]


def row_writes(*rest: object) -> list[Builder]:
    return [
        Sample((x(5, 6), 0, distinct(5, 3), x(3, 6, seed=1), *rest)),
        Sample((x(5, 6), -1, distinct(6, 4), x(5, 4, seed=1), *rest)),
        Sample((x(5, 6, dtype=INT), 0, distinct(5, 3), x(3, 6, dtype=INT, seed=1), *rest)),
        Sample((x(5, 6), 0, distinct(5, 0), x(0, 6), *rest)),
    ]


def writes() -> list[Builder]:
    a, b = distinct(5, 3), distinct(6, 3)
    return [
        Sample((x(5, 6), [a], x(3, 6, seed=1))),
        Sample((x(5, 6), [None, b], x(5, 3, seed=1))),
        Sample((x(5, 6), [a - 5, b], x(3, seed=1))),
        Sample((x(5, 6), [a, b], x(1, seed=1)), {}, "broadcast"),
        Sample((x(5, 6, 3), [a, None, distinct(3, 3)], x(3, 6, seed=1)), {}, "scattered dims"),
        Sample((x(5, 6), [ids(5, 7)], x(7, 6, seed=1), True), {}, "accumulate"),
        Sample((x(5, 6, dtype=INT), [ids(5, 7), ids(6, 7)], x(dtype=INT, seed=1), True), {}, "accumulate one"),
        Sample((x(5, 6), [MASK], x(seed=1)), {}, "mask, one value"),
        Sample((x(5, 6), [x(5, 6) > 0], x(seed=1)), {}, "mask, one value"),
        Sample((x(5, 6), [None, torch.tensor([True] * 2 + [False] * 4)], x(5, 2, seed=1)), {}, "mask, many values"),
        Sample((x(5, 6), [distinct(5, 0)], x(0, 6))),
    ]


SORTED = torch.tensor([-1.5, -0.5, 0.0, 0.5, 0.5, 1.0, 2.0], dtype=torch.float64)


SAMPLES: Samples = {
    "embedding": embeddings(),
    "embedding_dense_backward": [
        Sample((x(5, 2, 3), ids(7, 5, 2), 7, -1, False)),
        Sample((x(5, 3), ids(7, 5), 7, 2, False), {}, "padding"),
        Sample((x(5, 3), ids(3, 5), 7, -1, True), {}, "frequencies", gradients=False),
    ],
    "index_select": selected_rows(),
    "gather": gathers(),
    "take": [
        Sample((x(5, 6), ids(30, 7, 2, low=-30))),
        Sample((x(5, 6, 3, dtype=INT), ids(90, 7))),
        Sample((x(), ids(1, 2))),
        Sample((x(5), ids(5))),
        Sample((x(5), torch.tensor([5])), {}, "out of range"),
    ],
    "index": reads(),
    "_unsafe_index": reads()[:4],
    "bucketize": [Sample((x(5, 6), SORTED)), Sample((x(5), SORTED), {"right": True, "out_int32": True}), Sample((0.5, SORTED))],
    "searchsorted": [
        Sample((SORTED, x(5, 6))),
        Sample((SORTED, 0.5), {"side": "right"}),
        Sample((x(5, 7).sort(-1).values, x(5, 3, seed=1))),
        Sample((x(5, 7), x(5, 3, seed=1)), {"sorter": x(5, 7).argsort(-1)}, "sorter"),
    ],
    "scatter": [
        *scatters("scatter"),
        Sample((x(5, 6), 0, ids(5, 3, 6), 2.5), {}, "number"),
        Sample((x(5, 6), 0, ids(5, 7, 6), x(7, 6, seed=1)), {"reduce": "add"}, "add", gradients=False),
        Sample((x(5, 6), 1, ids(6, 5, 3), 2.0), {"reduce": "multiply"}, "multiply", gradients=False),
    ],
    "scatter_add": [*scatters("scatter_add"), *additions()],
    "scatter_reduce": [*scatters("scatter_reduce"), *reductions()],
    "index_add": [*row_writes(), Sample((x(5, 6), 0, ids(5, 7), x(7, 6, seed=1)), {"alpha": -2}, "repeated")],
    "index_copy": row_writes(),
    "index_fill": [
        Sample((x(5, 6), 0, ids(5, 3), 2.5), {}, "number"),
        Sample((x(5, 6), -1, ids(6, 3), x(seed=1)), {}, "tensor"),
        Sample((x(5, 6, dtype=INT), 0, ids(5, 3), 7), {}, "integers"),
    ],
    "index_reduce": [Sample((x(5, 6), 0, ids(5, 7), x(7, 6, seed=1), how), {}, how) for how in ("prod", "mean", "amax", "amin")],
    "index_put": writes(),
    "_index_put_impl": writes()[:6],
    "_unsafe_index_put": writes()[:6],
    "put": [
        Sample((x(5, 6), distinct(30, 7) - 15, x(7, seed=1))),
        Sample((x(5, 6), ids(30, 7), x(7, seed=1), True), {}, "accumulate"),
        Sample((x(5, 6, dtype=INT), distinct(30, 6).view(2, 3), x(6, dtype=INT, seed=1))),
    ],
}
