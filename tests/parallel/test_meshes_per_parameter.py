"""Meshes per parameter: parameters of one unit sharded over different meshes, and batches on the data-parallel mesh."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer
from compare_with_one_device import assert_same_gradients, assert_same_training, full_value
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import MeshError, PlacementError
from dtensor.fsdp import FSDPModule, ShardPlacementResult, fully_shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


class Experts(nn.Module):
    """Module with a linear layer, and expert weights that are sharded over fewer ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x)) @ self.experts.sum(0)


def _train_with_several_meshes(other: str, reshard: bool | int | None) -> dict[str, int]:
    """Compare steps of Adam with the plain model; the experts are sharded over two of four ranks, or also replicated."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    dp, experts_mesh = mesh.flatten("dp"), mesh if other == "both" else mesh[other]
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Linear(4, 4), Experts()).double()
    alone = copy.deepcopy(model)

    def where(p: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(1), experts_mesh) if p.ndim == 3 else None

    fully_shard(model[0], mesh=dp, shard_placement_fn=where, reshard_after_forward=reshard)
    fully_shard(model, mesh=dp, shard_placement_fn=where, reshard_after_forward=reshard)
    assert model[0].experts.device_mesh == experts_mesh
    assert model[0].up.weight.device_mesh == dp

    def batch(step: int) -> tuple[Any, Tensor]:
        x = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if other != "both":  # gradients of experts are averaged over their own mesh, so other ranks get equal batches
            x = x[:2].repeat(2, 1, 1) if other == "inner" else x[:2].repeat_interleave(2, 0)
        return dt.map_ranks(lambda at: x[at[0]].clone(), mesh=dp), x

    return assert_same_training(model, alone, lambda m: torch.optim.Adam(m.parameters(), lr=0.05), map(batch, range(2)))


@pytest.mark.parametrize("reshard", [None, False, 2])
@pytest.mark.parametrize("other", ["inner", "outer", "both"])
def test_units_with_several_meshes_train_like_plain_model(other: str, reshard: bool | int | None) -> None:
    counts = _train_with_several_meshes(other, reshard)
    assert counts["reduce_scatter"] == 4  # one for each mesh of each unit
    assert counts.get("all_reduce", 0) == (2 if other == "both" else 0)


@pytest.mark.gloo
def test_units_with_several_meshes_train_like_plain_model_on_process_groups() -> None:
    assert run_gloo(_train_with_several_meshes, 4, "inner", None) == [_train_with_several_meshes("inner", None)] * 4


def test_fully_shard_adds_its_mesh_dim_to_experts_sharded_over_another_dim() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    dp = mesh.flatten("dp")
    model = Experts().double()
    experts = model.experts.detach().clone()
    model.experts = nn.Parameter(dt.distribute_tensor(experts, mesh["ep"], [Shard(0)]))
    fully_shard(
        model, mesh=dp, shard_placement_fn=lambda p: ShardPlacementResult(Shard(1), mesh["efsdp"]) if p.ndim == 3 else None
    )
    assert model.experts.device_mesh == mesh
    assert model.experts.placements == (Shard(1), Shard(0))
    assert model.up.weight.placements == (Shard(0),)
    torch.testing.assert_close(full_value(model.experts), experts)
    model.unshard()
    assert model.experts.device_mesh == mesh["ep"]
    torch.testing.assert_close(full_value(model.experts), experts)


def test_invalid_shard_placement_results_raise() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(
        AssertionError, match=r"Shard\(dim=1\) for a parameter of shape \(4,\)"
    ):  # as in torch, for a dim that does not exist
        fully_shard(nn.Linear(3, 4), mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    for asked in (ShardPlacementResult(Shard(0), "dp"), ShardPlacementResult(Replicate(), mesh), Replicate()):
        with pytest.raises(PlacementError, match="ShardPlacementResult"):
            fully_shard(nn.Linear(3, 4), mesh=mesh, shard_placement_fn=lambda _, asked=asked: asked)
    cube = dt.init_device_mesh("cpu", (1, 2, 1))
    with pytest.raises(MeshError, match=r"a mesh of one dim .sharded., or of two"):
        fully_shard(nn.Linear(3, 4), mesh=mesh, shard_placement_fn=lambda _: ShardPlacementResult(None, cube))


def test_fsdp_module_has_the_methods_and_signatures_of_torch() -> None:
    for name, theirs in inspect.getmembers(peer.FSDPModule, inspect.isfunction):
        if not name.startswith("_"):
            ours, known = (inspect.signature(method).parameters.values() for method in (getattr(FSDPModule, name), theirs))
            assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in known], name
    later = {"dp_mesh_dims"}  # torch 2.11 does not have it
    assert set(inspect.signature(fully_shard).parameters) - set(inspect.signature(peer.fully_shard).parameters) <= later
    assert set(inspect.signature(peer.fully_shard).parameters) <= set(inspect.signature(fully_shard).parameters)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _batch_on_one_dim(size: int, sequence: bool) -> None:
    """Check tensor parallelism inside units, with a batch whose placements are on the data-parallel mesh only."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 6)).double()
    alone = copy.deepcopy(model)
    plan: dict[str, Any] = {"[01].up": ColwiseParallel(), "[01].down": RowwiseParallel()}
    if sequence:
        plan = {
            "[01].norm": SequenceParallel(use_local_output=True),
            "[01].up": ColwiseParallel(input_layouts=Shard(1)),
            "[01].down": RowwiseParallel(output_layouts=Shard(1)),
            "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False),
        }
    parallelize_module(model, mesh["tp"], plan)
    for block in model[:2]:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(size, 6, 4, dtype=torch.float64)
    given = dt.distribute_tensor(x, mesh, [Shard(0), Shard(1) if sequence else Replicate()])
    batch = dt.DTensor.from_local(given.to_local(), mesh["dp"], [Shard(0)])
    loss, expected = model(batch).square().mean(), alone(x).square().mean()
    torch.testing.assert_close(full_value(loss), expected.detach())
    loss.backward()
    expected.backward()
    assert_same_gradients(model, alone)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [3, 4])
def test_batch_on_dp_mesh_with_tensor_parallelism_equals_plain_model(size: int, sequence: bool) -> None:
    _batch_on_one_dim(size, sequence)


@pytest.mark.gloo
def test_batch_on_dp_mesh_equals_plain_model_on_process_groups() -> None:
    run_gloo(_batch_on_one_dim, 4, 4, False)


def _train_on_two_unflattened_meshes(copies: bool) -> None:
    """Check a mesh that is unflattened twice: for batches and tensor parallelism, and for parameters."""
    world = dt.init_device_mesh("cpu", (8 if copies else 4,), mesh_dim_names=("world",))
    data = world._unflatten(0, (1, 4 if copies else 2, 1, 2), ("pp", "batch", "cp", "tp"))
    dense = world._unflatten(0, (1, 2 if copies else 1, 2, 2), ("pp", "copies", "fsdp", "tp"))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)).double()
    model = copy.deepcopy(alone)
    parallelize_module(model, data["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=dense["copies", "fsdp"] if copies else dense["fsdp"])
    fully_shard(model, mesh=dense["copies", "fsdp"] if copies else dense["fsdp"])
    assert len({p.device_mesh for p in model.parameters()}) == 1

    def batch(step: int) -> tuple[Any, Tensor]:
        x = torch.randn(4, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if not copies:
            x = x[:2]
        return dt.map_ranks(lambda at: x[data.get_local_rank("batch")].clone(), mesh=data), x

    assert_same_training(model, alone, lambda m: torch.optim.Adam(m.parameters(), lr=0.05), map(batch, range(2)))


@pytest.mark.parametrize("copies", [False, True])
def test_units_on_meshes_unflattened_in_two_ways_train_like_plain_model(copies: bool) -> None:
    _train_on_two_unflattened_meshes(copies)


@pytest.mark.gloo
def test_two_unflattened_meshes_train_like_plain_model_on_process_groups() -> None:
    run_gloo(_train_on_two_unflattened_meshes, 4, False)
