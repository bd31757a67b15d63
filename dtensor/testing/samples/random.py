"""Samples of random operations: the verification seeds both runs alike."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

F = torch.float64


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape or (5, 7), F, seed)


SHAPES = ((5, 7), (3, 17), (), (0, 3))
FILLED = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_")

SAMPLES: Samples = {
    "rand_like": [
        *(Sample((x(*shape),), {}, str(shape)) for shape in SHAPES),
        Sample((x().t(),), {"dtype": torch.float32}, "strides, dtype"),
    ],
    "randn_like": [*(Sample((x(*shape),), {}, str(shape)) for shape in SHAPES), Sample((x().t(),), {}, "strides")],
    "randint_like": [Sample((x(), 9), {}, "high"), Sample((x(), 3, 9), {"dtype": torch.int64}, "low and high")],
    "bernoulli.p": [Sample((x(), 0.3)), Sample((x().t(), 0.5))],
    "bernoulli_.float": [Sample((x(), 0.3)), Sample((torch.zeros(5, 7, dtype=torch.bool), 0.5))],
    **{
        name: [
            *(Sample((x(*shape),), {}, str(shape), gradients=False) for shape in SHAPES),
            Sample((x().t(),), {}, "strides", gradients=False),
        ]
        for name in FILLED
    },
    **{name.removesuffix("_"): [Sample((x(),), {}, "", gradients=False)] for name in FILLED if name != "normal_"},
    "geometric": [Sample((x(), 0.3), {}, "", gradients=False)],
    "geometric_": [Sample((x(), 0.3), {}, "", gradients=False)],
    "native_dropout": [
        Sample((x(), p, train), {}, f"{p} {train}")
        for p, train in ((0.3, True), (0.0, True), (1.0, True), (0.3, False), (0.3, None))
    ],
}
