"""Training modes of Hugging Face models: attention implementations, activation checkpointing, autocast, and a 1-D mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES
from training_step import PLANS, Plan, check, magnitude, step

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
FLAT = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
COMMON = (
    "gpt2",
    "llama",
    "gemma2",
    "bert",
    "deberta",
    "t5",
    "bart",
    "mixtral",
    "mamba2",
    "vit",
    "swin",
    "clip",
    "whisper",
    "wav2vec2",
)


def attention(kind: str) -> Callable[[Any], None]:
    return lambda model: model.set_attn_implementation(kind)


def recomputing(reentrant: bool) -> Callable[[Any], None]:
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def along_tp(plan: Plan) -> Plan:
    """Return a plan with only the placements of the second mesh dim."""
    return lambda k, p: plan(k, p)[1:]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", COMMON)
def test_attention_implementations_equal_plain_models(family: str, kind: str) -> None:
    probe = FAMILIES[family].build()
    if kind == "sdpa" and not probe._supports_sdpa:
        pytest.skip("the family has no such attention")
    check(FAMILIES[family], PLANS["everywhere"], MESH, attention(kind))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", COMMON)
def test_gradient_checkpointing_equals_plain_models(family: str, reentrant: bool) -> None:
    if not FAMILIES[family].build().supports_gradient_checkpointing:
        pytest.skip("the family does not recompute")
    check(FAMILIES[family], PLANS["alternating"], MESH, recomputing(reentrant))


# its mask overflows bfloat16 in plain torch too
@pytest.mark.parametrize("family", [name for name in COMMON if name != "deberta"])
def test_bfloat16_autocast_equals_plain_models(family: str) -> None:
    """Compare with a tolerance given by the bfloat16 rounding error of the plain model."""
    single = replace(FAMILIES[family], single=True)
    exact, rounded = single.build().train(), single.build().train()
    _, loss = step(exact, single.call())
    with torch.autocast("cpu", torch.bfloat16):
        _, near = step(rounded, single.call())
    grads = [(p.grad, q.grad) for p, q in zip(exact.parameters(), rounded.parameters(), strict=True) if p.grad is not None]
    largest = max(magnitude(p) for p, _ in grads)
    cost = max(magnitude(p - q) / max(magnitude(p), 1e-2 * largest) for p, q in grads)
    cost = max(cost, abs(near.item() - loss.item()) / abs(loss.item()))
    assert cost < 1
    check(single, PLANS["alternating"], MESH, around=lambda: torch.autocast("cpu", torch.bfloat16), rounding=4 * cost)


@pytest.mark.parametrize("plan", ["alternating", "everywhere"])
@pytest.mark.parametrize("family", COMMON)
def test_parameters_sharded_on_a_1d_mesh_equal_plain_models(family: str, plan: str) -> None:
    check(FAMILIES[family], along_tp(PLANS[plan]), FLAT)
