"""Tiny models of any family in ``transformers``, made from its default configuration.

Sizes of channels are divided by one number throughout the configuration, so that sizes stay equal or divisible where models
require it. Depths are reduced; vocabularies, images and sounds are small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from family import Inputs
from model_inputs import inputs_of, parts
from model_sizes import SMALL, Scale
from torch import nn
from training_step import step
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_LAYERS = re.compile(r"(num_.*layers|n_layers?|.*_layers|depth|num_.*blocks|.*_depth|n_.*layers)$")
_LISTS_OF_LAYERS = re.compile(r"(layer_types|layers_block_type|mlp_layer_types|block_types|.*_layer_types|layers_types)$")
_FIXED = re.compile(
    r".*(vocab|image|patch|window|kernel|token|position|chunk|crop|batch|tile|merge|stride|group_size|groups|sample|beam|max_|min_|"
    r"codebook_size|num_channels|in_channels|queue|length|pool|frame|top_k|grid|num_bins|_rate).*"
)
_CHANNELS = re.compile(
    r".*(size|sizes|dim|dims|channels|d_model|width|widths|rank|d_ff|ffn|n_embd|features|n_inner|d_inner|d_kv|hidden|planes|filters|"
    r"d_state|units|embed)$"
)
_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_codebooks|n_codebooks)$")
_CHOSEN = re.compile(r"(.*top_?k|num_experts_per_tok|n_group|moe_k|num_selected_experts)$")
SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "unk": 3, "sep": 2, "cls": 1, "mask": 4}


_ABSOLUTE = (  # pattern of a name -> value, or which of a scale's: all widths alike, so that what is joined fits
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_sizes_out|embed_size|width|projection_dim|dim)",
        "width",
    ),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|heads)", "heads"),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads)", "shared"),
    (r"(.*_)?(head_dim|d_kv|d_head|key_dim|kv_channels|attention_head_size)", "head"),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|mlp_dim|n_inner|ffn_size|dim_feedforward)", "inner"),
    (r"qk_rope_head_dim", "turned"),
    (r"(q_lora_rank|kv_lora_rank)", 8),
    (r"patch_size", 4),
    (r"num_position_embeddings", 16),
    (r"(.*_)?sliding_window|attention_window_size", 4),
    (r"num_channels_latent|state_size|mamba_d_state|ssm_state_size", 8),
    (r"num_query_tokens|query_length|num_latents|num_queries|resampler_n_latents|mm_tokens_per_image", 4),
    (r"num_frames", 2),
    (r"coordinate_size", 6),
    (r"shape_size", 4),
    (r"upsample_groups", 32),
)
_MORE = (  # the same for configurations that leave open what their models need, or whose sounds have one length
    *(
        (rf"{name}", small)
        for name, small in {"max_source_positions": 20, "num_groups": 2, "num_experts_per_tok(en)?": 2}.items()
    ),
    (r"topk_group|num_selected_groups", 1),
    (r"n_group|num_groups?|num_expert_groups?", 2),
    (r"(num_|n_|moe_num_|n_routed_|num_local_)experts", 4),
    (r"vocab_size", "vocabulary"),
    (r"window_size", 16),
    (r"(image|audio)_token_(id|index)", 44),
    (r"pad_token_id", SPECIAL["pad"]),
    (r"context_length", 8),
    (r"mamba_(d_)?head_?(dim)?", 16),
    (r"n_groups|mamba_n_?groups", 1),
    (r"codebook_dim|vector_quantization_hidden_dimension", 32),
    *_ABSOLUTE,
)


def _absolute(name: str, value: Any, divisor: int, scale: Scale) -> Any:
    if name == "image_grid_pinpoints":
        return [[16, 32], [32, 16]]
    if name in ("deepstack_visual_indexes", "fullatt_block_indexes") and value:
        return type(value)([0])
    if isinstance(value, dict) and ("mrope_section" in value or (name == "rope_parameters" and "rope_type" in value)):
        return {**value, "mrope_section": [2, 1, 1]}
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        for pattern, small in _ABSOLUTE if divisor == 0 else _MORE:
            if re.fullmatch(pattern, name):
                return getattr(scale, small) if isinstance(small, str) else small
    return value


def _scaled(value: Any, divisor: int) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value // divisor if value >= 2 * divisor and value % divisor == 0 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(item, divisor) for item in value)
    return value


def shrink(config: PretrainedConfig, divisor: int, image: int, scale: Scale = SMALL) -> PretrainedConfig:
    """Set small sizes in ``config``, in place."""
    special = iter(range(5, 40))
    for _, part in list(parts(config)):
        if divisor < 0:
            part.use_cache = False
        for name, value in list(vars(part).items()):
            made = _small(name, value, divisor, image, scale, special)
            if made is not value:
                setattr(part, name, made)
    return config


def _small(name: str, value: Any, divisor: int, image: int, scale: Scale, special: Iterator[int]) -> Any:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if name == "prediction_length" and not value:
        return 4
    if isinstance(value, bool) or (value is None and divisor >= 0):
        return value
    if value is not None and getattr(value, "model_type", "") == "timm_backbone":
        return _resnet(len(value.out_indices or [0]))
    if divisor < 0:
        made = _absolute(name, value, divisor, scale)
        if made is not value or value is None:
            return made
    if integer and name.endswith(("token_id", "token_index", "_id")) and name != "forced_eos_token_id":
        kind = name.removesuffix("_token_id")
        return SPECIAL[kind] if kind in SPECIAL else value if value < scale.vocabulary else next(special)
    if integer and ("vocab" in name or name.endswith("codebook_size")):
        return min(value, scale.vocabulary)
    if integer and _LAYERS.fullmatch(name) and value > 2:
        return 2
    if integer and _EXPERTS.fullmatch(name):
        return min(value, 4)
    if integer and _CHOSEN.fullmatch(name):
        return min(value, 2)
    if isinstance(value, (list, tuple)) and _LISTS_OF_LAYERS.fullmatch(name) and len(value) > 2:
        return _varied(value)
    if divisor == 0:
        made = _absolute(name, value, divisor, scale)
        if made is not value:
            return made
    divisor = divisor if divisor > 0 else 16
    if name.endswith("image_size") and (integer or isinstance(value, (list, tuple))):
        return image if integer else type(value)(image for _ in value)
    if name == "window_size" and integer and value > 4:
        return 4
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)(1 for _ in value)
    if integer and re.fullmatch(
        r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_length|max_sequence_length|max_seq_len", name
    ):
        return min(value, 256)
    if _CHANNELS.fullmatch(name) and ((name.endswith("channels") and not integer) or not _FIXED.fullmatch(name)):
        return _scaled(value, divisor)
    return value


def _resnet(outputs: int) -> PretrainedConfig:
    """Return a small ResNet to replace a backbone of another library."""
    stages = [f"stage{k}" for k in range(1, 5)]
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1], layer_type="basic", out_features=stages[-outputs:]
    )


def _varied(kinds: Any) -> Any:
    """Return the kinds of two layers, different if there are several kinds."""
    return type(kinds)([kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[1])])


# --- a model that runs -----------------------------------------------------------------------------------------------
_KINDS = """IMAGE_TEXT_TO_TEXT MULTIMODAL_LM CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ CTC OBJECT_DETECTION
SEMANTIC_SEGMENTATION UNIVERSAL_SEGMENTATION DEPTH_ESTIMATION IMAGE_CLASSIFICATION VIDEO_CLASSIFICATION AUDIO_CLASSIFICATION
PRETRAINING TEXT_TO_WAVEFORM TIME_SERIES_PREDICTION QUESTION_ANSWERING TOKEN_CLASSIFICATION"""


def classes_of(model_type: str) -> list[str]:
    """Return the classes of a model type, those with a loss first."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in _KINDS.split()]
    found = [table[model_type] for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES) if model_type in table]
    return list(dict.fromkeys(name for item in found for name in ([item] if isinstance(item, str) else item)))


class NotShrunk(Exception):
    """No model of the family runs a training step on one device."""


@dataclass
class Shrunk:
    """A family like ``family.Family``, whose class, sizes and inputs are found by trial."""

    model_type: str
    model: str = ""
    scale: Scale = SMALL
    divisor: int = 0
    image: int = 16
    images: int = 0
    frames: int = 0
    single: bool = False
    labelled: bool = True
    turned: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model_class = getattr(transformers, self.model)
        config = shrink(CONFIG_MAPPING[self.model_type](), self.divisor, self.image, self.scale)
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(config).parameters())
        if count > self.scale.most_parameters:
            raise NotShrunk(f"{count:,} parameters")
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        self.built = model.float() if self.single else model.double()
        return self.built

    def call(self) -> Inputs:
        made = inputs_of(self.built, self.scale, self.image, self.images, self.turned)
        if self.frames:
            made["pixel_values"] = made["pixel_values"].unsqueeze(1).repeat(1, self.frames, 1, 1, 1)
        if not self.labelled:
            made.pop("labels", None)
        return {k: v.float() if self.single and v.is_floating_point() else v for k, v in made.items()}

    def runs(self) -> None:
        """Run a training step on one device: with labels, without labels, or with the dims of sounds swapped."""
        reason: Exception | None = None
        for self.labelled, self.turned in ((True, False), (False, False), (False, True)):
            try:
                return self._runs()
            except Exception as error:  # whatever inputs that do not fit raise
                reason = reason or error
                if not hasattr(self, "built") or (self.labelled is self.turned is False and not self._hears()):
                    break
        raise reason or NotShrunk("no inputs")

    def _hears(self) -> bool:
        return any(name.startswith("input_") and name != "input_ids" for name in inputs_of(self.built, self.scale, self.image, 0))

    def _runs(self) -> None:
        """Run a training step, changing inputs by the model's error messages."""
        for _ in range(5):
            try:
                model = self.build().train()
                step(model, self.call())
                return
            except ValueError as error:
                self._learn(str(error))
            except RuntimeError as error:
                if (
                    "split_sizes to sum exactly" in str(error)
                    and not self.frames
                    and hasattr(self.built.config, "image_grid_pinpoints")
                ):
                    self.frames = 3  # an image of two tiles and the whole
                    continue
                if self.single or ("dtype" not in str(error) and "Double" not in str(error)):
                    raise
                self.single = True
        raise NotShrunk("no inputs found")

    def _learn(self, message: str) -> None:
        if "expected 5, got 4" in message and not self.frames:
            self.frames = getattr(self.built.config, "num_frames", 1)
            return
        told = re.search(r"tokens: (\d+).*features:? (\d+)", message, re.DOTALL)
        if told is None:
            raise NotShrunk(message)
        wanted = int(told[2]) // self.scale.batch if int(told[2]) % self.scale.batch == 0 else int(told[2])
        if wanted in (self.images, 0) or wanted > 300:
            raise NotShrunk(message)
        self.images = wanted


def shrunk(model_type: str, scale: Scale = SMALL) -> Shrunk:
    """Return a family of that scale that runs a training step on one device.

    Raises:
        NotShrunk: none was found.
    """
    reason = ""
    for model in classes_of(model_type)[:2]:
        for divisor, image in scale.tried:
            made = Shrunk(model_type, model, scale, divisor, image)
            try:
                made.runs()
            except Exception as error:  # whatever a configuration that does not fit raises
                reason = reason or f"{type(error).__name__}: {error}"
            else:
                return made
    raise NotShrunk(reason)
