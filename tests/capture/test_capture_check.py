"""``capture(check=n)`` records each n-th call of a recording again, and raises if the recordings differ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch.nn import functional as F

import dtensor as dt
from dtensor.errors import ArgumentError, CaptureError

READERS = {"float clock": time.perf_counter, "integer clock": time.perf_counter_ns}


def distributed(*size: int) -> Any:
    mesh = dt.init_device_mesh("cpu", (2,))
    values = torch.arange(1.0, 1.0 + torch.Size(size).numel()).view(size)
    return dt.distribute_tensor(values, mesh, [dt.Shard(0)])


@pytest.mark.parametrize("name", READERS)
def test_check_raises_for_a_changing_value_without_a_guard(name: str) -> None:
    read = READERS[name]
    captured = dt.capture(lambda x: x * read(), trusted=["time"], check=3)
    for _ in range(3):
        captured(distributed(5))
    assert captured.cache_info().replayed == 2
    with pytest.raises(CaptureError, match=r"capture\(check=\).*takes a Python value that was"):
        captured(distributed(5))


def test_check_raises_if_the_function_runs_other_operations(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    captured = dt.capture(lambda x: x.relu() if os.access(str(flag), os.F_OK) else x.exp(), trusted=["posix"], check=2)
    x = distributed(5)
    for _ in range(2):
        assert torch.equal(captured(x).full_tensor(), x.exp().full_tensor())
    flag.touch()
    with pytest.raises(CaptureError, match="runs other operations than its recording"):
        captured(x)


def test_checked_training_step_with_dropout_equals_eager() -> None:
    def train(make: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        w = torch.nn.Parameter(distributed(6, 4))
        optimizer = torch.optim.AdamW([w], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = F.dropout(torch.relu(x @ w), 0.25).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, losses = make(step), []
        for k in range(12):
            losses.append(run(distributed(5, 6) / (1 + k)).item())
            schedule.step()
        return losses, run

    losses, captured = train(lambda step: dt.capture(step, check=2))
    assert losses == train(lambda step: step)[0]
    info = captured.cache_info()
    assert info.replayed >= 2
    assert info.recorded >= 2 + info.replayed
    assert info.kept < info.recorded


def test_gradients_of_checked_calls_equal_eager() -> None:
    def fn(x: Any, w: Any) -> Any:
        return torch.tanh(x * w)

    captured, x = dt.capture(fn, check=2), distributed(5)
    for _ in range(6):
        grads = []
        for run in (captured, fn):
            w = distributed(5).requires_grad_()
            run(x, w).sum().backward()
            grads.append(w.grad.full_tensor())
        assert torch.equal(*grads)
    assert captured.cache_info().replayed >= 2


@pytest.mark.parametrize("check", [0, -1, 1.5, True])
def test_check_that_is_not_a_positive_integer_raises(check: Any) -> None:
    with pytest.raises(ArgumentError, match="check="):
        dt.capture(lambda x: x, check=check)


def differ_on_one_rank() -> str:
    mesh = dt.init_device_mesh("cpu", (2,))
    constant, changing = (lambda: 2.0), time.perf_counter
    read = changing if mesh.get_local_rank() == 1 else constant
    x = dt.distribute_tensor(torch.ones(4, 2), mesh, [dt.Shard(0)])
    captured = dt.capture(lambda x: (x.to_local() * read()).sum() + (x * 2).sum().full_tensor(), trusted=["time"], check=2)
    captured(x), captured(x)
    with pytest.raises(CaptureError) as raised:
        captured(x)
    return str(raised.value)


@pytest.mark.gloo
def test_check_raises_on_all_ranks_if_recordings_of_one_rank_differ() -> None:
    one, other = run_gloo(differ_on_one_rank, 2)
    assert "differ on another rank" in one
    assert "takes a Python value" in other
