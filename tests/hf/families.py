"""Hugging Face families: which class, what its configuration needs beyond small sizes, what it eats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny import VOCABULARY, tiny
from torch import Tensor, nn

BATCH, LENGTH = 3, 7  # odd: no mesh dim of two cuts them evenly
Inputs = dict[str, Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(), dtype=torch.float64)


def tokens(length: int = LENGTH, low: int = 4, batch: int = BATCH) -> Tensor:
    return torch.randint(low, VOCABULARY, (batch, length), generator=_generator())


def ragged(length: int = LENGTH) -> Tensor:
    """A mask with padding at the right of the last row."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


def text(length: int = LENGTH) -> Inputs:
    ids, mask = tokens(length), ragged(length)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unmasked(length: int = LENGTH) -> Inputs:
    return {"input_ids": tokens(length), "labels": tokens(length)}


def pair(length: int = LENGTH) -> Inputs:
    labels = tokens(5, low=5)
    labels[0, -1] = -100
    return {"input_ids": tokens(length), "attention_mask": ragged(length), "labels": labels}


def plain_text(length: int = LENGTH) -> Inputs:
    return {"input_ids": tokens(length), "attention_mask": ragged(length)}


def image(size: int = 24) -> Inputs:
    return {"pixel_values": numbers(BATCH, 3, size, size), "labels": torch.tensor([1, 0, 1])}


def picture(size: int = 24) -> Inputs:
    return {"pixel_values": numbers(BATCH, 3, size, size)}


def segments(size: int = 32) -> Inputs:
    return {
        "pixel_values": numbers(BATCH, 3, size, size),
        "labels": torch.randint(0, 2, (BATCH, size, size), generator=_generator()),
    }


def captioned(size: int = 24) -> Inputs:
    return {**plain_text(), **picture(size), "return_loss": True}


def waveform(length: int = 400) -> Inputs:
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[-1, -120:] = 0
    return {"input_values": numbers(BATCH, length), "attention_mask": mask, "labels": tokens(3, low=5)}


def spectrogram(frames: int = 40) -> Inputs:
    return {"input_features": numbers(BATCH, 10, frames), "labels": tokens(5, low=5)}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model: the class's name in ``transformers``.
        config: what its configuration needs beyond small sizes.
        inputs: makes the arguments of a call.
        single: computes in float32 (its code converts to it, so that its float64 form does not run).
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], Inputs] = text
    single: bool = False

    def build(self) -> nn.Module:
        """The model, all parameters random (also those that start as zeros or ones)."""
        torch.manual_seed(0)
        model_class = getattr(transformers, self.model)
        model = model_class(tiny(model_class.config_class, **self.config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model if self.single else model.double()

    def call(self) -> Inputs:
        made = self.inputs()
        if not self.single:
            return made
        return {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in made.items()}


_CONV = {"conv_dim": (6, 6), "conv_stride": (5, 2), "conv_kernel": (7, 3), "num_feat_extract_layers": 2}
_SPEECH = {**_CONV, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 3}
_STAGES = {"hidden_sizes": [6, 10], "depths": [1, 1]}
_GROUPED = {"intermediate_size": 36, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 28}  # rows of 16 bytes
_VIT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 29, "image_size": 24, "patch_size": 8}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 40, "add_cross_attention": True, "is_decoder": True}
_RESNET = {"model_type": "resnet", "embedding_size": 6, **_STAGES, "layer_type": "basic", "out_features": ["stage2"]}

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
    "deepseek_v2": Family("DeepseekV2ForCausalLM", {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, **_GROUPED}, single=True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, **_GROUPED}, single=True),
    "switch_transformers": Family("SwitchTransformersForConditionalGeneration", {"decoder_start_token_id": 2}, pair),
    "gpt_oss": Family("GptOssForCausalLM", {"sliding_window": 4, **_GROUPED}, single=True),
    "phimoe": Family("PhimoeForCausalLM", {**_GROUPED}, single=True),
    "granitemoe": Family("GraniteMoeForCausalLM", {**_GROUPED}, single=True),
    "jetmoe": Family("JetMoeForCausalLM", {"kv_channels": 6}),
    "nllb_moe": Family("NllbMoeForConditionalGeneration", {"encoder_sparse_step": 1, "decoder_sparse_step": 1}, pair),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, **_GROUPED}, single=True),
    "glm4_moe": Family("Glm4MoeForCausalLM", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_GROUPED}, single=True),
}
RECURRENT = {
    "mamba": Family("MambaForCausalLM", {"time_step_rank": 4}, unmasked),
    "mamba2": Family("Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 12, "n_groups": 2, "chunk_size": 4, "expand": 2}),
    "falcon_mamba": Family("FalconMambaForCausalLM", {"time_step_rank": 4}, unmasked),
    "rwkv": Family("RwkvForCausalLM", {"attention_hidden_size": 24}, unmasked),
    "jamba": Family("JambaForCausalLM", {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 4, "use_mamba_kernels": False, **_GROUPED}, single=True),
    "recurrent_gemma": Family("RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "lru_width": 24, "attention_window_size": 8}),
    "bamba": Family("BambaForCausalLM", {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 4, "mamba_chunk_size": 4, "attn_layer_indices": [1]}),
    "zamba2": Family("Zamba2ForCausalLM", {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 4, "adapter_rank": 4, "num_mem_blocks": 1, "use_mem_rope": True}),
    "falcon_h1": Family("FalconH1ForCausalLM", {"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_ssm": 24, "mamba_d_state": 4, "mamba_chunk_size": 4}),
    "lfm2": Family("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "block_ff_dim": 37, "block_multiple_of": 1}),
    "qwen3_next": Family("Qwen3NextForCausalLM", {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"], **_GROUPED}, single=True),
}
ENCODERS = {
    "bert": Family("BertForMaskedLM"),
    "roberta": Family("RobertaForMaskedLM"),
    "xlm_roberta": Family("XLMRobertaForMaskedLM"),
    "deberta": Family("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": Family("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
    "albert": Family("AlbertForMaskedLM", {"embedding_size": 10}),
    "electra": Family("ElectraForMaskedLM", {"embedding_size": 10}),
    "distilbert": Family("DistilBertForMaskedLM"),
    "xlnet": Family("XLNetLMHeadModel"),
    "longformer": Family("LongformerForMaskedLM", {"attention_window": 4}),
    "modernbert": Family("ModernBertForMaskedLM"),
    "mpnet": Family("MPNetForMaskedLM", {"relative_attention_num_buckets": 32}),
    "fnet": Family("FNetForMaskedLM", {}, unmasked),
    "funnel": Family("FunnelForMaskedLM", {"block_sizes": [1, 1]}, lambda: text(8)),
    "roformer": Family("RoFormerForMaskedLM", {"embedding_size": 24}),
    "squeezebert": Family("SqueezeBertForMaskedLM", {"embedding_size": 24, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1, "intermediate_groups": 1, "output_groups": 1}),
    "camembert": Family("CamembertForMaskedLM"),
    "convbert": Family("ConvBertForMaskedLM", {"embedding_size": 24, "head_ratio": 2}),
    "mobilebert": Family("MobileBertForMaskedLM", {"embedding_size": 8, "intra_bottleneck_size": 12, "true_hidden_size": 12}),
    "layoutlm": Family("LayoutLMForMaskedLM"),
    "megatron_bert": Family("MegatronBertForMaskedLM"),
    "nystromformer": Family("NystromformerForMaskedLM", {"num_landmarks": 8, "segment_means_seq_len": 8}, lambda: text(8)),
    "rembert": Family("RemBertForMaskedLM", {"input_embedding_size": 10, "output_embedding_size": 10}),
    "xlm": Family("XLMWithLMHeadModel", {"emb_dim": 24}),
    "flaubert": Family("FlaubertWithLMHeadModel", {"emb_dim": 24}),
    "ibert": Family("IBertForMaskedLM"),
    "big_bird": Family("BigBirdForMaskedLM", {"block_size": 2, "num_random_blocks": 1}, lambda: text(16)),
    "canine": Family("CanineForTokenClassification", {"num_hash_buckets": 16, "local_transformer_stride": 4, "downsampling_rate": 4}, lambda: {"input_ids": tokens(8), "labels": tokens(8) % 2}),
    "esm": Family("EsmForMaskedLM", {"mask_token_id": 4}),
    "reformer": Family("ReformerForMaskedLM", {"is_decoder": False, "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "num_buckets": 2, "attention_head_size": 6, "feed_forward_size": 29, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0, "hidden_size": 24}, lambda: text(8)),
    "eurobert": Family("EuroBertForMaskedLM"),
    "luke": Family("LukeForMaskedLM", {"entity_vocab_size": 11, "entity_emb_size": 6}),
    "splinter": Family("SplinterForQuestionAnswering", {"question_token_id": 4}, lambda: {"input_ids": tokens(), "start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 2, 4])}),
    "perceiver": Family("PerceiverForMaskedLM", {"num_latents": 5, "d_latents": 24, "d_model": 24, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 24}, lambda: {"inputs": tokens(40), "labels": tokens(40)}),
    "bert classifier": Family("BertForSequenceClassification", {"num_labels": 3}, lambda: {**plain_text(), "labels": torch.tensor([2, 0, 1])}),
    "bert answers": Family("BertForQuestionAnswering", {}, lambda: {**plain_text(), "start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 2, 4])}),
    "bert choices": Family("BertForMultipleChoice", {}, lambda: {"input_ids": tokens(LENGTH * 2).view(BATCH, 2, LENGTH), "labels": torch.tensor([1, 0, 1])}),
}
SEQUENCE_TO_SEQUENCE = {
    "t5": Family("T5ForConditionalGeneration", {"decoder_start_token_id": 2}, pair),
    "mt5": Family("MT5ForConditionalGeneration", {}, pair),
    "umt5": Family("UMT5ForConditionalGeneration", {}, pair),
    "longt5": Family("LongT5ForConditionalGeneration", {"decoder_start_token_id": 2, "local_radius": 3}, pair),
    "longt5 global": Family("LongT5ForConditionalGeneration", {"decoder_start_token_id": 2, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4}, pair),
    "bart": Family("BartForConditionalGeneration", {}, pair),
    "mbart": Family("MBartForConditionalGeneration", {}, pair),
    "pegasus": Family("PegasusForConditionalGeneration", {}, pair),
    "pegasus_x": Family("PegasusXForConditionalGeneration", {"block_size": 4, "num_global_tokens": 2}, pair),
    "marian": Family("MarianMTModel", {"decoder_vocab_size": VOCABULARY}, pair),
    "m2m_100": Family("M2M100ForConditionalGeneration", {}, pair),
    "led": Family("LEDForConditionalGeneration", {"attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40}, pair),
    "blenderbot": Family("BlenderbotForConditionalGeneration", {}, pair),
    "blenderbot_small": Family("BlenderbotSmallForConditionalGeneration", {}, pair),
    "plbart": Family("PLBartForConditionalGeneration", {}, pair),
    "prophetnet": Family("ProphetNetForConditionalGeneration", {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2, "num_buckets": 8}, pair, single=True),
    "bigbird_pegasus": Family("BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}, pair),
    "fsmt": Family("FSMTForConditionalGeneration", {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]}, lambda: {**pair(5)}, single=True),
    "mvp": Family("MvpForConditionalGeneration", {}, pair),
}
VISION = {
    "vit": Family("ViTForImageClassification", {}, image),
    "deit": Family("DeiTForImageClassification", {}, image),
    "beit": Family("BeitForImageClassification", {"use_relative_position_bias": True}, image),
    "swin": Family("SwinForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}, lambda: image(32)),
    "swinv2": Family("Swinv2ForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}, lambda: image(32)),
    "convnext": Family("ConvNextForImageClassification", {"num_stages": 2, "patch_size": 4, **_STAGES}, image),
    "convnextv2": Family("ConvNextV2ForImageClassification", {"num_stages": 2, "patch_size": 4, **_STAGES}, image),
    "resnet": Family("ResNetForImageClassification", {"embedding_size": 6, **_STAGES, "layer_type": "bottleneck"}, image),
    "regnet": Family("RegNetForImageClassification", {"embedding_size": 6, "hidden_sizes": [6, 10], "depths": [1, 1], "groups_width": 2}, image),
    "mobilenet_v2": Family("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "finegrained_output": False}, image),
    "segformer": Family("SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "sr_ratios": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 10}, segments),
    "detr": Family("DetrForObjectDetection", {"backbone_config": _RESNET, "use_timm_backbone": False, "num_queries": 5}, lambda: picture(33)),
    "dinov2": Family("Dinov2ForImageClassification", {"mlp_ratio": 2}, image),
    "clip": Family("CLIPModel", {"text_config": {}, "vision_config": {}}, captioned),
    "siglip": Family("SiglipModel", {"text_config": {"projection_size": 24}, "vision_config": {}}, captioned),
    "clipseg": Family("CLIPSegModel", {"text_config": {}, "vision_config": {}}, captioned),
    "altclip": Family("ChineseCLIPModel", {"text_config": {}, "vision_config": {}}, captioned),
    "yolos": Family("YolosForObjectDetection", {"image_size": [24, 24], "num_detection_tokens": 5}, picture),
    "pvt": Family("PvtForImageClassification", {"image_size": 32, "num_encoder_blocks": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "sequence_reduction_ratios": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "patch_sizes": [4, 2], "strides": [4, 2]}, lambda: image(32)),
    "levit": Family("LevitForImageClassification", {"image_size": 32, "patch_size": 16, "hidden_sizes": [8, 12, 16], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2], "down_ops": [["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 3, 4, 2, 2]]}, lambda: image(32)),
    "poolformer": Family("PoolFormerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 12], "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}, image),
    "mobilevit": Family("MobileViTForImageClassification", {"image_size": 32, "hidden_sizes": [12, 16, 20], "neck_hidden_sizes": [4, 4, 6, 8, 8, 8, 16]}, lambda: image(32)),
    "focalnet": Family("FocalNetForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}, lambda: image(32)),
    "vit_mae": Family("ViTMAEForPreTraining", {"decoder_num_attention_heads": 2, "decoder_hidden_size": 12, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 16}, picture),
    "dpt": Family("DPTForDepthEstimation", {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [6, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False}, picture),
    "efficientnet": Family("EfficientNetForImageClassification", {"image_size": 32, "width_coefficient": 1.0, "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 5], "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": [], "hidden_dim": 1280}, lambda: image(32)),
    "vilt": Family("ViltForQuestionAnswering", {"num_labels": 5}, lambda: {**plain_text(), **picture(), "labels": numbers(BATCH, 5).sigmoid()}),
    "blip": Family("BlipForConditionalGeneration", {"text_config": {}, "vision_config": {}}, lambda: {**text(), **picture()}),
    "vision encoder decoder": Family("VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **_VIT}, "decoder": {"model_type": "gpt2", **_GPT2}, "decoder_start_token_id": 2, "pad_token_id": 1}, lambda: {**picture(), "labels": tokens(5, low=5)}),
    "videomae": Family("VideoMAEForVideoClassification", {"num_frames": 4, "tubelet_size": 2}, lambda: {"pixel_values": numbers(BATCH, 4, 3, 24, 24), "labels": torch.tensor([1, 0, 1])}),
}
SPEECH = {
    "whisper": Family("WhisperForConditionalGeneration", {"max_source_positions": 20}, spectrogram),
    "wav2vec2": Family("Wav2Vec2ForCTC", _SPEECH, waveform),
    "wav2vec2 stable": Family("Wav2Vec2ForCTC", {**_SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}, waveform),
    "hubert": Family("HubertForCTC", _SPEECH, waveform),
    "wavlm": Family("WavLMForCTC", _SPEECH, waveform),
    "unispeech_sat": Family("UniSpeechSatForCTC", _SPEECH, waveform),
    "data2vec audio": Family("Data2VecAudioForCTC", {**_SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, waveform),
    "sew": Family("SEWForCTC", {**_SPEECH, "squeeze_factor": 2}, waveform),
    "wav2vec2_conformer": Family("Wav2Vec2ConformerForCTC", {**_SPEECH, "conv_depthwise_kernel_size": 3}, waveform),
    "speech_to_text": Family("Speech2TextForConditionalGeneration", {"input_feat_per_channel": 10, "conv_channels": 12}, lambda: {"input_features": numbers(BATCH, 20, 10), "labels": tokens(5, low=5)}),
    "speecht5": Family("SpeechT5ForSpeechToText", {**_SPEECH, "max_speech_positions": 80, "max_text_positions": 40}, waveform),
    "audio_spectrogram_transformer": Family("ASTForAudioClassification", {"max_length": 20, "num_mel_bins": 12, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}, lambda: {"input_values": numbers(BATCH, 20, 12), "labels": torch.tensor([1, 0, 1])}),
    "moonshine": Family("MoonshineForConditionalGeneration", {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}, lambda: {"input_values": numbers(BATCH, 1200), "labels": tokens(5, low=5)}),
}
FAMILIES = {**DECODERS, **EXPERTS, **RECURRENT, **ENCODERS, **SEQUENCE_TO_SEQUENCE, **VISION, **SPEECH}
