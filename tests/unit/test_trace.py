"""Traces: valid Chrome trace format, the numbers of CommDebugMode and dt.memory, one file of all processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from case_lists import S0, S1, R, distribute_values, make_values
from gloo_processes import run_gloo
from torch import nn
from trace_format import read_trace_events

import dtensor as dt
from dtensor.debug import CommDebugMode


def train_step(mesh: dt.DeviceMesh) -> None:
    w = nn.Parameter(dt.ones(7, 6, device_mesh=mesh, placements=[S0]))
    x = dt.ones(5, 7, device_mesh=mesh, placements=[S0])
    (x @ w).relu().sum().backward()
    torch.optim.SGD([w], momentum=0.9).step()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_trace_has_each_collective_operator_and_memory_kind_on_each_rank(tmp_path: Path, device: str) -> None:
    mesh = dt.init_device_mesh(device, (3,))
    with CommDebugMode() as comm, dt.trace(tmp_path / "trace.json"):
        train_step(mesh)
    events = read_trace_events(tmp_path / "trace.json")
    ranks = range(3) if device == "cpu" else range(1)
    for rank in ranks:
        collectives = [event for event in events if event["ph"] == "X" and event["tid"] == 1 and event["pid"] == rank]
        assert len(collectives) == comm.get_total_counts() > 0
        assert sum(event["args"]["bytes"] for event in collectives) == sum(comm.get_comm_bytes().values())
        assert all("test_trace.py" in event["args"]["line"] for event in collectives)
        assert {"aten::mm", "aten::relu"} <= {event["name"] for event in events if event["pid"] == rank and event["tid"] == 0}
        counters = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert {"parameters", "gradients", "optimizer state"} <= set(counters[-1])
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == (2 * comm.get_total_counts() if device == "cpu" else 0)


def test_trace_arrows_of_a_submesh_collective_stay_within_its_group(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.ones(5, 6, device_mesh=mesh["tp"], placements=[S0])
    with dt.trace(tmp_path / "trace.json"):
        x.redistribute(placements=[R])
    arrows = {event["id"]: event["pid"] for event in read_trace_events(tmp_path / "trace.json") if event["ph"] in "f"}
    assert arrows == {"0-1/0/1": 1, "2-3/0/3": 3}


def test_trace_of_a_dry_run_has_the_estimated_durations(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("meta", (4,))

    def program() -> None:
        x = dt.ones(4096, 4096, device_mesh=mesh, placements=[S0])
        x.redistribute(placements=[R]) @ x

    report = dt.explain(program)
    with dt.trace(tmp_path / "trace.json"):
        program()
    spans = sorted((event["ts"], event["dur"]) for event in read_trace_events(tmp_path / "trace.json") if event["ph"] == "X")
    expected = report.seconds + sum(operation.seconds for operation in report.operations)
    assert sum(duration for _, duration in spans) == pytest.approx(expected * 1e6)
    assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(spans))


def test_trace_block_that_raises_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), dt.trace(tmp_path / "trace.json"):
        _ = distribute_values(make_values(5), S0) + distribute_values(make_values(5), S0), 1 / 0
    assert not (tmp_path / "trace.json").exists()


def test_trace_with_a_gz_path_is_compressed_with_equal_events(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("meta", (3,))
    for name in ("trace.json", "trace.json.gz"):
        with dt.trace(tmp_path / name):
            train_step(mesh)
    plain, compressed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    assert len(read_trace_events(plain)) == len(read_trace_events(compressed)) > 0
    assert compressed.stat().st_size < plain.stat().st_size / 4


def test_trace_memory_counters_have_the_peak_and_skip_small_changes(tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))

    def program() -> None:
        large = dt.ones(1000, 10, device_mesh=mesh)
        for _ in range(50):  # 8 bytes each, compared with 40,000
            dt.ones(2, device_mesh=mesh) + 1
        large + 1

    found = dt.memory(program)
    with dt.trace(tmp_path / "trace.json"):
        program()
    for rank in (0, 1):
        sizes = [
            sum(e["args"].values()) for e in read_trace_events(tmp_path / "trace.json") if e["ph"] == "C" and e["pid"] == rank
        ]
        assert (max(sizes), sizes[-1]) == (found.peaks[rank], found.timeline[rank][-1].bytes)
        assert len(sizes) < 10


def test_trace_of_a_decorated_function_has_the_events_of_its_call(tmp_path: Path) -> None:
    @dt.trace(tmp_path / "trace.json")
    def run() -> dt.DTensor:
        return distribute_values(make_values(5, 6), S0) + distribute_values(make_values(5, 6), S1)

    assert run().shape == (5, 6)
    assert "all_to_all" in {event["name"] for event in read_trace_events(tmp_path / "trace.json")}


def _trace_on_processes(folder: str) -> int:
    mesh = dt.init_device_mesh("cpu", (2,))
    with CommDebugMode() as comm, dt.trace(f"{folder}/trace.json"):
        train_step(mesh)
    return comm.get_total_counts()


@pytest.mark.gloo
def test_trace_on_processes_writes_one_file_with_the_events_of_all_ranks(tmp_path: Path) -> None:
    counts = run_gloo(_trace_on_processes, 2, str(tmp_path))
    events = read_trace_events(tmp_path / "trace.json")
    for rank, count in enumerate(counts):
        assert sum(event["ph"] == "X" and event["tid"] == 1 and event["pid"] == rank for event in events) == count
        assert any(event["ph"] == "C" and event["pid"] == rank for event in events)
    assert sum(event["ph"] == "f" for event in events) == counts[0]
