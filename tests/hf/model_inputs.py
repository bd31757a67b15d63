"""Inputs of models: the arguments of a call by their names in ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from family import Inputs, numbers
from model_sizes import Scale
from torch import Tensor, nn
from transformers import PretrainedConfig


def parts(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield a configuration and its nested ones, each with its path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from parts(value, f"{path}{name}.")


def _find(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    for _, part in parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _pixels(config: PretrainedConfig, image: int, scale: Scale) -> Tensor:
    size = _find(config, "image_size", default=image)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return scale.numbers(_find(config, "num_channels", "in_channels", "in_chans", default=3), height, width)


def inputs_of(model: nn.Module, scale: Scale, image: int, images: int, turned: bool = False) -> Inputs:
    """Return the arguments of a call by name; ``images`` positions per row are marked as an image's.

    ``turned``: swap the first and the last dim of a sound's frames.
    """
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    made: Inputs = {}
    seen = "pixel_values" in names or "pixel_values_videos" in names
    markers = ("image_token_id", "image_token_index", "media_placeholder_token_id")
    marker = _find(config, *(markers if seen else ("audio_token_id", "audio_token_index", *markers)))
    speaks = "input_ids" in names or "inputs_embeds" in names
    if "input_ids" in names:
        ids = scale.words(scale.length + images)
        if images and marker is not None:
            ids[:, 2 : 2 + images] = marker
        made["input_ids"] = ids
    main = getattr(model, "main_input_name", "")
    if "pixel_values" in names and main != "pixel_values_videos":
        if "image_grid_thw" in names:
            made |= _patches(config, scale)
        elif "grid_thw" in names:
            made["pixel_values"] = _patches(config, scale)["pixel_values"]
        elif "spatial_shapes" in names:
            made |= _patches_apart(config, scale)
        else:
            made["pixel_values"] = _pixels(config, image, scale)
    if "input_features" in names:
        mels = _find(
            config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "feat_dim", "input_dim", default=80
        )
        frames_first = (names.get("attention_mask") is not None and not speaks) != turned
        made["input_features"] = scale.numbers(40, mels) if frames_first else scale.numbers(mels, 40)
    if "input_values" in names:
        channels = _find(config, "audio_channels", default=1 if turned else None)
        made["input_values"] = scale.numbers(1600) if channels is None else scale.numbers(channels, 1600)
    for mask in ("input_features_mask", "feature_attention_mask", "padding_mask"):
        if mask in names and "input_features" in made:
            made[mask] = scale.ones(40)
    if "image_sizes" in names and "pixel_values" in made:
        made["image_sizes"] = torch.tensor([list(made["pixel_values"].shape[-2:])] * scale.batch)
    if "mm_token_type_ids" in names and "image_grid_thw" in made:
        made["mm_token_type_ids"] = (made["input_ids"] == marker).long()
    if "attention_mask" in names and "input_features" in made and not speaks:
        made["attention_mask"] = scale.ones(40)
    if "past_values" in names:
        return _series(config, names, scale)
    if not made and main in names:
        made[main] = scale.numbers(1600)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = scale.words(6)
    if "labels" in names:
        made["labels"] = made.get("decoder_input_ids", made.get("input_ids", (torch.arange(scale.batch) + 1) % 2))
    for name, told in names.items():
        if told.default is inspect.Parameter.empty and told.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in made:
            made |= _required(config, name, image, scale)
    if "bbox" in names and "input_ids" in made:
        made["bbox"] = torch.arange(4).expand(*made["input_ids"].shape, 4).clone()
    return made


def _patches_apart(config: PretrainedConfig, scale: Scale) -> Inputs:
    """Return each image as its patches, with the shape of their grid."""
    patch, channels = _find(config, "patch_size", default=16), _find(config, "num_channels", default=3)
    return {
        "pixel_values": scale.numbers(16, channels * patch * patch),
        "pixel_attention_mask": scale.ones(16),
        "spatial_shapes": torch.tensor([[4, 4]] * scale.batch),
    }


def _required(config: Any, name: str, image: int, scale: Scale) -> Inputs:
    """Return an unusual argument that the model requires."""
    if name == "grid_thw":
        patches = _patches(config, scale)
        return {name: patches["image_grid_thw"]}
    if (
        name in ("hidden_states", "pixel_values")
        and getattr(config, "patch_size", None)
        and hasattr(config, "spatial_merge_size")
    ):
        return {name: _patches(config, scale)["pixel_values"]}
    if name == "pixel_values_videos":
        return {name: _pixels(config, image, scale).unsqueeze(1).repeat(1, _find(config, "num_frames", default=2), 1, 1, 1)}
    if name in ("hidden_states", "query_embeds", "inputs_embeds"):
        return {name: scale.numbers(6, _find(config, "hidden_size", "d_model", default=32))}
    if name == "qformer_input_ids":
        return {name: scale.words(6)}
    return {}


def _series(config: Any, names: Any, scale: Scale) -> Inputs:
    """Return past and future values of time series."""
    past = getattr(config, "context_length", None) or 8
    ahead, lags = getattr(config, "prediction_length", None) or 4, max(getattr(config, "lags_sequence", [0]))
    width = getattr(config, "num_input_channels", 0)
    more = (width,) if width else ()
    times = getattr(config, "num_time_features", 0)
    made = {
        "past_values": scale.numbers(past + lags, *more),
        "past_time_features": scale.numbers(past + lags, times),
        "past_observed_mask": scale.ones(past + lags, *more, dtype=torch.float64),
        "future_values": scale.numbers(ahead, *more),
        "future_time_features": scale.numbers(ahead, times),
    }
    return {name: value for name, value in made.items() if name in names}


def _patches(config: PretrainedConfig, scale: Scale) -> Inputs:
    """Return the patches of all images in one tensor, and each image's grid."""
    vision: Any = getattr(config, "vision_config", config)
    edge = 2 * getattr(vision, "spatial_merge_size", 2)
    patch, times = getattr(vision, "patch_size", 14), getattr(vision, "temporal_patch_size", 1)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", getattr(vision, "num_channels", 3)))
    width = channels * times * (patch * patch if isinstance(patch, int) else patch[0] * patch[1])
    return {
        "pixel_values": numbers(scale.batch * edge * edge, width),
        "image_grid_thw": torch.tensor([[1, edge, edge]] * scale.batch),
    }
