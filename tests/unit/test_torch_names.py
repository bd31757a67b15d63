"""Torch names: the public names, methods, arguments and error classes of torch.distributed.tensor, device_mesh and fsdp."""

from __future__ import annotations

import importlib
import inspect
import json
import re
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
import torch.distributed.tensor.parallel.style
import torch.distributed.tensor.placement_types
from torch.distributed.fsdp import _fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor

MODULES = {
    "torch.distributed.tensor": "dtensor",
    "torch.distributed.tensor.debug": "dtensor.debug",
    "torch.distributed.tensor.experimental": "dtensor.experimental",
    "torch.distributed.tensor.parallel": "dtensor.parallel",
    "torch.distributed.tensor.parallel.style": "dtensor.parallel.style",
    "torch.distributed.tensor.placement_types": "dtensor.placement_types",
    "torch.distributed.device_mesh": "dtensor.device_mesh",
    "torch.distributed.fsdp": "dtensor.fsdp",
}


def names_of(module: ModuleType) -> list[str]:
    if module is torch.distributed.fsdp:  # it also exports the FSDP1 wrapper
        return sorted(name for name in module.__all__ if hasattr(_fully_shard, name))
    return sorted(module.__all__)


PAIRS = [
    (torch_module, our_module, name)
    for torch_module, our_module in MODULES.items()
    for name in names_of(importlib.import_module(torch_module))
]


def objects_of(torch_module: str, our_module: str, name: str) -> tuple[Any, Any]:
    return getattr(importlib.import_module(torch_module), name), getattr(importlib.import_module(our_module), name, None)


def test_local_shard_size_and_offset_equals_torch_and_covers_the_dim() -> None:
    for size in range(12):
        for count in range(1, 6):
            blocks = [dtensor.Shard.local_shard_size_and_offset(size, count, rank) for rank in range(count)]
            torch_function = torch.distributed.tensor.Shard.local_shard_size_and_offset
            assert blocks == [torch_function(size, count, rank) for rank in range(count)]
            blocks_of_range = [torch.arange(size).narrow(0, start, own) for own, start in blocks]
            assert torch.equal(torch.cat(blocks_of_range), torch.arange(size))


def test_shard_with_level_is_a_strided_shard_and_strided_shard_constructor_raises() -> None:
    strided = dtensor.placement_types._StridedShard
    nested = dtensor.Shard(0, level=1)
    assert isinstance(nested, strided)
    assert not any(isinstance(p, strided) for p in (dtensor.Shard(0), dtensor.Shard(0, level=0), dtensor.Replicate(), 3))
    assert not hasattr(nested, "split_factor")
    with pytest.raises(AttributeError, match="product of the sizes of the mesh dims with a lower level"):
        _ = nested.split_factor
    for made in (lambda: strided(dim=-2, split_factor=3), lambda: strided(-2, split_factor=3)):
        with pytest.raises(dtensor.errors.PlacementError, match=r"Shard\(-2, level=1\).*ColwiseParallel\(parts=3\)"):
            made()


def test_compute_local_shape_and_global_offset_gives_the_block_of_the_current_rank() -> None:
    from dtensor._utils import compute_local_shape_and_global_offset as block
    from dtensor.placement import Replicate, Shard

    mesh = dtensor.DeviceMesh("cpu", [[0, 1], [2, 3]])
    x = torch.arange(35.0).reshape(7, 5)
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(0, level=1), Shard(0, level=0)],
    ):
        blocks = dtensor.map_ranks(lambda at, p=placements: block((7, 5), mesh, p), mesh=mesh)
        shards = dtensor.distribute_tensor(x, mesh, placements).to_local().shards
        for (shape, offset), shard in zip(blocks, shards, strict=True):
            assert torch.equal(shard, x[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])
    with pytest.raises(dtensor.errors.MeshError, match=r"dtensor\.map_ranks\("):
        block((7, 5), mesh, [Shard(0), Shard(1)])


def test_a_tensor_in_flight_is_an_async_collective_tensor_until_wait() -> None:
    x = dtensor.distribute_tensor(torch.arange(5.0), dtensor.DeviceMesh("cpu", 2), [dtensor.Shard(0)])
    assert not isinstance(x, dtensor.AsyncCollectiveTensor)
    y = x.redistribute(placements=[dtensor.Replicate()], async_op=True)
    assert isinstance(y, dtensor.AsyncCollectiveTensor)
    assert y.wait() is y
    assert not isinstance(y, dtensor.AsyncCollectiveTensor)
    assert torch.equal(y.to_local().shards[1], torch.arange(5.0))


def test_generate_json_dump_of_comm_debug_mode_is_a_tree_of_modules(tmp_path: Path) -> None:
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


def test_names_compared_with_torch_include_the_main_classes() -> None:
    assert {"DTensor", "context_parallel", "fully_shard", "ColwiseParallel", "CommDebugMode"} <= {name for *_, name in PAIRS}


@pytest.mark.parametrize(("torch_module", "our_module", "name"), PAIRS)
def test_each_public_name_of_torch_dtensor_modules_is_exported_by_dtensor(torch_module: str, our_module: str, name: str) -> None:
    there, here = objects_of(torch_module, our_module, name)
    assert here is not None
    assert inspect.isclass(there) == inspect.isclass(here)
    exported = importlib.import_module(our_module).__all__
    assert name in exported


@pytest.mark.parametrize(("torch_module", "our_module", "name"), [row for row in PAIRS if inspect.isclass(objects_of(*row)[0])])
def test_each_public_method_of_a_torch_class_exists(torch_module: str, our_module: str, name: str) -> None:
    there, here = objects_of(torch_module, our_module, name)
    inherited = {name for base in (torch.Tensor, torch.nn.Module, TorchDispatchMode) for name in dir(base)}
    methods = [name for name in dir(there) if not name.startswith("_") and name not in inherited]
    methods = [name for name in methods if callable(getattr(there, name)) or isinstance(getattr(there, name), property)]
    assert [name for name in methods if not hasattr(here, name)] == []


_MISSING_ARGUMENTS = {"local_map": {"spmd_types"}}  # of torch 2.14, for a package of its own: see docs/porting.md


@pytest.mark.parametrize(("torch_module", "our_module", "name"), PAIRS)
def test_each_argument_of_a_torch_function_is_accepted(torch_module: str, our_module: str, name: str) -> None:
    there, here = objects_of(torch_module, our_module, name)
    try:
        torch_parameters, parameters = (inspect.signature(f).parameters.values() for f in (there, here))
    except ValueError:
        pytest.skip("written in C")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in torch_parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not p.name.startswith("_")]
    known = {p.name for p in parameters} | _MISSING_ARGUMENTS.get(name, set())
    assert takes_all or [name for name in names if name not in known] == []


MESH = dtensor.DeviceMesh("cpu", [[0, 1], [2, 3]])
NAMED = dtensor.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
PREPARE = dtensor.parallel.PrepareModuleInput(input_layouts=dtensor.Shard(0), desired_input_layouts=dtensor.Replicate())
ERRORS: dict[str, tuple[type[Exception], Any]] = {
    "two mesh dims have the same name": (RuntimeError, lambda: dtensor.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "a"))),
    "needs 1 mesh_dim_names": (
        RuntimeError,
        lambda: dtensor.init_device_mesh("cpu", (4,), mesh_dim_names=("a", "b")),
    ),
    "get_group() of a 2-d mesh needs a mesh dim": (RuntimeError, lambda: NAMED.get_group()),
    "get_local_rank() of a 2-d mesh needs a mesh dim": (RuntimeError, lambda: NAMED.get_local_rank()),
    "it was made without mesh_dim_names": (RuntimeError, lambda: MESH["dp"]),
    "Invalid mesh_dim_name": (KeyError, lambda: NAMED["pp"]),
    "with several groups needs mesh=": (ValueError, lambda: dtensor.DeviceMesh.from_group([object()], "cpu")),
    "an empty list of groups": (ValueError, lambda: dtensor.DeviceMesh.from_group([], "cpu", torch.arange(0))),
    "takes leaf tensors": (RuntimeError, lambda: dtensor.distribute_tensor(torch.ones(2, requires_grad=True) * 2, MESH)),
    "the DTensor is on": (ValueError, lambda: dtensor.distribute_tensor(dtensor.zeros(2, device_mesh=MESH), NAMED)),
    "without a forward of its own": (
        ValueError,
        lambda: dtensor.fsdp.fully_shard(torch.nn.ModuleList([torch.nn.Linear(2, 2)]), mesh=NAMED["dp"]),
    ),
    "input_layouts takes as many as the module has inputs": (
        ValueError,
        lambda: dtensor.parallel.parallelize_module(torch.nn.Bilinear(1, 1, 1), NAMED["tp"], PREPARE)(
            torch.ones(1), torch.ones(1)
        ),
    ),
    "has no 2-d parameter `weight`": (
        NotImplementedError,
        lambda: dtensor.parallel.parallelize_module(torch.nn.ReLU(), NAMED["tp"], dtensor.parallel.ColwiseParallel()),
    ),
    "expected a tensor": (
        TypeError,
        lambda: dtensor.parallel.parallelize_module(torch.nn.ReLU(), NAMED["tp"], dtensor.parallel.SequenceParallel())(5),
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_invalid_calls_raise_the_error_classes_of_torch(message: str) -> None:
    kind, provoke = ERRORS[message]
    with pytest.raises(kind, match=re.escape(message)):
        provoke()


def test_mesh_ranks_are_on_the_cpu_under_another_default_device() -> None:
    with torch.device("meta"):
        assert dtensor.init_device_mesh("cpu", (2,)).mesh.tolist() == [0, 1]


def test_distribute_tensor_scatters_the_value_of_the_source_rank() -> None:
    mesh = dtensor.DeviceMesh("cpu", 2)
    values = dtensor.per_rank([torch.arange(5.0), torch.zeros(5)])
    with dtensor.debug.CommDebugMode() as comm:
        x = dtensor.distribute_tensor(values, mesh, [dtensor.Shard(0)])
    assert (comm.get_comm_counts()[torch.ops.c10d.scatter_], comm.get_total_counts()) == (1, 1)
    assert comm.get_comm_bytes() == {"scatter": 8}
    assert torch.equal(x.full_tensor(), torch.arange(5.0))


def test_documented_differences_from_torch_dtensor_hold() -> None:
    """Check the differences that docs/porting.md lists."""
    mesh = dtensor.DeviceMesh("cpu", 2)
    shards = dtensor.per_rank([torch.ones(2, 3), torch.ones(1, 3)])
    assert dtensor.DTensor.from_local(shards, mesh, [dtensor.Shard(0)], shape=(3, 3)).stride() == (3, 1)
    x = dtensor.distribute_tensor(torch.ones(4, 3), mesh, [dtensor.Replicate()])
    assert dtensor.distribute_tensor(x, mesh, [dtensor.Shard(0)]).placements == (dtensor.Shard(0),)
    partial = x.redistribute(placements=[dtensor.Partial()])
    assert [shard.sum().item() for shard in partial.to_local().shards] == [12.0, 0.0]
    assert torch.empty_like(partial).placements == (dtensor.Replicate(),)
    assert torch.equal(partial.fill_(8.0).full_tensor(), torch.full((4, 3), 8.0))
    assert len(x.redistribute(placements=[dtensor.Shard(0)]).unbind(0)) == 4
    model = dtensor.fsdp.fully_shard(torch.nn.Linear(3, 5), mesh=mesh, reshard_after_forward=False)
    model(torch.ones(2, 3))
    assert isinstance(model.weight, dtensor.DTensor)
    model.unshard()
    assert not isinstance(model.weight, dtensor.DTensor)


def test_spec_has_the_attributes_of_torch_dtensor_spec_with_right_values() -> None:
    x = dtensor.zeros(5, 3, device_mesh=dtensor.init_device_mesh("cpu", (2,)), placements=[dtensor.Shard(0)])
    assert (x._spec.mesh, x._spec.device_mesh, x._spec.placements) == (x.device_mesh, x.device_mesh, x.placements)
    assert (x._spec.tensor_meta.shape, x._spec.tensor_meta.stride, x._spec.tensor_meta.dtype) == ((5, 3), (3, 1), torch.float32)
    assert hash(x._spec) == hash((x + 1)._spec)
    square = dtensor.init_device_mesh("cpu", (2, 2))
    y, z = (
        dtensor.zeros(5, 3, device_mesh=square, placements=[dtensor.Shard(1), where])
        for where in (dtensor.Shard(1), dtensor.Replicate())
    )
    assert [(value._spec.num_shards, value._spec.dim_map) for value in (x, y, z)] == [(2, [0, -1]), (4, [-1, 0]), (2, [-1, 0])]
