"""Caches of dispatch are bounded: programs whose shapes and numbers change at each step keep memory and time per op flat."""

from __future__ import annotations

import ast
import gc
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor.base.caches import BoundedDict
from dtensor.dispatch import dispatcher as dispatching
from dtensor.layout import layout
from dtensor.propagation import shape_inference as infer
from dtensor.propagation import strategy_table as prices
from dtensor.redistribute import planner

MESH = dt.DeviceMesh("meta", 4)


def _step(size: int, number: float) -> None:
    x = dt.zeros(size, 3, device_mesh=MESH, placements=[dt.Shard(0)])
    y = (x * number + x).t()
    y.redistribute(placements=[dt.Shard(0)]).add_(x.t(), alpha=number)


def test_numbers_do_not_make_plans() -> None:
    _step(8, 0.5)
    before = {name: info.made for name, info in dt.cache_info().items()}
    for k in range(50):
        _step(8, k / 7)
    assert {name: info.made for name, info in dt.cache_info().items()} == before


def test_changing_shapes_keep_caches_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.each", 20)
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 70)
    for cache, limit in ((infer._INFERENCE_CACHE, 2), (prices._TABLE_CACHE, 2), (layout._BY_REQUEST, 30), (planner._PLANS, 20)):
        cache.clear()
        monkeypatch.setattr(cache, "limit", limit)
    dispatching.clear_plans()
    for size in range(1, 120):
        _step(size, 1 / size)
        info = dt.cache_info()
        assert all(cache.kept <= cache.limit for cache in info.values() if cache.limit is not None), info
    assert max(cache.made or 0 for cache in info.values()) >= 119  # each shape is a plan of its own


OPERATORS = (torch.cos, torch.sin, torch.exp, torch.tanh, torch.relu, torch.abs, torch.neg, torch.erf, torch.ceil, torch.sign)


@pytest.mark.slow
def test_changing_shapes_keep_the_plans_of_all_operators_together_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the operators comes near a bound of its own; what is alive keeps its layout, whatever was forgotten."""
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 64)
    for name, limit in (
        ("layout.layout._BY_REQUEST", 16),
        ("redistribute.planner._PLANS", 99),
        ("propagation.strategy_table._TABLES", 99),
    ):
        monkeypatch.setattr(f"dtensor.{name}", BoundedDict(limit))
    dispatching.clear_plans()
    held = dt.zeros(77, device_mesh=MESH, placements=[dt.Shard(0)])
    twin = held.cos()
    alive = []
    for size in range(100, 160):
        x = dt.zeros(size, device_mesh=MESH, placements=[dt.Shard(0)])
        for operator in OPERATORS:
            operator(x)
        info = dt.cache_info()
        assert sum(cache.kept for cache in info.values() if cache.made is not None) <= info["plans"].kept <= 64
        if size % 10 == 9:
            gc.collect()
            alive.append(dt.cache_info()["layouts"].kept)
    assert max(alive[3:]) <= max(alive[:3]) + 5, alive
    assert dt.Layout.of(MESH, [dt.Shard(0)], (77,)) is held._layout is twin._layout is held.cos()._layout
    assert (held + twin).placements == (dt.Shard(0),)


@pytest.mark.slow
def test_threads_that_meet_operators_and_shapes_first_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry per operator, one object per layout, and bounds that hold, however the threads are interleaved."""
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 40)
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.each", 6)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            dispatching.clear_plans()
            _at_once(8)
    finally:
        sys.setswitchinterval(interval)
        dispatching.clear_plans()


def _at_once(threads: int) -> None:
    barrier = threading.Barrier(threads)

    def work(_: int) -> list[dt.Layout]:
        barrier.wait()
        x = [dt.zeros(size, device_mesh=MESH, placements=[dt.Shard(0)]) for size in range(3, 11)]
        return [y._layout for operator in OPERATORS for y in map(operator, x)]

    with ThreadPoolExecutor(threads) as pool:
        first, *others = pool.map(work, range(threads))
    assert len(first) == 80
    assert all(a is b for other in others for a, b in zip(first, other, strict=True))
    info = dt.cache_info()
    assert all(cache.kept <= cache.limit for cache in info.values() if cache.limit is not None), info


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {
        name.id if isinstance(name, ast.Name) else name.attr
        for d in node.decorator_list
        for name in ast.walk(d)
        if isinstance(name, (ast.Name, ast.Attribute))
    }


def test_no_cache_without_bound() -> None:
    """Functions that remember their results do so with a bound, in sight of ``cache_info``; those without arguments have one."""
    package = Path(dt.__file__).parent
    loose = [
        f"{path.name}: {node.name}"
        for path in package.rglob("*.py")
        if "testing" not in path.parts and path.name != "caches.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.args.args and _decorators(node) & {"cache", "lru_cache"}
    ]
    assert loose == []
    assert {
        "layout.splits.chunk_sizes",
        "redistributions",
        "infer.answers",
        "prices.tables",
        "propagation.op_schema.operator_schema_of",
    } <= dt.cache_info().keys()


def test_layouts_die_with_their_last_use() -> None:
    layout._BY_REQUEST.clear()
    gc.collect()
    before = dt.cache_info()["layouts"].kept
    for size in range(5000, 5100):
        dt.Layout.of(MESH, [dt.Shard(0)], (size,))
    layout._BY_REQUEST.clear()
    gc.collect()
    assert dt.cache_info()["layouts"].kept <= before


@pytest.mark.slow
def test_a_hundred_thousand_operations() -> None:
    """Six or so a step; a program in its 2nd tenth against its last."""
    seconds, memory = [], []
    for tenth in range(10):
        start = time.thread_time()
        for k in range(1700):
            _step(1 + (tenth * 1700 + k) % 40_000, torch.rand(()).item())
        gc.collect()
        seconds.append(time.thread_time() - start)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert seconds[-1] < 1.5 * min(seconds[1:4]), seconds
    assert memory[-1] - memory[4] < 30, memory  # MiB; caches are full by then
