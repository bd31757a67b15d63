"""Samples of normalizations."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

aten = torch.ops.aten
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def x(*shape: int, seed: int = 0, dtype: torch.dtype = F64, low: float = -2.0) -> torch.Tensor:
    return tensor(shape, dtype, seed, low, 2.0)


def layer_norm_gradient(mask: list[bool], note: str = "") -> Sample:
    own, weight, bias = x(5, 3, 7), x(3, 7, seed=1), x(3, 7, seed=2)
    _, mean, rstd = aten.native_layer_norm(own, [3, 7], weight, bias, 1e-5)
    return Sample((x(5, 3, 7, seed=3), own, [3, 7], mean, rstd, weight, bias, mask), {}, note, gradients=False)


def group_norm_gradient(groups: int, mask: list[bool]) -> Sample:
    own, weight = x(5, 6, 3), x(6, seed=1)
    _, mean, rstd = aten.native_group_norm(own, weight, x(6, seed=2), 5, 6, 3, groups, 1e-5)
    return Sample((x(5, 6, 3, seed=3), own, mean, rstd, weight, 5, 6, 3, groups, mask), {}, f"{groups} groups", gradients=False)


def batch_norm_gradient(train: bool, mask: list[bool]) -> Sample:
    own, weight, mean, var = x(5, 3, 7), x(3, seed=1), x(3, seed=2), x(3, seed=3, low=0.5)
    _, saved, rstd = aten.native_batch_norm(own, weight, None, mean.clone(), var.clone(), train, 0.1, 1e-5)
    return Sample(
        (x(5, 3, 7, seed=4), own, weight, mean, var, saved, rstd, train, 1e-5, mask), {}, f"train={train}", gradients=False
    )


def batch_norm(*shape: int, train: bool, parameters: bool = True, dtype: torch.dtype = F64) -> tuple[object, ...]:
    c = shape[1]
    own = (x(c, seed=1, dtype=dtype), x(c, seed=2, dtype=dtype)) if parameters else (None, None)
    return (x(*shape, dtype=dtype), *own, x(c, seed=3, dtype=dtype), x(c, seed=4, low=0.5, dtype=dtype), train, 0.2, 1e-5)


ALL, FIRST, LAST = [True, True, True], [True, False, False], [False, True, True]
NORMS = torch.linalg.vector_norm(x(5, 6, 3), dim=(1, 2), keepdim=True)

SAMPLES: Samples = {
    "native_layer_norm": [
        Sample((x(5, 3, 7), [7], x(7, seed=1), x(7, seed=2), 1e-5)),
        Sample((x(5, 3, 7), [3, 7], None, None, 1e-5), {}, "two dims"),
        Sample((x(7), [7], x(7, seed=1), None, 1e-5), {}, "no rows"),
        Sample((x(5, 7, dtype=BF16), [7], x(7, seed=1, dtype=BF16), None, 1e-5), {}, "bfloat16"),
        Sample((x(5, 7, dtype=F32) + 100, [7], x(7, seed=1, dtype=F32), None, 1e-5), {}, "far from zero", gradients=False),
    ],
    "native_layer_norm_backward": [layer_norm_gradient(ALL), layer_norm_gradient(FIRST), layer_norm_gradient(LAST)],
    "_fused_rms_norm": [Sample((x(5, 3, 7), [7], x(7, seed=1), 1e-5)), Sample((x(5, 3, 7), [3, 7], None, None), {}, "two dims")],
    "_fused_rms_norm_backward": [],  # no CPU kernel: compared with the composite in tests/rules/test_rules_norm.py
    "native_group_norm": [
        Sample((x(5, 6, 3), x(6, seed=1), x(6, seed=2), 5, 6, 3, 2, 1e-5)),
        Sample((x(5, 6, 2, 3), None, None, 5, 6, 6, 3, 1e-5), {}, "images"),
        Sample((x(5, 6, 3), x(6, seed=1), x(6, seed=2), 5, 6, 3, 1, 1e-5), {}, "one group"),
        Sample((x(5, 6, 3), x(6, seed=1), x(6, seed=2), 5, 6, 3, 6, 1e-5), {}, "a group per channel"),
    ],
    "native_group_norm_backward": [group_norm_gradient(2, ALL), group_norm_gradient(1, ALL), group_norm_gradient(3, FIRST)],
    "native_batch_norm": [
        Sample(batch_norm(5, 3, 7, train=True), gradients=False),
        Sample(batch_norm(5, 3, train=True, parameters=False), {}, "no dims", gradients=False),
        Sample(batch_norm(5, 3, 2, 7, train=False), {}, "evaluation", gradients=False),
        Sample((x(5, 3, 7), x(3, seed=1), x(3, seed=2), None, None, True, 0.1, 1e-5), {}, "nothing kept"),
    ],
    "_native_batch_norm_legit": [
        Sample(batch_norm(5, 3, 7, train=True), gradients=False),
        Sample(batch_norm(5, 3, 7, train=False), gradients=False),
    ],
    "_native_batch_norm_legit.no_stats": [Sample((x(5, 3, 7), x(3, seed=1), x(3, seed=2), True, 0.1, 1e-5))],
    "_native_batch_norm_legit_no_training": [
        Sample((x(5, 3, 7), x(3, seed=1), x(3, seed=2), x(3, seed=3), x(3, seed=4, low=0.5), 0.1, 1e-5), gradients=False)
    ],
    "native_batch_norm_backward": [batch_norm_gradient(t, mask) for t in (True, False) for mask in (ALL, FIRST)],
    "_weight_norm_interface": [Sample((x(5, 6, 3), x(5, 1, 1, seed=1), 0)), Sample((x(5, 6, 3), x(1, 1, 3, seed=1), 2))],
    "_weight_norm_interface_backward": [Sample((x(5, 6, 3), x(5, 6, 3, seed=1), x(5, 1, 1, seed=2), NORMS, 0), gradients=False)],
}
