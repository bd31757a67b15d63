"""A whole training step captured: forward, backward, clipping, optimizer, gradients cleared; bit for bit what the step does."""

from __future__ import annotations

from typing import Any

import capture_steps
import pytest
import torch
from capture_cases import assert_same, mesh_of, randn
from capture_steps import STEPS, compare_steps
from gloo import run_gloo

from dtensor import Replicate, Shard
from dtensor.capture import capture
from dtensor.errors import CaptureError

MESH, GRID = mesh_of(2), mesh_of(2, 2)


@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["2", "2x2"])
@pytest.mark.parametrize("name", STEPS)
def test_trains_as_the_step_does(name: str, mesh: Any) -> None:
    captured = compare_steps(lambda: STEPS[name](mesh))
    assert captured.cache_info().recorded <= 3


@pytest.mark.gloo
def test_trains_as_the_step_does_on_four_processes() -> None:
    assert run_gloo(capture_steps.main, 4, timeout_s=200.0) == [list(STEPS)] * 4


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
        assert_same(w.grad, same.grad)
    assert f.cache_info()[2:4] == (3, 4)


def test_code_that_asks_for_gradients_is_recorded_for_each_answer() -> None:
    w = randn(4, on=MESH, at=[Shard(0)], grad=True)
    f = capture(lambda x: x * 2 if w.grad is None else x * 3)
    x = randn(4, on=MESH, at=[Shard(0)])
    for grad in (None, x, None, x):
        w.grad = grad
        assert_same(f(x), x * (2 if grad is None else 3))
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
        assert_same(w.grad, same.grad)
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
        assert_same([w.detach() for w in ws], [w.detach() for w in same])
    assert f.cache_info().replayed == 3


def test_gradients_of_arguments_are_refused() -> None:
    f = capture(lambda x: x.square().sum().backward())
    with pytest.raises(CaptureError, match="gives argument tensor 0 a gradient"):
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
