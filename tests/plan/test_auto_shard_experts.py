"""``auto_shard`` of mixtures of experts: experts are sharded where that is fastest, or where memory requires it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtensor as dt

R, S = dt.Replicate(), dt.Shard
EXPERTS = ("up", "down")


class Routed(nn.Module):
    """Mixture of experts with stacked matrices and two experts for each token."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def routed(self, x: Any) -> tuple[Any, Any]:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return weights, chosen


class Grouped(Routed):
    """Mixture of experts with sorted tokens and grouped matmuls."""

    def forward(self, x: Any) -> Any:
        weights, chosen = self.routed(x)
        numbers, order = torch.sort(chosen.reshape(-1))
        ends = torch.cumsum(F.one_hot(numbers, self.up.shape[0]).sum(0), 0, dtype=torch.int32)
        gate, h = F.grouped_mm(x[order // 2], self.up, offs=ends).chunk(2, dim=-1)
        made = F.grouped_mm(F.silu(gate) * h, self.down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return (x + torch.zeros_like(x).index_add(0, order // 2, made)).square().mean()


class Batched(Routed):
    """Mixture of experts with a fixed number of tokens for each expert and batched matmuls."""

    def forward(self, x: Any) -> Any:
        weights, chosen = self.routed(x)
        experts, room = self.up.shape[0], 4 * x.shape[0] // self.up.shape[0]
        mask = F.one_hot(chosen, experts).to(x.dtype)
        scores = (mask * weights.unsqueeze(-1)).sum(1)
        best, tokens = scores.t().topk(room)
        gate, h = torch.bmm(x[tokens], self.up).chunk(2, dim=-1)
        made = torch.bmm(F.silu(gate) * h, self.down) * best.unsqueeze(-1)
        return (x + torch.zeros_like(x).index_add(0, tokens.reshape(-1), made.reshape(-1, x.shape[1]))).square().mean()


def find_sharding(
    kind: type[Routed], tokens: int, width: int, inner: int, ranks: int = 8, experts: int = 16, **options: Any
) -> dt.Sharding:
    with torch.device("meta"):
        model, x = kind(experts, width, inner).bfloat16(), torch.empty(tokens, width, dtype=torch.bfloat16)
    return dt.auto_shard(model, dt.init_device_mesh("meta", (8,)), example=(x,), **options)


def hand_written_shardings(kind: type[Routed], *sizes: int) -> dict[str, dt.Sharding]:
    """Return the shardings of hand-written placements: replicated, sharded by experts, and by columns and rows."""
    ways = {"copies": (R, R), "experts": (S(0), S(0)), "columns": (S(2), S(1))}
    given = {name: {key: [place] for key, place in zip(EXPERTS, way, strict=True)} for name, way in ways.items()}
    return {name: find_sharding(kind, *sizes, placements=way) for name, way in given.items()}


@pytest.mark.parametrize("kind", [Grouped, Batched])
def test_auto_shard_shards_large_experts(kind: type[Routed]) -> None:
    sizes = (4096, 2048, 4096)
    sharding, known = find_sharding(kind, *sizes), hand_written_shardings(kind, *sizes)
    assert [sharding.placements[name] for name in EXPERTS] == [(S(0),), (S(0),)]
    assert sharding.seconds <= 1.05 * min(hand.seconds for hand in known.values())
    assert known["experts"].seconds < known["copies"].seconds


@pytest.mark.parametrize("kind", [Grouped, Batched])
def test_auto_shard_of_experts_in_limited_memory_is_as_fast_as_hand_written(kind: type[Routed]) -> None:
    sizes = (65536, 256, 256)
    free, known = find_sharding(kind, *sizes), hand_written_shardings(kind, *sizes)
    limit = (free.memory + known["experts"].memory) / 2
    bound = find_sharding(kind, *sizes, memory=limit)
    assert bound.memory <= limit
    fitting = [hand.seconds for hand in known.values() if hand.memory <= limit]
    assert bound.seconds <= 1.05 * min(fitting)
    assert free.seconds <= 1.05 * min(hand.seconds for hand in known.values())


@pytest.mark.parametrize("kind", [Grouped, Batched])
def test_applied_sharding_of_experts_keeps_loss_and_gradients(kind: type[Routed]) -> None:
    torch.manual_seed(0)
    model, x, mesh = kind(4, 16, 8), torch.randn(12, 16), dt.init_device_mesh("cpu", (2,))
    sharding = dt.auto_shard(model, mesh, example=(x,), placements={name: [S(0)] for name in EXPERTS})
    sharded = sharding.apply(copy.deepcopy(model), mesh)
    loss, expected = sharded(dt.distribute_tensor(x, mesh, sharding.batch[0])), model(x)
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.backward()
    expected.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), p.grad, atol=1e-5, rtol=1e-4)
