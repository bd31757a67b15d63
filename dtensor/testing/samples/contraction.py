"""Samples of the products of matrices."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

FLOAT, INT, COMPLEX = torch.float64, torch.int64, torch.complex128


def x(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return tensor(shape, dtype, seed)


SAMPLES: Samples = {
    "mm": [
        *(Sample((x(5, 6, dtype=t), x(6, 7, seed=1, dtype=t)), {}, str(t)) for t in (FLOAT, INT, COMPLEX)),
        Sample((x(6, 5).t(), x(7, 6, seed=1).t()), {}, "strides"),
        Sample((x(5, 0), x(0, 7)), {}, "empty"),
        Sample((x(1, 6), x(6, 1, seed=1)), {}, "size one"),
    ],
    "bmm": [Sample((x(5, 2, 6, dtype=t), x(5, 6, 7, seed=1, dtype=t)), {}, str(t)) for t in (FLOAT, INT)],
    "mv": [Sample((x(5, 6, dtype=t), x(6, seed=1, dtype=t)), {}, str(t)) for t in (FLOAT, INT)],
    "dot": [Sample((x(6, dtype=t), x(6, seed=1, dtype=t)), {}, str(t)) for t in (FLOAT, INT, COMPLEX)],
    "vdot": [Sample((x(6, dtype=t), x(6, seed=1, dtype=t)), {}, str(t)) for t in (FLOAT, COMPLEX)],
    "ger": [Sample((x(5), x(7, seed=1)))],
    "outer": [Sample((x(5), x(7, seed=1)))],
    "addmm": [
        Sample((x(5, 7), x(5, 6, seed=1), x(6, 7, seed=2))),
        Sample((x(7), x(5, 6, seed=1), x(6, 7, seed=2)), {}, "vector"),
        Sample((x(5, 1), x(5, 6, seed=1), x(6, 7, seed=2)), {"beta": 0.5, "alpha": -2.0}, "column, scaled"),
        Sample((x(7, dtype=INT), x(5, 6, seed=1, dtype=INT), x(6, 7, seed=2, dtype=INT)), {"beta": 3}, "integers"),
        Sample((x(), x(5, 6, seed=1), x(6, 7, seed=2)), {}, "0-d"),
    ],
    "baddbmm": [
        Sample((x(5, 2, 7), x(5, 2, 6, seed=1), x(5, 6, 7, seed=2)), {"beta": 0.5}, "scaled"),
        Sample((x(7), x(5, 2, 6, seed=1), x(5, 6, 7, seed=2)), {}, "vector"),
    ],
    "addbmm": [Sample((x(2, 7), x(5, 2, 6, seed=1), x(5, 6, 7, seed=2)), {"beta": 0.5, "alpha": 2.0}, "scaled")],
    "addmv": [
        Sample((x(5), x(5, 6, seed=1), x(6, seed=2)), {"beta": 0.5}, "scaled"),
        Sample((x(), x(5, 6, seed=1), x(6, seed=2)), {}, "0-d"),
    ],
    "_grouped_mm": [
        Sample(
            (x(7, 8, dtype=torch.float32), x(3, 8, 12, seed=1, dtype=torch.float32)),
            {"offs": torch.tensor([3, 3, 7], dtype=torch.int32)},
            "rows, an empty group",
            gradients=False,
        )
    ],
    "addr": [
        Sample((x(5, 7), x(5, seed=1), x(7, seed=2)), {"alpha": -2.0}, "scaled"),
        Sample((x(7), x(5, seed=1), x(7, seed=2)), {}, "vector"),
    ],
}
