"""What is put beside a cache goes where the cache was wanted: each token moves what is new, however long the cache is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dtensor as dt
from dtensor import Replicate, Shard

MESH = dt.init_device_mesh("cpu", (4,))
UNEVEN = Shard(1, sizes=(0, 0, 2, 6))


def whole(x: Any) -> list[Tensor]:
    x = x.full_tensor()
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def step(cache: Tensor, keys: Tensor, query: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
    cache = torch.cat([cache, keys], dim=-2)
    kept = cache[:, :, -window:] if window else cache
    return kept, scaled_dot_product_attention(query, cache, cache, enable_gqa=True)


def decoded(heads: int, there: dt.Placement, window: int = 0, length: int = 30) -> list[int]:
    """The bytes that each step moves; its values are those of one device, on all ranks."""
    torch.manual_seed(0)
    plain, moved = torch.rand(2, heads, length, 16), []
    cache = dt.distribute_tensor(plain, MESH, [there])
    with torch.no_grad():
        cache = cache + 0  # nobody else has its pieces
        for _ in range(5):
            new, query = torch.rand(2, heads, 1, 16), torch.rand(2, 8, 1, 16)
            plain, wanted = step(plain, new, query, window)
            given = dt.distribute_tensor(new, MESH, [there]), dt.distribute_tensor(query, MESH, [Shard(1)])
            with dt.debug.CommDebugMode() as comm:
                cache, found = step(cache, *given, window)
            moved.append(sum(event.bytes for event in comm.events))
            for own in whole(found):
                torch.testing.assert_close(own, wanted)
    return moved


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize(("heads", "there"), [(1, Shard(3)), (8, UNEVEN)])
def test_a_step_moves_what_is_new(heads: int, there: dt.Placement, window: int) -> None:
    new = 2 * heads * 16 * 4
    first, *then, last = decoded(heads, there, window)
    assert last <= new < first
    assert then[-1] == last


def test_a_cache_of_even_heads_does_not_move() -> None:
    assert decoded(8, Shard(1)) == [0] * 5


def test_what_is_as_large_as_the_rest_is_no_cache() -> None:
    """The gradient of a product's halves was moved for the product: they are joined where they lie."""
    x, y = [dt.distribute_tensor(torch.rand(4, 12), MESH, [Shard(0)]) + 0 for _ in range(2)]
    x @ x.t()
    assert x.placements == torch.cat([x, y]).placements == (Shard(0),)
    with dt.debug.CommDebugMode() as comm:
        torch.cat([x, y], 1)
    assert not comm.events


def test_a_copy_knows_nothing_of_where_it_was_wanted() -> None:
    cache = dt.distribute_tensor(torch.rand(2, 1, 30, 16), MESH, [Shard(3)]) + 0
    step(cache, cache[:, :, :1], dt.distribute_tensor(torch.rand(2, 8, 1, 16), MESH, [Replicate()]))
    twin = copy.deepcopy(cache)
    joined = torch.cat([twin, twin[:, :, :1]], 2)
    assert joined.placements == (Shard(3),)
    for own in whole(joined):
        torch.testing.assert_close(own[:, :, :30], whole(cache)[0])
