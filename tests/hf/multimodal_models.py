"""Multimodal model families, audio codecs, time series, and models that locate objects."""

from __future__ import annotations

from typing import Any

import torch
from family import BATCH, Family, Inputs, captioned, numbers, picture, plain_text, tokens
from tiny_configs import VOCABULARY

_TEXT = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_SEEN = {
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 10,
}
_CLIP, _SIGLIP = {"model_type": "clip_vision_model", **_SEEN}, {"model_type": "siglip_vision_model", **_SEEN}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 6,
    "hidden_sizes": [6, 10],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage1", "stage2"],
}
IMAGE = 5  # the token that stands for a piece of an image


def shown(count: int, size: int = 16, **more: Any) -> Inputs:
    """Return text in which ``count`` tokens a row stand for an image."""
    ids = tokens(count + 5, low=8)
    ids[:, 1 : 1 + count] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **picture(size), "labels": labels, **more}


def patches(edge: int = 4, patch: int = 4, times: int = 2) -> Inputs:
    """Return text and the patches of all images in one tensor; merging leaves a quarter of an image's patches as tokens."""
    made = shown(edge * edge // 4)
    made["pixel_values"] = numbers(BATCH * edge * edge, 3 * times * patch * patch)
    made["mm_token_type_ids"] = (made["input_ids"] == IMAGE).long()
    return {**made, "image_grid_thw": torch.tensor([[1, edge, edge]] * BATCH)}


def series(width: int, past: int, ahead: int) -> Inputs:
    return {"past_values": numbers(BATCH, past, width), "future_values": numbers(BATCH, ahead, width)}


def series_with_times() -> Inputs:
    """Return ten known values, four to predict, and two features of each time."""
    return {
        "past_values": numbers(BATCH, 10),
        "past_time_features": numbers(BATCH, 10, 2),
        "past_observed_mask": torch.ones(BATCH, 10, dtype=torch.float64),
        "future_values": numbers(BATCH, 4),
        "future_time_features": numbers(BATCH, 4, 2),
    }


def _qwen(vision: dict[str, Any]) -> dict[str, Any]:
    special = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 4}
    return {**special, "text_config": {"rope_parameters": _ROTARY}, "vision_config": {"patch_size": 4, "depth": 2, **vision}}


MULTIMODAL = {
    "llava": Family(
        "LlavaForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _CLIP, "image_token_index": IMAGE},
        lambda: shown(4),
    ),
    "vipllava": Family(
        "VipLlavaForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _CLIP, "image_token_index": IMAGE, "vision_feature_layers": [-1, -2]},
        lambda: shown(4),
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "gemma"},
            "vision_config": _SIGLIP,
            "image_token_id": IMAGE,
            "projection_dim": 24,
            "hidden_size": 24,
        },
        lambda: shown(4, token_type_ids=torch.ones(BATCH, 9, dtype=torch.long)),
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": {**_SEEN, "patch_size": 4}, "image_token_id": IMAGE, "scale_factor": 2},
        lambda: {**shown(4), "pixel_values": numbers(BATCH, 1, 3, 16, 16)},
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        _qwen({"embed_dim": 24, "hidden_size": 24, "num_heads": 3, "mlp_ratio": 2}),
        patches,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen({"hidden_size": 24, "out_hidden_size": 24, "num_heads": 3, "window_size": 16, "fullatt_block_indexes": [1]}),
        patches,
    ),
    "blip2": Family(
        "Blip2ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "opt", "ffn_dim": 29, "word_embed_proj_dim": 24},
            "vision_config": {**_SEEN},
            "qformer_config": {"encoder_hidden_size": 24},
            "image_token_index": IMAGE,
            "num_query_tokens": 4,
        },
        lambda: shown(4),
    ),
    "kosmos2": Family(
        "Kosmos2ForConditionalGeneration",
        {
            "text_config": {"embed_dim": 24, "layers": 1, "ffn_dim": 29, "attention_heads": 4},
            "vision_config": _SEEN,
            "latent_query_num": 4,
        },
        lambda: {**shown(4), "image_embeds_position_mask": (shown(4)["input_ids"] == IMAGE).long()},
        single=True,
    ),
    "flava": Family(
        "FlavaModel",
        {"text_config": {}, "image_config": {}, "multimodal_config": {}, "image_codebook_config": {}},
        lambda: {**plain_text(), **picture()},
    ),
    "owlvit": Family("OwlViTModel", {"text_config": {}, "vision_config": {}}, captioned),
    "clap": Family("ClapTextModelWithProjection", {"max_position_embeddings": 40, "projection_hidden_act": "relu"}, plain_text),
    "layoutlmv3": Family(
        "LayoutLMv3ForTokenClassification",
        {"coordinate_size": 4, "shape_size": 4, "input_size": 24, "visual_embed": True},
        lambda: {
            **plain_text(),
            **picture(),
            "bbox": tokens(28, low=1).view(BATCH, 7, 4).sort(-1).values,
            "labels": tokens() % 2,
        },
    ),
}

CODECS = {
    "encodec": Family(
        "EncodecModel",
        {
            "num_filters": 4,
            "hidden_size": 8,
            "codebook_size": 8,
            "codebook_dim": 8,
            "upsampling_ratios": [5, 4],
            "num_lstm_layers": 1,
        },
        lambda: {"input_values": numbers(BATCH, 1, 400)},
    ),
    "mimi": Family(
        "MimiModel",
        {
            "num_filters": 4,
            "hidden_size": 24,
            "codebook_size": 8,
            "codebook_dim": 8,
            "vector_quantization_hidden_dimension": 8,
            "upsampling_ratios": [5, 4],
            "num_quantizers": 4,
            "upsample_groups": 24,
            "head_dim": 6,
        },
        lambda: {"input_values": numbers(BATCH, 1, 800)},
    ),
    "dac": Family(
        "DacModel",
        {
            "encoder_hidden_size": 4,
            "decoder_hidden_size": 16,
            "hidden_size": 16,
            "downsampling_ratios": [2, 4],
            "upsampling_ratios": [4, 2],
            "n_codebooks": 2,
            "codebook_size": 8,
            "codebook_dim": 4,
        },
        lambda: {"input_values": numbers(BATCH, 1, 128)},
    ),
}

SERIES = {
    "patchtst": Family(
        "PatchTSTForPrediction",
        {"context_length": 16, "prediction_length": 5, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2},
        lambda: series(2, 16, 5),
    ),
    "patchtsmixer": Family(
        "PatchTSMixerForPrediction",
        {
            "context_length": 16,
            "prediction_length": 5,
            "patch_length": 4,
            "patch_stride": 4,
            "num_input_channels": 2,
            "d_model": 8,
        },
        lambda: series(2, 16, 5),
    ),
    "autoformer": Family(
        "AutoformerForPrediction",
        {
            "context_length": 8,
            "prediction_length": 4,
            "lags_sequence": [1, 2],
            "num_time_features": 2,
            "d_model": 16,
            "label_length": 4,
        },
        series_with_times,
        single=True,
    ),
    "time_series": Family(
        "TimeSeriesTransformerForPrediction",
        {"context_length": 8, "prediction_length": 4, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16},
        series_with_times,
    ),
}

POINTING = {
    "deformable_detr": Family(
        "DeformableDetrForObjectDetection",
        {"backbone_config": _RESNET, "use_timm_backbone": False, "num_queries": 5, "num_feature_levels": 2, "d_model": 32},
        lambda: picture(33),
    ),
    "conditional_detr": Family(
        "ConditionalDetrForObjectDetection",
        {"backbone_config": {**_RESNET, "out_features": ["stage2"]}, "use_timm_backbone": False, "num_queries": 5},
        lambda: picture(33),
    ),
    "superpoint": Family(
        "SuperPointForKeypointDetection",
        {"encoder_hidden_sizes": [6, 6, 8, 8], "decoder_hidden_size": 8, "descriptor_decoder_dim": 8},
        lambda: picture(32),
    ),
}
MIXED = {**MULTIMODAL, **CODECS, **SERIES, **POINTING}
