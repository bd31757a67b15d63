"""State dict functions of torch with DTensors: full state dicts that are read, set, and broadcast from the first rank."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare_with_one_device import full_value
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dtensor as dt
from dtensor import DTensor, Shard
from dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    fully_shard,
    parallelize_module,
    replicate,
)

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_FIRST_RANK = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST_FROM_FIRST_RANK = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def train_model(shape: tuple[int, ...], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model and optimizer: tensor- and data-parallel on two mesh dims, else data-parallel."""
    torch.manual_seed(seed)
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.BatchNorm1d(5, affine=False))
    if len(shape) == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x: Any = torch.randn(4, 6)
    model(x if mesh.kind != "in_process" else dt.per_rank([x] * len(mesh.members))).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_equal_states(
    a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer], optimizer: bool = True
) -> None:
    for (name, x), y in zip(a[0].state_dict().items(), b[0].state_dict().values(), strict=True):
        assert torch.equal(full_value(x), full_value(y)), name
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        for name, x in a[1].state[p].items() if optimizer else ():
            assert torch.equal(full_value(x), full_value(b[1].state[q][name])), name


def _check_full_state_dicts() -> None:
    one, other = train_model((2, 2), 0), train_model((4,), 1)
    model, state = (
        get_model_state_dict(one[0], options=FULL_ON_FIRST_RANK),
        get_optimizer_state_dict(*one, options=FULL_ON_FIRST_RANK),
    )
    assert bool(model) == bool(state) == (dist.get_rank() == 0)
    assert not any(isinstance(x, DTensor) for x in model.values())
    set_model_state_dict(other[0], dict(model), options=BROADCAST_FROM_FIRST_RANK)  # torch's function writes to the dict
    set_optimizer_state_dict(*other, state, options=BROADCAST_FROM_FIRST_RANK)
    assert_equal_states(one, other)
    assert all(isinstance(p, DTensor) for p in other[0].parameters())

    third = train_model((2, 2), 2)
    set_model_state_dict(third[0], get_model_state_dict(one[0], options=FULL), options=FULL)
    set_optimizer_state_dict(*third, get_optimizer_state_dict(*one, options=FULL), options=FULL)
    assert_equal_states(one, third)

    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    fully_shard(empty, mesh=dt.init_device_mesh("cpu", (4,)))
    given = {name: x for name, x in model.items() if name in dict(empty.named_parameters())}
    set_model_state_dict(empty, given, options=BROADCAST_FROM_FIRST_RANK)
    for p, q in zip(empty.parameters(), one[0].parameters(), strict=True):
        assert torch.equal(full_value(p), full_value(q))


@pytest.mark.gloo
def test_full_state_dicts_load_on_other_meshes_on_process_groups() -> None:
    run_gloo(_check_full_state_dicts, 4)


def test_full_state_dicts_load_on_other_meshes_in_one_process() -> None:
    one, other = train_model((2, 2), 0), train_model((4,), 1)
    model, state = get_model_state_dict(one[0], options=FULL), get_optimizer_state_dict(*one, options=FULL)
    assert {type(x) for x in model.values()} == {Tensor}
    set_model_state_dict(other[0], dict(model), options=FULL)  # torch's function writes to the dict
    set_optimizer_state_dict(*other, state, options=FULL)
    assert_equal_states(one, other)
    third = train_model((2, 2), 2)
    set_model_state_dict(third[0], dict(model), options=BROADCAST_FROM_FIRST_RANK)
    set_optimizer_state_dict(*third, state, options=BROADCAST_FROM_FIRST_RANK)
    assert_equal_states(one, third)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    """Language model of blocks between an embedding and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers, self.norm = nn.Embedding(7, 6), nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(6)
        self.output = nn.Linear(6, 7, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.scale.fill_(1.0)


RANKS = {"mixed": (2, 2), "flat": (4,)}


def start_training(shape: tuple[int, ...], saved: Path | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model on meta, shard it layer by layer, and initialize it or load a saved state, as in torch's ``fully_shard``
    example."""
    with torch.device("meta"):
        model = Language()
    mesh = dt.init_device_mesh("cpu", shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if saved is None:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.reset_parameters()
    else:
        full = torch.load(saved / "model.pt", mmap=True, weights_only=True)
        set_model_state_dict(model, full, options=BROADCAST_FROM_FIRST_RANK)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if saved is None else 0.5)
    if saved is not None:
        full = torch.load(saved / "optimizer.pt", mmap=True, weights_only=True)
        set_optimizer_state_dict(model, optimizer, full, options=BROADCAST_FROM_FIRST_RANK)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        tokens: Any = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(seed))
        model(tokens if dist.is_initialized() else dt.per_rank([tokens] * 4)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _stop_and_resume(folder: str) -> None:
    for name, shape in RANKS.items():
        saved, (model, optimizer) = Path(folder) / name, start_training(shape, None)
        steps(model, optimizer, range(2))
        whole_model = get_model_state_dict(model, options=FULL_ON_FIRST_RANK)
        whole_optimizer = get_optimizer_state_dict(model, optimizer, options=FULL_ON_FIRST_RANK)
        if not dist.is_initialized() or dist.get_rank() == 0:
            saved.mkdir()
            torch.save(whole_model, saved / "model.pt")
            torch.save(whole_optimizer, saved / "optimizer.pt")
        if dist.is_initialized():
            dist.barrier()
        steps(model, optimizer, range(2, 4))
        for other in RANKS.values():
            resumed = start_training(other, saved)
            assert resumed[1].param_groups[0]["lr"] == 0.01
            steps(*resumed, range(2, 4))
            for (key, x), y in zip(model.state_dict().items(), resumed[0].state_dict().values(), strict=True):
                torch.testing.assert_close(full_value(x), full_value(y), msg=key)
            for p, q in zip(model.parameters(), resumed[0].parameters(), strict=True):
                for key, x in optimizer.state[p].items():
                    torch.testing.assert_close(full_value(x), full_value(resumed[1].state[q][key]), msg=key)


def test_training_resumed_from_full_state_dicts_equals_uninterrupted_in_process(tmp_path: Path) -> None:
    _stop_and_resume(str(tmp_path))


@pytest.mark.gloo
def test_training_resumed_from_full_state_dicts_equals_uninterrupted_on_gloo(tmp_path: Path) -> None:
    run_gloo(_stop_and_resume, 4, str(tmp_path))


def test_zero_optimizer_state_dict_loads_on_another_number_of_ranks() -> None:
    torch.manual_seed(2)
    alone = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    inputs, found = torch.randn(3, 4, 6), []
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    states: list[tuple[Any, Any]] = []
    made = copy.deepcopy(alone)
    for k, ranks in enumerate((2, 3)):  # one step on two ranks, the others on three
        model = replicate(copy.deepcopy(made), dt.init_device_mesh("cpu", (ranks,)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1 if k == 0 else 9.0)
        if states:
            set_model_state_dict(model, states[0][0], options=FULL)
            set_optimizer_state_dict(model, optimizer, states[0][1], options=FULL)
        for x in inputs[k : k + 1 + k]:
            model(dt.per_rank([x] * ranks)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append((get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)))
        found.append(model)
    for x in inputs:
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
    for p, q in zip(alone.parameters(), found[1].parameters(), strict=True):
        assert torch.allclose(p, full_value(q), atol=1e-6)
    for name, p in alone.named_parameters():
        assert torch.allclose(full_value(states[1][1]["state"][name]["exp_avg"]), plain.state[p]["exp_avg"], atol=1e-6)
        assert states[1][1]["state"][name]["step"] == 3


def test_cpu_copy_of_a_state_dict_has_equal_values_and_placements() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    state = {"x": dt.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "n": 3, "plain": torch.ones(2)}
    staged = _create_cpu_state_dict(state)
    assert staged["x"] is not state["x"]
    _copy_state_dict(state, staged)
    assert torch.equal(full_value(staged["x"]), torch.arange(5.0))
    assert staged["x"].placements == (Shard(0),)


@pytest.mark.slow
def test_torch_state_dict_functions_accept_pytorch_dtensors_after_import() -> None:
    """Run in a subprocess, because torch's DTensors need a process group."""
    code = """
import torch, torch.distributed as dist, dtensor
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard, DTensor
from torch.distributed.checkpoint.state_dict import *
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
m = torch.nn.Linear(3, 2); fully_shard(m, mesh=init_device_mesh("cpu", (1,)))
full = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True))
assert type(full["weight"]) is torch.Tensor
full = {k: v.clone() for k, v in full.items()}
for broadcast in (True, False):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(m, {k: v + 1 for k, v in full.items()}, options=options)
    assert isinstance(m.weight, DTensor) and torch.equal(m.weight.full_tensor(), full["weight"] + 1)
dist.destroy_process_group()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(dt.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
