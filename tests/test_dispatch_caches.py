"""Caches of dispatch are bounded: programs whose shapes and numbers change at each step keep memory and time per op flat."""

from __future__ import annotations

import ast
import gc
import resource
import time
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor import dispatch as dispatching
from dtensor import infer, layout, prices
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
    monkeypatch.setattr("dtensor.dispatch.CACHE_LIMIT", 20)
    monkeypatch.setattr("dtensor.layout._LIMIT", 30)
    monkeypatch.setattr("dtensor.redistribute.planner._LIMIT", 20)
    monkeypatch.setattr("dtensor.infer._LIMIT", 2)
    monkeypatch.setattr("dtensor.prices._LIMIT", 2)
    for module in (infer._ANSWERS, prices._TABLES, layout._BY_REQUEST, planner._PLANS):
        module.clear()
    dispatching.clear_plans()  # type: ignore[attr-defined]  # a module
    for size in range(1, 120):
        _step(size, 1 / size)
        info = dt.cache_info()
        assert all(cache.kept <= cache.limit for cache in info.values() if cache.limit is not None), info
    assert max(cache.made or 0 for cache in info.values()) >= 119  # each shape is a plan of its own


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
        if "testing" not in path.parts and path.name != "remembered.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.args.args and _decorators(node) & {"cache", "lru_cache"}
    ]
    assert loose == []
    assert {
        "layout.chunk_sizes",
        "redistributions",
        "infer.answers",
        "prices.tables",
        "operators.operator_of",
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
