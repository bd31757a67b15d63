"""Training loops of Hugging Face models: losses and parameters of several steps equal those of plain models."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import FAMILIES
from family import Inputs
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_step import PLANS, compare, distributed, spread
from transformers import get_cosine_schedule_with_warmup
from transformers.optimization import Adafactor

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
STEPS = 4
WAYS: dict[str, dict[str, Any]] = {
    "scaler": {"scaled": True},
    "accumulated": {"every": 2},
    "recomputed": {"reentrant": False},
    "recomputed reentrant": {"reentrant": True},
    "averaged": {"averaged": True},
    "Adafactor": {"optimizer": Adafactor},
    "RAdam": {"optimizer": torch.optim.RAdam},
    "autocast": {"dtype": torch.bfloat16, "rounding": 3e-2},
}


def batches(name: str) -> list[Inputs]:
    return [{key: x.roll(k, 0) if isinstance(x, Tensor) else x for key, x in FAMILIES[name].call().items()} for k in range(STEPS)]


def train(
    model: Any,
    data: list[Inputs],
    *,
    dtype: torch.dtype | None = None,
    scaled: bool = False,
    every: int = 1,
    reentrant: bool | None = None,
    averaged: bool = False,
    optimizer: Any = torch.optim.AdamW,
    **_: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses and the averaged parameters, or the parameters."""
    torch.manual_seed(5)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(parameters) if optimizer is Adafactor else optimizer(parameters, lr=1e-2)
    schedule = get_cosine_schedule_with_warmup(made, 1, 2 * STEPS) if optimizer is not Adafactor else None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
    losses = []
    for k, batch in enumerate(data):
        with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
            loss = model(**batch).loss / every
        losses.append(loss.detach())
        scaler.scale(loss).backward()
        if (k + 1) % every == 0:
            scaler.unscale_(made)
            nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(made)
            scaler.update()
            if schedule is not None:
                schedule.step()
            if mean is not None:
                mean.update_parameters(model)
            made.zero_grad()
    return losses, list((model if mean is None else mean).parameters())


def check(name: str, plain: nn.Module, way: dict[str, Any]) -> None:
    data, model, rounding = batches(name), spread(plain, MESH, PLANS["everywhere"]), way.get("rounding", 3e-5)
    expected, after = train(plain, data, **way)
    with dt.implicit_replication():
        losses, found = train(model, [distributed(batch, MESH) for batch in data], **way)
    for k, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
        compare(ours, theirs, f"loss {k}", rounding=rounding)
    for k, (ours, theirs) in enumerate(zip(found, after, strict=True)):
        # Adam's step does not depend on the size of a gradient
        compare(ours, theirs, f"parameter {k}", 1.0, max(100 * rounding, 2e-3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "vit", "mixtral", "whisper", "mamba"])
def test_training_loops_equal_plain_models(family: str, way: str) -> None:
    check(family, FAMILIES[family].build(), WAYS[way])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "vit", "whisper"])
def test_lora_training_equals_plain_models(family: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(11)
    model = peft.get_peft_model(FAMILIES[family].build(), peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn_like(p) * 0.1)
    check(family, model, {})


def test_resize_token_embeddings_equals_plain_model() -> None:
    plain = FAMILIES["gpt2"].build()
    model = spread(plain, MESH, PLANS["everywhere"])
    for one in (plain, copy.copy(model)):
        torch.manual_seed(0)
        with dt.implicit_replication():
            one.resize_token_embeddings(101, mean_resizing=False)
    compare(model.get_input_embeddings().weight, plain.get_input_embeddings().weight, "embedding")
