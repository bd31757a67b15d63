"""Gradients that wait for a later backward: cleared with all others, shown, and reduced without another backward."""

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

LINE = dt.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
SQUARE = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Sum(nn.Module):
    """Two products that parts of a program may ask for by themselves."""

    def __init__(self, inputs: int = 4, outputs: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, outputs, bias=False)
        self.second = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Any, both: bool = True) -> Any:
        return self.first(x) + self.second(x) if both else self.first(x)


def numbers(value: float, mesh: Any = LINE) -> Any:
    """A batch of each rank's own: every gradient of it is ``value``."""
    if mesh.kind == "process_group":
        return torch.full((1, 4), float(value))
    return dt.per_rank([torch.full((1, 4), float(value)) for _ in range(mesh.size())])


def gradients(model: Any) -> list[Any]:
    """The one number of each, or None."""
    found = [None if p.grad is None else p.grad.full_tensor().unique().tolist() for p in model.parameters()]
    return [x if x is None else x[0] if len(x) == 1 else x for x in found]


CLEARS: dict[str, Callable[[Any, Any], Any]] = {
    "module": lambda model, optimizer: model.zero_grad(),
    "module, kept": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, kept": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("way", [fully_shard, replicate])
@pytest.mark.parametrize("how", CLEARS)
def test_an_accumulation_that_was_given_up_does_not_join_the_next_step(how: str, way: Any) -> None:
    """``.grad`` is none until gradients are reduced, so clearing it cleared nothing."""
    model = Sum()
    way(model, mesh=LINE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.set_requires_gradient_sync(False)
    model(numbers(100)).sum().backward()
    CLEARS[how](model, optimizer)
    model.set_requires_gradient_sync(True)
    model(numbers(1)).sum().backward()
    assert gradients(model) == [1, 1]


def test_who_clears_some_parameters_leaves_the_others() -> None:
    model = fully_shard(Sum(), mesh=LINE)
    optimizer = torch.optim.SGD([model.first.weight], lr=1.0)
    model.set_requires_gradient_sync(False)
    model(numbers(3)).sum().backward()
    optimizer.zero_grad()
    assert list(model.get_pending_gradients()) == [model.second.weight]
    model.synchronize_gradients()
    assert gradients(model) == [None, 3]


def test_a_copy_has_none_of_what_waits_in_the_original() -> None:
    """As copies of plain parameters have no ``.grad``. They did, and clearing gradients did not find them."""
    model = fully_shard(Sum(), mesh=LINE)
    model.set_requires_gradient_sync(False)
    model(numbers(100)).sum().backward()
    other = copy.deepcopy(model)
    assert not other.get_pending_gradients()
    other.set_requires_gradient_sync(True)
    other(numbers(1)).sum().backward()
    assert gradients(other) == [1, 1]
    assert len(model.get_pending_gradients()) == 2


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_unit_of_several_modules_is_cleared_by_module(to_none: bool, all_of_it: bool) -> None:
    model = Sum()
    fully_shard([model.first, model.second], mesh=LINE)
    fully_shard(model, mesh=LINE)
    for sync, value in ((True, 4.0), (False, 2.0)):
        model.set_requires_gradient_sync(sync)
        model(numbers(value)).sum().backward()
    assert set(model.get_pending_gradients()) == {model.first.weight, model.second.weight}
    (model if all_of_it else model.first).zero_grad(set_to_none=to_none)
    model.synchronize_gradients()
    cleared = None if to_none else 0
    assert gradients(model) == [cleared, cleared if all_of_it else 6]
    assert not model.get_pending_gradients()


@pytest.mark.parametrize("clear", [None, False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_that_wait_for_the_other_replicas(clear: bool | None, dim: int) -> None:
    model, policy = Sum(4, 6), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard([model.first, model.second], mesh=SQUARE, shard_placement_fn=lambda _: Shard(dim), mp_policy=policy)
    fully_shard(model, mesh=SQUARE)
    model(numbers(4, SQUARE)).sum().backward()
    model.set_requires_all_reduce(False)
    model.first(numbers(2, SQUARE)).sum().backward()
    model.second(numbers(3, SQUARE)).sum().backward()
    model.set_requires_gradient_sync(False)
    model.first(numbers(1, SQUARE)).sum().backward()
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
    model(numbers(1, SQUARE)).sum().backward()
    assert gradients(model) == [(first or 0) + 1] * 2


def test_under_tensor_parallelism_they_lie_on_its_mesh() -> None:
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


def test_what_is_written_to_them_counts_and_nothing_moves() -> None:
    model: Any = fully_shard(nn.Linear(4, 5, bias=False), mesh=LINE)
    model.set_requires_gradient_sync(False)
    model(numbers(2)).sum().backward()
    with CommDebugMode() as moved:
        unreduced, _ = model.get_pending_gradients()[model.weight]
        assert isinstance(unreduced, PerRank)
        unreduced.mul_(5)
    assert not moved.get_total_counts()
    model(numbers(1)).sum().backward()
    for _ in range(2):  # the second time there is nothing
        model.synchronize_gradients()
        assert gradients(model) == [11]


def test_a_divisor_holds_for_them_too() -> None:
    model: Any = fully_shard(nn.Linear(4, 2, bias=False), mesh=LINE)
    model.set_gradient_divide_factor(2)
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        model(numbers(4)).sum().backward()
    assert gradients(model) == [6]
    model.synchronize_gradients()
    assert gradients(model) == [12]


@pytest.mark.slow
def test_a_captured_step_clears_what_waits() -> None:
    model: Any = fully_shard(nn.Linear(4, 2, bias=False), mesh=LINE)
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
        rows = [dt.distribute_tensor(torch.full((3, 4), x), LINE, [Shard(0)]) for x in (100.0, value)]
        captured(*rows)
        assert gradients(model) == [3 * value]
        optimizer.zero_grad()
    assert captured.cache_info().replayed


def _on_ranks() -> list[Any]:
    mesh = dt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    found = []
    for way in (fully_shard, replicate):
        model: Any = way(Sum(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for value in (100.0, 6.0):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)
            model(numbers(value, mesh), both=dist.get_rank() > 0).sum().backward()
        model.synchronize_gradients()
        found.append(gradients(model))
    return found


@pytest.mark.gloo
def test_ranks_that_hold_other_parameters_agree() -> None:
    assert run_gloo(_on_ranks, 2) == [[[6, 3], [6, 3]]] * 2
