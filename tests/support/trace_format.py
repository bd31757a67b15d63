"""Trace format: check files against the documented trace event format, so that Perfetto and chrome://tracing open them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

NUMBER = (int, float)
# phase -> what such an event has, of which types (the trace event format: duration, metadata, counter and flow events)
FORMAT: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "M": {"name": str, "args": dict},
    "C": {"name": str, "ts": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "ts": NUMBER, "id": (int, str)},
    "f": {"name": str, "cat": str, "ts": NUMBER, "id": (int, str), "bp": str},
}


def read_trace_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file; assert that the file follows the trace event format."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
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
        assert any(is_inside_span(event, end) for event in events if event["ph"] == "X")
        assert any(is_inside_span(event, begin) for event in events if event["ph"] == "X")
    return events


def is_inside_span(span: dict[str, Any], at: dict[str, Any]) -> bool:
    """Return whether an arrow's end is on the thread and within the time of a span, to which viewers bind it."""
    same = (span["pid"], span["tid"]) == (at["pid"], at["tid"])
    return bool(same and span["ts"] <= at["ts"] <= span["ts"] + span["dur"] + 1e-3)
