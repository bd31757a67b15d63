"""``auto_shard`` of steps with an optimizer: states are placed too, and hand-written placements are not faster by its cost
model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt

R, S = dt.Replicate(), dt.Shard
ADAM = ("exp_avg", "exp_avg_sq")
Places = Sequence[Any]


def stack(width: int, layers: int = 1) -> nn.Sequential:
    up, down = (lambda: nn.Linear(width, 4 * width, bias=False)), (lambda: nn.Linear(4 * width, width, bias=False))
    return nn.Sequential(*[part for _ in range(layers) for part in (up(), nn.GELU(), down())])


def find_sharding(mesh: dt.DeviceMesh, width: int, batch: int, layers: int = 1, **options: Any) -> dt.Sharding:
    with torch.device("meta"):
        model, x = stack(width, layers).bfloat16(), torch.empty(batch, width, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Any) -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = [*model.parameters()], optimizer.param_groups[0]["params"]
    sharding = dt.auto_shard(step, mesh, example=(x,), **options)
    assert [*model.parameters()] == before[0]
    assert optimizer.param_groups[0]["params"] is before[1]
    assert not optimizer.state
    return sharding


def name_placements(weights: dict[str, tuple[Places, Places]]) -> dict[str, Places]:
    """Return the placements of weights and their optimizer states, by name."""
    placed = {f"{name}.weight": weight for name, (weight, _) in weights.items()}
    return placed | {f"{name}.weight.{key}": state for name, (_, state) in weights.items() for key in ADAM}


def hand_written_placements(ndim: int) -> dict[str, dict[str, Places]]:
    """Return hand-written placements of the two weights of a layer; on two mesh dims the last one shards."""
    rest: Places = [R] * (ndim - 1)
    whole, rows, columns = [*rest, R], [*rest, S(0)], [*rest, S(1)]
    return {
        "data": name_placements({"0": (whole, whole), "2": (whole, whole)}),
        "zero": name_placements({"0": (whole, rows), "2": (whole, rows)}),
        "fsdp": name_placements({"0": (rows, rows), "2": (rows, rows)}),
        "megatron": name_placements({"0": (rows, rows), "2": (columns, columns)}),
    }


@pytest.mark.parametrize(
    ("shape", "width", "batch", "part"),
    [
        pytest.param((8,), 256, 8192, None, marks=pytest.mark.slow),
        ((8,), 2048, 512, None),
        pytest.param((8,), 1024, 8192, 1.1, marks=pytest.mark.slow),
        pytest.param((2, 4), 1024, 8192, 1.1, marks=pytest.mark.slow),
    ],
)
def test_auto_shard_of_step_is_at_least_as_fast_as_hand_written_placements(
    shape: tuple[int, ...], width: int, batch: int, part: float | None
) -> None:
    """Compare with hand-written placements. ``part`` is the memory limit over that of FSDP (HSDP on two mesh dims)."""
    mesh = dt.init_device_mesh("meta", shape)
    hands = {name: find_sharding(mesh, width, batch, placements=way) for name, way in hand_written_placements(len(shape)).items()}
    limit = None if part is None else int(hands["fsdp"].memory * part)
    sharding = find_sharding(mesh, width, batch, memory=limit)
    fitting = [hand.seconds for hand in hands.values() if limit is None or hand.memory <= limit]
    assert fitting
    assert limit is None or sharding.memory <= limit
    assert sharding.seconds <= 1.05 * min(fitting)


def test_auto_shard_shards_optimizer_states_under_a_memory_limit() -> None:
    mesh = dt.init_device_mesh("meta", (8,))
    data = find_sharding(mesh, 256, 65536, placements=hand_written_placements(1)["data"])
    zero = find_sharding(mesh, 256, 65536, placements=hand_written_placements(1)["zero"])
    assert zero.memory < data.memory
    bound = find_sharding(mesh, 256, 65536, memory=zero.memory)
    assert bound.memory <= zero.memory
    assert bound.seconds <= 1.05 * zero.seconds
    assert any(bound.placements[f"{i}.weight.{key}"] != (R,) for i in (0, 2) for key in ADAM)


def test_applied_sharding_of_step_trains_like_plain_model() -> None:
    torch.manual_seed(0)
    model, x = stack(8).double(), torch.randn(8, 8, dtype=torch.float64)
    plain, placed = copy.deepcopy(model), copy.deepcopy(model)
    sides = [(plain, torch.optim.Adam(plain.parameters())), (placed, torch.optim.Adam(placed.parameters()))]

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mesh = dt.init_device_mesh("cpu", (2,))
    given = {f"{i}.weight": [R] for i in (0, 2)} | {f"{i}.weight.{key}": [S(0)] for i in (0, 2) for key in ADAM}
    sharding = dt.auto_shard(step, mesh, example=(*sides[1], x), placements=given)
    sharding.apply(placed, mesh, sides[1][1])
    batch = dt.distribute_tensor(x, mesh, sharding.batch[0])
    for _ in range(3):
        torch.testing.assert_close(step(*sides[1], batch).full_tensor(), step(*sides[0], x))
    states = sides[1][1].state[placed[0].weight]
    assert all(states[key].placements == (S(0),) for key in ADAM)
    assert placed[0].weight.placements == (R,)


def test_auto_shard_shards_many_experts_and_their_tokens_by_expert() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.empty(16, 2048, 8192)), nn.Parameter(torch.empty(16, 8192, 2048))

        def forward(self, x: Any) -> Any:  # tokens by expert: [experts, tokens, width]
            return (torch.relu(x @ self.up) @ self.down).float().square().mean()

    with torch.device("meta"):
        model, x = Experts().bfloat16(), torch.empty(16, 256, 2048, dtype=torch.bfloat16)
    sharding = dt.auto_shard(model, dt.init_device_mesh("meta", (8,)), example=(x,))
    assert set(sharding.placements.values()) == {(S(0),)}
    assert sharding.batch == ((S(0),),)


def test_auto_shard_estimates_more_seconds_for_a_cpu_than_for_a_gpu() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(256, 256), torch.empty(64, 256)
    meant, real = (dt.auto_shard(model, dt.init_device_mesh(kind, (2,)), example=(x,)).seconds for kind in ("meta", "cpu"))
    assert real > meant  # a CPU is slower than a GPU


def test_auto_shard_of_function_without_module_raises() -> None:
    with pytest.raises(dt.errors.PlanError, match="no module"):
        dt.auto_shard(lambda x: x, dt.init_device_mesh("meta", (2,)), example=(1,))
