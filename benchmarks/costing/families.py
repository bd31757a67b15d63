"""Families: unchanged models, how Megatron would shard their parameters, and the communication of the hand-written program."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import dtensor as dt

COLUMN, ROW = dt.Shard(0), dt.Shard(1)
PATCHES = 65  # of an image of 64 x 64, with the class token


@dataclass(frozen=True)
class Size:
    """Sizes of a model and its batch. ``heads``: of queries and of keys; ``inner``: the MLP's width."""

    layers: int = 2
    width: int = 256
    batch: int = 8
    length: int = 128
    vocabulary: int = 1024
    heads: tuple[int, int] = (8, 8)
    inner: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def hidden(self) -> int:
        return self.inner or 4 * self.width


def make_token_batch(size: Size) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = size.batch, size.length
    return {name: torch.randint(0, size.vocabulary, shape, generator=generator) for name in ("input_ids", "labels")}


def make_image_batch(size: Size) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(size.batch, 3, 64, 64, generator=generator).to(size.dtype)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (size.batch,), generator=generator)}


@dataclass(frozen=True)
class Family:
    """An unchanged model: its class and configuration, and how Megatron would shard its parameters (first matching pattern).

    Attributes:
        reductions: how often the residual stream is all-reduced in a step, by layers: twice a layer and direction, once for the
            embedding, once for the gradient of the head's input.
        logits: the loss is computed from logits sharded over the vocabulary.
    """

    kind: str
    config: Callable[[Size], dict[str, Any]]
    places: tuple[tuple[str, dt.placement.Placement], ...]
    reductions: Callable[[int], int] = lambda layers: 4 * layers + 2
    inputs: Callable[[Size], dict[str, torch.Tensor]] = make_token_batch
    logits: bool = True

    def place(self, name: str) -> dt.placement.Placement:
        return next((spot for pattern, spot in self.places if re.search(pattern, name)), dt.Replicate())


def make_llama_config(size: Size) -> dict[str, Any]:
    heads = {"num_attention_heads": size.heads[0], "num_key_value_heads": size.heads[1]}
    sizes = {"hidden_size": size.width, "intermediate_size": size.hidden, "vocab_size": size.vocabulary}
    return heads | sizes | {"num_hidden_layers": size.layers, "max_position_embeddings": 2 * size.length}


def _gpt2(size: Size) -> dict[str, Any]:
    sizes = {"n_layer": size.layers, "n_embd": size.width, "n_head": size.heads[0]}
    return sizes | {"vocab_size": size.vocabulary, "n_positions": size.length}


def _t5(size: Size) -> dict[str, Any]:
    sizes = {"d_model": size.width, "d_kv": size.width // size.heads[0], "d_ff": size.hidden, "num_heads": size.heads[0]}
    return sizes | {"num_layers": size.layers, "vocab_size": size.vocabulary, "dropout_rate": 0.0, "decoder_start_token_id": 0}


def _vit(size: Size) -> dict[str, Any]:
    return make_llama_config(size) | {"image_size": 64, "patch_size": 8}


LLAMA = ((r"(q|k|v|gate|up)_proj\.weight|embed_tokens|lm_head", COLUMN), (r"(o|down)_proj\.weight", ROW))
BERT = (
    (r"attention\.self\.(query|key|value)|intermediate\.dense|word_embeddings|decoder", COLUMN),
    (r"attention\.output\.dense\.weight|layer\.\d+\.output\.dense\.weight", ROW),
)
_T5 = (
    (r"Attention\.(q|k|v)\.|DenseReluDense\.wi|shared|embed_tokens|lm_head", COLUMN),
    (r"Attention\.o\.|DenseReluDense\.wo|relative_attention_bias", ROW),
)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", make_llama_config, LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", lambda size: make_llama_config(size) | {"head_dim": size.width // size.heads[0]}, LLAMA),
    "mistral": Family("MistralForCausalLM", make_llama_config, LLAMA),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2,
        (  # weights are transposed
            (r"(c_attn|c_fc)\.weight", ROW),
            (r"(c_attn|c_fc)\.bias|wte|lm_head", COLUMN),
            (r"c_proj\.weight", COLUMN),
        ),
    ),
    "bert": Family(
        "BertForMaskedLM",
        make_llama_config,
        BERT,
    ),
    "opt": Family(
        "OPTForCausalLM",
        lambda size: make_llama_config(size) | {"ffn_dim": size.hidden, "word_embed_proj_dim": size.width},
        ((r"(q|k|v)_proj|fc1|embed_tokens|lm_head", COLUMN), (r"(out_proj|fc2)\.weight", ROW)),
    ),
    # one table embeds for encoder and decoder; what all decoder layers owe the encoder's result is reduced once
    "t5": Family("T5ForConditionalGeneration", _t5, _T5, reductions=lambda layers: 10 * layers + 4),
    # patches are embedded, and images classified, by every rank
    "vit": Family(
        "ViTForImageClassification",
        _vit,
        ((r"(q|k|v)_proj|fc1", COLUMN), (r"(o_proj|fc2)\.weight", ROW)),
        reductions=lambda layers: 4 * layers,
        inputs=make_image_batch,
        logits=False,
    ),
    # whole experts on each rank; every rank routes all tokens
    "mixtral": Family(
        "MixtralForCausalLM",
        lambda size: make_llama_config(size) | {"num_local_experts": 4, "num_experts_per_tok": 2},
        ((r"experts\.", dt.Shard(0)), *LLAMA),
    ),
}
USUAL = (
    "llama",
    "qwen3",
    "mistral",
    "gpt2",
    "bert",
    "opt",
    "t5",
    "vit",
)  # what a program with a choice of experts costs: --families


def run_causal_attention(
    module: nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    """Replace a model's attention by causal attention without a mask. Models test for packed sequences by reading values, which a
    dry run lacks.
    """
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def build_model(family: Family, size: Size) -> nn.Module:
    """Return an unchanged model of a family in the given size, without dropout and caches."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, family.kind)
    config = kind.config_class(**family.config(size))
    if torch.get_default_device().type == "meta":
        transformers.AttentionInterface.register("causal", run_causal_attention)
        config._attn_implementation = "causal"
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.use_cache = False
    return kind(config).to(size.dtype)


# --- by hand: what one rank receives, and how many collectives -------------------------------------------------------------
def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank receives in an all-reduce of ``nbytes``, or in a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks * nbytes


def count_hand_written_cost(
    layout: str, family: Family, model: nn.Module, size: Size, ranks: tuple[int, ...]
) -> tuple[float, int]:
    """Return the bytes that a rank receives in a step of the hand-written program, and the number of its collectives.

    - tp, styles (Megatron): ``family.reductions`` of the residual stream; the loss of sharded logits reduces a maximum, a sum and
      the target's logit of every token, in float32
    - styles_sp: the same with a reduce-scatter and an all-gather for each reduction; the gradients of replicated parameters are
      reduced
    - fsdp: parameters gathered twice, gradients reduce-scattered
    - dp: gradients all-reduced once
    """
    of_parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    layers, n, dp = size.layers, ranks[-1], ranks[0] if len(ranks) > 1 else 1
    if layout == "fsdp":
        return 3 * (n - 1) / n * of_parameters, 3 * layers
    if layout == "dp":
        return all_reduce_bytes(of_parameters, n), 1
    places = size.batch // dp * (size.length if family.logits else PATCHES)
    count = family.reductions(layers)
    moved = count * all_reduce_bytes(places * size.width * size.dtype.itemsize, n) + (
        3 * all_reduce_bytes(4 * places, n) if family.logits else 0
    )
    if layout in ("styles", "styles_sp"):
        whole = sum(p.numel() * p.element_size() for p in model.parameters() if p.ndim == 1)
        norms = 2 * layers + 1
        return (moved, count + 3) if layout == "styles" else (moved + all_reduce_bytes(whole, n), 2 * count + norms + 3)
    if layout == "tp":
        return moved, count
    return moved + all_reduce_bytes(count_gradient_bytes(family, model, n), dp), count + 1


def count_gradient_bytes(family: Family, model: nn.Module, n: int) -> float:
    """Return the bytes of one rank's gradients with parameters sharded over ``n`` ranks."""
    cut = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return sum(nbytes / (n if family.place(name) != dt.Replicate() else 1) for name, nbytes in cut.items())
