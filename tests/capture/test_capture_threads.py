"""Threads: each thread records its own operations, and torch is unpatched afterwards."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.errors import CaptureError

MESH = dt.init_device_mesh("cpu", (2,))
S0, R = dt.Shard(0), dt.Replicate()


def _patched_attributes() -> list[dict[str, Any]]:
    """Return the attributes of torch classes and math that a recording patches."""
    return [dict(vars(kind)) for kind in (torch.Tensor, torch._C.TensorBase, torch.nn.Module, math)]


def _run_in_threads(*walks: Callable[[], Any]) -> None:
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(walks))

    def run(walk: Callable[[], Any]) -> None:
        barrier.wait(60)
        try:
            walk()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(walk,)) for walk in walks]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if raised:
        raise raised[0]


def _program(number: int) -> Callable[[], None]:
    """Return a function that captures several programs and compares replays with eager; one in three raises."""

    def walk() -> None:
        w = dt.distribute_tensor(torch.randn(5, 4, generator=torch.Generator().manual_seed(number)), MESH, [S0])
        w.requires_grad_()
        for turn in range(4):
            scale = 1.0 + number + turn

            def fn(x: Any, scale: float = scale, fails: bool = turn % 3 == 2) -> Any:
                y = (x @ w.t()).relu() * scale
                for _ in range(number):
                    y = y.tanh()
                if fails:
                    y.full_tensor().tolist()
                return y.sum(0) * math.sqrt(scale)

            f, x = dt.capture(fn), dt.distribute_tensor(torch.ones(3, 4), MESH, [R])
            for call in range(3):
                if turn % 3 == 2:
                    with pytest.raises(CaptureError):
                        f(x)
                    continue
                found, wanted = f(x * call), fn(x * call)
                (mine,) = torch.autograd.grad(found.sum(), w)
                (its,) = torch.autograd.grad(wanted.sum(), w)
                assert torch.equal(found.full_tensor(), wanted.full_tensor())
                assert torch.equal(mine.full_tensor(), its.full_tensor())
            assert turn % 3 == 2 or f.cache_info().replayed == 2

    return walk


def test_threads_that_capture_at_once_equal_eager_and_undo_patches() -> None:
    before = _patched_attributes()
    _run_in_threads(*map(_program, range(4)))
    assert _patched_attributes() == before


def test_thread_reads_values_and_gradients_while_another_captures() -> None:
    before, done = _patched_attributes(), threading.Event()
    x = torch.arange(3.0)

    def read() -> None:
        leaf = torch.ones(2, requires_grad=True)
        leaf.sum().backward()
        while not done.is_set():
            assert x.tolist() == [0, 1, 2]
            assert x.numpy().sum() == 3
            assert leaf.grad is not None
            assert math.sqrt(4.0) == 2

    def record() -> None:
        try:
            _program(2)()
        finally:
            done.set()

    _run_in_threads(read, record)
    assert _patched_attributes() == before


def test_captured_optimizer_steps_in_threads_equal_eager() -> None:
    def steps(rate: float) -> Callable[[], None]:
        def walk() -> None:
            w = [torch.nn.Parameter(dt.ones(5, 3, device_mesh=MESH, placements=[S0])) for _ in range(2)]
            opts = [torch.optim.Adam([p], lr=rate, foreach=True) for p in w]

            def step(k: int) -> Any:
                loss = w[k].square().sum()
                loss.backward()
                opts[k].step()
                opts[k].zero_grad()
                return loss

            f = dt.capture(lambda: step(0))
            for turn in range(6):
                for opt in opts:
                    opt.param_groups[0]["lr"] = rate / (1 + turn // 2)
                found, wanted = f(), step(1)
                assert found.item() == wanted.item()
            assert torch.equal(w[0].full_tensor(), w[1].full_tensor())

        return walk

    before = _patched_attributes()
    _run_in_threads(*map(steps, (0.1, 0.2, 0.3)))
    assert _patched_attributes() == before


def test_one_captured_function_called_by_threads_equals_eager() -> None:
    state = {"scale": 1.0}
    w = dt.distribute_tensor(torch.arange(7.0), MESH, [S0])
    f = dt.capture(lambda x: x * w * state["scale"])

    def call() -> None:
        for k in range(1, 8):
            x = dt.distribute_tensor(torch.full((7,), float(k)), MESH, [S0 if k % 2 else R])
            assert torch.equal(f(x).full_tensor(), torch.arange(7.0) * k)

    _run_in_threads(call, call, call)


def test_math_is_patched_in_capture_only_after_item_gives_a_number() -> None:
    own, seen = math.sqrt, []

    def without(x: Any) -> Any:
        seen.append(math.sqrt is own)
        return x * 2

    def reading(x: Any) -> Any:
        scale = x.sum().item()
        seen.append(math.sqrt is own)
        return x * math.sqrt(scale)

    x = dt.distribute_tensor(torch.ones(4), MESH, [S0])
    dt.capture(without)(x)
    replayed = dt.capture(reading)
    replayed(x)
    assert seen == [True, False]
    assert math.sqrt is own
    torch.testing.assert_close(replayed(x * 4).full_tensor(), torch.full((4,), 16.0))


def test_module_imported_in_capture_gets_the_original_math_functions(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "imported_meanwhile.py").write_text("from math import sqrt as root\nimport math\nNAMES = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    held: list[Any] = []

    def step(x: Any) -> Any:
        scale = x.sum().item()
        held.append(importlib.import_module("imported_meanwhile"))
        return x * held[0].root(scale)

    try:
        x = dt.distribute_tensor(torch.ones(4), MESH, [S0])
        dt.capture(step)(x)
        assert held[0].root is math.sqrt
        assert type(math.sqrt).__name__ == "builtin_function_or_method"
    finally:
        sys.modules.pop("imported_meanwhile", None)


def test_capture_with_dropout_works_while_another_thread_draws_numbers() -> None:
    x, ended = dt.distribute_tensor(torch.arange(20.0).reshape(5, 4), MESH, [S0]), threading.Event()

    def draw() -> None:
        while not ended.is_set():
            torch.rand(3)

    def record(number: int) -> Callable[[], None]:
        def walk() -> None:
            for turn in range(8):
                scaled = dt.capture(lambda x, k=number + turn: torch.nn.functional.dropout(x * k, 0.5).exp().sum())
                scaled(x)

        return walk

    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        _run_in_threads(*map(record, range(4)))
    finally:
        ended.set()
        drawing.join()
