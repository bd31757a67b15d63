"""``trace``: what a program does, over time, as a file that Perfetto and chrome://tracing open.

Each rank is a process of the trace, with a track for what it computes and one for what it communicates, and a counter of what it
holds. Arrows join the ranks of one collective. On a dry run, which takes no time worth showing, spans are as long as estimated.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace events, JSON object form).
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.scoped import entering
from .holdings import told_by_all
from .operators import LocalCall, Operation
from .seen import Movement, Record

COMPUTE, COMMUNICATION = 0, 1  # tracks
Event = dict[str, Any]


@entering
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """A ``with`` block, or a decorator of functions, that writes what ran inside to ``path``: JSON of trace events.

    Open it in https://ui.perfetto.dev or chrome://tracing. Each operator has its layouts, FLOPs, line and module; each
    collective its bytes, its estimated time and why it was needed. On processes all ranks enter the block, and the first writes
    one file for all: what each has seen is exchanged at the end, once. The clocks are those of the hosts. Where the block
    raises, nothing is written, as other ranks might not come to the exchange.

    With all ranks in one process their operators run one after the other, and are shown so. On a mesh of ``"meta"`` time is
    what the profile of the machine estimates: a rank computes or communicates, never both.

    >>> import json, pathlib, tempfile, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with dt.trace(f"{folder}/trace.json"):
    ...         _ = x @ x.t()
    ...     events = json.loads(pathlib.Path(f"{folder}/trace.json").read_text())["traceEvents"]
    >>> [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
    [(0, 'all_gather'), (1, 'all_gather'), (0, 'aten::mm'), (1, 'aten::mm')]
    """
    with Record(computing=True) as record:
        began = time.perf_counter_ns()
        yield
    save(record, began, path)


def save(record: Record, began: int, path: str | os.PathLike[str]) -> None:
    """Writes what was recorded since ``began``, of all ranks; all of them call it, and the first writes."""
    events = list(events_of(record, began))
    told = told_by_all(record.holdings, (time.time_ns() - time.perf_counter_ns() + began, events))
    if len(told) == 1 or dist.get_rank() == 0:
        first = min(start for start, _ in told)
        merged = [_later(event, (start - first) / 1e3) for start, each in told for event in each]
        Path(path).write_text(json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}))


def events_of(record: Record, began: int) -> Iterator[Event]:
    """Of the ranks that are here; ``began``: when, in nanoseconds of ``time.perf_counter_ns``. Times are in microseconds."""
    ranks = record.holdings.everyone()
    clock = _Estimated(record) if _is_dry(record) else _Measured(began)
    for rank in ranks:
        yield _named(rank, None, f"rank {rank}")
        yield _named(rank, COMPUTE, "compute")
        yield _named(rank, COMMUNICATION, "communication")
    collectives: Counter[tuple[int, ...]] = Counter()
    for movement in record.movements:
        for group in movement.event.groups or (tuple(ranks),):
            number = collectives[group]
            collectives[group] += 1
            yield from _collective(movement, group, [rank for rank in group if rank in ranks], number, clock)
    for operation in record.operations:
        for call in operation.calls:
            for rank in ranks if call.rank is None else (call.rank,):
                yield _span(rank, COMPUTE, call.operator, *clock.of_call(operation, call), _about(operation, call))
    for rank in ranks:
        yield from _memory(record, rank, clock)


# --- when ---------------------------------------------------------------------------------------------------------------
class _Measured:
    """As the clock of this process has it; spans are (beginning, duration)."""

    def __init__(self, began: int) -> None:
        self._began = began

    def of_call(self, operation: Operation, call: LocalCall) -> tuple[float, float]:
        return self._span(call.start, call.end)

    def of_movement(self, movement: Movement) -> tuple[float, float]:
        """From when it was issued to its end; what runs meanwhile overlaps it."""
        return self._span(movement.spans[0][0], movement.spans[-1][1]) if movement.spans else (0.0, 0.0)

    def of_entry(self, when: int) -> float:
        return (when - self._began) / 1e3

    def _span(self, start: int, end: int) -> tuple[float, float]:
        return (start - self._began) / 1e3, (end - start) / 1e3


class _Estimated:
    """One after the other, each as long as estimated."""

    def __init__(self, record: Record) -> None:
        self._spans: dict[int, tuple[float, float]] = {}
        self._marks: list[tuple[int, float]] = []  # when something began in truth, and how late it is when it has ended
        calls = [(call.start, call, operation.estimated(call)) for operation in record.operations for call in operation.calls]
        moved = [(one.spans[0][0], one, one.seconds) for one in record.movements if one.spans]
        now = 0.0
        for start, one, seconds in sorted([*calls, *moved], key=lambda item: item[0]):
            self._spans[id(one)] = now, seconds * 1e6
            now += seconds * 1e6
            self._marks.append((start, now))

    def of_call(self, operation: Operation, call: LocalCall) -> tuple[float, float]:
        return self._spans[id(call)]

    def of_movement(self, movement: Movement) -> tuple[float, float]:
        return self._spans.get(id(movement), (0.0, 0.0))

    def of_entry(self, when: int) -> float:
        after = bisect_right(self._marks, when, key=lambda mark: mark[0])
        return self._marks[after - 1][1] if after else 0.0


def _is_dry(record: Record) -> bool:
    meshes = [one.event.mesh for one in record.movements] + [one.mesh for one in record.operations]
    return any(mesh is not None and mesh.kind == "dry_run" for mesh in meshes)


def _later(event: Event, microseconds: float) -> Event:
    return {**event, "ts": event["ts"] + microseconds} if "ts" in event else event


# --- events -------------------------------------------------------------------------------------------------------------
def _named(rank: int, track: int | None, name: str) -> Event:
    what, thread = ("process_name", COMPUTE) if track is None else ("thread_name", track)
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _span(rank: int, track: int, name: str, start: float, duration: float, about: dict[str, Any]) -> Event:
    cat = "communication" if track == COMMUNICATION else "compute"
    return {"ph": "X", "pid": rank, "tid": track, "ts": start, "dur": duration, "name": name, "cat": cat, "args": about}


def _collective(
    movement: Movement, group: tuple[int, ...], here: list[int], number: int, clock: _Measured | _Estimated
) -> Iterator[Event]:
    """On each rank of a group that is here, with an arrow from the first of the group to the others."""
    start, duration = clock.of_movement(movement)
    about = {
        "operator": movement.operator,
        "line": movement.place.line,
        "module": movement.module,
        "phase": movement.phase,
        "group": list(group),
        "bytes": movement.bytes,
        "estimated_us": movement.seconds * 1e6,
        "steps": [str(step) for step in movement.steps],
    }
    kind = movement.event.kind
    for rank in here:
        yield _span(rank, COMMUNICATION, kind, start, duration, about)
    dry = movement.event.mesh is not None and movement.event.mesh.kind == "dry_run"
    for other in () if dry else group[1:]:  # an arrow has one end: each is one of its own
        flow = {"name": kind, "cat": "collective", "id": f"{'-'.join(map(str, group))}/{number}/{other}", "tid": COMMUNICATION}
        if group[0] in here:
            yield {**flow, "ph": "s", "pid": group[0], "ts": start}
        if other in here:
            yield {**flow, "ph": "f", "bp": "e", "pid": other, "ts": start + duration}


def _about(operation: Operation, call: LocalCall) -> dict[str, Any]:
    return {
        "operator": operation.operator,
        "operands": list(operation.operands),
        "results": list(operation.results),
        "line": operation.place.line,
        "module": operation.module,
        "phase": operation.phase,
        "flops": call.flops,
        "bytes": call.bytes,
        "estimated_us": operation.estimated(call) * 1e6,
    }


def _memory(record: Record, rank: int, clock: _Measured | _Estimated) -> Iterator[Event]:
    log = record.holdings.log
    for count, held in record.holdings.over_time(rank):
        when = clock.of_entry(log[count - 1][0]) if count else 0.0
        yield {"ph": "C", "pid": rank, "tid": COMPUTE, "ts": when, "name": "memory", "args": dict(held)}
