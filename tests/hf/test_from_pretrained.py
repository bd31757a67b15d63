"""``from_pretrained`` and ``save_pretrained`` of distributed Hugging Face models: tokens, losses and parameters of plain
models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import checkpoint
from dtensor.errors import CheckpointError
from dtensor.hf import from_pretrained, save_pretrained
from dtensor.parallel import fully_shard, parallelize_module, replicate

transformers = pytest.importorskip("transformers")

from slow_case_marks import keep_every_nth_fast  # noqa: E402
from tiny_configs import first, trained  # noqa: E402

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}


def by_heads(model: nn.Module) -> nn.Module:
    return parallelize_module(model, MESH["tp"], "auto")


def fully(model: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=MESH["dp"])
    return fully_shard(model, mesh=MESH["dp"])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    plain.save_pretrained(tmp_path)
    return tmp_path, plain


@pytest.mark.parametrize("distribute", [by_heads, fully])
def test_loaded_model_generates_the_tokens_of_the_plain_model(saved: tuple[Path, Any], distribute: Any) -> None:
    folder, plain = saved
    model = from_pretrained(folder, distribute)
    assert not model.training
    prompt = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(first(model.generate(prompt, max_new_tokens=4, do_sample=False)), expected)
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is table
    assert isinstance(head, dt.DTensor)
    assert head.layout.max_local_nbytes == head.layout.nbytes // 2


@pytest.mark.parametrize("distribute", [by_heads, fully])
def test_loaded_model_under_trainer_has_the_losses_of_the_plain_model(
    saved: tuple[Path, Any], distribute: Any, tmp_path: Path
) -> None:
    folder, plain = saved
    rows = torch.randint(1, 64, (8, 5), generator=torch.Generator().manual_seed(2))

    def losses(model: nn.Module) -> list[float]:
        options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2, "seed": 3}
        args = transformers.TrainingArguments(
            str(tmp_path / "runs"), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(from_pretrained(folder, distribute)) == pytest.approx(losses(plain), abs=1e-3)


def test_lora_on_a_fully_sharded_model_trains_like_plain_model(saved: tuple[Path, Any]) -> None:
    peft = pytest.importorskip("peft")
    folder, plain = saved
    tokens = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))

    def adapted(model: nn.Module) -> nn.Module:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=True))

    torch.manual_seed(4)
    expected = trained(adapted(plain), tokens)
    torch.manual_seed(4)
    model = adapted(transformers.LlamaForCausalLM.from_pretrained(folder))
    assert trained(fully_shard(model, mesh=MESH["dp"]), tokens) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != expected[-1]


def test_saved_safetensors_load_in_transformers(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, plain = saved
    model = from_pretrained(folder, by_heads)
    checkpoint.save_safetensors(model, tmp_path / "again")
    plain.config.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def write_sharded(folder: Path, target: Path) -> list[str]:
    """Write a model that is sharded over this mesh to ``target``; return the names of the files."""
    mesh = dt.init_device_mesh("cpu", (2,))
    model = from_pretrained(folder, lambda model: parallelize_module(model, mesh, "auto"))
    save_pretrained(model, target, max_shard_size=5_000)
    return sorted(file.name for file in target.iterdir())


def read_back_by_all(target: Path, plain: Any) -> None:
    for again in (
        transformers.AutoModelForCausalLM.from_pretrained(target),
        from_pretrained(target, lambda model: fully_shard(model, mesh=MESH["dp"])),
    ):
        assert isinstance(again, transformers.LlamaForCausalLM)
        assert again.config.dtype == plain.dtype
        assert again.generation_config.max_new_tokens == 3
        for a, b in zip(again.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.full_tensor() if isinstance(a, dt.DTensor) else a, b)


@pytest.fixture
def in_bfloat16(tmp_path: Path) -> tuple[Path, Any]:
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16().eval()
    plain.generation_config.max_new_tokens = 3
    plain.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain", plain


def replicated(model: nn.Module) -> nn.Module:
    return replicate(model, mesh=MESH["dp"])


@pytest.mark.parametrize("distribute", [by_heads, fully, replicated])
def test_save_pretrained_files_load_with_equal_weights_and_settings(
    in_bfloat16: tuple[Path, Any], tmp_path: Path, distribute: Any
) -> None:
    folder, plain = in_bfloat16
    save_pretrained(from_pretrained(folder, distribute), tmp_path / "again")
    read_back_by_all(tmp_path / "again", plain)


@pytest.mark.gloo
def test_save_pretrained_files_of_two_processes_load_with_equal_weights(in_bfloat16: tuple[Path, Any], tmp_path: Path) -> None:
    folder, plain = in_bfloat16
    files = run_gloo(write_sharded, 2, folder, tmp_path / "again")
    assert files[0] == files[1]
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} < set(files[0])
    read_back_by_all(tmp_path / "again", plain)


def test_invalid_save_and_load_calls_raise_with_remedy(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, plain = saved
    model = from_pretrained(folder, by_heads)
    with pytest.raises(dt.errors.DTensorError, match=r"dtensor\.hf\.save_pretrained\(model, folder\)"):
        model.save_pretrained(tmp_path / "again")
    with pytest.raises(TypeError, match=r"checkpoint\.save_safetensors\(model, folder\)"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "again")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"names no model class of transformers .* model_class="):
        from_pretrained(folder, by_heads)
    again = from_pretrained(folder, by_heads, model_class=transformers.LlamaForCausalLM)
    assert again.config.hidden_size == plain.config.hidden_size


EXPERTS: dict[str, dict[str, Any]] = {  # files store each expert separately, and gate and up projections separately
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 6, "decoder_sparse_step": 1},
}


@pytest.mark.parametrize("name", keep_every_nth_fast(list(EXPERTS)))
@pytest.mark.parametrize("distribute", ["auto", "fully"])
def test_experts_load_sharded_from_separate_tensors_and_save_again(name: str, distribute: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    plain = kind(kind.config_class(**SIZES | EXPERTS[name] | {"tie_word_embeddings": False})).eval()
    plain.save_pretrained(tmp_path / "saved")
    cut = fully if distribute == "fully" else lambda model: parallelize_module(model, MESH["dp"], "auto")
    model = from_pretrained(tmp_path / "saved", cut)
    kept = [p for label, p in model.named_parameters() if "gate_up_proj" in label]
    assert kept
    assert all(p.layout.max_local_nbytes == p.layout.nbytes // 2 for p in kept)
    tokens = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(first(model(tokens).logits), plain(tokens).logits, rtol=1e-4, atol=1e-5)
    checkpoint.save_safetensors(model, tmp_path / "again")
    plain.config.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def test_from_pretrained_with_missing_values_raises(saved: tuple[Path, Any]) -> None:
    class Tabled(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    with pytest.raises(CheckpointError, match=r"its buffers \['table'\]"):
        from_pretrained(saved[0], by_heads, model_class=Tabled)
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        from_pretrained(saved[0], by_heads, model_class=transformers.LlamaForSequenceClassification)
