"""Values that a unit's forward keeps outside of its output: their backward can run while parameters are resharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import dtensor as dt
from dtensor.parallel import fully_shard

MESH = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
# kernels that crash the process if they read freed storage
WEIGHT_USES: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, w: x * w,
    "rms_norm": lambda x, w: F.rms_norm(x, (256,), w),
    "layer_norm": lambda x, w: F.layer_norm(x, (256,), w),
    "cat": lambda x, w: torch.cat([x, w[None] * x]),
    "prelu": lambda x, w: F.prelu(x, w[:1]),
}


class StoresResult(nn.Module):
    """Module that returns its input and stores its result in an attribute."""

    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight, self.read, self.aside = nn.Parameter(torch.full((256,), 2.0)), read, None

    def forward(self, x: Any) -> Any:
        self.aside = self.read(x, self.weight)
        return x


class Model(nn.Module):
    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Linear(256, 256), StoresResult(read)

    def forward(self, x: Any) -> Any:
        return self.inner(self.first(x))


def make_sharded(read: Callable[[Any, Any], Any], keeps: bool = False) -> Any:
    model = Model(read)
    fully_shard(model.inner, mesh=MESH, reshard_after_forward=not keeps)
    return fully_shard(model, mesh=MESH)


def batches() -> list[torch.Tensor]:
    return [torch.randn(2, 256, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def loss_of(model: Any, x: Any) -> Any:
    return model(x).sum() + model.inner.aside.square().sum()


@pytest.mark.parametrize("name", WEIGHT_USES)
def test_backward_of_a_result_stored_in_an_attribute_raises_after_reshard(name: str) -> None:
    loss = loss_of(make_sharded(WEIGHT_USES[name]), dt.per_rank(batches()))
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        loss.backward()


@pytest.mark.parametrize("name", WEIGHT_USES)
def test_backward_of_a_stored_result_without_reshard_equals_plain_model(name: str) -> None:
    model, plain = make_sharded(WEIGHT_USES[name], keeps=True), Model(WEIGHT_USES[name])
    loss_of(model, dt.per_rank(batches())).backward()
    for x in batches():
        (loss_of(plain, x) / 2).backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)


def test_backward_of_a_stored_result_raises_after_parameter_update() -> None:
    model, x = make_sharded(WEIGHT_USES["mul"], keeps=True), dt.per_rank(batches())
    model(x)
    before = model.inner.aside
    with torch.no_grad():
        model.inner.weight.mul_(3)
    model(x)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        before.sum().backward()


def test_backward_of_three_passes_with_retained_graphs_accumulates() -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), mesh=MESH, reshard_after_forward=True)
    x = dt.per_rank([torch.ones(1, 4), torch.ones(1, 4)])
    losses = [model(x).square().sum() for _ in range(3)]
    for loss in reversed(losses):
        loss.backward(retain_graph=True)
    once = model[0].weight.grad.full_tensor().clone() / 3
    losses[1].backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), once * 4)


def test_passes_without_backward_do_not_accumulate_saved_tensors() -> None:
    model: Any = fully_shard(nn.Linear(4, 4), mesh=MESH)
    for _ in range(5):
        model(dt.per_rank([torch.ones(1, 4), torch.ones(1, 4)]))
    (group,) = model.__dict__["_data_parallel_unit"].groups
    assert len(group.unsharded.saved_aliases._tensors) <= 8  # two passes on two ranks


class ReturnsWeight(nn.Module):
    """Module that returns its weight, or parts of it."""

    def __init__(self, give: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.give = nn.Parameter(torch.arange(512.0).view(2, 256)), give

    def forward(self, x: Any) -> Any:
        return self.give(self.weight)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("give", [lambda w: w, lambda w: w.t(), lambda w: {"row": w[1], "all": [w * 2]}, lambda w: w.detach()])
def test_weights_that_a_unit_returns_have_their_values_after_reshard(give: Callable[[Any], Any], backward: bool) -> None:
    model: Any = nn.Sequential(ReturnsWeight(give))
    plain = copy.deepcopy(model)
    fully_shard(model[0], mesh=MESH)
    fully_shard(model, mesh=MESH)
    x = torch.ones(1)
    given, expected = (tree_leaves(one(at)) for one, at in ((model, dt.per_rank([x, x])), (plain, x)))
    if backward and given[0].requires_grad:
        sum(part.square().sum() for part in given).backward()
        sum(part.square().sum() for part in expected).backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    model(dt.per_rank([x, x]))
    for part, like in zip(given, expected, strict=True):
        for shard in part.shards:
            assert torch.equal(shard, like)
