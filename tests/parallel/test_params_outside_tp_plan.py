"""Parameters outside of a tensor-parallel plan, under data parallelism: correct, or an error if their gradients differ between
ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dtensor as dt
from dtensor.errors import PlacementError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module, replicate

HEADS: dict[str, Any] = {"into": ColwiseParallel(), "out": RowwiseParallel()}
ADDED = "replicated_with_grad_allreduce"


class Heads(nn.Module):
    """Model with a norm of full activations, and a norm and a factor of heads."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm, self.of_heads = nn.RMSNorm(8, dtype=dtype), nn.RMSNorm(2, dtype=dtype)
        self.into, self.out = (nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2))
        self.factor = nn.Parameter(torch.tensor([0.7], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.of_heads(self.into(self.norm(x)).unflatten(-1, (-1, 2))) * self.factor
        return self.out(heads.flatten(-2).tanh())


def parallel(
    plan: dict[str, Any], over: Callable[..., nn.Module], dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    alone = Heads(dtype)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(copy.deepcopy(alone), mesh["tp"], plan)
    return alone, over(model, mesh=mesh["dp"])


def step(model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    x = torch.randn(4, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()


def whole(x: Any) -> torch.Tensor:
    full = x.full_tensor()
    return full.shards[0] if isinstance(full, dt.PerRank) else full


def error_of_step(over: Callable[..., nn.Module] = fully_shard) -> str:
    _, model = parallel(HEADS, over)
    with pytest.raises(PlacementError, match="differs between ranks of mesh dim 'tp'") as caught:
        step(model)
    return str(caught.value)


@pytest.mark.parametrize("over", [fully_shard, replicate])
def test_gradients_that_differ_between_tp_ranks_raise_with_the_parameter(over: Callable[..., nn.Module]) -> None:
    assert "'factor' of FSDPHeads" in error_of_step() or over is replicate
    assert ADDED in error_of_step(over)


@pytest.mark.parametrize("over", [fully_shard, replicate])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_outside_the_tp_plan_have_gradients_of_plain_model(over: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    alone, model = parallel({**HEADS, "": ADDED, "of_heads": ADDED}, over, dtype)  # ``norm`` is left out
    for _ in range(2):
        step(alone, dtype)
        step(model, dtype)
    for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None
        atol, rtol = (1e-7, 1e-7) if dtype is torch.float64 else (0.02, 0.1)
        torch.testing.assert_close(whole(own.grad), wanted.grad, atol=atol, rtol=rtol)


def test_frozen_parameters_outside_the_plan_are_not_checked() -> None:
    def frozen(model: nn.Module, mesh: Any) -> nn.Module:
        assert isinstance(model, Heads)
        model.of_heads.requires_grad_(False)
        model.factor.requires_grad_(False)
        return fully_shard(model, mesh=mesh)

    alone, model = parallel(HEADS, frozen)
    step(alone)
    step(model)
    torch.testing.assert_close(whole(model.norm.weight.grad), alone.norm.weight.grad)  # type: ignore[union-attr]  # of Heads


def test_norm_of_sharded_sequence_without_sequence_parallel_style_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 6)).double()
    cut = {"1": ColwiseParallel(input_layouts=dt.Shard(1)), "2": RowwiseParallel(output_layouts=dt.Shard(1))}
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    for plan, right in (({**cut, "0": SequenceParallel(use_local_output=True)}, True), (cut, False)):
        model = fully_shard(parallelize_module(copy.deepcopy(alone), mesh["tp"], plan), mesh=mesh["dp"])
        pieces = dt.distribute_tensor(x, mesh, [dt.Shard(0), dt.Shard(1)]).to_local()
        loss = model(dt.DTensor.from_local(pieces, mesh["tp"], [dt.Shard(1)]) if right else pieces).square().mean()
        if right:
            loss.backward()
        else:
            with pytest.raises(PlacementError, match="'tp'"):
                loss.backward()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_backward_with_fake_tensors_skips_the_comparison_of_tp_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with FakeTensorMode():
        model = fully_shard(parallelize_module(Heads(), mesh["tp"], HEADS), mesh=mesh["dp"])
        model(torch.randn(4, 3, 8, dtype=torch.float64)).sum().backward()


def _error_on_rank() -> str:
    return error_of_step()


@pytest.mark.gloo
def test_gradients_that_differ_between_tp_ranks_raise_on_process_groups() -> None:
    told = run_gloo(_error_on_rank, 4)
    assert len(set(told)) == 1
