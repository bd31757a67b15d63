"""A Hugging Face model family: its class, the settings of its configuration besides small sizes, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_configs import VOCABULARY, tiny
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
    """Return a mask with right padding in the last row."""
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
        config: settings of its configuration besides small sizes.
        inputs: returns the arguments of a call.
        single: computes in float32 (its code converts to it, so that it does not run in float64).
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[], Inputs] = text
    single: bool = False

    def build(self) -> nn.Module:
        """Build the model with random parameters, also those that start as zeros or ones."""
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
