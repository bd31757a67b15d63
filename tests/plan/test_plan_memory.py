"""Memory of program plans: predicted peaks equal measured ones, and a plan under a memory limit gives equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from live_memory import LiveTensorMemory
from torch.nn import functional as F

import dtensor as dt
from dtensor.base.units import bytes_text
from dtensor.debug import CommDebugMode
from dtensor.plan.graph_recorder import record_graph
from dtensor.plan.liveness import MemoryModel
from dtensor.plan.make_plan import make_plan
from dtensor.plan.plan_executor import PlanExecutor
from dtensor.plan.strategy_options import recorded_options

R, S = dt.Replicate(), dt.Shard
Step = Callable[[], Any]
WAYS = {
    "data": ({}, S(0)),
    "tensor": ({"q": S(0), "o": S(1), "up": S(0), "down": S(1)}, R),
    "fully sharded": ({"q": S(0), "o": S(0), "up": S(0), "down": S(0)}, S(0)),
}


def make_block_step(
    mesh: dt.DeviceMesh, way: str, width: int = 32, batch: int = 8, layers: int = 2
) -> tuple[Step, list[dt.DTensor]]:
    """Return a step of two layers of attention and MLP with common placements, and its batch and parameters."""
    cuts, spot = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (3 * width, width), "o": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}

    def drawn(shape: tuple[int, ...], place: Any) -> dt.DTensor:
        places = [place if ranks > 1 else R for ranks in mesh.shape]
        return dt.distribute_tensor(torch.randn(*shape, generator=generator, dtype=torch.float64), mesh, places)

    weights = [
        {name: (drawn(shape, cuts.get(name, R)) * 0.1).detach().requires_grad_() for name, shape in sizes.items()}
        for _ in range(layers)
    ]
    x = drawn((batch, 16, width), spot)

    def step() -> Any:
        h = x
        for w in weights:
            q, k, v = F.linear(F.layer_norm(h, (width,)), w["q"]).view(batch, 16, 3, 4, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, 16, width)
            h = h + F.linear(mixed, w["o"])
            h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (width,)), w["up"])), w["down"])
        loss = h.square().mean()
        loss.backward()
        return loss.detach()

    leaves = [p for w in weights for p in w.values()]
    return step, [x, *leaves]


def plan_step(step: Step, given: list[dt.DTensor], **options: Any) -> dt.ProgramPlan:
    """Plan a step, and clear the gradients that it made."""
    plan = dt.plan(step, **options)
    for p in given:
        p.grad = None
    return plan


def run_and_measure(step: Step, given: list[dt.DTensor], plan: dt.ProgramPlan | None) -> tuple[list[torch.Tensor], int, int]:
    """Return the gradients of a step, its peak bytes, and the bytes that a rank received."""
    for p in given:
        p.grad = None
    with LiveTensorMemory(given) as live, CommDebugMode() as comm:
        if plan is None:
            step()
        else:
            with PlanExecutor(plan) as following:
                step()
            assert following.is_complete, following.difference
    nbytes = sum(event.bytes for event in comm.events)
    grads = [p.grad.full_tensor() for p in given[1:]]
    for p in given:
        p.grad = None
    return grads, live.peak, nbytes


@pytest.mark.parametrize("way", WAYS)
def test_predicted_peak_memory_of_a_plan_equals_the_measured_peak(way: str) -> None:
    step, given = make_block_step(mesh := dt.init_device_mesh("cpu", (2,)), way)
    expected, _, _ = run_and_measure(step, given, None)
    plan = plan_step(step, given)
    grads, peak, nbytes = run_and_measure(step, given, plan)
    torch.testing.assert_close(grads, expected)
    assert nbytes == plan.nbytes
    assert plan.peak_bytes == pytest.approx(peak / mesh.size(), rel=0.1)
    assert f"peak memory {bytes_text(plan.peak_bytes)} per rank" in str(plan)
    assert dt.ProgramPlan.loads(plan.dumps()) == plan


@pytest.mark.parametrize("way", WAYS)
def test_predicted_peak_memory_without_a_plan_equals_the_measured_peak(way: str) -> None:
    step, given = make_block_step(mesh := dt.init_device_mesh("cpu", (2,)), way)
    run_and_measure(step, given, None)
    _, graph = record_graph(step, (), {})
    for p in given:
        p.grad = None
    _, peak, nbytes = run_and_measure(step, given, None)
    assert nbytes == sum(event.bytes for event, _ in graph.collectives)
    assert MemoryModel(graph).compute_usage(recorded_options(graph), without_plan=True).peak == pytest.approx(
        peak / mesh.size(), rel=0.1
    )


def test_plan_under_memory_limit_keeps_gradients_and_predicted_bytes() -> None:
    """Check a plan under a memory limit, in which backward does not redistribute gradients of planned operands."""
    step, given = make_block_step(dt.init_device_mesh("cpu", (2,)), "fully sharded", width=64, layers=1)
    expected, _, _ = run_and_measure(step, given, None)
    _, graph = record_graph(step, (), {})
    plan = make_plan(graph, seconds=0, memory=0.95 * make_plan(graph, seconds=0).peak_bytes)
    grads, _, nbytes = run_and_measure(step, given, plan)
    torch.testing.assert_close(grads, expected)
    assert nbytes == plan.nbytes


def test_planned_explicit_redistribution_has_eager_gradients_and_fewer_bytes() -> None:
    """Check the gradient of an explicit redistribution whose source has another placement under a plan."""
    mesh = dt.init_device_mesh("cpu", (4,))
    x, w = (dt.randn(n, 32, dtype=torch.float64, device_mesh=mesh, placements=[at]) for n, at in ((1024, R), (32, S(0))))
    given = [x, w.requires_grad_()]

    def step() -> None:
        F.linear(x, w).redistribute(placements=[S(0)]).square().mean().backward()

    expected, _, before = run_and_measure(step, given, None)
    plan = plan_step(step, given)
    grads, _, nbytes = run_and_measure(step, given, plan)
    torch.testing.assert_close(grads, expected)
    assert nbytes == plan.nbytes < before / 4


def test_plan_under_memory_limit_frees_and_repeats_redistributed_copies() -> None:
    mesh, width = dt.init_device_mesh("cpu", (4,)), 32
    given = [dt.randn(4 * width, width, dtype=torch.float64, device_mesh=mesh, placements=[S(0)])]
    given += [
        (dt.randn(width, width, dtype=torch.float64, device_mesh=mesh, placements=[S(0)])).requires_grad_() for _ in range(4)
    ]

    def step() -> None:
        h = given[0]
        for w in given[1:]:
            h = torch.tanh(F.linear(h, w))
        h.square().mean().backward()

    expected, _, _ = run_and_measure(step, given, None)
    free = plan_step(step, given)
    limit = int(free.peak_bytes * 0.8)
    bound = plan_step(step, given, memory=limit)
    grads, peak, nbytes = run_and_measure(step, given, bound)
    torch.testing.assert_close(grads, expected)
    assert bound.peak_bytes <= limit < free.peak_bytes
    assert bound.peak_bytes == pytest.approx(peak / mesh.size(), rel=0.1)
    assert nbytes == bound.nbytes
    assert bound.seconds >= free.seconds
    with pytest.raises(dt.errors.PlanError, match=r"the smallest peak is [\d,]+ bytes, in aten::"):
        dt.plan(step, memory=1000)


def test_plan_fixes_layouts_of_views_that_are_read_after_a_write_to_the_base() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    w = dt.randn(8, 8, device_mesh=mesh, placements=[S(0)])
    x = dt.randn(4, 8, device_mesh=mesh, placements=[S(0)])
    before, kept = w.full_tensor().clone(), []

    def step() -> Any:
        y = x @ w.t()
        kept[:] = [w[:4]]
        w.mul_(2)
        return y + kept[0].sum()

    plan = dt.plan(step)
    assert [call.kind for call in plan.calls if call.name in ("aten::t", "aten::slice.Tensor")] == ["call", "fixed"]
    with PlanExecutor(plan) as following:
        y = step()
    assert following.is_complete
    expected = x.full_tensor() @ (2 * before).t() + 4 * before[:4].sum()
    torch.testing.assert_close(y.full_tensor(), expected)


def _predict_and_measure(way: str) -> tuple[int, int, int, int]:
    step, given = make_block_step(dt.init_device_mesh("cpu", (2,)), way)
    run_and_measure(step, given, None)
    plan = plan_step(step, given)
    _, peak, nbytes = run_and_measure(step, given, plan)
    return plan.peak_bytes, peak, plan.nbytes, nbytes


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_predicted_peak_memory_and_bytes_of_a_plan_equal_those_on_processes(way: str) -> None:
    for predicted, peak, nbytes, received in run_gloo(_predict_and_measure, 2, way):
        assert nbytes == received
        assert predicted == pytest.approx(peak, rel=0.1)


def _plan_error() -> str:
    step, _ = make_block_step(dt.init_device_mesh("cpu", (2,)), "data")
    with pytest.raises(dt.errors.PlanError) as error:
        dt.plan(step, memory=1000)
    return str(error.value)


@pytest.mark.gloo
@pytest.mark.slow
def test_plan_error_of_a_memory_limit_is_equal_on_all_processes() -> None:
    assert len(set(run_gloo(_plan_error, 2))) == 1
