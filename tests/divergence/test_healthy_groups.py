"""Healthy groups: groups of ranks that do different work do not diverge, and no program of the table raises."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo
from healthy_groups import ACTIONS, PROGRAMS, SIZE, WORKERS, alarms
from process_pool import Pool
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import dtensor as dt
from dtensor.errors import DivergenceError
from dtensor.parallel import fully_shard

pytestmark = pytest.mark.gloo
LEVELS = ("watch", "strict")


@pytest.fixture(scope="module", params=LEVELS)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(SIZE, request.param)
    yield made
    made.close()


def test_groups_of_ranks_with_different_work_raise_no_divergence_error(pool: Pool) -> None:
    """Run each work once and each set of workers at least twice, in one world."""
    workers, names = list(WORKERS), []
    for number, action in enumerate(ACTIONS):
        names += [name for k in range(2) if (name := f"{workers[(number + 7 * k) % len(workers)]}/{action}") in PROGRAMS]
    assert not list(alarms(pool, names))


@pytest.mark.slow
@pytest.mark.parametrize("workers", list(WORKERS))
def test_each_set_of_ranks_with_each_kind_of_work_raises_no_divergence_error(workers: str, pool: Pool) -> None:
    assert not list(alarms(pool, [name for name in PROGRAMS if name.startswith(f"{workers}/")]))


@pytest.mark.parametrize("workers", [pytest.param(name, marks=[pytest.mark.slow] * (k > 0)) for k, name in enumerate(WORKERS)])
def test_first_work_by_only_some_ranks_raises_no_divergence_error(workers: str, pool: Pool) -> None:
    names = [f"{workers}/{action}" for action in ("reads a sum", "trains a sharded model", "draws random numbers")]
    assert not list(alarms(pool, names, at_once=1))


def _begin(folder: str, name: str, ranks: list[int], me: int) -> Any:
    """Initialize a world of these processes, in this order."""
    own = {"rank": ranks.index(me), "world_size": len(ranks), "timeout": timedelta(seconds=100)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", **own)


def _sums(mesh: dt.DeviceMesh) -> list[float]:
    placements = [dt.Shard(0), dt.Shard(1)][: mesh.ndim]
    meshes = [(mesh, placements), *((mesh[name], [dt.Shard(0)]) for name in mesh.mesh_dim_names or ())]
    return [float(dt.distribute_tensor(torch.ones(4, 4), each, cut).sum()) for each, cut in meshes]


def _in_several_worlds(folder: str, level: str) -> list[float]:
    me, shape, names = dist.get_rank(), (2, 2), ("dp", "tp")
    dt.check_ranks(level)
    old = dt.distribute_tensor(torch.ones(4, 4), dt.init_device_mesh("cpu", shape, names), [dt.Shard(0), dt.Shard(1)])
    found = _sums(old.device_mesh)
    if me < 2:
        old.relu()  # their world ends before any comparison
    dist.destroy_process_group()
    _begin(folder, "same", [0, 1, 2, 3], me)
    mesh = dt.init_device_mesh("cpu", shape, names)
    if me == 1:
        (old * 3).tanh()
    found += _sums(mesh)
    if me == 2:
        old.exp()
    found += _sums(mesh)
    dist.destroy_process_group()
    _begin(
        folder, f"half {me % 2}", [me % 2, me % 2 + 2], me
    )  # the present rank 1 was in another group of ranks 0 and 1, or in none
    found += _sums(dt.init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()
    _begin(folder, "turned", [3, 1, 2, 0], me)
    return found + _sums(dt.init_device_mesh("cpu", shape, names))


@pytest.mark.parametrize("level", LEVELS)
def test_operations_of_a_destroyed_process_group_are_not_compared(level: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_gloo(_in_several_worlds, SIZE, folder, level) == [[16.0] * 13] * SIZE


WIDTH = 6


def _run_pipeline(schedule: str, level: str) -> float:
    """Run two steps of four fully sharded stages on two pipeline ranks, then a sum over all ranks."""
    dt.check_ranks(level)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, stages = mesh.get_local_rank("pp"), []
    for index in (rank, 3 - rank) if schedule == "ScheduleZBVZeroBubble" else (rank, rank + 2):
        torch.manual_seed(index)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        fully_shard(layers[0], mesh=mesh["dp"])
        part = fully_shard(layers, mesh=mesh["dp"])
        stages.append(PipelineStage(part, index, 4, torch.device("cpu"), group=mesh.get_group("pp")))
    pipeline = getattr(schedules, schedule)(stages, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([weight for stage in stages for weight in stage.submod.parameters()], 0.1)
    held = [stage.stage_index for stage in stages]
    for _ in range(2):
        target = {"target": torch.zeros(8, WIDTH)} if 3 in held else {}
        pipeline.step(*([torch.ones(8, WIDTH)] if 0 in held else []), **target)
        optimizer.step()
        optimizer.zero_grad()
    return float(dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0), dt.Shard(1)]).sum())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "schedule",
    [
        "ScheduleZBVZeroBubble",
        pytest.param("ScheduleInterleavedZeroBubble", marks=pytest.mark.slow),
        pytest.param("ScheduleInterleaved1F1B", marks=pytest.mark.slow),
    ],
)
def test_pipeline_schedules_with_any_order_of_gradient_sums_do_not_diverge(schedule: str, level: str) -> None:
    assert run_gloo(_run_pipeline, SIZE, schedule, level) == [16.0] * SIZE


def _gather_on_one_replica(level: str) -> list[float]:
    """Evaluate one replica of a sharded model, and read its weights, on the full mesh."""
    dt.check_ranks(level)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh=mesh)
    found = []
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        if mesh.get_local_rank("replicate") == 0:
            with torch.no_grad():
                found.append(float(model(torch.ones(2, 4)).sum()))
            if level == "watch":  # "strict" also compares operations on replicated tensors
                found.append(float(next(iter(model.parameters())).detach().full_tensor().sum()))
    return [float(dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0), dt.Shard(1)]).sum())]


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_on_one_replica_only_raises_no_divergence_error(level: str) -> None:
    assert run_gloo(_gather_on_one_replica, SIZE, level) == [[16.0]] * SIZE


def _call_captured_by_groups(level: str) -> list[float]:
    """Call one captured function with a plain argument, by all ranks and by one replica."""
    dt.check_ranks(level)
    mesh, found = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    captured = dt.capture(lambda x, y: x.sum(0).full_tensor().sum() + y.sum())
    whole = dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0), dt.Shard(1)])
    part = dt.distribute_tensor(torch.ones(4, 4), mesh["tp"], [dt.Shard(0)])
    for alone in (0, 1, 0):
        for _ in range(2):
            if mesh.get_local_rank("dp") == alone:
                captured(part, torch.ones(3))
        found += [float(captured(whole, torch.ones(3))) for _ in range(3)]
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_captured_function_called_by_one_replica_only_does_not_diverge(level: str) -> None:
    assert run_gloo(_call_captured_by_groups, SIZE, level) == [[19.0] * 9] * SIZE


def _add_in_place(level: str) -> str:
    dt.check_ranks(level)
    mesh = dt.init_device_mesh("cpu", (3,))
    x = dt.distribute_tensor(torch.ones(6, 4), mesh, [dt.Shard(0)])
    others = [dt.ones(6, 4, device_mesh=mesh, placements=[cut]) for cut in (dt.Shard(0), dt.Replicate())]
    for other in others[:: -1 if dist.get_rank() else 1]:  # ranks other than 0 add them in another order
        x.add_(other)
    x.sum().item()
    x.add_(others[dist.get_rank() == 1])
    try:
        x.sum().item()
    except DivergenceError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("level", LEVELS)
def test_order_of_in_place_additions_is_ignored_but_a_different_operand_raises(level: str) -> None:
    words = run_gloo(_add_in_place, 3, level)
    assert len(set(words)) == 1
    assert "rank 1 differs from ranks 0, 2" in words[0]
    assert ("added in place before this" if level == "strict" else "in operations before this call") in words[0]
