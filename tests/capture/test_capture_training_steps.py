"""Training steps: a captured step with backward pass, clipping, optimizer and cleared gradients equals the step, bit for bit."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace
from typing import Any

import capture_step_cases
import pytest
import torch
from capture_cases import assert_bitwise_equal, mesh_of, randn
from capture_step_cases import CASES, compare_steps, count_recordings_with_held_frames
from case_lists import run_cases_on_four_processes
from slow_case_marks import keep_every_nth_fast

from dtensor import Replicate, Shard
from dtensor.capture import capture
from dtensor.errors import CaptureError

MESH, GRID = mesh_of(2), mesh_of(2, 2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *keep_every_nth_fast([(name, MESH) for name in CASES], 9),
        ("adamw", GRID),
        ("losses_as_floats", GRID),
        ("buffers_and_averages", GRID),
    ],
)
def test_captured_training_steps_equal_eager(name: str, mesh: Any) -> None:
    captured = compare_steps(lambda: CASES[name](mesh))
    assert captured.cache_info().recorded <= 4


@pytest.mark.parametrize("held", keep_every_nth_fast([[1], [2], [0, 2], range(8)], 4))
def test_frames_that_hold_gradients_do_not_cause_new_recordings(held: Any) -> None:
    assert count_recordings_with_held_frames(MESH, held) == (3, 5)


@pytest.mark.gloo
def test_captured_training_steps_equal_eager_on_four_processes() -> None:
    run_cases_on_four_processes(capture_step_cases)


def test_results_of_a_captured_step_do_not_require_grad() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)

    def step(x: Any) -> Any:
        loss = (w * x).sum()
        loss.backward()
        return loss, (x * 2).sum()

    f = capture(step)
    for _ in range(3):
        w.grad = None
        loss, other = f(randn(4, on=MESH, at=[Shard(0)]))
        assert not loss.requires_grad
        assert not other.requires_grad
    assert f.cache_info().replayed == 2


def test_existing_gradients_and_their_layouts_are_guarded() -> None:
    w = randn(4, 4, on=MESH, at=[Shard(0)], grad=True)
    same = w.detach().clone().requires_grad_()

    def step_on(w: Any) -> Any:
        return lambda x: (x @ w).square().sum().backward()

    step, f = step_on(same), capture(step_on(w))
    kinds: list[Any] = [None, "keep", None, Replicate(), "keep", Shard(0), None]
    for kind in kinds:
        if kind != "keep":
            for p in (w, same):
                torch.manual_seed(3)
                p.grad = None if kind is None else randn(4, 4, on=MESH, at=[kind])
        x = randn(3, 4, on=MESH)
        step(x)
        f(x)
        assert_bitwise_equal(w.grad, same.grad)
    assert f.cache_info()[2:4] == (3, 4)


def test_branch_on_grad_is_none_is_recorded_for_both_cases() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    f = capture(lambda x: x * 2 if w.grad is None else x * 3)
    x = randn(4, on=MESH, at=[Shard(0)])
    for grad in (None, x, None, x):
        w.grad = grad
        assert_bitwise_equal(f(x), x * (2 if grad is None else 3))
    assert f.cache_info()[2:4] == (2, 2)


def test_hooks_on_parameters_are_recorded_and_guarded() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    same = w.detach().clone().requires_grad_()
    step, f = (lambda x: (x * same).sum().backward()), capture(lambda x: (x * w).sum().backward())
    for hooked in (False, False, True, False):
        if hooked:
            for p in (w, same):
                p.register_hook(lambda grad: grad * 2.0)
        w.grad = same.grad = None
        x = randn(4, on=MESH, at=[Shard(0)])
        step(x)
        f(x)
        assert_bitwise_equal(w.grad, same.grad)
    assert f.cache_info()[2:4] == (2, 2)


def test_captured_optimizer_step_equals_eager() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        ws = [randn(4, 3, on=MESH, at=[at], grad=True) for at in (Shard(0), Shard(1), Replicate())]
        return ws, torch.optim.AdamW(ws, lr=0.1, fused=True)

    (ws, opt), (same, same_opt) = build(), build()
    f = capture(opt.step)
    for i in range(5):
        for group in (ws, same):
            torch.manual_seed(i)
            for w in group:
                w.grad = randn(4, 3, on=MESH, at=list(w.placements))
        same_opt.step()
        f()
        assert_bitwise_equal([w.detach() for w in ws], [w.detach() for w in same])
    assert f.cache_info().replayed == 3


# --- floats ------------------------------------------------------------------------------------------------------------
def test_branch_int_or_differentiable_use_of_item_raises() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    for fn, message in (
        (lambda x: x * 2 if x.sum().item() > 0 else x, "is used by gt"),
        (lambda x: [x] * int(x.sum().item()), "is used by int"),
        (lambda x: (w * x.sum().item()).sum(), "differentiable operation mul"),
    ):
        with pytest.raises(CaptureError, match=message):
            capture(fn)(randn(4, on=MESH, at=[Shard(0)]))


def test_untracked_use_of_item_raises_at_the_second_call() -> None:
    f = capture(lambda x: x * sqrt(x.square().sum().item()))
    f(randn(4, on=MESH, at=[Shard(0)]))
    with pytest.raises(CaptureError, match="not followed"):
        f(randn(4, on=MESH, at=[Shard(0)]))


def test_equal_floats_that_later_differ_are_replayed_with_their_own_values() -> None:
    held = SimpleNamespace(first=2.0, second=2.0, other=0.5)
    x = randn(4, on=MESH, at=[Shard(0)])

    def fn(x: Any) -> Any:
        return torch.add(x * held.first, x, alpha=held.second), x.clamp(held.other, 2.0), x * 2.0

    f = capture(fn)
    for first, second, other in (
        (2.0, 2.0, 0.5),
        (3.0, 2.0, 0.5),
        (2.0, 2.0, 0.5),
        (2.0, 7.0, 2.0),
        (2.0, 2.0, 2.0),
        (1.5, 4.0, 0.1),
    ):
        held.first, held.second, held.other = first, second, other
        for _ in range(2):
            assert_bitwise_equal(f(x), fn(x))
    assert f.cache_info().replayed >= 4


def test_branch_on_a_changing_float_equals_eager() -> None:
    held = {"scale": 1.0}
    x = randn(4, on=MESH, at=[Shard(0)])

    def fn(x: Any) -> Any:
        return x * held["scale"] if held["scale"] > 2 else x

    f = capture(fn)
    for scale in (1.0, 1.5, 3.0, 4.0, 1.0, 3.0):
        held["scale"] = scale
        for _ in range(3):
            assert_bitwise_equal(f(x), fn(x))
    assert held["scale"] == 3.0
    assert type(held["scale"]) is float


def test_changing_learning_rate_is_replayed_after_at_most_4_recordings() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    opt = torch.optim.SGD([w], lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)

    def step(x: Any) -> None:
        (x * w).sum().backward()
        opt.step()
        opt.zero_grad()

    f = capture(step)
    for _ in range(20):
        x, before = randn(4, on=MESH, at=[Shard(0)]), w.detach().clone()
        f(x)
        assert_bitwise_equal(w.detach(), before.add(x, alpha=-opt.param_groups[0]["lr"]))
        schedule.step()
    assert f.cache_info().recorded <= 4, f.cache_info()


def test_backward_to_an_argument_raises_at_capture() -> None:
    f = capture(lambda x: x.square().sum().backward())
    with pytest.raises(CaptureError, match=r"sets the \.grad of argument tensor 0"):
        f(randn(4, on=MESH, at=[Shard(0)], grad=True))


def test_replayed_parameter_update_invalidates_earlier_graphs() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    opt = torch.optim.SGD([w], lr=0.1)

    def step(x: Any) -> None:
        (x * w).sum().backward()
        opt.step()
        opt.zero_grad()

    f = capture(step)
    for _ in range(3):
        y = (w * w).sum()
        f(randn(4, on=MESH, at=[Shard(0)]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
