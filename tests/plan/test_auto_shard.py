"""``auto_shard``: it finds known kinds of parallelism where they are best, and its cost model prefers none of them to its
result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtensor as dt
from dtensor.base.units import seconds_text

R, S = dt.Replicate(), dt.Shard


class Block(nn.Module):
    """Transformer block with a head that returns a loss."""

    def __init__(self, width: int, heads: int, vocabulary: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        h = F.layer_norm(x, (width,))
        q, k, v = (m(h).view(batch, length, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(F.layer_norm(x, (width,)))))
        return self.head(F.layer_norm(x, (width,))).float().square().mean()


MEGATRON = {"q": S(0), "k": S(0), "v": S(0), "o": S(1), "up": S(0), "down": S(1)}


def find_sharding(width: int, batch: int, length: int, mesh: tuple[int, ...] = (8,), **options: Any) -> dt.Sharding:
    with torch.device("meta"):
        model, x = Block(width, width // 128).bfloat16(), torch.empty(batch, length, width, dtype=torch.bfloat16)
    return dt.auto_shard(model, dt.init_device_mesh("meta", mesh), example=(x,), **options)


def test_auto_shard_of_small_parameters_gives_data_parallelism() -> None:
    sharding = find_sharding(256, 64, 512)
    assert set(sharding.placements.values()) == {(R,)}
    assert sharding.batch == ((S(0),),)


@pytest.mark.slow
def test_auto_shard_of_one_sequence_gives_tensor_parallelism() -> None:
    sharding = find_sharding(8192, 1, 2048)
    assert {name: sharding.placements[f"{name}.weight"][0] for name in MEGATRON} == MEGATRON
    by_hand = find_sharding(8192, 1, 2048, placements={f"{name}.weight": [place] for name, place in MEGATRON.items()})
    copies = find_sharding(8192, 1, 2048, placements={f"{name}.weight": [R] for name in MEGATRON})
    assert sharding.seconds <= 1.05 * min(by_hand.seconds, copies.seconds)
    assert by_hand.seconds < copies.seconds


WAYS = {"data": dict.fromkeys(MEGATRON, R), "fsdp": dict.fromkeys(MEGATRON, S(0)), "megatron": MEGATRON}


@pytest.mark.parametrize(
    ("width", "batch", "length", "mesh", "part"),
    [
        pytest.param(1024, 8, 1024, (8,), None, marks=pytest.mark.slow),
        (4096, 8, 2048, (8,), None),
        pytest.param(2048, 64, 512, (8,), 1.1, marks=pytest.mark.slow),
        pytest.param(2048, 8, 512, (2, 4), None, marks=pytest.mark.slow),
        pytest.param(2048, 8, 512, (2, 4), 1.1, marks=pytest.mark.slow),
    ],
)
def test_auto_shard_of_block_is_at_least_as_fast_as_hand_written_placements(
    width: int, batch: int, length: int, mesh: tuple[int, ...], part: float | None
) -> None:
    """Compare with hand-written placements. ``part`` is the memory limit over that of FSDP; on two mesh dims the last one
    shards."""
    ways = {n: {f"{name}.weight": [*[R] * (len(mesh) - 1), p] for name, p in way.items()} for n, way in WAYS.items()}
    hands = {name: find_sharding(width, batch, length, mesh, placements=way) for name, way in ways.items()}
    limit = None if part is None else int(hands["fsdp"].memory * part)
    sharding = find_sharding(width, batch, length, mesh, memory=limit)
    fitting = [hand.seconds for hand in hands.values() if limit is None or hand.memory <= limit]
    assert fitting
    assert limit is None or sharding.memory <= limit
    assert sharding.seconds <= 1.05 * min(fitting)


@pytest.mark.slow
def test_auto_shard_shards_more_weights_under_a_memory_limit() -> None:
    free = find_sharding(2048, 64, 512)
    limit = free.memory * 0.65
    bound = find_sharding(2048, 64, 512, memory=limit)
    assert bound.memory <= limit < free.memory
    assert bound.batch == ((S(0),),)
    sizes = {name: p.numel() for name, p in Block(2048, 16).named_parameters()}
    cut = [sum(sizes[name] for name, places in way.placements.items() if places != (R,)) for way in (bound, free)]
    assert cut[0] > cut[1]
    assert bound.seconds >= free.seconds
    with pytest.raises(dt.errors.PlanError, match="the smallest peak is"):
        find_sharding(2048, 64, 512, memory=1000.0)


def test_sharding_apply_distributes_the_model_and_keeps_its_loss() -> None:
    torch.manual_seed(0)
    model, x = Block(16, 4), torch.randn(4, 6, 16)
    sharding = dt.auto_shard(model, dt.init_device_mesh("meta", (2,)), example={"x": x})
    mesh = dt.init_device_mesh("cpu", (2,))
    sharded = sharding.apply(copy.deepcopy(model), mesh)
    assert all(p.placements == sharding.placements[name] for name, p in sharded.named_parameters())
    loss = sharded(dt.distribute_tensor(x, mesh, sharding.batch[0]))
    torch.testing.assert_close(loss.full_tensor(), model(x))
    assert f"{seconds_text(sharding.seconds)} a step" in str(sharding)
    with pytest.raises(dt.errors.ArgumentError, match="mesh of shape"):
        sharding.apply(model, dt.init_device_mesh("cpu", (3,)))
    with pytest.raises(dt.errors.ArgumentError, match="does not have"):
        dt.auto_shard(model, mesh, example=(x,), placements={"w": [R]})
