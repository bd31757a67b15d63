"""Samples of convolutions."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape, torch.float64, seed)


def convolution(
    ndim: int, *, bias: bool = True, groups: int = 1, transposed: bool = False, stride: int = 1, padding: int = 0
) -> Sample:
    positions, kernel = (7, 6, 5)[:ndim], (3, 2, 2)[:ndim]
    weight = (6, 5 if groups == 1 else 2) if transposed else (5 if groups == 1 else 6, 6 // groups)
    out = weight[1] * groups if transposed else weight[0]
    args = (x(4, 6, *positions), x(*weight, *kernel, seed=1), x(out, seed=2) if bias else None)
    more = ([stride] * ndim, [padding] * ndim, [1] * ndim, transposed, [0] * ndim, groups)
    return Sample((*args, *more), {}, f"{ndim}-d, {groups} groups{', transposed' if transposed else ''}")


def gradient(mask: list[bool], **options: object) -> Sample:
    forward = convolution(1, **options)  # type: ignore[arg-type]  # passed on
    own, weight, bias, *more = forward.args
    out = torch.ops.aten.convolution(*forward.args)
    sizes = None if bias is None else list(bias.shape)
    return Sample((x(*out.shape, seed=3), own, weight, sizes, *more, mask), {}, f"{forward.note} {mask}", gradients=False)


ALL, INPUT, LAST = [True, True, True], [True, False, False], [False, True, True]

SAMPLES: Samples = {
    "convolution": [
        convolution(1),
        convolution(2, stride=2, padding=1),
        convolution(3, bias=False),
        convolution(1, groups=3),
        convolution(1, groups=6, bias=False),
        convolution(1, transposed=True),
        convolution(1, transposed=True, groups=3),
    ],
    "convolution_backward": [
        gradient(ALL),
        gradient(INPUT, bias=False),
        gradient(LAST),
        gradient(ALL, groups=3),
        gradient(ALL, transposed=True),
        gradient(ALL, transposed=True, groups=2),
    ],
}
