"""Samples of softmax and its kin."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

F = torch.float64


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape or (5, 7), F, seed)


MASKED = torch.tensor(
    [[0.5, float("-inf"), 1.0, float("-inf"), 2.0], [float("-inf")] * 5, [0.0, 1.0, 2.0, 3.0, float("inf")]], dtype=F
)
SAMPLES: Samples = {
    **{
        name: [Sample((x(5, 6, 7), dim, False), {}, f"dim {dim}") for dim in (0, 1, -1)]
        + [Sample((MASKED, dim, False), {}, "masked") for dim in (0, 1)]
        + [
            Sample((tensor((), F), 0, False), {}, "0-d"),
            Sample((x().half(), 1, False), {}, "half"),
            Sample((x(0, 7), 1, False), {}, "empty"),
        ]
        for name in ("_softmax", "_log_softmax")
    },
    **{
        name: [Sample((x(5, 6, 7), x(5, 6, 7, seed=1), dim, F), {}, f"dim {dim}") for dim in (0, 1, -1)]
        + [Sample((tensor((), F), tensor((), F, 1), 0, F), {}, "0-d")]
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
    },
    "_safe_softmax": [Sample((x(5, 7), dim), {}, f"dim {dim}") for dim in (0, -1)] + [Sample((MASKED, 1), {}, "masked")],
}
