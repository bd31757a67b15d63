"""Pending gradients: they are cleared with other gradients, listed, and reduced without another backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import PerRank, Shard
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, MixedPrecisionPolicy, fully_shard, parallelize_module, replicate

MESH_1D = dt.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
MESH_2D = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class TwoProducts(nn.Module):
    """Module with two products that can be computed separately."""

    def __init__(self, inputs: int = 4, outputs: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, outputs, bias=False)
        self.second = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Any, both: bool = True) -> Any:
        return self.first(x) + self.second(x) if both else self.first(x)


def constant_batch(value: float, mesh: Any = MESH_1D) -> Any:
    """Return a batch on each rank whose gradients all equal ``value``."""
    if mesh.kind == "process_group":
        return torch.full((1, 4), float(value))
    return dt.per_rank([torch.full((1, 4), float(value)) for _ in range(mesh.size())])


def gradients(model: Any) -> list[Any]:
    """Return the unique value of each gradient, or None."""
    found = [None if p.grad is None else p.grad.full_tensor().unique().tolist() for p in model.parameters()]
    return [x if x is None else x[0] if len(x) == 1 else x for x in found]


CLEARS: dict[str, Callable[[Any, Any], Any]] = {
    "module": lambda model, optimizer: model.zero_grad(),
    "module, set_to_none=False": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, set_to_none=False": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("way", [fully_shard, replicate])
@pytest.mark.parametrize("how", CLEARS)
def test_zero_grad_clears_pending_gradients(how: str, way: Any) -> None:
    """Check that clearing ``.grad``, which is None until the reduction, also clears pending gradients."""
    model = TwoProducts()
    way(model, mesh=MESH_1D)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_requires_gradient_sync(False)
    model(constant_batch(100)).sum().backward()
    CLEARS[how](model, optimizer)
    model.set_requires_gradient_sync(True)
    model(constant_batch(1)).sum().backward()
    assert gradients(model) == [1, 1]


def test_zero_grad_of_some_parameters_keeps_other_pending_gradients() -> None:
    model = fully_shard(TwoProducts(), mesh=MESH_1D)
    optimizer = torch.optim.SGD([model.first.weight], lr=1.0)
    model.set_requires_gradient_sync(False)
    model(constant_batch(3)).sum().backward()
    optimizer.zero_grad()
    assert list(model.get_pending_gradients()) == [model.second.weight]
    model.synchronize_gradients()
    assert gradients(model) == [None, 3]


def test_deepcopy_has_no_pending_gradients() -> None:
    """Check that a deepcopy has no pending gradients, as copies of plain parameters have no ``.grad``."""
    model = fully_shard(TwoProducts(), mesh=MESH_1D)
    model.set_requires_gradient_sync(False)
    model(constant_batch(100)).sum().backward()
    other = copy.deepcopy(model)
    assert not other.get_pending_gradients()
    other.set_requires_gradient_sync(True)
    other(constant_batch(1)).sum().backward()
    assert gradients(other) == [1, 1]
    assert len(model.get_pending_gradients()) == 2


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_zero_grad_of_one_module_keeps_pending_gradients_of_others(to_none: bool, all_of_it: bool) -> None:
    model = TwoProducts()
    fully_shard([model.first, model.second], mesh=MESH_1D)
    fully_shard(model, mesh=MESH_1D)
    for sync, value in ((True, 4.0), (False, 2.0)):
        model.set_requires_gradient_sync(sync)
        model(constant_batch(value)).sum().backward()
    assert set(model.get_pending_gradients()) == {model.first.weight, model.second.weight}
    (model if all_of_it else model.first).zero_grad(set_to_none=to_none)
    model.synchronize_gradients()
    cleared = None if to_none else 0
    assert gradients(model) == [cleared, cleared if all_of_it else 6]
    assert not model.get_pending_gradients()


@pytest.mark.parametrize("clear", [None, False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_hsdp_pending_gradients_are_added_or_cleared_by_zero_grad(clear: bool | None, dim: int) -> None:
    model, policy = TwoProducts(4, 6), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard([model.first, model.second], mesh=MESH_2D, shard_placement_fn=lambda _: Shard(dim), mp_policy=policy)
    fully_shard(model, mesh=MESH_2D)
    model(constant_batch(4, MESH_2D)).sum().backward()
    model.set_requires_all_reduce(False)
    model.first(constant_batch(2, MESH_2D)).sum().backward()
    model.second(constant_batch(3, MESH_2D)).sum().backward()
    model.set_requires_gradient_sync(False)
    model.first(constant_batch(1, MESH_2D)).sum().backward()
    (whole, block), (none, other) = model.get_pending_gradients().values()
    assert whole.shards[0].shape == (6, 4)
    assert block.shards[3].shape == other.shards[3].shape == model.first.weight.to_local().shards[3].shape
    assert none is None
    if clear is not None:
        model.zero_grad(set_to_none=clear)
    model.synchronize_gradients()
    first = 7 if clear is None else None if clear else 0
    assert gradients(model) == [first, first]
    model.set_requires_all_reduce(True)
    model.set_requires_gradient_sync(True)
    model(constant_batch(1, MESH_2D)).sum().backward()
    assert gradients(model) == [(first or 0) + 1] * 2


def test_pending_gradients_have_the_tensor_parallel_mesh() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = nn.Linear(4, 6, bias=False)
    model: Any = fully_shard(parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
    model.set_requires_gradient_sync(False)
    for value in (1.0, 2.0):
        x = torch.full((2, 4), value)
        plain(x).sum().backward()
        model(x).sum().backward()
        unreduced, block = model.get_pending_gradients()[model.weight]
        assert unreduced.device_mesh == mesh["tp"]
        assert unreduced.placements == (Shard(0),)
        assert block is None
    model.synchronize_gradients()
    assert torch.equal(model.weight.grad.full_tensor(), plain.weight.grad)


def test_writes_to_pending_gradients_take_effect_without_communication() -> None:
    model: Any = fully_shard(nn.Linear(4, 5, bias=False), mesh=MESH_1D)
    model.set_requires_gradient_sync(False)
    model(constant_batch(2)).sum().backward()
    with CommDebugMode() as moved:
        unreduced, _ = model.get_pending_gradients()[model.weight]
        assert isinstance(unreduced, PerRank)
        unreduced.mul_(5)
    assert not moved.get_total_counts()
    model(constant_batch(1)).sum().backward()
    for _ in range(2):  # the second call has no pending gradients
        model.synchronize_gradients()
        assert gradients(model) == [11]


def test_gradient_divide_factor_applies_to_pending_gradients() -> None:
    model: Any = fully_shard(nn.Linear(4, 2, bias=False), mesh=MESH_1D)
    model.set_gradient_divide_factor(2)
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        model(constant_batch(4)).sum().backward()
    assert gradients(model) == [6]
    model.synchronize_gradients()
    assert gradients(model) == [12]


@pytest.mark.slow
def test_captured_step_clears_pending_gradients() -> None:
    model: Any = fully_shard(nn.Linear(4, 2, bias=False), mesh=MESH_1D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(given_up: Any, x: Any) -> None:
        model.set_requires_gradient_sync(False)
        model(given_up).sum().backward()
        optimizer.zero_grad()
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        optimizer.step()

    captured = dt.capture(step)
    for value in (1.0, 2.0, 3.0, 4.0):
        rows = [dt.distribute_tensor(torch.full((3, 4), x), MESH_1D, [Shard(0)]) for x in (100.0, value)]
        captured(*rows)
        assert gradients(model) == [3 * value]
        optimizer.zero_grad()
    assert captured.cache_info().replayed


def _synchronize_different_gradients() -> list[Any]:
    mesh = dt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    found = []
    for way in (fully_shard, replicate):
        model: Any = way(TwoProducts(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for value in (100.0, 6.0):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)
            model(constant_batch(value, mesh), both=dist.get_rank() > 0).sum().backward()
        model.synchronize_gradients()
        found.append(gradients(model))
    return found


@pytest.mark.gloo
def test_synchronize_gradients_averages_over_ranks_without_a_gradient() -> None:
    assert run_gloo(_synchronize_different_gradients, 2) == [[[6, 3], [6, 3]]] * 2
