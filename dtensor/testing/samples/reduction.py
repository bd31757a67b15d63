"""Samples of the operations that reduce dims, or run along them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .of_schema import tensor
from .sample import Builder, Sample, Samples

F, Z, B, C = torch.float64, torch.int64, torch.bool, torch.complex128


def x(*shape: int, seed: int = 0, dtype: torch.dtype = F) -> torch.Tensor:
    return tensor(shape or (5, 7), dtype, seed)


def flags(*shape: int, rare: bool) -> torch.Tensor:
    """Mostly False, or mostly True."""
    drawn = tensor(shape, F, 3, 0.0, 1.0)
    return drawn > 0.9 if rare else drawn < 0.9


SPECIAL = torch.tensor(
    [
        [1.0, float("nan"), 3.0, float("nan"), 0.0],
        [2.0, 5.0, 5.0, -1.0, 5.0],
        [float("inf"), 1.0, float("inf"), 0.0, float("-inf")],
    ]
)
SPECIAL = SPECIAL.to(F)
TIES = torch.tensor([[3, 1, 3, 2, 3, 0], [1, 1, 1, 1, 1, 1], [0, 7, 0, 7, 0, 7]])
WITH_DIMS: tuple[dict[str, Any], ...] = (
    {},
    {"dim": [0]},
    {"dim": [-1], "keepdim": True},
    {"dim": [0, 2]},
    {"dim": [0, 1, 2], "keepdim": True},
)
ONE_DIM: tuple[dict[str, Any], ...] = ({"dim": 0}, {"dim": -1, "keepdim": True})


def over(*kwargs: dict[str, Any], dtypes: tuple[torch.dtype, ...] = (F,), nothing: bool = True) -> Sequence[Builder]:
    """A 3-d and an empty operand, under each of ``kwargs`` and ``dtypes``; 0-d."""
    found: list[Builder] = [
        Sample((x(5, 6, 7, dtype=dtype),), dict(given), f"{given} {dtype}")
        for dtype in dtypes
        for given in (kwargs if dtype is dtypes[0] else kwargs[:2])
    ]
    if nothing:
        found += [Sample((x(0, 7),), dict(given), "empty") for given in kwargs if 2 not in (given.get("dim") or ())]
    return found


def plain(*dtypes: torch.dtype) -> Sequence[Builder]:
    """All dims of tensors of 2, 0 and 1 dims."""
    return [
        Sample((x(*shape, dtype=dtype) if shape else tensor((), dtype),), {}, f"{shape} {dtype}")
        for dtype in dtypes
        for shape in ((5, 7), (), (3,))
    ]


def along(dtypes: tuple[torch.dtype, ...] = (F, Z), **kwargs: object) -> Sequence[Builder]:
    """Running along either dim."""
    return [Sample((x(5, 7, dtype=dtype), dim), dict(kwargs), f"dim {dim} {dtype}") for dtype in dtypes for dim in (0, -1)]


SAMPLES: Samples = {
    "sum": [
        *over(*WITH_DIMS, dtypes=(F, Z, B, C)),
        *plain(F, Z),
        Sample((x(),), {"dtype": torch.float32}, "dtype"),
        Sample((x(), []), {}, "no dims"),
    ],
    "nansum": [*over(*WITH_DIMS, dtypes=(F,)), Sample((SPECIAL,), {}, "nan")],
    "mean": [*over(*WITH_DIMS, dtypes=(F, C)), Sample((x(dtype=Z),), {"dtype": F}, "dtype"), Sample((x().half(),), {}, "half")],
    "prod": [*plain(F, Z, B), *over(*ONE_DIM, dtypes=(F, Z), nothing=False)],
    "_foreach_powsum": [Sample(([x(), x(3)], order), {}, str(order), gradients=False) for order in (2, 3)],
    "count_nonzero": [*plain(F, Z, B), Sample((x(5, 6, 7), 0)), Sample((x(5, 6, 7), [0, 2]))],
    "any": [
        *plain(F, Z, B),
        *(Sample((flags(5, 6, 7, rare=True),), dict(given), str(given)) for given in (*WITH_DIMS, *ONE_DIM)),
        Sample((x(), []), {}, "no dims"),
        Sample((torch.tensor([0, 3, 0], dtype=torch.uint8),), {}, "uint8"),
        Sample((torch.zeros(0, 4),), {"dim": 0}, "empty"),
    ],
    "all": [
        *plain(F, Z, B),
        *(Sample((flags(5, 6, 7, rare=False),), dict(given), str(given)) for given in (*WITH_DIMS, *ONE_DIM)),
        Sample((x(), []), {}, "no dims"),
        Sample((torch.zeros(0, 4),), {"dim": 0}, "empty"),
    ],
    "_is_any_true": [Sample((flags(5, 7, rare=True),))],
    "_is_all_true": [Sample((flags(5, 7, rare=False),))],
    "amax": [
        *over(*WITH_DIMS, dtypes=(F, Z, B), nothing=False),
        Sample((x(0, 7), [1]), {}, "empty"),
        Sample((SPECIAL, [1]), {}, "nan"),
        Sample((TIES, [0]), {}, "ties"),
    ],
    "amin": [
        *over(*WITH_DIMS, dtypes=(F, Z, B), nothing=False),
        Sample((x(0, 7), [1]), {}, "empty"),
        Sample((SPECIAL, [1]), {}, "nan"),
        Sample((TIES, [0]), {}, "ties"),
    ],
    "max": [*plain(F, Z), Sample((SPECIAL,), {}, "nan")],
    "min": [*plain(F, Z), Sample((SPECIAL,), {}, "nan")],
    "aminmax": [*plain(F, Z), Sample((x(5, 6, 7),), {"dim": 1}), Sample((x(5, 6, 7),), {"dim": 0, "keepdim": True})],
    **{
        name: [
            *(
                Sample((x(5, 6, 7, dtype=dtype),), {"dim": dim, "keepdim": keep}, f"{dim} {dtype}")
                for dtype in (F, Z)
                for dim, keep in ((0, False), (-1, True))
            ),
            Sample((TIES, 1), {}, "ties"),
            Sample((SPECIAL, 1), {}, "nan"),
            Sample((flags(3, 6, rare=True), 1), {}, "bool"),
            Sample((tensor((), F), 0), {}, "0-d"),
        ]
        for name in ("max.dim", "min.dim")
    },
    **{
        name: [
            *(
                Sample((x(5, 6, 7, dtype=dtype),), {"dim": dim, "keepdim": keep}, f"{dim}")
                for dtype in (F, Z)
                for dim, keep in ((None, False), (0, False), (-1, True))
            ),
            Sample((TIES,), {}, "ties"),
            Sample((TIES.t(),), {}, "ties, strides"),
            Sample((SPECIAL, 1), {}, "nan"),
            Sample((SPECIAL,), {}, "nan"),
        ]
        for name in ("argmax", "argmin")
    },
    "median": [*plain(F, Z), Sample((x(5, 6, 7), 1), {}, "dim")],
    "nanmedian": [*plain(F), Sample((SPECIAL, 1), {}, "dim")],
    "mode": [Sample((TIES, 1), {}, ""), Sample((TIES, 0), {"keepdim": True}, "")],
    "kthvalue": [Sample((x(5, 7), 2), {}, ""), Sample((x(5, 7), 2, 0), {"keepdim": True}, "")],
    **{
        name: [
            *over(*WITH_DIMS, dtypes=(F, C), nothing=False),
            *(Sample((x(5, 6),), {"dim": [0], "correction": c}, f"correction {c}", gradients=c < 5) for c in (0, 2, 5, 7, 0.5)),
            Sample((x(5, 7).half(), [1]), {}, "half"),
            Sample((1e6 + x(5, 7), [1]), {}, "far from zero"),
            Sample((x(1, 7), [0]), {}, "one element"),
        ]
        for name in ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
    },
    "linalg_vector_norm": [
        Sample((x(5, 6, 7, dtype=dtype), order), dict(given), f"{order} {given}")
        for dtype in (F, C)
        for order in (2, 1, 0, 3, 0.5, -1, float("inf"), float("-inf"))
        for given in (({}, {"dim": [0]}, {"dim": [0, 2], "keepdim": True}) if order in (2, float("inf")) else ({},))
    ],
    "norm": [
        Sample((x(),)),
        Sample((x(), 3)),
        Sample((x(), 2, [0])),
        Sample((x(), None, [1], True)),
        Sample((x(), 1, [0], True), {"dtype": torch.float32}),
    ],
    "dist": [Sample((x(), x(seed=1), order), {}, str(order)) for order in (2, 1, 3, float("inf"))]
    + [Sample((x(), x(7, seed=1)), {}, "broadcast")],
    "cumsum": [
        *along((F, Z, B, C)),
        Sample((x(), 0), {"dtype": torch.float32}, "dtype"),
        Sample((tensor((), F), 0), {}, "0-d"),
        Sample((x().half(), 0), {}, "half"),
    ],
    "cumprod": along((F, Z)),
    "logcumsumexp": along((F,)),
    "cummax": [*along((F, Z)), Sample((TIES, 1), {}, "ties"), Sample((SPECIAL, 1), {}, "nan")],
    "cummin": [*along((F, Z)), Sample((TIES, 1), {}, "ties"), Sample((SPECIAL, 1), {}, "nan")],
    "logsumexp": [
        *over(*WITH_DIMS[1:], dtypes=(F,)),
        Sample((SPECIAL, [1]), {}, "infinities"),
        Sample((torch.full((3, 5), -torch.inf), [1]), {}, "nothing"),
    ],
    "_local_scalar_dense": [Sample((tensor((), F),), {}, "0-d"), Sample((x(1, 1, dtype=Z),), {}, "one element")],
    "equal": [Sample((x(), x())), Sample((x(), x(seed=1))), Sample((x(), x(7))), Sample((SPECIAL, SPECIAL), {}, "nan")],
    "is_same_size": [Sample((x(), x(seed=1))), Sample((x(), x(7)))],
    "_has_same_storage_numel": [Sample((x(), x(seed=1))), Sample((x(), x(7)))],
}
