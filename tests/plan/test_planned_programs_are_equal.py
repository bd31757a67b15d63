"""Planned programs equal eager ones: values, gradients, placements of results, and in-place writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import capture_cases
import capture_step_cases
import pytest
import torch
from slow_case_marks import keep_chosen_fast, keep_every_nth_fast
from torch.utils import _pytree as pytree

import dtensor as dt
from dtensor.capture.program_plans import MAX_PLANS
from dtensor.plan.make_plan import run_and_plan
from dtensor.plan.plan_executor import PlanExecutor

MESHES = [pytest.param((4,), marks=pytest.mark.slow), (2, 2)]
QUICK = {"adamw_fused", "losses_as_floats", "buffers_and_averages"}
STEPS = keep_chosen_fast(list(capture_step_cases.CASES), QUICK)


def assert_close(a: Any, b: Any, label: str, same_placements: bool = True) -> None:
    """Assert equal global values, and equal placements if ``same_placements``."""
    a_leaves, a_tree = pytree.tree_flatten(a)
    b_leaves, b_tree = pytree.tree_flatten(b)
    assert a_tree == b_tree
    for x, y in zip(a_leaves, b_leaves, strict=True):
        if isinstance(x, dt.DTensor):
            assert x.placements == y.placements or not same_placements, label
            x, y = x.detach().full_tensor(), y.detach().full_tensor()
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(y, x, rtol=2e-4, atol=2e-5, equal_nan=True, msg=lambda text: f"{label}: {text}")
        else:
            assert x == (pytest.approx(y, rel=1e-5) if isinstance(y, float) else y), label


def make_step(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a step of one forward and backward pass."""

    def step() -> Any:
        out = fn(*args)
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        if results:
            sum((x * x).sum() for x in results).backward()
        return out

    return step


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", keep_every_nth_fast(list(capture_cases.CASES)))
def test_planned_functions_equal_eager_functions(name: str, shape: tuple[int, ...]) -> None:
    mesh, sides = capture_cases.mesh_of(*shape), []
    for _ in range(3):
        torch.manual_seed(0)
        fn, arguments, parameters = capture_cases.CASES[name](mesh)
        args = arguments(0)
        sides.append((make_step(fn, args), args, parameters))
    torch.manual_seed(1)
    expected = sides[0][0]()
    torch.manual_seed(1)
    _, plan = run_and_plan(sides[1][0], (), {})
    torch.manual_seed(1)
    with PlanExecutor(plan) as following:
        got = sides[2][0]()
    assert following.is_complete, following.difference
    assert plan.seconds <= plan.eager_seconds * (1 + 1e-9)  # two sums of equal numbers
    for (label, a), (_, b) in zip(_changed(*sides[0][1:]), _changed(*sides[2][1:]), strict=True):
        assert_close(a, b, label)
    assert_close(expected, got, "results")


def _changed(args: Any, parameters: Any) -> list[tuple[str, Any]]:
    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [("arguments", leaves), ("gradients", [x.grad for x in (*parameters, *leaves) if x.is_leaf])]


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("name", STEPS)
def test_planned_steps_equal_eager_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare planned steps with eager ones; results of calls that left their plan may have the plan's placements."""
    mesh, sides, followings = capture_cases.mesh_of(2, 2), [], []
    begin = PlanExecutor.__init__
    monkeypatch.setattr(PlanExecutor, "__init__", lambda self, plan: followings.append(self) or begin(self, plan))
    left = set()
    for planning in (False, True):
        torch.manual_seed(0)
        step, arguments, parameters, _ = capture_step_cases.CASES[name](mesh)
        run, trail = dt.capture(step, plan="program") if planning else step, []
        for i in range(5):
            torch.manual_seed(i)
            args = arguments(i)
            out = run(*args)
            if any(following.difference for following in followings):
                left.add(i)
            followings.clear()
            trail.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out))
        sides.append((trail, [x.detach() for x in parameters], [x.grad for x in parameters]))
    assert len(left) <= MAX_PLANS
    (expected, *others), (got, *found) = sides
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert_close(a, b, f"results of call {i}", i not in left)
    for label, a, b in zip(("parameters", "gradients"), others, found, strict=True):
        assert_close(a, b, label)
