"""Dispatch caches: bounded for programs with changing shapes and numbers, and consistent under threads."""

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
from parsed_modules import parse_source

import dtensor as dt
from dtensor.base.caches import BoundedDict
from dtensor.dispatch import dispatcher
from dtensor.layout import layout
from dtensor.propagation import shape_inference, strategy_table
from dtensor.redistribute import planner

MESH = dt.DeviceMesh("meta", 4)


def _step(size: int, number: float) -> None:
    x = dt.zeros(size, 3, device_mesh=MESH, placements=[dt.Shard(0)])
    y = (x * number + x).t()
    y.redistribute(placements=[dt.Shard(0)]).add_(x.t(), alpha=number)


def test_different_python_numbers_share_one_plan() -> None:
    _step(8, 0.5)
    before = {name: info.made for name, info in dt.cache_info().items()}
    for k in range(50):
        _step(8, k / 7)
    assert {name: info.made for name, info in dt.cache_info().items()} == before


def test_caches_stay_bounded_with_changing_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.each", 20)
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 70)
    for cache, limit in (
        (shape_inference._INFERENCE_CACHE, 2),
        (strategy_table._TABLE_CACHE, 2),
        (layout._BY_REQUEST, 30),
        (planner._PLANS, 20),
    ):
        cache.clear()
        monkeypatch.setattr(cache, "limit", limit)
    dispatcher.clear_plans()
    for size in range(1, 120):
        _step(size, 1 / size)
        info = dt.cache_info()
        assert all(cache.kept <= cache.limit for cache in info.values() if cache.limit is not None), info
    assert max(cache.made or 0 for cache in info.values()) >= 119  # each shape has its own plan


OPERATORS = (torch.cos, torch.sin, torch.exp, torch.tanh, torch.relu, torch.abs, torch.neg, torch.erf, torch.ceil, torch.sign)


@pytest.mark.slow
def test_plans_of_all_operators_together_stay_bounded_with_changing_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator reaches its own bound. Tensors that are alive keep their layout after plans are dropped."""
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 64)
    for name, limit in (
        ("layout.layout._BY_REQUEST", 16),
        ("redistribute.planner._PLANS", 99),
        ("propagation.strategy_table._TABLE_CACHE", 99),
    ):
        monkeypatch.setattr(f"dtensor.{name}", BoundedDict(limit))
    dispatcher.clear_plans()
    live = dt.zeros(77, device_mesh=MESH, placements=[dt.Shard(0)])
    same_layout = live.cos()
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
    assert dt.Layout.of(MESH, [dt.Shard(0)], (77,)) is live._layout is same_layout._layout is live.cos()._layout
    assert (live + same_layout).placements == (dt.Shard(0),)


@pytest.mark.slow
def test_threads_that_plan_the_same_calls_at_once_share_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout is one object, and bounds hold, for each interleaving of threads."""
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.together", 40)
    monkeypatch.setattr("dtensor.dispatch.dispatcher.PLANS.each", 6)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            dispatcher.clear_plans()
            _run_in_threads(8)
    finally:
        sys.setswitchinterval(interval)
        dispatcher.clear_plans()


def _run_in_threads(threads: int) -> None:
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


def test_functions_with_arguments_have_bounded_caches() -> None:
    """Functions with arguments use bounded caches that ``cache_info`` lists."""
    package = Path(dt.__file__).parent
    unbounded = [
        f"{path.name}: {node.name}"
        for path in package.rglob("*.py")
        if "testing" not in path.parts and path.name != "caches.py"
        for node in parse_source(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.args.args and _decorators(node) & {"cache", "lru_cache"}
    ]
    assert unbounded == []
    assert {
        "layout.splits.chunk_sizes",
        "redistributions",
        "shape_inference.results",
        "strategy_table.tables",
        "propagation.op_schema.operator_schema_of",
    } <= dt.cache_info().keys()


def test_unused_layouts_are_freed() -> None:
    layout._BY_REQUEST.clear()
    gc.collect()
    before = dt.cache_info()["layouts"].kept
    for size in range(5000, 5100):
        dt.Layout.of(MESH, [dt.Shard(0)], (size,))
    layout._BY_REQUEST.clear()
    gc.collect()
    assert dt.cache_info()["layouts"].kept <= before


@pytest.mark.slow
def test_time_and_memory_stay_flat_over_a_hundred_thousand_operations() -> None:
    """A step has about six operations. Compare the seconds and memory of early and late tenths of the program."""
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
