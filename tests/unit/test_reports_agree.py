"""Every view of what a program moves has the same numbers: on the programs of the lists of cases, here and on processes.

Under all other tests the same is held to what arrives (``tests/support/check_reported_bytes.py``).
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from itertools import zip_longest
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

from dtensor.comm.events import Event
from dtensor.debug import CommDebugMode
from dtensor.debug.budget import Limits, excess_message, usage_of
from dtensor.debug.explain import Explanation
from dtensor.debug.run_recorder import RunRecorder
from dtensor.debug.trace import COMMUNICATION, events_of

LISTS = (
    "process_cases",
    "pytorch_defect_cases",
    "torch_feature_cases",
    "random_cases",
    "reported_operator_cases",
    "reported_recent_cases",
    "reported_tensor_cases",
)
HELD = {"ranks_seeded_differently_draw_alike"}  # they do something for each piece that is here
EVERY = 60  # of the list, in each run; the others are slow
PROGRAMS = [
    pytest.param(name, case, id=case, marks=() if k % EVERY == 0 else pytest.mark.slow)
    for name in LISTS
    for k, case in enumerate(importlib.import_module(name).CASES.here)
]


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize(("cases", "name"), PROGRAMS)
def test_every_view_has_the_same_numbers(cases: str, name: str) -> None:
    began = time.perf_counter_ns()
    with CommDebugMode() as comm, RunRecorder(with_operators=True) as record:
        importlib.import_module(cases).CASES[name]()
    told, traced = Explanation.from_record(record), list(events_of(record, began))
    kinds, sizes = Counter[str](), Counter[str]()
    for movement in told.movements:
        kinds[movement.event.kind] += 1
        sizes[movement.event.kind] += movement.bytes
    assert comm.get_comm_counts() == kinds
    assert comm.get_comm_bytes() == dict(sizes)
    assert told.exchanges == comm.get_exchange_count()
    assert told.bytes == sum(line.bytes for line in told.lines) == sizes.total()
    assert all(movement.place.file for movement in told.movements)
    assert _in_trace(traced, told.memory.peaks) == _expected(told)
    assert usage_of(record) == Limits(told.bytes, len(told.movements), told.flops, told.memory.peak)
    assert not excess_message(record, usage_of(record))
    str(told)


def _in_trace(traced: list[dict[str, Any]], ranks: dict[int, int]) -> dict[int, tuple[Counter[tuple[str, int]], int, int]]:
    """By rank the collectives, each with its bytes; FLOPs; the most that is held at once."""
    found: dict[int, tuple[Counter[tuple[str, int]], int, int]] = {rank: (Counter(), 0, 0) for rank in ranks}
    for event in traced:
        moved, flops, most = found.get(event["pid"], (Counter(), 0, 0))
        if event["ph"] == "X" and event["tid"] == COMMUNICATION:
            moved[event["name"], event["args"]["bytes"]] += 1
        elif event["ph"] == "X":
            flops += event["args"]["flops"]
        elif event["ph"] == "C":
            most = max(most, sum(event["args"].values()))
        found[event["pid"]] = moved, flops, most
    return found


def _expected(told: Explanation) -> dict[int, tuple[Counter[tuple[str, int]], int, int]]:
    found = {}
    for rank, most in told.memory.peaks.items():
        mine = [one for one in told.movements if not one.event.groups or any(rank in group for group in one.event.groups)]
        calls = [call for operation in told.operations for call in operation.calls if call.rank in (rank, None)]
        moved = Counter((one.event.kind, one.bytes) for one in mine for _ in range(_times(one.event, rank)))
        found[rank] = moved, sum(call.flops for call in calls), most
    return found


def _times(event: Event, rank: int) -> int:
    return sum(rank in group for group in event.groups) or 1


def _moved(names: tuple[str, ...]) -> dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]]:
    """Of each case the collectives in order, as counted and as explained."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        for case, program in importlib.import_module(name).CASES.items():
            with CommDebugMode() as comm, RunRecorder() as record:
                try:
                    program()
                except pytest.skip.Exception:
                    continue
            events = [event for event in comm.events if event.kind != "all_gather_object"]
            found[case] = [(event.kind, event.bytes) for event in events], [(m.event.kind, m.bytes) for m in record.movements]
    return found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("name", LISTS)
def test_processes_move_what_one_process_does(name: str) -> None:
    """And what only processes do: they send the first rank's values where tensors are distributed, and its random state."""
    ranks, here = run_gloo(_moved, 4, (name,), timeout_s=280.0), _moved((name,))
    missing = {}
    for case in ranks[0]:
        for ours, explained in (rank[case] for rank in ranks):
            assert ours == explained, case
        most: Counter[tuple[str, int]] = Counter()
        for kind in {kind for rank in ranks for kind, _ in rank[case][0]}:  # ranks outside of a mesh issue fewer
            sizes = ([size for own, size in rank[case][0] if own == kind] for rank in ranks)
            most.update((kind, max(each)) for each in zip_longest(*sizes, fillvalue=0))  # an uneven part may be less
        if case in here and (left := Counter(here[case][0]) - most):
            missing[case] = left
    assert missing.keys() <= HELD
