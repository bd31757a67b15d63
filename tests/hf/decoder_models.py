"""Model families that predict the next token: attention, experts, recurrence."""

from __future__ import annotations

from family import (
    Family,
    pair,
    unmasked,
)

_GROUPED = {"intermediate_size": 36, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 28}  # rows of 16 bytes

DECODERS = {
    "gpt2": Family("GPT2LMHeadModel"),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "gemma": Family("GemmaForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", {"sliding_window": 4}),
    "gemma3": Family("Gemma3ForCausalLM", {"sliding_window": 4}),
    "phi": Family("PhiForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "phi3": Family("Phi3ForCausalLM"),
    "gpt_neox": Family("GPTNeoXForCausalLM"),
    "gpt_neo": Family("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 3}),
    "gptj": Family("GPTJForCausalLM", {"rotary_dim": 4}),
    "codegen": Family("CodeGenForCausalLM", {"rotary_dim": 4}),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM"),
    "opt": Family("OPTForCausalLM"),
    "bloom": Family("BloomForCausalLM"),
    "falcon": Family("FalconForCausalLM"),
    "falcon alibi": Family("FalconForCausalLM", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "stablelm": Family("StableLmForCausalLM"),
    "cohere": Family("CohereForCausalLM"),
    "cohere2": Family("Cohere2ForCausalLM", {"sliding_window": 4}),
    "olmo": Family("OlmoForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family("Olmo3ForCausalLM"),
    "granite": Family("GraniteForCausalLM"),
    "starcoder2": Family("Starcoder2ForCausalLM"),
    "mpt": Family("MptForCausalLM", {"d_model": 24}),
    "xglm": Family("XGLMForCausalLM", {"attention_heads": 4}, single=True),
    "biogpt": Family("BioGptForCausalLM"),
    "ctrl": Family("CTRLLMHeadModel", {"dff": 37}),
    "openai": Family("OpenAIGPTLMHeadModel"),
    "nemotron": Family("NemotronForCausalLM"),
    "persimmon": Family("PersimmonForCausalLM", {"num_attention_heads": 3}),
    "glm": Family("GlmForCausalLM"),
    "glm4": Family("Glm4ForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "helium": Family("HeliumForCausalLM"),
    "exaone4": Family("Exaone4ForCausalLM"),
    "ministral": Family("MinistralForCausalLM"),
    "modernbert decoder": Family("ModernBertDecoderForCausalLM"),
    "diffllama": Family("DiffLlamaForCausalLM"),
}

EXPERTS = {
    "mixtral": Family("MixtralForCausalLM", {"output_router_logits": True, **_GROUPED}, single=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {"output_router_logits": True, **_GROUPED}, single=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**_GROUPED}, single=True),
    "olmoe": Family("OlmoeForCausalLM", {**_GROUPED}, single=True),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **_GROUPED,
        },
        single=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 6,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **_GROUPED,
        },
        single=True,
    ),
    "switch_transformers": Family("SwitchTransformersForConditionalGeneration", {"decoder_start_token_id": 2}, pair),
    "gpt_oss": Family("GptOssForCausalLM", {"sliding_window": 4, **_GROUPED}, single=True),
    "phimoe": Family("PhimoeForCausalLM", {**_GROUPED}, single=True),
    "granitemoe": Family("GraniteMoeForCausalLM", {**_GROUPED}, single=True),
    "jetmoe": Family("JetMoeForCausalLM", {"kv_channels": 6}),
    "nllb_moe": Family("NllbMoeForConditionalGeneration", {"encoder_sparse_step": 1, "decoder_sparse_step": 1}, pair),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, **_GROUPED}, single=True
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_GROUPED}, single=True
    ),
}

RECURRENT = {
    "mamba": Family("MambaForCausalLM", {"time_step_rank": 4}, unmasked),
    "mamba2": Family("Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 12, "n_groups": 2, "chunk_size": 4, "expand": 2}),
    "falcon_mamba": Family("FalconMambaForCausalLM", {"time_step_rank": 4}, unmasked),
    "rwkv": Family("RwkvForCausalLM", {"attention_hidden_size": 24}, unmasked),
    "jamba": Family(
        "JambaForCausalLM",
        {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
            **_GROUPED,
        },
        single=True,
    ),
    "recurrent_gemma": Family("RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "lru_width": 24, "attention_window_size": 8}),
    "bamba": Family(
        "BambaForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 4, "mamba_chunk_size": 4, "attn_layer_indices": [1]},
    ),
    "zamba2": Family(
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "chunk_size": 4,
            "adapter_rank": 4,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_ssm": 24, "mamba_d_state": 4, "mamba_chunk_size": 4},
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "block_ff_dim": 37, "block_multiple_of": 1},
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "layer_types": ["linear_attention", "full_attention"],
            **_GROUPED,
        },
        single=True,
    ),
}
