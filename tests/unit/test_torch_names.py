"""Code ports by changing an import: what torch documents of DTensors, meshes, styles and FSDP2 is found under the same names."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.distributed.tensor.placement_types
from torch.distributed.fsdp import _fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor

MODULES = {
    "torch.distributed.tensor": "dtensor",
    "torch.distributed.tensor.debug": "dtensor.debug",
    "torch.distributed.tensor.experimental": "dtensor.experimental",
    "torch.distributed.tensor.parallel": "dtensor.parallel",
    "torch.distributed.tensor.placement_types": "dtensor.placement_types",
    "torch.distributed.device_mesh": "dtensor.device_mesh",
    "torch.distributed.fsdp": "dtensor.fsdp",
}

GROUPS = {"backend_override"}  # refused, with a word on DeviceMesh.from_group, which takes groups of any backend


def names_of(module: ModuleType) -> list[str]:
    if module is torch.distributed.fsdp:  # which has the wrapper of before as well
        return sorted(name for name in module.__all__ if hasattr(_fully_shard, name))
    return sorted(module.__all__)


PAIRS = [(theirs, ours, name) for theirs, ours in MODULES.items() for name in names_of(importlib.import_module(theirs))]


def pair(theirs: str, ours: str, name: str) -> tuple[Any, Any]:
    return getattr(importlib.import_module(theirs), name), getattr(importlib.import_module(ours), name, None)


def test_a_block_is_where_a_shard_says() -> None:
    for size in range(12):
        for count in range(1, 6):
            blocks = [dtensor.Shard.local_shard_size_and_offset(size, count, rank) for rank in range(count)]
            theirs = torch.distributed.tensor.Shard.local_shard_size_and_offset
            assert blocks == [theirs(size, count, rank) for rank in range(count)]
            held = [torch.arange(size).narrow(0, start, own) for own, start in blocks]
            assert torch.equal(torch.cat(held), torch.arange(size))


def test_what_is_on_its_way_says_so_and_arrives() -> None:
    x = dtensor.distribute_tensor(torch.arange(5.0), dtensor.DeviceMesh("cpu", 2), [dtensor.Shard(0)])
    assert not isinstance(x, dtensor.AsyncCollectiveTensor)
    y = x.redistribute(placements=[dtensor.Replicate()], async_op=True)
    assert isinstance(y, dtensor.AsyncCollectiveTensor)
    assert y.wait() is y
    assert not isinstance(y, dtensor.AsyncCollectiveTensor)
    assert torch.equal(y.to_local().shards[1], torch.arange(5.0))


def test_the_dump_of_collectives_is_a_tree_of_the_modules(tmp_path: Path) -> None:
    mesh = dtensor.DeviceMesh("cpu", 2)
    plan = {"0": dtensor.parallel.ColwiseParallel(), "2": dtensor.parallel.RowwiseParallel()}
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(dtensor.parallel.parallelize_module(inner, mesh, plan), torch.nn.Flatten())
    with dtensor.debug.CommDebugMode() as comm:
        model(torch.ones(2, 4)).sum().backward()
    comm.generate_json_dump(str(tmp_path / "dump.json"))
    everything = json.loads((tmp_path / "dump.json").read_text())
    assert (everything["fqn"], everything["collectives_forward"]) == ("Global", [["all_reduce", 1]])
    (root,) = everything["children"]
    assert (root["fqn"], root["module_type"], root["collectives_forward"]) == ("Sequential", "Sequential", [["all_reduce", 1]])
    layers = root["children"][0]["children"]
    assert [child["module_type"] for child in root["children"]] == ["Sequential", "Flatten"]
    assert [(layer["module_type"], layer["collectives_forward"]) for layer in layers] == [
        ("Linear", []),
        ("ReLU", []),
        ("Linear", [["all_reduce", 1]]),
    ]
    assert layers[0]["parameters"] == [["weight", "(Shard(dim=0),)"], ["bias", "(Shard(dim=0),)"]]


def test_the_modules_are_looked_through() -> None:
    assert {"DTensor", "context_parallel", "fully_shard", "ColwiseParallel", "CommDebugMode"} <= {name for *_, name in PAIRS}


@pytest.mark.parametrize(("theirs", "ours", "name"), PAIRS)
def test_a_name_of_torch_is_a_name_here(theirs: str, ours: str, name: str) -> None:
    there, here = pair(theirs, ours, name)
    assert here is not None
    assert inspect.isclass(there) == inspect.isclass(here)
    exported = importlib.import_module(ours).__all__
    assert name in exported


@pytest.mark.parametrize(("theirs", "ours", "name"), [row for row in PAIRS if inspect.isclass(pair(*row)[0])])
def test_what_a_class_of_torch_can_do_ours_can(theirs: str, ours: str, name: str) -> None:
    there, here = pair(theirs, ours, name)
    inherited = {name for base in (torch.Tensor, torch.nn.Module, TorchDispatchMode) for name in dir(base)}
    methods = [name for name in dir(there) if not name.startswith("_") and name not in inherited]
    methods = [name for name in methods if callable(getattr(there, name)) or isinstance(getattr(there, name), property)]
    assert [name for name in methods if not hasattr(here, name)] == []


@pytest.mark.parametrize(("theirs", "ours", "name"), PAIRS)
def test_every_argument_of_torchs_is_taken(theirs: str, ours: str, name: str) -> None:
    there, here = pair(theirs, ours, name)
    try:
        wanted, given = (inspect.signature(f).parameters.values() for f in (there, here))
    except ValueError:
        pytest.skip("written in C")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in given)
    names = [p.name for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not p.name.startswith("_")]
    assert takes_all or [name for name in names if name not in {p.name for p in given} | GROUPS] == []
