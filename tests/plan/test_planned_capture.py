"""Planned capture, ``capture(step, plan="program")``: planned at the first call, recorded at the second, replayed from the
third."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch.nn import functional as F

import dtensor as dt
from dtensor.debug import CommDebugMode

R, S = dt.Replicate(), dt.Shard


def train(
    mesh: dt.DeviceMesh, steps: int, plan: Any, fused: bool = True
) -> tuple[list[float], list[torch.Tensor], Any, list[int]]:
    """Return losses, parameters, the captured step and the bytes of each step of a residual stack under AdamW."""
    dt.manual_seed(3)
    leaves = [dt.randn(12, 12, device_mesh=mesh, placements=[S(i)]).requires_grad_() for _ in range(2) for i in (0, 1)]
    scale = dt.ones(12, device_mesh=mesh).requires_grad_()
    optimizer = torch.optim.AdamW([*leaves, scale], lr=0.01, fused=fused)

    def step(x: Any) -> Any:
        h = x
        for a, b in zip(leaves[::2], leaves[1::2], strict=True):
            h = h + F.linear(torch.tanh(F.linear(F.rms_norm(h, (12,), scale), a)), b)
        loss = h.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*leaves, scale], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = dt.capture(step, plan=plan) if plan is not None else step
    losses, nbytes = [], []
    for k in range(steps):
        x = dt.distribute_tensor(torch.sin(torch.arange(7 * 12.0) + k).view(7, 12), mesh, [R])
        with CommDebugMode() as comm:
            losses.append(run(x).item())
        nbytes.append(sum(event.bytes for event in comm.events))
    return losses, [x.full_tensor() for x in (*leaves, scale)], run, nbytes


def test_planned_capture_trains_like_the_eager_step_with_fewer_bytes() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    losses, parameters, _, eager = train(mesh, 7, None)
    found, others, run, nbytes = train(mesh, 7, "program")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
    torch.testing.assert_close(others, parameters)
    info = run.cache_info()
    assert info.replayed >= 2
    assert info.plain == 0
    assert nbytes[-1] < eager[-1]
    (plan,) = run.plans()
    assert plan.nbytes <= plan.eager_nbytes


def _train_on_rank() -> Any:
    losses, parameters, run, nbytes = train(dt.init_device_mesh("cpu", (2,)), 6, "program")
    return losses, parameters, nbytes[-1], run.cache_info().replayed, run.plans()[0].dumps()


@pytest.mark.gloo
def test_planned_capture_on_process_groups_equals_one_process() -> None:
    losses, parameters, nbytes, replayed, _ = _train_on_rank()
    for others in run_gloo(_train_on_rank, 2):
        torch.testing.assert_close(torch.tensor(others[0]), torch.tensor(losses))
        torch.testing.assert_close(others[1], parameters)
        assert others[2:4] == (nbytes, replayed)


def test_capture_with_loaded_plan_records_at_the_first_call() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    a, b = (dt.randn(6, 6, device_mesh=mesh, placements=[S(i)]) for i in (1, 0))

    def step(x: Any) -> Any:
        return (torch.relu(x @ a) @ b).square().sum()

    x = dt.randn(5, 6, device_mesh=mesh)
    plan = dt.ProgramPlan.loads(dt.plan(step, x).dumps())
    run = dt.capture(step, plan=plan)
    for _ in range(3):
        torch.testing.assert_close(run(x).full_tensor(), step(x).full_tensor())
    assert run.cache_info().recorded == 1
    assert run.cache_info().replayed == 2


def test_capture_with_plan_of_another_program_warns_and_runs_without_it() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.randn(5, 6, device_mesh=mesh, placements=[S(0)])
    run = dt.capture(lambda x: (x * 2).sum(), plan=dt.plan(lambda x: (x + 2).sum(), x))
    with pytest.warns(UserWarning, match="differs from the one that was planned") as warned:
        y = run(x)
    assert [one.filename for one in warned] == [__file__]
    torch.testing.assert_close(y.full_tensor(), (x * 2).sum().full_tensor())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x)


def test_planned_step_that_replaces_a_list_by_an_equal_one_is_replayed() -> None:
    x = dt.randn(5, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[S(0)])
    state = {"scales": [2]}

    def step(x: Any) -> Any:
        state["scales"] = list(state["scales"])
        return (x * state["scales"][0]).sum()

    run = dt.capture(step, plan="program")
    for _ in range(4):
        torch.testing.assert_close(run(x).full_tensor(), 2 * x.sum().full_tensor())
    assert run.cache_info().replayed == 2


@pytest.mark.slow
def test_capture_with_memory_limit_plans_within_it_or_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    weights = [dt.randn(32, 32, device_mesh=mesh, placements=[S(0)]).requires_grad_() for _ in range(4)]
    x = dt.randn(128, 32, device_mesh=mesh, placements=[S(0)])

    def step(x: Any) -> Any:
        h = x
        for w in weights:
            h = torch.tanh(F.linear(h, w))
        loss = h.square().mean()
        return loss.detach(), *torch.autograd.grad(loss, weights)

    free = dt.capture(step, plan="program")
    expected = [free(x) for _ in range(3)][-1]
    limit = int(0.8 * free.plans()[0].peak_bytes)
    bound = dt.capture(step, memory=limit)
    found = [bound(x) for _ in range(3)][-1]
    torch.testing.assert_close([y.full_tensor() for y in found], [y.full_tensor() for y in expected])
    assert bound.plans()[0].peak_bytes <= limit < free.plans()[0].peak_bytes
    assert bound.cache_info().replayed == 1
    with pytest.raises(
        dt.errors.PlanError, match=r"no plan within memory=1,000 bytes per rank was found; the smallest peak is [\d,]+ bytes"
    ):
        dt.capture(step, memory=1000)(x)


def test_capture_with_invalid_plan_arguments_raises() -> None:
    with pytest.raises(dt.errors.ArgumentError, match="program"):
        dt.capture(lambda x: x, plan="model")
    plan = dt.plan(lambda: dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,))).sum())
    with pytest.raises(dt.errors.ArgumentError, match="memory="):
        dt.capture(lambda x: x, plan=plan, memory=1000)
