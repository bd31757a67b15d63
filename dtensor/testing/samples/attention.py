"""Samples of fused attention. Sizes are such that no rank's block is empty where the operator itself would divide by zero."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Sample, Samples

aten = torch.ops.aten


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape, torch.float64, seed)


def operands(heads: int = 7, key_heads: int = 7, queries: int = 10, keys: int = 11) -> tuple[torch.Tensor, ...]:
    return x(8, heads, queries, 2), x(8, key_heads, keys, 2, seed=1), x(8, key_heads, keys, 2, seed=2)


def mask(*shape: int) -> torch.Tensor:
    hidden = tensor(shape, torch.bool, 5)
    return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def gradient(note: str, causal: bool = False, attn_mask: torch.Tensor | None = None, **sizes: int) -> Sample:
    q, k, v = operands(**sizes)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=attn_mask)
    kwargs = {} if attn_mask is None else {"attn_mask": attn_mask}
    return Sample((x(*out.shape, seed=3), q, k, v, out, sums, 0.0, causal), kwargs, note, gradients=False)


SAMPLES: Samples = {
    "_scaled_dot_product_flash_attention_for_cpu": [
        Sample(operands()),
        Sample((*operands(), 0.0, True), {}, "causal"),
        Sample(operands(heads=14), {}, "grouped queries"),
        Sample(operands(), {"attn_mask": mask(10, 11), "scale": 0.5}, "mask", gradients=False),
        Sample(operands(), {"attn_mask": mask(8, 1, 1, 11)}, "mask of keys", gradients=False),
    ],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        gradient("plain"),
        gradient("causal", causal=True),
        gradient("grouped queries", heads=14),
        gradient("mask", attn_mask=mask(8, 1, 10, 11)),
    ],
    "_fused_sdp_choice": [
        Sample(operands()),
        Sample((x(7, 10, 2), x(7, 11, 2), x(7, 11, 2)), {}, "three dims"),
        Sample(operands(), {"dropout_p": 0.5}),
    ],
    **{
        f"_scaled_dot_product_{name}_attention{kind}": []
        for name in ("flash", "efficient", "cudnn")
        for kind in ("", "_backward")
    },  # CUDA only
}
