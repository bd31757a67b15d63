"""Diagnosis: the text that all ranks raise when ranks diverge, fail, or wait for each other.

A text has a first line with what happened and on which ranks, then a line for each group of ranks that did the same, with their
line of user code, then a line with what to write instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.group_by import group_by_key
from .collective_log import Lengths, find_length_mismatches, read_lengths
from .flight_recorder import MAX_EVENTS, LoggedEvent, StateFile, read_event
from .host_state import ERROR, ERROR_LINE, ERROR_WAIT_COUNT, EXITED, FAILED, STATE, WAIT_COUNT, HostState, open_log
from .levels import CheckLevel

# "kind": "differs" (DivergenceError), "lost" (RankLostError) or "error" (the error of one rank, by module and class name in
# "error"); "words": the text.
Diagnosis = dict[str, Any]

SAME_CALLS = (
    "All ranks of a group must run the same operations in the same order: move the call out of any branch that depends on the "
    "rank or on the rank's own data, so that all ranks run it or none does"
)
SAME_REPLICAS = "Replicas must stay equal: update them on every rank with the same values, or distribute the tensor again"
_SAME_LENGTHS = "Ranks must agree on the sizes of shards: pass the same sizes and layouts on all ranks"


class RankReport(NamedTuple):
    """Description of what a rank does. Ranks with equal hashes agree."""

    hash: int
    mesh_dims: str
    text: str


_BEFORE_COLLECTIVE = {
    "watch": " in operations before this call; run under check_ranks('strict') to see which one",
    # such operations have no order, so no number
    "strict": " in which tensors were added in place before this call, or how many",
}
_GATHERING_S = 1.0  # time to wait for ranks that are about to log the same number, so that the text covers all ranks


def diagnose_difference(host_state: HostState, key: int, ranks: Sequence[int], number: int) -> Diagnosis:
    """Return the diagnosis for ranks with different collectives of one number, or with different operations before it."""
    deadline = time.monotonic() + _GATHERING_S
    events = _find_events(host_state, key, ranks, number)
    while len(events) < len(ranks) and time.monotonic() < deadline and host_state.find_diagnosis() is None:
        time.sleep(0.01)
        events = _find_events(host_state, key, ranks, number)
    if len({event.hash for event in events.values()}) < 2:
        return _diagnose_lengths(host_state, key, ranks, number, events)
    first_difference = _find_first_difference(host_state, events)
    if first_difference is None:
        return format_difference(number, {rank: make_rank_report(event) for rank, event in events.items()})
    number, operations = first_difference
    reports = {}
    for rank, event in events.items():
        operation = operations.get(rank)
        hashed = 0 if operation is None else operation.hash
        mesh_dims = event.mesh_dims if operation is None else operation.mesh_dims
        reports[rank] = RankReport(hashed, mesh_dims, str(operation or event))
    return format_difference(number, reports)


def make_rank_report(event: LoggedEvent) -> RankReport:
    """Make the report of a rank from its logged collective, with the last operation before it."""
    after = f", after {event.last_operation}" if event.last_operation else ""
    return RankReport(event.hash, event.mesh_dims, f"{event.text}{after}   {event.line}")


def _find_first_difference(host_state: HostState, events: dict[int, LoggedEvent]) -> tuple[int, dict[int, LoggedEvent]] | None:
    """Return number and events (by rank) of the first logged operation before these collectives that differs between ranks.

    None if no logged operation differs. A rank without an operation of that number is missing in the dict.
    """
    for key in host_state.operations:
        files = {rank: open_log(host_state, "operations", key, rank) for rank in events}
        if any(file is None for file in files.values()):
            continue
        counts = {rank: min(file.slots[0], events[rank].operations) for rank, file in files.items() if file is not None}
        for number in range(max(1, min(counts.values()) - MAX_EVENTS + 2), max(counts.values()) + 1):
            operations = {rank: read_event(files[rank], number) if number <= counts[rank] else None for rank in events}
            if len({None if operation is None else operation.hash for operation in operations.values()}) > 1:
                return number, {rank: operation for rank, operation in operations.items() if operation is not None}
    return None


def _diagnose_lengths(
    host_state: HostState, key: int, ranks: Sequence[int], number: int, events: dict[int, LoggedEvent]
) -> Diagnosis:
    """Return the diagnosis for ranks that logged one collective with message lengths that do not match."""
    files = {rank: open_log(host_state, "log", key, rank) for rank in events}
    logged = {rank: read_lengths(file, number) for rank, file in files.items() if file is not None}
    lengths = {rank: each for rank, each in logged.items() if each is not None}
    reports = {rank: RankReport(0, event.mesh_dims, str(event)) for rank, event in events.items()}
    return format_length_mismatch(ranks, number, lengths, reports)


def format_length_mismatch(
    ranks: Sequence[int], number: int, lengths: dict[int, Lengths], reports: dict[int, RankReport]
) -> Diagnosis:
    """Return the diagnosis for ranks that send other lengths than their receivers expect, with one line for each rank."""
    mismatches = find_length_mismatches(ranks, lengths)
    parts = [
        f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}"
        for sender, receiver, sent, expected in mismatches
    ]
    head = f"{_format_step(number, reports)}: {'; '.join(parts[:4])}"
    table = _format_table({(rank,): reports[rank].text for rank in sorted(reports)})
    return {"kind": "differs", "words": "\n".join([head, *table, _SAME_LENGTHS])}


def format_difference(number: int, reports: dict[int, RankReport], advice: str = SAME_CALLS) -> Diagnosis:
    """Return the diagnosis for reports with different hashes, with one line for each group of ranks that agree."""
    groups = group_by_key((report.hash, rank) for rank, report in sorted(reports.items()))
    by_size = sorted(groups.values(), key=lambda members: (-len(members), members))
    texts = {tuple(members): reports[members[0]].text for members in by_size}
    before = _BEFORE_COLLECTIVE.get(CheckLevel.now, "") if len(by_size) > 1 and len(set(texts.values())) == 1 else ""
    head = f"{_format_step(number, reports)}: {_format_minority(by_size)}{before}"
    return {"kind": "differs", "words": "\n".join([head, *_format_table(texts), advice])}


def _format_step(number: int, reports: dict[int, RankReport]) -> str:
    mesh_dims = next((report.mesh_dims for report in reports.values() if report.mesh_dims), "")
    return f"ranks diverged at step {number:,}{mesh_dims and ' on mesh dims '}{mesh_dims}"


def _format_table(texts: dict[tuple[int, ...], str]) -> list[str]:
    """Return a line for each group of ranks, with aligned texts."""
    width = max(len(_join_ranks(members)) for members in texts) + 1
    return [f"  {_join_ranks(members) + ':':<{width}} {text}" for members, text in texts.items()]


def diagnose_lost_rank(host_state: HostState, rank: int, needed: str, reason: str = "") -> Diagnosis:
    """Return the diagnosis for a rank that others need and that has failed, ended or died.

    Args:
        needed: which ranks need it, and for what.
        reason: what happened to the rank, if the caller knows more than its published state.
    """
    line, _ = host_state.location_of(rank)
    at = f", at {line}" if line else ""
    file, remote = host_state.rank_file(rank), host_state.remote_state_of(rank)
    if file is not None:
        slots, otherwise = file.slots, "has died: its process is gone"
        state = FAILED if slots[STATE] == FAILED or _ended_with_error(file) else slots[STATE]
        error, error_line = file.read_text(slots[ERROR]), file.read_text(slots[ERROR_LINE])
    elif remote is not None:  # a rank of another host
        state, error, error_line = remote.state, remote.error, remote.error_line
        otherwise = "publishes no state: its process is gone or stopped, or its host is unreachable"
    else:
        state, error, error_line, otherwise = EXITED, "", "", ""
    if not reason and state == FAILED:
        return _diagnose_error(rank, error, error_line, at, needed)
    ended = "has left: its program ended, or it called destroy_process_group()"
    reason = reason or (ended if state == EXITED else otherwise)
    return {"kind": "lost", "words": f"rank {rank} {reason}{at}{_format_last_event(host_state, rank)}; {needed}"}


def _diagnose_error(rank: int, error: str, line: str, at: str, needed: str) -> Diagnosis:
    """Return the diagnosis for an error of one rank; ``error`` as :func:`.host_state.encode_error` gives it."""
    module, name, message = json.loads(error or '["", "an error", ""]')
    if name == "KeyboardInterrupt":
        return {"kind": "lost", "words": f"rank {rank} was interrupted{at}; {needed}"}
    return {"kind": "error", "error": [module, name], "words": f"{message} (on rank {rank}{line and ', at '}{line})"}


def diagnose_own_error(host_state: HostState) -> Diagnosis:
    """Return the diagnosis for an error of this rank that other ranks did not have."""
    file = host_state.file
    error, line = file.read_text(file.slots[ERROR]), file.read_text(file.slots[ERROR_LINE])
    return _diagnose_error(host_state.rank, error, line, "", "others need it")


def _ended_with_error(file: StateFile) -> bool:
    """Return True if a rank recorded an error and no wait since then."""
    return bool(file.slots[ERROR]) and file.slots[WAIT_COUNT] == file.slots[ERROR_WAIT_COUNT]


def diagnose_deadlock(waits: dict[int, str]) -> Diagnosis:
    """Return the diagnosis for ranks that wait for each other; ``waits`` says where each one waits."""
    lines = ["deadlock, no rank can go on: each rank waits for one that waits in another call"]
    groups = group_by_key((text, rank) for rank, text in sorted(waits.items()))
    lines += _format_table({tuple(members): text for text, members in groups.items()})
    return {"kind": "differs", "words": "\n".join([*lines, SAME_CALLS])}


def format_event(host_state: HostState, key: int, rank: int, number: int) -> str:
    """Return text and user line of a collective that a rank logged; "a collective" if it is not known."""
    event = find_event(host_state, key, rank, number)
    return "a collective" if event is None else str(event)


def find_event(host_state: HostState, key: int, rank: int, number: int) -> LoggedEvent | None:
    """Return a collective that a rank logged, None if it is not known. Of a rank of another host only the last one is known."""
    event = read_event(open_log(host_state, "log", key, rank), number)
    if event is not None:
        return event
    remote = host_state.remote_state_of(rank)
    log = None if remote is None else remote.logs.get(f"{key:016x}")
    return LoggedEvent.from_store(*log[2:]) if log is not None and log[0] == number else None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 1"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _find_events(host_state: HostState, key: int, ranks: Sequence[int], number: int) -> dict[int, LoggedEvent]:
    events = {rank: find_event(host_state, key, rank, number) for rank in ranks}
    return {rank: event for rank, event in events.items() if event is not None}


def _format_minority(by_size: list[list[int]]) -> str:
    """Return which ranks differ from the largest group; ``by_size`` are the groups that agree, largest first."""
    first, *others = by_size
    if not others:
        return f"only {format_ranks(first)} made this call"
    minority = [rank for members in others for rank in members]
    if len(first) == len(others[0]):
        return " and ".join(map(format_ranks, by_size)) + " differ"
    return f"{format_ranks(sorted(minority))} {'differs' if len(minority) == 1 else 'differ'} from {format_ranks(first)}"


def _join_ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _format_last_event(host_state: HostState, rank: int) -> str:
    """Return ", after ..." with the last collective of a rank in any log that this process knows; empty if there is none."""
    files, remote = [open_log(host_state, "log", key, rank) for key in host_state.logs], host_state.remote_state_of(rank)
    events = [read_event(file, file.slots[0]) for file in files if file is not None and file.slots[0]]
    events += [] if remote is None else [LoggedEvent.from_store(*log[2:]) for log in reversed(remote.logs.values()) if log[0]]
    last = max((event for event in events if event is not None), key=lambda event: event.time, default=None)
    return "" if last is None else f", after {last}"
