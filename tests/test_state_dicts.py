"""Torch's tools for state dicts over this package's DTensors: full state dicts out, in, and broadcast from the first rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_gloo
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
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

WHOLE = StateDictOptions(full_state_dict=True)
TO_THE_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_THE_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(shape: tuple[int, ...], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of uneven sizes with a buffer: tensor-parallel under data parallelism on two mesh dims, else data-parallel."""
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


def whole(x: Any) -> Any:
    found = x.full_tensor() if isinstance(x, DTensor) else x
    return found.shards[0] if isinstance(found, dt.PerRank) else found


def same(a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer], optimizer: bool = True) -> None:
    for (name, x), y in zip(a[0].state_dict().items(), b[0].state_dict().values(), strict=True):
        assert torch.equal(whole(x), whole(y)), name
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        for name, x in a[1].state[p].items() if optimizer else ():
            assert torch.equal(whole(x), whole(b[1].state[q][name])), name


def _full() -> None:
    one, other = trained((2, 2), 0), trained((4,), 1)
    model, state = get_model_state_dict(one[0], options=TO_THE_FIRST), get_optimizer_state_dict(*one, options=TO_THE_FIRST)
    assert bool(model) == bool(state) == (dist.get_rank() == 0)
    assert not any(isinstance(x, DTensor) for x in model.values())
    set_model_state_dict(other[0], dict(model), options=FROM_THE_FIRST)  # torch's function writes to the dict
    set_optimizer_state_dict(*other, state, options=FROM_THE_FIRST)
    same(one, other)
    assert all(isinstance(p, DTensor) for p in other[0].parameters())

    third = trained((2, 2), 2)
    set_model_state_dict(third[0], get_model_state_dict(one[0], options=WHOLE), options=WHOLE)
    set_optimizer_state_dict(*third, get_optimizer_state_dict(*one, options=WHOLE), options=WHOLE)
    same(one, third)

    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    fully_shard(empty, mesh=dt.init_device_mesh("cpu", (4,)))
    given = {name: x for name, x in model.items() if name in dict(empty.named_parameters())}
    set_model_state_dict(empty, given, options=FROM_THE_FIRST)
    for p, q in zip(empty.parameters(), one[0].parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))


@pytest.mark.gloo
def test_full_state_dicts_on_process_groups() -> None:
    run_gloo(_full, 4)


def test_full_state_dicts_in_one_process() -> None:
    one, other = trained((2, 2), 0), trained((4,), 1)
    model, state = get_model_state_dict(one[0], options=WHOLE), get_optimizer_state_dict(*one, options=WHOLE)
    assert {type(x) for x in model.values()} == {Tensor}
    set_model_state_dict(other[0], model, options=WHOLE)
    set_optimizer_state_dict(*other, state, options=WHOLE)
    same(one, other)


def test_staging_on_the_host() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    state = {"x": dt.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "n": 3, "plain": torch.ones(2)}
    staged = _create_cpu_state_dict(state)
    assert staged["x"] is not state["x"]
    _copy_state_dict(state, staged)
    assert torch.equal(whole(staged["x"]), torch.arange(5.0))
    assert staged["x"].placements == (Shard(0),)


@pytest.mark.slow
def test_torchs_own_are_treated_as_ever() -> None:
    """In a process of its own: torch's DTensors want a process group."""
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
