"""Tiny configurations of Hugging Face models, with a small value for every size, and a short training run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import dtensor as dt

VOCABULARY = 37

# Names in the configurations of many families. Sizes are odd where heads allow it, so that shards are uneven.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 24),
    "emb_dim": 24,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "d_inner", "ffn_hidden_size", "d_ffn"), 37),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 29),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 6,
    "d_kv": 6,
    "d_head": 6,
    "rotary_dim": 6,
    "max_position_embeddings": 40,
    "n_positions": 40,
    "n_ctx": 40,
    "max_seq_len": 40,
    "context_length": 40,
    "max_source_positions": 40,
    "max_target_positions": 40,
    "type_vocab_size": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "image_size": 24,
    "patch_size": 8,
    "num_channels": 3,
    "num_mel_bins": 10,
    "state_size": 4,
    "projection_dim": 10,
    "relative_attention_num_buckets": 8,
}  # fmt: skip


def tiny(config_class: type[Any], **given: Any) -> Any:
    """Return a configuration with small sizes; ``given`` takes precedence. A dictionary sets the values of a nested
    configuration."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in SMALL.items() if name in fields}
    inner = config_class.sub_configs
    for name, sub_class in inner.items():
        if name in fields and name not in given and sub_class is not transformers.AutoConfig:
            values[name] = tiny(sub_class)
    for name, value in given.items():
        if isinstance(value, dict) and name in inner and inner[name] is not transformers.AutoConfig:
            value = tiny(inner[name], **value)
        values[name] = value
    return config_class(**values)


def first(x: Any) -> Tensor:
    """Return the value, asserting that all ranks have the same."""
    whole = x.full_tensor() if isinstance(x, dt.DTensor) else x
    pieces: list[Tensor] = list(whole.shards) if isinstance(whole, dt.PerRank) else [whole]
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def trained(model: nn.Module, tokens: Tensor) -> list[float]:
    """Return the losses of three training steps of the parameters that require gradients."""
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(first(loss.detach())))
    return losses
