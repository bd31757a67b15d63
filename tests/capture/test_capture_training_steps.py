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
def test_trains_as_the_step_does(name: str, mesh: Any) -> None:
    captured = compare_steps(lambda: CASES[name](mesh))
    assert captured.cache_info().recorded <= 4


@pytest.mark.parametrize("held", keep_every_nth_fast([[1], [2], [0, 2], range(8)], 4))
def test_what_autograd_copies_while_somebody_looks_on_is_no_other_program(held: Any) -> None:
    assert count_recordings_with_held_frames(MESH, held) == (3, 5)


@pytest.mark.gloo
def test_trains_as_the_step_does_on_four_processes() -> None:
    run_cases_on_four_processes(capture_step_cases)


def test_what_a_step_returns_has_no_history_left() -> None:
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


def test_gradients_that_are_there_are_guarded() -> None:
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


def test_code_that_asks_for_gradients_is_recorded_for_each_answer() -> None:
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


def test_an_optimizer_alone() -> None:
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
def test_floats_that_a_replay_could_not_follow_are_refused() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    for fn, what in (
        (lambda x: x * 2 if x.sum().item() > 0 else x, "is used by gt"),
        (lambda x: [x] * int(x.sum().item()), "is used by int"),
        (lambda x: (w * x.sum().item()).sum(), "differentiable operation mul"),
    ):
        with pytest.raises(CaptureError, match=what):
            capture(fn)(randn(4, on=MESH, at=[Shard(0)]))


def test_floats_that_slip_away_are_found_by_a_second_recording() -> None:
    f = capture(lambda x: x * sqrt(x.square().sum().item()))
    f(randn(4, on=MESH, at=[Shard(0)]))
    with pytest.raises(CaptureError, match="not followed"):
        f(randn(4, on=MESH, at=[Shard(0)]))


def test_floats_of_one_value_are_told_apart() -> None:
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


def test_a_changing_float_that_decides_is_guarded() -> None:
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


def test_a_learning_rate_is_recorded_once_more_and_then_followed() -> None:
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


def test_gradients_of_arguments_are_refused() -> None:
    f = capture(lambda x: x.square().sum().backward())
    with pytest.raises(CaptureError, match=r"sets the \.grad of argument tensor 0"):
        f(randn(4, on=MESH, at=[Shard(0)], grad=True))


def test_parameters_count_their_writes() -> None:
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
