"""Samples of new tensors made like another one."""

from __future__ import annotations

import torch

from .sample import Sample, Samples
from .views import x

SAMPLES: Samples = {
    "new_empty": [Sample((x(5, 6), list(size)), {}, str(size), values=False, gradients=False) for size in ((5, 6), (7,), ())],
    "new_empty_strided": [
        Sample((x(5, 6), [5, 6], [6, 1]), {}, "the same", values=False, gradients=False),
        Sample((x(5, 6), [5, 6], [1, 5]), {}, "transposed", values=False, gradients=False),
        Sample((x(5, 6), [7], [2]), {}, "other", values=False, gradients=False),
    ],
    "new_zeros": [Sample((x(5, 6), list(size)), {}, str(size), gradients=False) for size in ((5, 6), (7, 2), ())],
    "new_ones": [
        Sample((x(5, 6), [5, 6]), {"dtype": torch.int64}, "dtype", gradients=False),
        Sample((x(5), [7]), {}, "", gradients=False),
    ],
    "new_full": [Sample((x(5, 6), [5, 6], 2.5), {}, "", gradients=False), Sample((x(5, 6), [6, 5], 7), {}, "", gradients=False)],
    "_new_zeros_with_same_feature_meta": [
        Sample((x(5, 6), x(7, 3)), {}, "the other's", gradients=False),
        Sample((x(2, 5), x(6)), {"self_num_batch_dims": 1}, "one batch dim", gradients=False),
    ],
}
