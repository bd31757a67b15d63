"""Where this library meets torch's own: what does not go together raises, on all ranks, and names both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_styles
from gloo_processes import run_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dtensor as dt
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module, replicate


def words_of(call: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def borders() -> dict[str, str]:
    mesh, other = dt.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    ours = dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0)])
    foreign = theirs.distribute_tensor(torch.ones(4, 4), other, [theirs.Shard(0)])
    single = theirs.distribute_tensor(torch.ones(1), other, [theirs.Replicate()])

    def implicitly() -> Any:
        with dt.implicit_replication():
            return ours + foreign

    def again() -> bool:
        local = foreign.to_local()
        made = dt.DTensor.from_local(local, mesh, [dt.Shard(0)], shape=foreign.shape, stride=foreign.stride())
        return torch.equal((made + ours).full_tensor(), torch.full((4, 4), 2.0))

    calls: dict[str, Callable[[], Any]] = {
        "a sum": lambda: ours + foreign,
        "a sum with one number": lambda: ours * single,
        "a sum under implicit_replication": implicitly,
        "distribute_tensor": lambda: dt.distribute_tensor(foreign, mesh, [dt.Shard(0)]),
        "from_local": lambda: dt.DTensor.from_local(foreign, mesh, [dt.Shard(0)]),
        "a placement": lambda: dt.distribute_tensor(torch.ones(4), mesh, [theirs.Shard(0)]),
        "a style": lambda: parallelize_module(model(), mesh, {"0": their_styles.ColwiseParallel()}),
        "ddp of fsdp": lambda: DistributedDataParallel(fully_shard(model(), mesh=mesh)),
        "ddp of tp": lambda: DistributedDataParallel(parallelize_module(model(), mesh, {"0": ColwiseParallel()})),
        "ddp of ddp": lambda: DistributedDataParallel(replicate(model(), mesh)),
    }
    found = {name: words_of(call) for name, call in calls.items()}
    assert again()  # what the words say to write
    return found


@pytest.mark.gloo
def test_both_sides_are_named() -> None:
    first, second = run_gloo(borders, 2)
    assert first == second
    for name in ("a sum", "a sum with one number", "a sum under implicit_replication", "distribute_tensor", "from_local"):
        assert "DTensor of torch.distributed.tensor on" in first[name], name
        assert "dtensor.DTensor.from_local(x.to_local(), mesh" in first[name], name
    assert "not a placement of dtensor but one of torch" in first["a placement"]
    assert "of torch.distributed.tensor.parallel" in first["a style"]
    for name in ("ddp of fsdp", "ddp of tp", "ddp of ddp"):
        assert "torch.nn.parallel.DistributedDataParallel does not support DTensors" in first[name], name
        assert "dtensor.parallel.replicate(model, mesh)" in first[name], name
