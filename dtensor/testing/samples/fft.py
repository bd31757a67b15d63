"""Samples of Fourier transforms."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples


def x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return tensor(shape, dtype)


C = torch.complex128

SAMPLES: Samples = {
    "_fft_r2c": [
        Sample((x(5, 6, 7), [2], 0, True)),
        Sample((x(5, 6, 7), [0, 1], 1, True)),
        Sample((x(5, 6), [1], 0, False), note="two-sided"),
    ],
    "_fft_c2r": [Sample((x(5, 6, 4, dtype=C), [2], 2, 7)), Sample((x(5, 4, dtype=C), [0, 1], 2, 6))],
    "_fft_c2c": [Sample((x(5, 6, 7, dtype=C), [1], 0, True)), Sample((x(5, 6, dtype=C), [0, 1], 2, False))],
}
