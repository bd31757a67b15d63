"""Tensor-parallel plans of Hugging Face models: outputs and all gradients equal those of plain models on each rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import dtensor as dt
from dtensor.parallel import parallelize_module

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 12, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},  # columns and rows
    "Qwen3": {},  # and norms of heads: parameters with partial gradients
    "Olmo2": {},  # and norms over all heads: columns that are gathered
    "Mixtral": EXPERTS,  # and experts, two matrices packed in one
    "DeepseekV3": {  # and a part of the keys that all heads share
        **EXPERTS,
        **MLA,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    made: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return made.train()


def whole(x: Any) -> list[Tensor]:
    """Return the full value on each rank."""
    x = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def kept(model: nn.Module, label: str) -> tuple[Tensor, Any]:
    """Return a stored parameter, and its gradient in the shape of the plain model."""
    owner, _, name = label.rpartition(".")
    module: Any = model.get_submodule(owner)
    if not is_parametrized(module, name):
        return module._parameters[name], module._parameters[name].grad
    seen = module.parametrizations[name]
    return seen.original, None if seen.original.grad is None else seen[0](seen.original.grad)


def check(name: str, ranks: int, whole_experts: bool = False) -> None:
    plain: Any = built(name)
    plan = {**plain._tp_plan, **plain._ep_plan} if whole_experts else "auto"
    model = parallelize_module(copy.deepcopy(plain), dt.init_device_mesh("cpu", (ranks,)), plan)
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = plain(tokens, labels=tokens)
    found = model(tokens, labels=tokens)
    for own in whole(found.logits):
        torch.testing.assert_close(own, expected.logits, rtol=1e-4, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    largest = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    cut = 0
    assert model.state_dict().keys() == plain.state_dict().keys()
    for label, theirs in plain.named_parameters():
        ours, grad = kept(model, label)
        cut += isinstance(ours, dt.DTensor) and ours.placements[0].is_shard()
        assert (grad is None) == (theirs.grad is None), label
        for own in whole(grad) if theirs.grad is not None else ():
            assert (own - theirs.grad).abs().max() < 1e-4 * largest, label
    assert cut > 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_under_their_tp_plan_equal_plain_models(name: str) -> None:
    check(name, 2)


@pytest.mark.filterwarnings("ignore")
def test_mixtral_under_its_expert_parallel_plan_equals_plain_model() -> None:
    check("Mixtral", 2, whole_experts=True)
