"""Mixing with torch.distributed.tensor: tensors, placements and styles of torch raise and are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from gloo_processes import run_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dtensor as dt
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module, replicate


def error_text(call: Callable[[], Any]) -> str:
    """Return the class and text of the error that ``call`` raises."""
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def collect_errors() -> dict[str, str]:
    mesh, other = dt.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    own = dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0)])
    torch_dtensor = torch_tensor.distribute_tensor(torch.ones(4, 4), other, [torch_tensor.Shard(0)])
    single = torch_tensor.distribute_tensor(torch.ones(1), other, [torch_tensor.Replicate()])

    def add_under_implicit_replication() -> Any:
        with dt.implicit_replication():
            return own + torch_dtensor

    def convert_by_from_local() -> bool:
        local = torch_dtensor.to_local()
        made = dt.DTensor.from_local(local, mesh, [dt.Shard(0)], shape=torch_dtensor.shape, stride=torch_dtensor.stride())
        return torch.equal((made + own).full_tensor(), torch.full((4, 4), 2.0))

    calls: dict[str, Callable[[], Any]] = {
        "a sum": lambda: own + torch_dtensor,
        "a sum with one number": lambda: own * single,
        "a sum under implicit_replication": add_under_implicit_replication,
        "distribute_tensor": lambda: dt.distribute_tensor(torch_dtensor, mesh, [dt.Shard(0)]),
        "from_local": lambda: dt.DTensor.from_local(torch_dtensor, mesh, [dt.Shard(0)]),
        "a placement": lambda: dt.distribute_tensor(torch.ones(4), mesh, [torch_tensor.Shard(0)]),
        "a style": lambda: parallelize_module(make_model(), mesh, {"0": torch_parallel.ColwiseParallel()}),
        "ddp of fsdp": lambda: DistributedDataParallel(fully_shard(make_model(), mesh=mesh)),
        "ddp of tp": lambda: DistributedDataParallel(parallelize_module(make_model(), mesh, {"0": ColwiseParallel()})),
        "ddp of ddp": lambda: DistributedDataParallel(replicate(make_model(), mesh)),
    }
    found = {name: error_text(call) for name, call in calls.items()}
    assert convert_by_from_local()  # the fix of the error text
    return found


@pytest.mark.gloo
def test_mixing_with_torch_dtensor_raises_and_names_both_libraries() -> None:
    first, second = run_gloo(collect_errors, 2)
    assert first == second
    for name in ("a sum", "a sum with one number", "a sum under implicit_replication", "distribute_tensor", "from_local"):
        assert "DTensor of torch.distributed.tensor on" in first[name], name
        assert "dtensor.DTensor.from_local(x.to_local(), mesh" in first[name], name
    assert "not a placement of dtensor but one of torch" in first["a placement"]
    assert "of torch.distributed.tensor.parallel" in first["a style"]
    for name in ("ddp of fsdp", "ddp of tp", "ddp of ddp"):
        assert "torch.nn.parallel.DistributedDataParallel does not support DTensors" in first[name], name
        assert "dtensor.parallel.replicate(model, mesh)" in first[name], name
