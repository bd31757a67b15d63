"""Rules of ``embedding_bag`` with sharded indices: each rank computes the bags of its own indices, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode

OFFSETS = {
    "matrix of indices": lambda bags: None,  # a matrix of indices: all bags have the same size
    "offsets": lambda bags: torch.cat([torch.zeros(1), torch.arange(1, bags) // 2 * 9]).long(),  # offsets, with empty bags
    "offsets with end": lambda bags: torch.cat([torch.zeros(2), torch.arange(2, bags) + 3, torch.tensor([6 * bags])]).long(),
}
TABLES = {
    "replicated table": ((4,), [Replicate()]),
    "table sharded by columns": ((2, 2), [Replicate(), Shard(1)]),
    "table sharded by rows": ((2, 2), [Replicate(), Shard(0)]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean with padding_idx": {"mode": "mean", "padding_idx": 2},
    "max with padding_idx": {"mode": "max", "padding_idx": 2},
    "scale_grad_by_freq": {"mode": "mean", "scale_grad_by_freq": True},
    "per_sample_weights": {"mode": "sum", "per_sample_weights": True, "padding_idx": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("lists", OFFSETS)
@pytest.mark.parametrize("bags", [8, 5])
def test_embedding_bag_of_sharded_indices_gives_sharded_bags(bags: int, lists: str, table: str, settings: str) -> None:
    torch.manual_seed(0)
    shape, of_table = TABLES[table]
    mesh = dt.init_device_mesh("cpu", shape)
    cut, whole = [Shard(0), *[Replicate()] * (mesh.ndim - 1)], [Replicate()] * mesh.ndim
    options, offsets = dict(SETTINGS[settings]), OFFSETS[lists](bags)
    indices = torch.randint(0, 16, (bags, 6)) if offsets is None else torch.randint(0, 16, (bags * 6,))
    weighted = options.pop("per_sample_weights", False)
    last = lists == "offsets with end"
    one = [torch.randn(16, 5), torch.randn(indices.shape)]
    given = [dt.distribute_tensor(one[0], mesh, of_table), dt.distribute_tensor(one[1], mesh, cut)]

    def step(indices: Any, offsets: Any, weight: Any, weights: Any) -> Any:
        weight.requires_grad_(), weights.requires_grad_()
        beside = {"per_sample_weights": weights} if weighted else {}
        return F.embedding_bag(indices, weight, offsets, include_last_offset=last, **options, **beside)

    expected = step(indices, offsets, *one)
    found = step(
        dt.distribute_tensor(indices, mesh, cut),
        None if offsets is None else dt.distribute_tensor(offsets, mesh, whole),
        *given,
    )
    if mesh.ndim == 1 or bags == 8 or offsets is None:  # else a bag has indices on two ranks
        assert found.placements[0] == Shard(0)
    torch.testing.assert_close(found.full_tensor(), expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    found.backward(dt.distribute_tensor(grad, mesh, cut))
    for got, plain in zip(given, one, strict=True):
        if plain.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), plain.grad)


def test_embedding_bag_communicates_only_indices_and_the_weight_gradient() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    table = torch.randn(1024, 16)
    weight = dt.distribute_tensor(table, mesh, [Replicate()]).requires_grad_()
    indices = dt.distribute_tensor(torch.randint(0, 1024, (256, 4)), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        F.embedding_bag(indices, weight).square().sum().backward()
    listed, gradient = indices.numel() * 8, table.numel() * 4
    assert sum(comm.get_comm_bytes().values()) <= (2 * listed + 2 * gradient) * 3 // 4
    assert weight.grad.placements == (Replicate(),)


def test_captured_embedding_bag_uses_the_offsets_of_each_call() -> None:
    torch.manual_seed(0)
    mesh = dt.init_device_mesh("cpu", (4,))
    table = torch.randn(16, 5)
    weight = dt.distribute_tensor(table, mesh, [Replicate()])

    def step(indices: Any, offsets: Any, weight: Any) -> Any:
        weight = weight.detach().requires_grad_()
        bags = F.embedding_bag(indices, weight, offsets, mode="mean")
        return bags, torch.autograd.grad(bags.square().sum(), weight)[0]

    captured = dt.capture(step)
    for seed in range(3):
        torch.manual_seed(seed)
        indices, offsets = torch.randint(0, 16, (48,)), torch.randint(0, 49, (8,)).sort().values
        offsets[0] = 0
        given = dt.distribute_tensor(indices, mesh, [Shard(0)]), dt.distribute_tensor(offsets, mesh, [Replicate()])
        for found, expected in zip(captured(*given, weight), step(indices, offsets, table), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)
