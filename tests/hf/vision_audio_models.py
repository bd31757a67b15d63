"""Model families for images and audio."""

from __future__ import annotations

import torch
from family import BATCH, Family, captioned, image, numbers, picture, plain_text, segments, spectrogram, text, tokens, waveform
from tiny_configs import VOCABULARY

_CONV = {"conv_dim": (6, 6), "conv_stride": (5, 2), "conv_kernel": (7, 3), "num_feat_extract_layers": 2}
_SPEECH = {**_CONV, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 3}
_STAGES = {"hidden_sizes": [6, 10], "depths": [1, 1]}
_VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 29,
    "image_size": 24,
    "patch_size": 8,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 24,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 40,
    "add_cross_attention": True,
    "is_decoder": True,
}
_RESNET = {"model_type": "resnet", "embedding_size": 6, **_STAGES, "layer_type": "basic", "out_features": ["stage2"]}

VISION = {
    "vit": Family("ViTForImageClassification", {}, image),
    "deit": Family("DeiTForImageClassification", {}, image),
    "beit": Family("BeitForImageClassification", {"use_relative_position_bias": True}, image),
    "swin": Family(
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
        lambda: image(32),
    ),
    "swinv2": Family(
        "Swinv2ForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
        lambda: image(32),
    ),
    "convnext": Family("ConvNextForImageClassification", {"num_stages": 2, "patch_size": 4, **_STAGES}, image),
    "convnextv2": Family("ConvNextV2ForImageClassification", {"num_stages": 2, "patch_size": 4, **_STAGES}, image),
    "resnet": Family("ResNetForImageClassification", {"embedding_size": 6, **_STAGES, "layer_type": "bottleneck"}, image),
    "regnet": Family(
        "RegNetForImageClassification", {"embedding_size": 6, "hidden_sizes": [6, 10], "depths": [1, 1], "groups_width": 2}, image
    ),
    "mobilenet_v2": Family("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "finegrained_output": False}, image),
    "segformer": Family(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "decoder_hidden_size": 10,
        },
        segments,
    ),
    "detr": Family(
        "DetrForObjectDetection", {"backbone_config": _RESNET, "use_timm_backbone": False, "num_queries": 5}, lambda: picture(33)
    ),
    "dinov2": Family("Dinov2ForImageClassification", {"mlp_ratio": 2}, image),
    "clip": Family("CLIPModel", {"text_config": {}, "vision_config": {}}, captioned),
    "siglip": Family("SiglipModel", {"text_config": {"projection_size": 24}, "vision_config": {}}, captioned),
    "clipseg": Family("CLIPSegModel", {"text_config": {}, "vision_config": {}}, captioned),
    "altclip": Family("ChineseCLIPModel", {"text_config": {}, "vision_config": {}}, captioned),
    "yolos": Family("YolosForObjectDetection", {"image_size": [24, 24], "num_detection_tokens": 5}, picture),
    "pvt": Family(
        "PvtForImageClassification",
        {
            "image_size": 32,
            "num_encoder_blocks": 2,
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "sequence_reduction_ratios": [2, 1],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
        },
        lambda: image(32),
    ),
    "levit": Family(
        "LevitForImageClassification",
        {
            "image_size": 32,
            "patch_size": 16,
            "hidden_sizes": [8, 12, 16],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "mlp_ratio": [2, 2, 2],
            "attention_ratio": [2, 2, 2],
            "down_ops": [["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 3, 4, 2, 2]],
        },
        lambda: image(32),
    ),
    "poolformer": Family(
        "PoolFormerForImageClassification",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 12],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
        },
        image,
    ),
    "mobilevit": Family(
        "MobileViTForImageClassification",
        {"image_size": 32, "hidden_sizes": [12, 16, 20], "neck_hidden_sizes": [4, 4, 6, 8, 8, 8, 16]},
        lambda: image(32),
    ),
    "focalnet": Family(
        "FocalNetForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        lambda: image(32),
    ),
    "vit_mae": Family(
        "ViTMAEForPreTraining",
        {
            "decoder_num_attention_heads": 2,
            "decoder_hidden_size": 12,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 16,
        },
        picture,
    ),
    "dpt": Family(
        "DPTForDepthEstimation",
        {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [6, 8, 8, 8],
            "fusion_hidden_size": 8,
            "is_hybrid": False,
        },
        picture,
    ),
    "efficientnet": Family(
        "EfficientNetForImageClassification",
        {
            "image_size": 32,
            "width_coefficient": 1.0,
            "in_channels": [32, 16],
            "out_channels": [16, 24],
            "kernel_sizes": [3, 5],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
            "depthwise_padding": [],
            "hidden_dim": 1280,
        },
        lambda: image(32),
    ),
    "vilt": Family(
        "ViltForQuestionAnswering",
        {"num_labels": 5},
        lambda: {**plain_text(), **picture(), "labels": numbers(BATCH, 5).sigmoid()},
    ),
    "blip": Family("BlipForConditionalGeneration", {"text_config": {}, "vision_config": {}}, lambda: {**text(), **picture()}),
    "vision encoder decoder": Family(
        "VisionEncoderDecoderModel",
        {
            "encoder": {"model_type": "vit", **_VIT},
            "decoder": {"model_type": "gpt2", **_GPT2},
            "decoder_start_token_id": 2,
            "pad_token_id": 1,
        },
        lambda: {**picture(), "labels": tokens(5, low=5)},
    ),
    "videomae": Family(
        "VideoMAEForVideoClassification",
        {"num_frames": 4, "tubelet_size": 2},
        lambda: {"pixel_values": numbers(BATCH, 4, 3, 24, 24), "labels": torch.tensor([1, 0, 1])},
    ),
}

SPEECH = {
    "whisper": Family("WhisperForConditionalGeneration", {"max_source_positions": 20}, spectrogram),
    "wav2vec2": Family("Wav2Vec2ForCTC", _SPEECH, waveform),
    "wav2vec2 stable": Family(
        "Wav2Vec2ForCTC", {**_SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}, waveform
    ),
    "hubert": Family("HubertForCTC", _SPEECH, waveform),
    "wavlm": Family("WavLMForCTC", _SPEECH, waveform),
    "unispeech_sat": Family("UniSpeechSatForCTC", _SPEECH, waveform),
    "data2vec audio": Family(
        "Data2VecAudioForCTC", {**_SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, waveform
    ),
    "sew": Family("SEWForCTC", {**_SPEECH, "squeeze_factor": 2}, waveform),
    "wav2vec2_conformer": Family("Wav2Vec2ConformerForCTC", {**_SPEECH, "conv_depthwise_kernel_size": 3}, waveform),
    "speech_to_text": Family(
        "Speech2TextForConditionalGeneration",
        {"input_feat_per_channel": 10, "conv_channels": 12},
        lambda: {"input_features": numbers(BATCH, 20, 10), "labels": tokens(5, low=5)},
    ),
    "speecht5": Family("SpeechT5ForSpeechToText", {**_SPEECH, "max_speech_positions": 80, "max_text_positions": 40}, waveform),
    "audio_spectrogram_transformer": Family(
        "ASTForAudioClassification",
        {"max_length": 20, "num_mel_bins": 12, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
        lambda: {"input_values": numbers(BATCH, 20, 12), "labels": torch.tensor([1, 0, 1])},
    ),
    "moonshine": Family(
        "MoonshineForConditionalGeneration",
        {
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
            "decoder_num_key_value_heads": 4,
        },
        lambda: {"input_values": numbers(BATCH, 1200), "labels": tokens(5, low=5)},
    ),
}
