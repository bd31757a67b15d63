"""Pipelines: schedules of ``torch.distributed.pipelining`` over parallel stages train like a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import RankFailed, run_gloo
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import dtensor as dt
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

WIDTH, BATCH, MICROBATCHES, STEPS = 6, 8, 4, 3
PLAN: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
WAYS: dict[str, Callable[[nn.Module, dt.DeviceMesh], nn.Module]] = {
    "tensor parallel": lambda module, mesh: parallelize_module(module, mesh, PLAN),
    "fully sharded": lambda module, mesh: fully_shard(module, mesh=mesh),
    "units inside": lambda module, mesh: units_inside(module, mesh),
    "replicated": replicate,
    "averaged afterwards": lambda module, mesh: module,
}
IN_ONE_BACKWARD = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
IN_TWO = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def units_inside(module: nn.Module, mesh: dt.DeviceMesh) -> nn.Module:
    for child in module.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def train_plain(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stages_of_rank(kind: Any, rank: int) -> list[int]:
    """Return the stages of one of two pipeline ranks: one stage, two alternating ones, or the outer or inner two."""
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return [rank]
    in_v = kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
    return [[0, 3], [1, 2]][rank] if in_v else [rank, rank + 2]


def _train_pipeline(name: str, way: str) -> tuple[list[float], list[float]]:
    """Return the losses of the pipeline (on ranks of its last stage) and of the plain model."""
    kind = getattr(schedules, name)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    mine, inner = stages_of_rank(kind, int(mesh.get_local_rank("pp"))), mesh["inner"]
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2 * len(mine))]
    x, y = torch.randn(BATCH, 3, WIDTH), torch.randn(BATCH, 3, WIDTH)
    expected = train_plain(nn.Sequential(*copy.deepcopy(blocks)), x, y)
    modules = [WAYS[way](blocks[i], inner) for i in mine]
    stages = [
        PipelineStage(module, i, len(blocks), torch.device("cpu"), group=mesh.get_group("pp"))
        for module, i in zip(modules, mine, strict=True)
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.5)
    last, found = len(blocks) - 1 in mine, []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        given = {"target": rows_of_rank(y, inner, way), "losses": losses} if last else {}
        schedule.step(*([rows_of_rank(x, inner, way)] if 0 in mine else []), **given)
        if way == "averaged afterwards":
            for p in (p for module in modules for p in module.parameters()):
                assert p.grad is not None
                p.grad = dt.DTensor.from_local(p.grad, inner, [dt.Partial("avg")]).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            loss = torch.stack(losses).mean().detach()
            if way != "tensor parallel":
                loss = dt.DTensor.from_local(loss, inner, [dt.Partial("avg")]).full_tensor()
            found.append(loss.item())
    dist.barrier()
    return found, expected if last else []


def rows_of_rank(x: Tensor, mesh: dt.DeviceMesh, way: str) -> Tensor:
    """Return this rank's rows of every microbatch."""
    if way == "tensor parallel":
        return x
    return x.unflatten(0, (MICROBATCHES, 2, -1))[:, int(mesh.get_local_rank())].flatten(0, 1)


def _train_all_pipelines(cases: list[tuple[str, str]], level: str) -> list[tuple[list[float], list[float]]]:
    dt.check_ranks(level)
    return [_train_pipeline(*case) for case in cases]


def check(cases: list[tuple[str, str]], level: str = "watch") -> None:
    by_rank = run_gloo(_train_all_pipelines, 4, cases, level, timeout_s=200)
    for k, case in enumerate(cases):
        measured = [found for found, _ in (results[k] for results in by_rank)]
        expected = [losses for _, losses in (results[k] for results in by_rank)]
        assert sum(map(bool, measured)) == 2, case
        for ours, theirs in zip(measured, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), case


@pytest.mark.gloo
@pytest.mark.slow
def test_pipeline_schedules_with_one_backward_train_like_plain_model() -> None:
    ways = [way for way in WAYS if way != "averaged afterwards"]
    check([(name, way) for name in IN_ONE_BACKWARD for way in ways])


@pytest.mark.gloo
@pytest.mark.slow
def test_pipeline_schedules_with_split_backward_train_like_plain_model() -> None:
    """Check zero-bubble schedules without rank checks: torch sums weight gradients in a different order on each rank."""
    check([(name, way) for name in IN_TWO for way in WAYS if way != "replicated"], "off")


@pytest.mark.gloo
@pytest.mark.slow
def test_split_backward_of_replicated_stages_raises() -> None:
    with pytest.raises(RankFailed, match=r"UnsupportedOperationError.*ScheduleInterleaved1F1B"):
        run_gloo(_train_all_pipelines, 4, [(IN_TWO[0], "replicated")], "off", timeout_s=60)


def test_pipeline_stage_in_one_process_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    with pytest.raises(dt.errors.MeshError, match="torchrun --nproc-per-node"):
        PipelineStage(Block(), 0, 2, torch.device("cpu"), group=mesh.get_group("pp"))
