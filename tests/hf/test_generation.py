"""Greedy generation with a key-value cache gives the tokens of plain models."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from training_step import PLANS, distributed, spread

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
GENERATING = (
    "gpt2",
    "llama",
    "mistral",
    "gemma2",
    "bloom",
    "mamba",
    "t5",
    "bart",
    "whisper",
    "qwen3_moe",
    "vision encoder decoder",
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", GENERATING)
def test_greedy_generation_equals_plain_model(name: str, plan: str) -> None:
    family = FAMILIES[name]
    plain = family.build().eval()
    inputs = {key: value for key, value in family.call().items() if key != "labels"}
    model = spread(plain, MESH, PLANS[plan])
    options = {"max_new_tokens": 5, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}
    with torch.no_grad(), dt.implicit_replication():
        expected = plain.generate(**inputs, **options)
        got = model.generate(**distributed(inputs, MESH), **options)
    whole = got.full_tensor() if isinstance(got, dt.DTensor) else got
    assert torch.equal(whole, expected)
