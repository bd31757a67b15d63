"""Reports agree: explain, trace, budget and CommDebugMode report equal numbers for the programs of the case lists.

``tests/support/check_reported_bytes.py`` compares the reported bytes with the received bytes in all other tests.
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
from dtensor.debug.trace import COMMUNICATION, events_of
from dtensor.recorders.run_recorder import RunRecorder

LISTS = (
    "process_cases",
    "pytorch_defect_cases",
    "torch_feature_cases",
    "random_cases",
    "reported_operator_cases",
    "reported_recent_cases",
    "reported_tensor_cases",
)
PER_LOCAL_TENSOR = {"ranks_seeded_differently_draw_alike"}  # cases with a call for each local tensor of the process
EVERY = 60  # one of 60 cases is in the fast set: the second one, as the first one of process_cases takes seconds
PROGRAMS = [
    pytest.param(name, case, id=case, marks=() if k % EVERY == 1 else pytest.mark.slow)
    for name in LISTS
    for k, case in enumerate(importlib.import_module(name).CASES.names_in_one_process)
]


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize(("cases", "name"), PROGRAMS)
def test_explain_trace_budget_and_comm_debug_mode_report_equal_numbers(cases: str, name: str) -> None:
    began = time.perf_counter_ns()
    with CommDebugMode() as comm, RunRecorder(with_operators=True) as record:
        importlib.import_module(cases).CASES[name]()
    report, trace_events = Explanation.from_record(record), list(events_of(record, began))
    kinds, sizes = Counter[str](), Counter[str]()
    for movement in report.movements:
        kinds[movement.event.kind] += 1
        sizes[movement.event.kind] += movement.bytes
    assert comm.get_comm_counts() == kinds
    assert comm.get_comm_bytes() == dict(sizes)
    assert report.exchanges == comm.get_exchange_count()
    assert report.bytes == sum(line.bytes for line in report.lines) == sizes.total()
    assert all(movement.place.file for movement in report.movements)
    assert _totals_of_trace(trace_events, report.memory.peaks) == _totals_of_report(report)
    assert usage_of(record) == Limits(report.bytes, len(report.movements), report.flops, report.memory.peak)
    assert not excess_message(record, usage_of(record))
    str(report)


def _totals_of_trace(
    trace_events: list[dict[str, Any]], ranks: dict[int, int]
) -> dict[int, tuple[Counter[tuple[str, int]], int, int]]:
    """Return, for each rank, the collectives with their bytes, the FLOPs, and the peak memory."""
    found: dict[int, tuple[Counter[tuple[str, int]], int, int]] = {rank: (Counter(), 0, 0) for rank in ranks}
    for event in trace_events:
        collectives, flops, peak = found.get(event["pid"], (Counter(), 0, 0))
        if event["ph"] == "X" and event["tid"] == COMMUNICATION:
            collectives[event["name"], event["args"]["bytes"]] += 1
        elif event["ph"] == "X":
            flops += event["args"]["flops"]
        elif event["ph"] == "C":
            peak = max(peak, sum(event["args"].values()))
        found[event["pid"]] = collectives, flops, peak
    return found


def _totals_of_report(report: Explanation) -> dict[int, tuple[Counter[tuple[str, int]], int, int]]:
    found = {}
    for rank, peak in report.memory.peaks.items():
        of_rank = [one for one in report.movements if not one.event.groups or any(rank in group for group in one.event.groups)]
        calls = [call for operation in report.operations for call in operation.calls if call.rank in (rank, None)]
        collectives = Counter((one.event.kind, one.bytes) for one in of_rank for _ in range(_count_of_rank(one.event, rank)))
        found[rank] = collectives, sum(call.flops for call in calls), peak
    return found


def _count_of_rank(event: Event, rank: int) -> int:
    return sum(rank in group for group in event.groups) or 1


def _collectives_of_cases(names: tuple[str, ...]) -> dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]]:
    """Return, for each case, the collectives in order, as counted and as explained."""
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
def test_collectives_in_process_are_a_subset_of_those_on_processes(name: str) -> None:
    """Processes also send the values and the random state of the first rank."""
    ranks, in_process = run_gloo(_collectives_of_cases, 4, (name,), timeout_s=280.0), _collectives_of_cases((name,))
    missing = {}
    for case in ranks[0]:
        for counted, explained in (rank[case] for rank in ranks):
            assert counted == explained, case
        largest: Counter[tuple[str, int]] = Counter()
        for kind in {kind for rank in ranks for kind, _ in rank[case][0]}:  # ranks outside of a mesh have fewer collectives
            sizes = ([size for own, size in rank[case][0] if own == kind] for rank in ranks)
            largest.update((kind, max(each)) for each in zip_longest(*sizes, fillvalue=0))  # uneven shards can be smaller
        if case in in_process and (left := Counter(in_process[case][0]) - largest):
            missing[case] = left
    assert missing.keys() <= PER_LOCAL_TENSOR
