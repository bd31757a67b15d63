"""Captured training steps of unchanged Hugging Face models equal eager steps, with a different batch on each rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor.capture import capture
from dtensor.parallel import fully_shard, parallelize_module, replicate

transformers = pytest.importorskip("transformers")

from tiny_configs import VOCABULARY, tiny  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {"intermediate_size": 48},  # expert shards have rows that grouped_mm accepts
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    made: nn.Module = kind(tiny(kind.config_class, **MODELS[name]))
    return made


def cut(model: Any, mesh: Any, way: str) -> Any:
    if way == "tensor parallel":
        return parallelize_module(model, mesh, "auto")
    if way == "replicated":
        return replicate(model, mesh)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Any) -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def both_ways(ways: Any) -> list[Any]:
    mesh, found = dt.init_device_mesh("cpu", (2,)), []
    for name, way in ways:
        model = built(name)
        step = trained(cut(copy.deepcopy(model), mesh, way))
        captured = capture(trained(cut(copy.deepcopy(model), mesh, way)))
        equal = True
        for k in range(5):
            generator = torch.manual_seed(2 * k + (0 if way == "tensor parallel" else mesh.get_rank()))
            tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
            mine, like = [
                loss.full_tensor() if isinstance(loss, dt.DTensor) else loss for loss in (captured(tokens), step(tokens))
            ]
            equal &= torch.equal(mine, like)
        found.append((name, way, equal, captured.cache_info().replayed))
    return found


@pytest.mark.gloo
def test_captured_steps_of_some_models_equal_eager_steps() -> None:
    ways = [("LlamaForCausalLM", "replicated"), ("BertForMaskedLM", "fully sharded"), ("MixtralForCausalLM", "tensor parallel")]
    assert run_gloo(both_ways, 2, ways) == [[(*way, True, 2) for way in ways]] * 2


@pytest.mark.gloo
@pytest.mark.slow
def test_captured_steps_of_all_models_equal_eager_steps() -> None:
    ways = [(name, way) for name in MODELS for way in ("replicated", "fully sharded")]
    ways.append(("LlamaForCausalLM", "tensor parallel"))  # to record one takes about 10 s
    assert run_gloo(both_ways, 2, ways, timeout_s=300) == [[(*way, True, 2) for way in ways]] * 2
