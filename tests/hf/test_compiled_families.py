"""Compiled training steps of unchanged Hugging Face models equal eager steps on two processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import Tensor
from training_step import spread

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import parallelize_module

transformers = pytest.importorskip("transformers")

from tiny_configs import VOCABULARY, first, tiny  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {"intermediate_size": 48},
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "T5ForConditionalGeneration": {"dropout_rate": 0.0, "decoder_start_token_id": 2, "pad_token_id": 1},
}
LOGS = ("GPT2LMHeadModel",)  # its loss logs, which breaks the graph of a plain model too


def cut(model: Any, mesh: Any, way: str) -> Any:
    if way == "tensor parallel":
        return parallelize_module(model, mesh, "auto")
    if way == "batch":
        return spread(model, mesh, lambda k, p: [Replicate()])
    return spread(model, mesh, lambda k, p: [Shard(k % min(p.ndim, 2)) if p.ndim else Replicate()])


def trained(name: str, way: str, backend: str | None, mesh: Any) -> list[Tensor]:
    """Return the losses of two steps, the last gradients, and the parameters."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = cut(kind(tiny(kind.config_class, **MODELS[name])), mesh, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=name not in LOGS)
    found: list[Any] = []
    for i in range(2):
        tokens: Tensor = torch.randint(4, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(i))
        if way != "tensor parallel":
            tokens = dt.distribute_tensor(tokens, mesh, [Shard(0) if way == "batch" else Replicate()])
        optimizer.zero_grad()
        with nullcontext() if way == "tensor parallel" else dt.implicit_replication():
            loss = call(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [first(value).detach() for value in (*found, *model.parameters())]


def compared(name: str, way: str, backend: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    got, wanted = trained(name, way, backend, mesh), trained(name, way, None, mesh)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("way", ["batch", "parameters"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_of_models_equal_eager_steps(name: str, way: str) -> None:
    run_gloo(compared, 2, name, way, "aot_eager", timeout_s=280.0)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_of_llama_under_its_tp_plan_equal_eager_steps(backend: str) -> None:
    run_gloo(compared, 2, "LlamaForCausalLM", "tensor parallel", backend, timeout_s=280.0)
