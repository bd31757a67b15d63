"""Rules of unique, histogram, geqrf and chunk_cat under sharded, nested, uneven and empty shards, without the gather fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_database import gathers

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check

MESH = dt.init_device_mesh("cpu", (2, 2))
R = Replicate()
PLACEMENTS = [[Shard(0), R], [R, Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(0, level=1), Shard(0, level=0)]]
DTYPES = [torch.float64, torch.int64, torch.bool, torch.bfloat16]
CALLS: list[Callable[[torch.Tensor], Any]] = [
    torch.unique,
    lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    lambda x: torch.unique(x, return_counts=True, sorted=False),
    lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
    lambda x: torch.unique(x, dim=-1, return_counts=True),
    torch.unique_consecutive,
    lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=0),
    lambda x: torch.unique_consecutive(x, return_counts=True, dim=1),
    lambda x: torch.ops.aten._unique(x, True, True),
]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_unique_values_inverse_and_counts_equal_plain_torch(call: Callable[[torch.Tensor], Any], placements: Any) -> None:
    with gathers() as gathered:
        dtype = DTYPES[(CALLS.index(call) + PLACEMENTS.index(placements)) % len(DTYPES)]
        check(call, drawn(5, 3, dtype=dtype), mesh=MESH, placements=[placements])
        check(call, drawn(3, 2, 2, dtype=torch.int64), mesh=MESH, placements=[placements])
    assert not gathered


@pytest.mark.parametrize("call", CALLS)
def test_unique_of_partial_one_element_and_empty_tensors_equals_plain_torch(call: Callable[[torch.Tensor], Any]) -> None:
    check(call, drawn(5, 2, dtype=torch.int64), mesh=MESH, placements=[[Partial(), Shard(0)]])
    check(call, drawn(1, 1, dtype=torch.int64), mesh=MESH, placements=[[Shard(0), Shard(1)]])
    check(call, drawn(0, 2, dtype=torch.int64), mesh=MESH, placements=[[Shard(0), Shard(1)]])


@pytest.mark.parametrize("call", [CALLS[0], CALLS[1], CALLS[6]])
def test_unique_gives_each_nan_separately(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.tensor([3, torch.nan, 1, -torch.inf, torch.nan, 3, torch.inf, 0, -0.0, torch.nan, torch.nan])
    check(call, x, mesh=MESH, placements=[[Shard(0), Shard(0)]])


def test_unique_inverse_keeps_the_sharding_of_the_input() -> None:
    x = dt.distribute_tensor(drawn(400, dtype=torch.int64), MESH, [Shard(0), Shard(0)])
    values, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert places.placements == x.placements
    assert values.full_tensor().tolist() == [0, 1, 2]
    assert int(counts.sum().item()) == 400


@pytest.mark.parametrize("placements", [*PLACEMENTS[:4], [Partial(), Shard(0)]], ids=str)
def test_histogram_counts_and_edges_equal_plain_torch(placements: Any) -> None:
    x = torch.randint(-9, 9, (5, 3), generator=torch.Generator().manual_seed(0)).double() / 8
    edges = torch.tensor([-1.0, 0, 0.5, 2], dtype=torch.float64)
    with gathers() as gathered:
        for density in (False, True):
            check(lambda x, d=density: torch.histogram(x, 4, density=d), x, mesh=MESH, placements=[placements])
            check(
                lambda x, w, d=density: torch.histogram(x, 4, weight=w, density=d),
                x,
                x.abs(),
                mesh=MESH,
                placements=[placements] * 2,
            )
            check(lambda x, d=density: torch.histogram(x, 3, range=(-1.0, 0.5), density=d), x, mesh=MESH, placements=[placements])
            check(
                lambda x, e, d=density: torch.histogram(x, e, density=d),
                x,
                edges,
                mesh=MESH,
                placements=[placements, [R, Shard(0)]],
            )
        check(lambda x: torch.histogram(x, 4), x[:1] * 0 + 3, mesh=MESH, placements=[placements])
        check(lambda x: torch.histogram(x, 4), x[:0], mesh=MESH, placements=[placements])
    assert not gathered
    bad = torch.tensor([[1.0, torch.inf], [2, 3]])
    check(lambda x: torch.histogram(x, 4), bad, mesh=MESH, placements=[placements])


@pytest.mark.parametrize("placements", [[Shard(0), R], [Shard(0), Shard(1)], [Shard(2), Shard(0)], [Partial(), R]], ids=str)
def test_geqrf_and_chunk_cat_equal_plain_torch(placements: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator)
    with gathers() as gathered:
        check(torch.geqrf, x, mesh=MESH, placements=[placements], gradients=False)
        check(torch.geqrf, x.mT.contiguous(), mesh=MESH, placements=[placements], gradients=False)
        y = torch.randn(3, 2, 2, dtype=torch.float64, generator=generator)
        for dim, count in ((0, 2), (1, 3), (0, 4), (-1, 2)):
            check(
                lambda x, y, d=dim, n=count: torch._chunk_cat([x, y] if d != 1 and d != -1 else [x, x], d, n),
                x,
                y,
                mesh=MESH,
                placements=[placements, [R, Shard(0)]],
                gradients=False,
            )
    assert not gathered
