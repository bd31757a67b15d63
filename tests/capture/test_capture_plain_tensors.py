"""Plain tensors: if sizes of arguments or variables change on one rank alone, all ranks record."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.capture import capture
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

ROWS = ((4, 4), (4, 4), (4, 4), (3, 5), (4, 4), (3, 5), (0, 4), (0, 4), (5, 4), (4, 4))  # of each rank's batch, call by call


class Net(nn.Module):
    """Model of two layers with values that differ between ranks in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


def data_parallel(mesh: Any, model: Any) -> Any:
    return replicate(model, mesh)


def sharded(mesh: Any, model: Any) -> Any:
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(mesh: Any, model: Any) -> Any:
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: Any, model: Any) -> Any:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trained(model: Any, around: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return around(step)


def compare_parallel_modes(rows: Any, shape: Any) -> dict[str, Any]:
    """Return for each parallel mode whether captured training equals eager, and the counts of recordings and replays."""
    mesh, found = dt.init_device_mesh("cpu", shape), {}
    for way in (data_parallel, sharded, tensor_parallel) if mesh.ndim == 1 else (hybrid,):
        torch.manual_seed(0)
        model = Net()
        step, captured = [trained(way(mesh, copy.deepcopy(model)), around) for around in (lambda fn: fn, capture)]
        equal = True
        for k, sizes in enumerate(rows):
            x = torch.randn(sizes[0 if way is tensor_parallel else mesh.get_rank()], 6, generator=torch.manual_seed(k))
            equal &= torch.equal(step(x), captured(x))
        found[way.__name__] = equal, captured.cache_info()[2:]
    return found


@pytest.mark.gloo
def test_all_ranks_record_again_if_the_batch_size_of_one_rank_is_new() -> None:
    one, other = run_gloo(compare_parallel_modes, 2, ROWS, (2,))
    assert one == other
    assert all(equal and replayed >= 4 and not plain for equal, (_, replayed, plain) in one.values())
    assert one["data_parallel"] == (True, (4, 6, 0))  # (4, 4), (3, 5), (0, 4) and (5, 4)


@pytest.mark.gloo
@pytest.mark.slow
def test_all_ranks_of_a_2d_mesh_record_again_if_one_batch_size_is_new() -> None:
    told = run_gloo(compare_parallel_modes, 4, [(4, 4, 4, 4)] * 3 + [(3, 4, 4, 5), (4, 4, 4, 4)] * 2, (2, 2))
    assert all(one == told[0] for one in told)
    assert told[0]["hybrid"] == (True, (2, 5, 0))


def reach_limit_on_one_rank() -> Any:
    """Use other batch sizes on rank 1 at each call, so that it reaches the limit of recordings."""
    mesh = dt.init_device_mesh("cpu", (2,))
    step = trained(replicate(Net(), mesh), lambda fn: capture(fn, limit=2))
    for k in range(2):
        step(torch.ones(2 + k * mesh.get_local_rank(), 6))
    with pytest.warns(UserWarning, match="recorded 2 times"):
        step(torch.ones(2 + 2 * mesh.get_local_rank(), 6))
    step(torch.ones(2 + mesh.get_local_rank(), 6))  # the second call's
    return step.cache_info()[2:]


def change_size_on_one_rank() -> Any:
    """Change the size of a tensor that the function reads on one rank."""
    mesh = dt.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    rows = {"rows": torch.ones(3, 4)}

    def fn(w: Any) -> Any:
        own = dt.DTensor.from_local(rows["rows"] * 2, mesh, [Shard(0), Replicate()])
        return (own @ w).redistribute(placements=[Replicate(), Replicate()]), own.sum()

    f, w = capture(fn), dt.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate(), Replicate()])
    for size in (3, 3, 2 + 5 * mesh.get_local_rank("a"), 3, 3):
        rows["rows"] = torch.ones(size, 4)
        for mine, like in zip(f(w), fn(w), strict=True):
            assert torch.equal(mine.full_tensor(), like.full_tensor())
    return f.cache_info()[2:]


def change_plain_scalar() -> Any:
    """Call with different values of a plain 0-d tensor, which are compared between ranks and are no guard."""
    mesh = dt.init_device_mesh("cpu", (2,))
    fn = capture(lambda x, number: torch.stack([number, x.sum()]).max())
    x = dt.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    first, *_, last = (fn(x, torch.tensor(float(k))).item() for k in (8, 1, 16))
    return first, last, fn.cache_info().replayed


def run_changes_on_one_rank() -> list[Any]:
    return [reach_limit_on_one_rank(), change_size_on_one_rank(), change_plain_scalar()]


@pytest.mark.gloo
def test_limit_or_new_size_on_one_rank_is_followed_by_all_ranks() -> None:
    one, other = run_gloo(run_changes_on_one_rank, 2)
    assert one == other == [(2, 1, 1), (2, 3, 0), (8.0, 16.0, 2)]
