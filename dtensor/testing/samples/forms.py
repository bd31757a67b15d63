"""Samples of the forms that families leave out: composite operators, host reads, results named in ``out=``, fused layers."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

SINGLE = torch.float32


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return tensor(shape, dtype, seed)


def _extremum(name: str) -> Sample:
    """``max.dim_max``: values and places written into two given tensors."""
    out = {
        name: torch.zeros(5, dtype=torch.float64),
        f"{name}_values" if name == "max" else "min_indices": torch.zeros(5, dtype=torch.int64),
    }
    return Sample((x(5, 7), 1), out, gradients=False)


def _attention() -> tuple[torch.Tensor, ...]:
    """Packed projection weights of 2 heads of 4."""
    return x(24, 8, seed=1, dtype=SINGLE), x(24, seed=2, dtype=SINGLE), x(8, 8, seed=3, dtype=SINGLE), x(8, seed=4, dtype=SINGLE)


def _encoder() -> Sample:
    norms = tuple(x(8, seed=5 + k, dtype=SINGLE) for k in range(4))
    feed = (
        x(6, 8, seed=9, dtype=SINGLE),
        x(6, seed=10, dtype=SINGLE),
        x(8, 6, seed=11, dtype=SINGLE),
        x(8, seed=12, dtype=SINGLE),
    )
    return Sample((x(3, 5, 8, dtype=SINGLE), 8, 2, *_attention(), True, False, 1e-5, *norms, *feed), gradients=False)


SAMPLES: Samples = {
    "softmax": [Sample((x(5, 7), 1)), Sample((x(5, 7, dtype=torch.int64), 0), {"dtype": torch.float64}, "integers")],
    "log_softmax": [Sample((x(5, 7), 1)), Sample((x(5, 7, dtype=torch.int64), 0), {"dtype": torch.float64}, "integers")],
    "item": [Sample((x(),)), Sample((x(1, 1, dtype=torch.int64),))],
    "max.dim_max": [_extremum("max")],
    "min.dim_min": [_extremum("min")],
    "set_": [
        Sample((x(5, 7), x(6, seed=1)), {}, "another tensor's memory", gradients=False),
        Sample((x(5, 7),), {}, "none", gradients=False),
    ],
    "_foreach_powsum": [
        Sample(([x(5, 7), x(6, seed=1)],), {}, "squares", gradients=False),
        Sample(([x(5, 7), x(6, seed=1)], 3), gradients=False),
    ],
    "_native_multi_head_attention": [
        Sample((x(3, 5, 8, dtype=SINGLE),) * 3 + (8, 2, *_attention()), {"need_weights": False}, gradients=False),
        Sample((x(3, 5, 8, dtype=SINGLE),) * 3 + (8, 2, *_attention()), {}, "weights", gradients=False),
    ],
    "_transformer_encoder_layer_fwd": [_encoder()],
    "_scaled_mm": [
        Sample(
            (
                x(16, 32).to(torch.float8_e4m3fn),
                x(16, 32, seed=1).to(torch.float8_e4m3fn).t(),
                torch.tensor(0.5),
                torch.tensor(2.0),
            ),
            {"out_dtype": SINGLE},
            gradients=False,
        )
    ],
}

# What runs on other devices only, where the tests of that device check it.
ELSEWHERE: dict[str, str] = dict.fromkeys(
    (
        "_fused_rms_norm_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
        "linear_backward",
    ),
    "no CPU kernel",
)
ELSEWHERE["_amp_foreach_non_finite_check_and_unscale_"] = "writes to a plain tensor: tests/parallel/test_parallel_training.py"
