"""``peft`` adapters on tensor-parallel and fully sharded models: trained, saved, loaded and merged like plain models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dtensor as dt
from dtensor.errors import PlacementError, StyleError
from dtensor.hf import adapted_plan
from dtensor.parallel import fully_shard, parallelize_module

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tiny_configs import first, trained  # noqa: E402

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(1, 64, (4, 5), generator=torch.Generator().manual_seed(1))
ADAPTED = ["q_proj", "v_proj", "o_proj", "down_proj"]


@pytest.fixture(scope="module")
def plain() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def adapted(plain: nn.Module) -> Any:
    torch.manual_seed(4)
    return peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=ADAPTED))


def by_heads(model: Any) -> Any:
    parallelize_module(model.get_base_model(), MESH["tp"], adapted_plan(model))
    return model


def fully(model: Any) -> Any:
    return fully_shard(model, mesh=MESH["dp"])


WAYS: dict[str, Callable[[Any], Any]] = {
    "tensor parallel": by_heads,
    "fully sharded": fully,
    "tensor parallel and fully sharded": lambda model: fully(by_heads(model)),
}


@torch.no_grad()
def answers(model: Any) -> Tensor:
    return first(model.eval()(input_ids=TOKENS).logits)


@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_save_load_and_merge_like_plain_models(way: str, plain: Any, tmp_path: Path) -> None:
    alone, model = adapted(plain), WAYS[way](adapted(plain))
    losses = trained(alone, TOKENS)
    assert trained(model, TOKENS) == pytest.approx(losses, abs=1e-5)
    assert losses[0] != losses[-1]

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path, state_dict=whole)
    saved = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
    assert torch.allclose(answers(saved), answers(alone), atol=1e-5)

    again = WAYS[way](adapted(plain))
    with dt.implicit_replication():  # files and unsharded factors are equal on all ranks
        peft.set_peft_model_state_dict(again, peft.load_peft_weights(str(tmp_path), device="cpu"))
        assert torch.allclose(answers(again), answers(alone), atol=1e-5)
        again.merge_adapter()
    assert torch.allclose(answers(again), answers(alone), atol=1e-5)


def test_lora_of_a_sharded_matrix_shards_exactly_one_of_its_two_factors(plain: Any) -> None:
    model = by_heads(adapted(plain))
    cut = {
        name
        for name, p in model.named_parameters()
        if "lora" in name and isinstance(p, dt.DTensor) and p.placements[0].is_shard()
    }
    assert len(cut) == len(ADAPTED) * SIZES["num_hidden_layers"]
    assert all(("lora_A" in name) == ("o_proj" in name or "down_proj" in name) for name in cut)


def test_unsupported_adapters_raise(plain: Any) -> None:
    with pytest.raises(StyleError, match="parallelize its submodules"):
        parallelize_module(adapted(plain).get_base_model(), MESH["tp"], "auto")
    scaled = peft.get_peft_model(copy.deepcopy(plain), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(PlacementError, match="low-rank adapters"):
        adapted_plan(scaled)
    with pytest.raises(PlacementError, match="has no tensor-parallel plan"):
        adapted_plan(nn.Linear(2, 2))


def test_plain_state_dicts_load_into_sharded_adapters(plain: Any) -> None:
    """Check ``load_state_dict``: ``copy_`` accepts a plain source that is equal on all ranks."""
    model = fully(adapted(plain))
    state = {name: value + 1 for name, value in adapted(plain).state_dict().items()}
    model.load_state_dict(state)
    assert all(isinstance(p, dt.DTensor) for p in model.parameters())
    assert all(torch.equal(first(value), state[name]) for name, value in model.state_dict().items())


def test_adapted_mixtral_has_sharded_experts_and_logits_of_plain_model() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    plain = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model = copy.deepcopy(plain)
    parallelize_module(model.get_base_model(), MESH["tp"], adapted_plan(model))
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert [p.layout.max_local_nbytes * 2 for p in experts] == [p.layout.nbytes for p in experts]
    tokens = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(first(model(tokens).logits), plain(tokens).logits, rtol=1e-4, atol=1e-5)
