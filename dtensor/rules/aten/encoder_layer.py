"""The fused inference operators of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``, in terms of others."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..verbs import composed


def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of (batch, sequence, features), and its weights where asked for. Query, key and value may be one tensor."""
    projected = [
        F.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    ]
    hidden = None if mask is None else broadcast_mask(mask, mask_type)
    weights = None
    if need_weights:
        q, k, v = projected
        scores = (q * (embed_dim // num_head) ** -0.5) @ k.transpose(-2, -1)
        weights = (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        q, k, v = projected
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else hidden.logical_not())
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def broadcast_mask(mask: Tensor, mask_type: int | None) -> Tensor:
    """What is hidden, broadcastable to (batch, heads, queries, keys): type 0 is (queries, keys), 1 is (batch, keys), 2 is full.

    Masks of numbers hide where they are not zero, as in the operator.
    """
    hidden = mask.bool()
    return hidden[:, None, None, :] if mask_type == 1 else hidden


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """The layer's forward pass in evaluation."""

    def attend(x: Tensor) -> Tensor:
        own = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *own, mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


composed("_native_multi_head_attention", native_multi_head_attention, "linear, attention, linear")
composed("_transformer_encoder_layer_fwd", transformer_encoder_layer, "attention, layer norm, feed forward, layer norm")
