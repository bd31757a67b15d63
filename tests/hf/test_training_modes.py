"""Training steps as people run them: attention implementations, recomputation, autocast, a mesh of one dim."""

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
    """The second of two mesh dims' placements alone."""
    return lambda k, p: plan(k, p)[1:]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", COMMON)
def test_attention_implementations(family: str, kind: str) -> None:
    probe = FAMILIES[family].build()
    if kind == "sdpa" and not probe._supports_sdpa:
        pytest.skip("the family has no such attention")
    check(FAMILIES[family], PLANS["everywhere"], MESH, attention(kind))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", COMMON)
def test_recomputed_activations(family: str, reentrant: bool) -> None:
    if not FAMILIES[family].build().supports_gradient_checkpointing:
        pytest.skip("the family does not recompute")
    check(FAMILIES[family], PLANS["alternating"], MESH, recomputing(reentrant))


@pytest.mark.parametrize("family", [name for name in COMMON if name != "deberta"])  # its mask overflows bfloat16 on one device
def test_autocast_to_bfloat16(family: str) -> None:
    """Sums over shards round otherwise than one sum: what bfloat16 costs a model on one device is what it may cost here."""
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
def test_four_ranks_along_one_dim(family: str, plan: str) -> None:
    check(FAMILIES[family], along_tp(PLANS[plan]), FLAT)
