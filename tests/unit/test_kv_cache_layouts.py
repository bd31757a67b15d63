"""KV cache layouts: a cache keeps the layout that attention needs, so each token sends only the new keys."""

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


def local_values(x: Any) -> list[Tensor]:
    x = x.full_tensor()
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def attend(cache: Tensor, keys: Tensor, query: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
    cache = torch.cat([cache, keys], dim=-2)
    next_cache = cache[:, :, -window:] if window else cache
    return next_cache, scaled_dot_product_attention(query, cache, cache, enable_gqa=True)


def decode(heads: int, cache_placement: dt.Placement, window: int = 0, length: int = 30) -> list[int]:
    """Run five decoding steps, compare them with one device, and return the bytes of each step."""
    torch.manual_seed(0)
    plain, received = torch.rand(2, heads, length, 16), []
    cache = dt.distribute_tensor(plain, MESH, [cache_placement])
    with torch.no_grad():
        cache = cache + 0  # a result, so its local tensors are not exposed
        for _ in range(5):
            new, query = torch.rand(2, heads, 1, 16), torch.rand(2, 8, 1, 16)
            plain, expected = attend(plain, new, query, window)
            operands = dt.distribute_tensor(new, MESH, [cache_placement]), dt.distribute_tensor(query, MESH, [Shard(1)])
            with dt.debug.CommDebugMode() as comm:
                cache, found = attend(cache, *operands, window)
            received.append(sum(event.bytes for event in comm.events))
            for own in local_values(found):
                torch.testing.assert_close(own, expected)
    return received


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize(("heads", "cache_placement"), [(1, Shard(3)), (8, UNEVEN)])
def test_decoding_steps_after_the_first_send_only_the_new_keys(heads: int, cache_placement: dt.Placement, window: int) -> None:
    new = 2 * heads * 16 * 4
    first, *then, last = decode(heads, cache_placement, window)
    assert last <= new < first
    assert then[-1] == last


def test_a_cache_sharded_by_even_heads_needs_no_communication() -> None:
    assert decode(8, Shard(1)) == [0] * 5


def test_cat_of_equally_large_tensors_keeps_their_placements() -> None:
    """``torch.cat`` takes the preferred layout of an operand only if the operand is most of the result."""
    x, y = [dt.distribute_tensor(torch.rand(4, 12), MESH, [Shard(0)]) + 0 for _ in range(2)]
    x @ x.t()
    assert x.placements == torch.cat([x, y]).placements == (Shard(0),)
    with dt.debug.CommDebugMode() as comm:
        torch.cat([x, y], 1)
    assert not comm.events


def test_a_deepcopy_of_a_cache_has_no_preferred_layout() -> None:
    cache = dt.distribute_tensor(torch.rand(2, 1, 30, 16), MESH, [Shard(3)]) + 0
    attend(cache, cache[:, :, :1], dt.distribute_tensor(torch.rand(2, 8, 1, 16), MESH, [Replicate()]))
    copied = copy.deepcopy(cache)
    joined = torch.cat([copied, copied[:, :, :1]], 2)
    assert joined.placements == (Shard(3),)
    for own in local_values(joined):
        torch.testing.assert_close(own[:, :, :30], local_values(cache)[0])
