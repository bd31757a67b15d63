"""Traces: what the documented format asks for, the numbers of the record, one file from all ranks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from case_lists import S0, S1, R, put, value
from gloo import run_gloo
from torch import nn

import dtensor as dt
from dtensor.debug import CommDebugMode

NUMBER = (int, float)
# phase -> what such an event has, of which types (the trace event format: duration, metadata, counter and flow events)
FORMAT: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "M": {"name": str, "args": dict},
    "C": {"name": str, "ts": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "ts": NUMBER, "id": (int, str)},
    "f": {"name": str, "cat": str, "ts": NUMBER, "id": (int, str), "bp": str},
}


def checked(path: Path) -> list[dict[str, Any]]:
    """The events of a file, which is as the format says."""
    read = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert read["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = read["traceEvents"]
    starts: dict[Any, dict[str, Any]] = {}
    for event in events:
        for name, kind in FORMAT[event["ph"]].items():
            assert isinstance(event[name], kind), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
        if event["ph"] == "C":
            assert all(isinstance(size, int) and size >= 0 for size in event["args"].values()), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        if event["ph"] == "s":
            assert event["id"] not in starts
            starts[event["id"]] = event
    ends = [event for event in events if event["ph"] == "f"]
    assert sorted(event["id"] for event in ends) == sorted(starts)
    for end in ends:
        begin = starts[end["id"]]
        assert (end["cat"], end["name"], end["bp"]) == (begin["cat"], begin["name"], "e")
        assert end["pid"] != begin["pid"]
        assert any(inside(event, end) for event in events if event["ph"] == "X")
        assert any(inside(event, begin) for event in events if event["ph"] == "X")
    return events


def inside(span: dict[str, Any], at: dict[str, Any]) -> bool:
    """Arrows bind to the span around their end."""
    same = (span["pid"], span["tid"]) == (at["pid"], at["tid"])
    return bool(same and span["ts"] <= at["ts"] <= span["ts"] + span["dur"] + 1e-3)


def step(mesh: dt.DeviceMesh) -> None:
    w = nn.Parameter(dt.ones(7, 6, device_mesh=mesh, placements=[S0]))
    x = dt.ones(5, 7, device_mesh=mesh, placements=[S0])
    (x @ w).relu().sum().backward()
    torch.optim.SGD([w], momentum=0.9).step()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_trace_is_in_the_format_and_has_every_collective_on_every_rank(tmp_path: Path, device: str) -> None:
    mesh = dt.init_device_mesh(device, (3,))
    with CommDebugMode() as comm, dt.trace(tmp_path / "trace.json"):
        step(mesh)
    events = checked(tmp_path / "trace.json")
    ranks = range(3) if device == "cpu" else range(1)
    for rank in ranks:
        moved = [event for event in events if event["ph"] == "X" and event["tid"] == 1 and event["pid"] == rank]
        assert len(moved) == comm.get_total_counts() > 0
        assert sum(event["args"]["bytes"] for event in moved) == sum(comm.get_comm_bytes().values())
        assert all("test_trace.py" in event["args"]["line"] for event in moved)
        assert {"aten::mm", "aten::relu"} <= {event["name"] for event in events if event["pid"] == rank and event["tid"] == 0}
        counters = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert {"parameters", "gradients", "optimizer state"} <= set(counters[-1])
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == (2 * comm.get_total_counts() if device == "cpu" else 0)


def test_a_submesh_has_arrows_within_its_copies(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.ones(5, 6, device_mesh=mesh["tp"], placements=[S0])
    with dt.trace(tmp_path / "trace.json"):
        x.redistribute(placements=[R])
    arrows = {event["id"]: event["pid"] for event in checked(tmp_path / "trace.json") if event["ph"] in "f"}
    assert arrows == {"0-1/0/1": 1, "2-3/0/3": 3}


def test_a_dry_run_takes_the_time_that_is_estimated(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("meta", (4,))

    def program() -> None:
        x = dt.ones(4096, 4096, device_mesh=mesh, placements=[S0])
        x.redistribute(placements=[R]) @ x

    told = dt.explain(program)
    with dt.trace(tmp_path / "trace.json"):
        program()
    spans = sorted((event["ts"], event["dur"]) for event in checked(tmp_path / "trace.json") if event["ph"] == "X")
    expected = told.seconds + sum(operation.seconds for operation in told.operations)
    assert sum(duration for _, duration in spans) == pytest.approx(expected * 1e6)
    assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(spans))


def test_a_block_that_raises_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), dt.trace(tmp_path / "trace.json"):
        _ = put(value(5), S0) + put(value(5), S0), 1 / 0
    assert not (tmp_path / "trace.json").exists()


@dt.trace("/dev/null")
def decorated() -> dt.DTensor:
    return put(value(5, 6), S0) + put(value(5, 6), S1)


def test_a_function_can_be_traced() -> None:
    assert decorated().shape == (5, 6)


def _on_processes(folder: str) -> int:
    mesh = dt.init_device_mesh("cpu", (2,))
    with CommDebugMode() as comm, dt.trace(f"{folder}/trace.json"):
        step(mesh)
    return comm.get_total_counts()


@pytest.mark.gloo
def test_processes_write_one_file(tmp_path: Path) -> None:
    counts = run_gloo(_on_processes, 2, str(tmp_path))
    events = checked(tmp_path / "trace.json")
    for rank, count in enumerate(counts):
        assert sum(event["ph"] == "X" and event["tid"] == 1 and event["pid"] == rank for event in events) == count
        assert any(event["ph"] == "C" and event["pid"] == rank for event in events)
    assert sum(event["ph"] == "f" for event in events) == counts[0]
