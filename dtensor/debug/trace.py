"""Trace: write the timeline of a program as a file that Perfetto and chrome://tracing open.

Each rank is a process of the trace, with a track for compute, a track for communication and a counter of its memory. Arrows join
the ranks of one collective. In a dry run the measured times mean nothing, so spans have estimated durations.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace events, JSON object form).
"""

from __future__ import annotations

import gzip
import json
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..base.mode_stack import mode_context
from ..recorders.memory_tracker import gather_from_processes
from ..recorders.operator_recorder import RecordedLocalCall, RecordedOperation
from ..recorders.run_recorder import RecordedCollective, RunRecorder

COMPUTE, COMMUNICATION = 0, 1  # tracks
_MEMORY_STEPS = 200  # a change is written if it is at least this fraction of the peak
TraceEvent = dict[str, Any]


@mode_context
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a trace of a ``with`` block, or of each call of a decorated function, to ``path``.

    The file is JSON of trace events, compressed with gzip if ``path`` ends in ``.gz``. Open it in https://ui.perfetto.dev or
    chrome://tracing. Each operator has its layouts, FLOP, line and module. Each collective has its bytes, its estimated time and
    the operator that needed it. On processes all ranks enter the block and rank 0 writes one file for all, after one exchange at
    the end. Times are those of the hosts' clocks. If the block raises, nothing is written, because other ranks might not take
    part in the exchange.

    With all ranks in one process the operators of the ranks run one after the other, and are shown so. On a ``"meta"`` mesh times
    are estimated by the cost model, and a rank never computes and communicates at the same time.

    >>> import json, pathlib, tempfile, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with dt.trace(f"{folder}/trace.json"):
    ...         _ = x @ x.t()
    ...     events = json.loads(pathlib.Path(f"{folder}/trace.json").read_text())["traceEvents"]
    >>> [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
    [(0, 'all_gather'), (1, 'all_gather'), (0, 'aten::mm'), (1, 'aten::mm')]
    """
    with RunRecorder(with_operators=True) as record:
        began = time.perf_counter_ns()
        yield
    save_trace(record, began, path)


def save_trace(record: RunRecorder, began: int, path: str | os.PathLike[str]) -> None:
    """Gather the events of all ranks since ``began`` and write them on rank 0 as a trace file. All ranks call it."""
    events = list(events_of(record, began))
    gathered = gather_from_processes(record.tracker, (time.time_ns() - time.perf_counter_ns() + began, events))
    if len(gathered) == 1 or dist.get_rank() == 0:
        first = min(start for start, _ in gathered)
        merged = [
            {**event, "ts": event["ts"] + (start - first) / 1e3} if "ts" in event else event
            for start, each in gathered
            for event in each
        ]
        text = json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
        Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def events_of(record: RunRecorder, began: int) -> Iterator[TraceEvent]:
    """Yield the trace events of this process's ranks; ``began``: the start, by ``time.perf_counter_ns``."""
    ranks = record.tracker.current_ranks()
    clock = _estimated_clock(record) if _is_dry_run(record) else _measured_clock(record, began)
    for rank in ranks:
        yield _name_event(rank, None, f"rank {rank}")
        yield _name_event(rank, COMPUTE, "compute")
        yield _name_event(rank, COMMUNICATION, "communication")
    collectives: Counter[tuple[int, ...]] = Counter()
    for collective in record.movements:
        for group in collective.event.groups or (tuple(ranks),):
            number = collectives[group]
            collectives[group] += 1
            yield from _collective_events(collective, group, [rank for rank in group if rank in ranks], number, clock)
    for operation in record.operations:
        for call in operation.calls:
            for rank in ranks if call.rank is None else (call.rank,):
                yield _span_event(rank, COMPUTE, call.operator, *clock.spans[id(call)], _call_details(operation, call))
    for rank in ranks:
        yield from _memory_events(record, rank, clock)


# --- when ---------------------------------------------------------------------------------------------------------------
class _Clock(NamedTuple):
    """Start and duration of each recorded call and collective in a trace, in microseconds.

    Attributes:
        spans: by ``id`` of a local call or a collective, its start and its duration.
        at: a function from a time of ``time.perf_counter_ns`` to microseconds of the trace.
    """

    spans: dict[int, tuple[float, float]]
    at: Callable[[int], float]


def _measured_clock(record: RunRecorder, began: int) -> _Clock:
    """Return the measured times of calls and collectives, relative to ``began`` (``time.perf_counter_ns``)."""
    timed: list[tuple[Any, int, int]] = [(call, call.start, call.end) for item in record.operations for call in item.calls]
    timed += [(item, item.spans[0][0], item.spans[-1][1]) for item in record.movements if item.spans]
    spans = {id(item): ((start - began) / 1e3, (end - start) / 1e3) for item, start, end in timed}
    return _Clock(spans, lambda when: (when - began) / 1e3)


def _estimated_clock(record: RunRecorder) -> _Clock:
    """Return estimated times, as if calls and collectives ran one after another, each for its estimated duration."""
    ran: list[tuple[int, Any, float]] = [
        (call.start, call, one.estimated(call)) for one in record.operations for call in one.calls
    ]
    ran += [(one.spans[0][0], one, one.seconds) for one in record.movements if one.spans]
    spans, marks, now = {}, [], 0.0  # marks: (measured start, estimated end)
    for start, one, seconds in sorted(ran, key=lambda item: item[0]):
        spans[id(one)] = now, seconds * 1e6
        now += seconds * 1e6
        marks.append((start, now))

    def at(when: int) -> float:
        after = bisect_right(marks, when, key=lambda mark: mark[0])
        return marks[after - 1][1] if after else 0.0

    return _Clock(spans, at)


def _is_dry_run(record: RunRecorder) -> bool:
    meshes = [one.event.mesh for one in record.movements] + [one.mesh for one in record.operations]
    return any(mesh is not None and mesh.kind == "dry_run" for mesh in meshes)


# --- events -------------------------------------------------------------------------------------------------------------
def _name_event(rank: int, track: int | None, name: str) -> TraceEvent:
    what, thread = ("process_name", COMPUTE) if track is None else ("thread_name", track)
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _span_event(rank: int, track: int, name: str, start: float, duration: float, details: dict[str, Any]) -> TraceEvent:
    cat = "communication" if track == COMMUNICATION else "compute"
    return {"ph": "X", "pid": rank, "tid": track, "ts": start, "dur": duration, "name": name, "cat": cat, "args": details}


def _collective_events(
    collective: RecordedCollective, group: tuple[int, ...], local_ranks: list[int], number: int, clock: _Clock
) -> Iterator[TraceEvent]:
    """Yield a trace span of a collective for each local rank of its group, and arrows between the ranks."""
    start, duration = clock.spans.get(id(collective), (0.0, 0.0))
    details = {
        "operator": collective.operator,
        "line": collective.place.line,
        "module": collective.module,
        "phase": collective.phase,
        "group": list(group),
        "bytes": collective.bytes,
        "estimated_us": round(collective.seconds * 1e6, 3),
        "steps": [str(step) for step in collective.steps],
    }
    kind = collective.event.kind
    for rank in local_ranks:
        yield _span_event(rank, COMMUNICATION, kind, start, duration, details)
    is_dry = collective.event.mesh is not None and collective.event.mesh.kind == "dry_run"
    for other in () if is_dry else group[1:]:  # an arrow has one end: each pair of ranks needs its own
        flow = {"name": kind, "cat": "collective", "id": f"{'-'.join(map(str, group))}/{number}/{other}", "tid": COMMUNICATION}
        if group[0] in local_ranks:
            yield {**flow, "ph": "s", "pid": group[0], "ts": start}
        if other in local_ranks:
            yield {**flow, "ph": "f", "bp": "e", "pid": other, "ts": start + duration}


def _call_details(operation: RecordedOperation, call: RecordedLocalCall) -> dict[str, Any]:
    """Return the details that the timeline shows for one local call."""
    return {
        "operator": operation.operator,
        "operands": list(operation.operands),
        "results": list(operation.results),
        "line": operation.place.line,
        "module": operation.module,
        "phase": operation.phase,
        "flops": call.flops,
        "bytes": call.bytes,
        "estimated_us": round(operation.estimated(call) * 1e6, 3),
    }


def _memory_events(record: RunRecorder, rank: int, clock: _Clock) -> Iterator[TraceEvent]:
    """Yield trace counters of a rank's memory by kind, at larger changes, at the peak and at the end."""
    log, (peak, _, _) = record.tracker.log, record.tracker.peak_of(rank)
    least, written = max(peak / _MEMORY_STEPS, 1), -peak

    def counter(count: int, sizes: Counter[str]) -> TraceEvent:
        when = clock.at(log[count - 1][0]) if count else 0.0
        return {"ph": "C", "pid": rank, "tid": COMPUTE, "ts": when, "name": "memory", "args": dict(sizes)}

    last: tuple[int, Counter[str]] = (0, Counter())
    for last in record.tracker.sizes_over_time(rank):
        total = last[1].total()
        if abs(total - written) >= least or total == peak != written:
            written = total
            yield counter(*last)
    yield counter(*last)
