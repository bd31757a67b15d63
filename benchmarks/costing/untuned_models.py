"""Untuned models: unchanged models that were not tuned for: explicit attention, folded heads, parallel blocks, post-norms,
experts.

python benchmarks/program_cost.py --families more --layouts tp,fsdp,tp_dp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dtensor as dt

from .families import BERT, COLUMN, LLAMA, ROW, Family, Size, make_llama_config

Config = Callable[[Size], dict[str, Any]]


def _extend_patterns(**more: Callable[[Size], Any]) -> Config:
    """Return a configuration function: the Llama fields that most families share, and ``more`` fields."""
    return lambda size: make_llama_config(size) | {name: value(size) for name, value in more.items()}


def _named(**names: Callable[[Size], Any]) -> Config:
    return lambda size: {name: value(size) for name, value in names.items()}


def _width(size: Size) -> int:
    return size.width


def _heads(size: Size) -> int:
    return size.heads[0]


def _layers(size: Size) -> int:
    return size.layers


def _hidden(size: Size) -> int:
    return size.hidden


def _words(size: Size) -> int:
    return size.vocabulary


def _per_head(size: Size) -> int:
    return size.width // size.heads[0]


def _none(size: Size) -> int:
    return 0


def _count_parallel_reductions(layers: int) -> int:
    """Return the number of reductions of a family that adds attention and MLP of a layer before reducing."""
    return 2 * layers + 2


_GPT = (r"(q|k|v)_proj|c_fc|fc_in|fc1|wte|embed_tokens|lm_head", COLUMN), (r"(out_proj|c_proj|fc_out|fc2|dense)\.weight", ROW)
_FUSED = (
    (r"query_key_value|dense_h_to_4h|word_embeddings\.|embed_in|embed_out|lm_head", COLUMN),
    (r"(attention\.dense|dense_4h_to_h)\.weight", ROW),
)
_EXPERTS = (r"\.experts\.", dt.Shard(0))
_FEW = {"num_experts_per_tok": lambda _: 2, "moe_intermediate_size": _hidden}
MORE = {
    "gemma": Family("GemmaForCausalLM", _extend_patterns(head_dim=_per_head), LLAMA),
    "gemma2": Family("Gemma2ForCausalLM", _extend_patterns(head_dim=_per_head), LLAMA),
    "gemma3": Family("Gemma3ForCausalLM", _extend_patterns(head_dim=_per_head), LLAMA),
    "granite": Family("GraniteForCausalLM", make_llama_config, LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", make_llama_config, LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", make_llama_config, ((r"(q|k|v)_proj\.bias", COLUMN), *LLAMA)),
    "stablelm": Family("StableLmForCausalLM", make_llama_config, LLAMA),
    "cohere": Family("CohereForCausalLM", make_llama_config, LLAMA, reductions=_count_parallel_reductions),
    "phi": Family("PhiForCausalLM", make_llama_config, _GPT, reductions=_count_parallel_reductions),
    "phi3": Family("Phi3ForCausalLM", _extend_patterns(pad_token_id=lambda _: 0), ((r"qkv_proj|gate_up_proj", COLUMN), *LLAMA)),
    "glm": Family(
        "GlmForCausalLM", _extend_patterns(head_dim=_per_head, pad_token_id=_none), ((r"gate_up_proj", COLUMN), *LLAMA)
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        _extend_patterns(**dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")], _none)),
        ((r"Wqkv|Wi|tok_embeddings|decoder", COLUMN), (r"Wo\.weight", ROW)),
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", make_llama_config, ((r"o_proj\.weight", ROW), *_GPT)),
    "gptj": Family(
        "GPTJForCausalLM",
        _named(
            n_embd=_width,
            n_head=_heads,
            n_layer=_layers,
            vocab_size=_words,
            n_positions=lambda s: 2 * s.length,
            rotary_dim=_per_head,
        ),
        _GPT,
        reductions=_count_parallel_reductions,
    ),
    "gptneo": Family(
        "GPTNeoForCausalLM",
        _named(
            hidden_size=_width,
            num_heads=_heads,
            num_layers=_layers,
            attention_types=lambda s: [[["global"], s.layers]],
            vocab_size=_words,
            max_position_embeddings=lambda s: 2 * s.length,
        ),
        _GPT,
    ),
    # attention and MLP have a norm each: what their inputs owe is reduced apart, what they give together
    "gptneox": Family("GPTNeoXForCausalLM", make_llama_config, _FUSED, reductions=lambda layers: 3 * layers + 2),
    "falcon": Family(
        "FalconForCausalLM",
        _extend_patterns(multi_query=lambda _: False, parallel_attn=lambda _: False, bias=lambda _: True),
        _FUSED,
    ),
    "bloom": Family("BloomForCausalLM", _named(hidden_size=_width, n_head=_heads, n_layer=_layers, vocab_size=_words), _FUSED),
    "roberta": Family("RobertaForMaskedLM", make_llama_config, BERT),
    "electra": Family("ElectraForMaskedLM", _extend_patterns(embedding_size=_width), BERT),
    "deberta": Family(
        "DebertaV2ForMaskedLM",
        make_llama_config,
        ((r"(query|key|value)_proj|intermediate\.dense|word_embeddings|decoder", COLUMN), (r"output\.dense\.weight", ROW)),
    ),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        _named(dim=_width, n_heads=_heads, n_layers=_layers, hidden_dim=_hidden, vocab_size=_words),
        ((r"(q|k|v)_lin|lin1|word_embeddings|vocab_projector", COLUMN), (r"(out_lin|lin2)\.weight", ROW)),
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        _named(
            d_model=_width,
            encoder_layers=_layers,
            decoder_layers=_layers,
            encoder_attention_heads=_heads,
            decoder_attention_heads=_heads,
            encoder_ffn_dim=_hidden,
            decoder_ffn_dim=_hidden,
            vocab_size=_words,
        ),
        ((r"shared", COLUMN), *_GPT),
        reductions=lambda layers: 10 * layers + 4,
    ),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        _extend_patterns(num_experts=lambda _: 4, shared_expert_intermediate_size=_hidden, **_FEW),
        (_EXPERTS, *LLAMA),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _extend_patterns(
            num_local_experts=lambda _: 4, num_experts_per_tok=lambda _: 2, head_dim=_per_head, pad_token_id=lambda _: 0
        ),
        (_EXPERTS, (r"(q|k|v)_proj\.bias|sinks", COLUMN), *LLAMA),
    ),
    "mamba": Family(
        "MambaForCausalLM",
        _named(hidden_size=_width, num_hidden_layers=_layers, vocab_size=_words),
        ((r"in_proj|embeddings|lm_head|conv1d|dt_proj|A_log|\.D$", COLUMN), (r"(out_proj|x_proj)\.weight", ROW)),
    ),
}
