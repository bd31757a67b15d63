"""Figures of document 002: its printed values, in one process and on as many gloo processes as the document has ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import PerRank, Replicate, Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module


def local_values(x: Any) -> dict[int, list[Any]]:
    """Return a dict from rank to local values, for all ranks of this process."""
    if isinstance(x, dt.DTensor):
        ranks, local = x.device_mesh.ranks, x.to_local().detach()
    else:
        ranks, local = None, x.detach()
    if isinstance(local, PerRank):
        return {rank: shard.tolist() for rank, shard in zip(ranks or range(len(local.shards)), local.shards, strict=True)}
    return {torch.distributed.get_rank(): local.tolist()}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all ranks into those of one process."""
    out: dict[str, Any] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, dict):
                out.setdefault(name, {}).update(value)
            else:
                assert out.setdefault(name, value) == value
    return out


def tp() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2,), mesh_dim_names=("TP",))["TP"]


def products() -> dict[str, Any]:
    mesh = tp()
    x, y = torch.arange(1, 9).reshape(2, 4), torch.arange(9, 17).reshape(2, 4)
    x_replicated = dt.distribute_tensor(x, mesh, [Replicate()])
    both = x_replicated @ dt.distribute_tensor(y, mesh, [Replicate()]).T
    one = x_replicated @ dt.distribute_tensor(y, mesh, [Shard(0)]).T
    return {"both": local_values(both), "both at": str(both.placements), "one": local_values(one), "one at": str(one.placements)}


def gated() -> dict[str, Any]:
    mesh = tp()
    x = dt.distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    w1 = dt.distribute_tensor(torch.arange(1.0, 9.0).reshape(2, 4), mesh, [Shard(-1)])
    w3 = dt.distribute_tensor(torch.arange(9.0, 17.0).reshape(2, 4), mesh, [Shard(-1)])
    w2 = dt.distribute_tensor(torch.tril(torch.ones(4, 2), diagonal=-1), mesh, [Shard(0)])
    c = (x @ w1) * (x @ w3)
    d = c @ w2
    whole = d.redistribute(placements=[Replicate()])
    return {
        "c": local_values(c),
        "d": local_values(d),
        "whole": local_values(whole),
        "at": f"{c.placements} {d.placements} {whole.placements}",
    }


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(2, 4, bias=False)
        self.w3 = nn.Linear(2, 4, bias=False)
        self.w2 = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.w1.weight = nn.Parameter(torch.arange(1.0, 9.0).reshape(4, 2))
            self.w3.weight = nn.Parameter(torch.arange(9.0, 17.0).reshape(4, 2))
            self.w2.weight = nn.Parameter(torch.tril(torch.ones(2, 4), diagonal=-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) * self.w3(x))


def toy() -> dict[str, Any]:
    model = parallelize_module(ToyModel(), tp(), {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()})
    x = dt.distribute_tensor(torch.ones(3, 2), tp(), [Replicate()])
    return {
        "weight": local_values(model.w1.weight),
        "at": str(model.w1.weight.placements),
        "product": local_values(model.w1(x) * model.w3(x)),
        "output": local_values(model(x)),
    }


def three_dims() -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("DDP", "FSDP", "TP"))
    model = nn.ModuleDict({"wq": nn.Linear(8, 8, bias=False)})
    model.forward = lambda x: model["wq"](x)
    model["wq"].weight = nn.Parameter(torch.arange(1.0, 65.0).reshape(8, 8))
    parallelize_module(model, mesh["TP"], {"wq": ColwiseParallel(use_local_output=False)})
    cut = local_values(model["wq"].weight)
    fully_shard(model, mesh=mesh["DDP", "FSDP"])
    weight = model["wq"].weight
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    meshes = (mesh["TP"].mesh.tolist(), mesh["DDP", "FSDP"].mesh.tolist()) if rank == 0 else None
    return {"meshes": {rank: meshes}, "cut": cut, "cut again": local_values(weight), "at": str(weight.placements)}


def averaged() -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("FSDP", "TP"))
    model = nn.ModuleDict({"layer0": nn.Linear(4, 4, bias=False)})
    model.forward = lambda x: model["layer0"](x)
    model["layer0"].weight = nn.Parameter(torch.arange(1.0, 17.0).reshape(4, 4))
    parallelize_module(model, mesh["TP"], {"layer0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["FSDP"])
    x = dt.map_ranks(lambda at: torch.ones(2, 2) * (at[0] + 1), mesh=mesh)
    out = model(x)
    torch.manual_seed(42)
    original = torch.randn(2, 4)
    loss = ((original - out) ** 2).sum()
    loss.backward()
    grad = model["layer0"].weight.grad
    return {"grad": local_values(grad), "at": str(grad.placements)}


IN_PROCESS_AND_GLOO = pytest.mark.parametrize("start", ["in process", pytest.param("gloo", marks=pytest.mark.gloo)])


def run_on(start: str, program: Callable[[], dict[str, Any]], ranks: int) -> dict[str, Any]:
    return program() if start == "in process" else merged(run_gloo(program, ranks))


@IN_PROCESS_AND_GLOO
def test_matmul_of_replicated_and_sharded_matrices_has_documented_values(start: str) -> None:
    seen = run_on(start, products, 2)
    assert seen["both"] == {key: [[110, 150], [278, 382]] for key in range(2)}
    assert seen["both at"] == "(Replicate(),)"
    assert seen["one"] == {0: [[110], [278]], 1: [[150], [382]]}
    assert seen["one at"] == "(Shard(dim=1),)"


@IN_PROCESS_AND_GLOO
def test_hand_written_gated_layer_has_documented_values(start: str) -> None:
    seen = run_on(start, gated, 2)
    assert seen["c"] == {0: [[132, 192]] * 3, 1: [[260, 336]] * 3}
    assert seen["d"] == {0: [[192, 0]] * 3, 1: [[596, 596]] * 3}
    assert seen["whole"] == dict.fromkeys(range(2), [[788, 596]] * 3)
    assert seen["at"] == "(Shard(dim=1),) (Partial(sum),) (Replicate(),)"


@IN_PROCESS_AND_GLOO
def test_tensor_parallel_toy_model_has_documented_values(start: str) -> None:
    seen = run_on(start, toy, 2)
    assert seen["weight"] == {0: [[1, 2], [3, 4]], 1: [[5, 6], [7, 8]]}
    assert seen["at"] == "(Shard(dim=0),)"
    assert seen["product"] == {0: [[57, 161]] * 3, 1: [[297, 465]] * 3}
    assert seen["output"] == dict.fromkeys(range(2), [[0, 57]] * 3)


def rows(first: int) -> list[list[float]]:
    return torch.arange(float(first), first + 16.0).reshape(2, 8).tolist()


@IN_PROCESS_AND_GLOO
def test_fully_shard_over_tensor_parallelism_on_3d_mesh_has_documented_shards(start: str) -> None:
    seen = run_on(start, three_dims, 8)
    assert seen["meshes"][0] == ([0, 1], [[0, 2], [4, 6]])
    assert seen["cut"] == {rank: rows(1) + rows(17) if rank % 2 == 0 else rows(33) + rows(49) for rank in range(8)}
    first = {0: 1, 4: 1, 2: 17, 6: 17, 1: 33, 5: 33, 3: 49, 7: 49}
    assert seen["cut again"] == {rank: rows(first[rank]) for rank in range(8)}
    assert seen["at"] == "(Replicate(), Shard(dim=0, level=1), Shard(dim=0, level=0))"


@IN_PROCESS_AND_GLOO
def test_averaged_gradient_of_tensor_parallel_layer_has_documented_values(start: str) -> None:
    seen = run_on(start, averaged, 4)
    expected = [[102.3585] * 2, [260.1725] * 2, [412.6720] * 2, [581.2230] * 2]
    for rank in range(4):
        torch.testing.assert_close(torch.tensor(seen["grad"][rank]), torch.tensor(expected[:2] if rank < 2 else expected[2:]))
    assert seen["at"] == "(Shard(dim=0), Shard(dim=1))"
