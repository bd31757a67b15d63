"""Deadlock: why a wait cannot end. Other ranks do something else, are gone, or wait for ranks that wait for them.

Only certain facts count. A rank that computes may still come, so it is never taken for lost, however long it takes.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .blocked_call import C10dCall, is_behind, is_disconnected
from .diagnosis import (
    Diagnosis,
    diagnose_deadlock,
    diagnose_difference,
    diagnose_lost_rank,
    find_event,
    format_event,
    format_ranks,
)
from .flight_recorder import StateFile, last_completed
from .host_state import (
    C10D_CALL,
    C10D_CALL_SINCE,
    C10D_STARTED,
    ERROR_COUNT,
    ERROR_TIME,
    ERROR_WAIT_COUNT,
    FAILED,
    HEARTBEAT,
    LOCATION,
    LOCATION_SINCE,
    MULTI_THREADED,
    STATE,
    WAIT_COUNT,
    WAIT_LOG,
    WAIT_NUMBER,
    WAIT_SINCE,
    WAITING,
    HostState,
    has_rank_ended,
    open_log,
    was_killed,
)

PATIENCE_S = 2.0  # minimum duration of waits that count as a deadlock
_SILENT_S = 15.0  # a rank of another host without news for so long is lost; it may compute without releasing the GIL
_SILENT_AFTER_BREAK_S = 1.5  # the same for a rank with a broken connection
_GAVE_UP_S = 3.0  # a rank without running code has given up so long after its error
_PROBE_S = 0.5  # minimum interval between two probes of a rank's connection
_FRESH_S, _FRESH_REMOTE_S = 0.5, 1.2  # maximum age of the state of a rank of this host, of another host
_CONFIRM_S, _CONFIRM_REMOTE_S = 0.2, 1.2  # a deadlock is diagnosed if nothing has changed after so long


class Wait(NamedTuple):
    """The call in which a rank waits: a collective of this library, or a call of torch.distributed.

    Attributes:
        key, number: log and number of a collective; for a call of torch.distributed ``key`` is 0.
        since: begin of the wait by the clock of this host in ns; 0 for a rank of another host.
        waits: number of waits that ended before.
        call: the encoded :class:`.blocked_call.C10dCall`; empty for a collective of this library.
        started: what the rank has started in process groups of the program, see :func:`.blocked_call.count_started`.
    """

    rank: int
    key: int
    number: int
    since: int
    waits: int
    call: str = ""
    started: str = ""


def explain_wait(host_state: HostState, ranks: tuple[int, ...], key: int, number: int) -> Diagnosis | None:
    """Return the diagnosis why the wait of these ranks in collective ``number`` cannot end; None if it may end."""
    events = {rank: find_event(host_state, key, rank, number) for rank in ranks}
    if len({event.hash for event in events.values() if event is not None}) > 1:
        return diagnose_difference(host_state, key, ranks, number)
    missing = [rank for rank in ranks if not has_reached(host_state, key, rank, number)]
    present = next((rank for rank, event in events.items() if event is not None), None)
    text = "" if present is None else format_event(host_state, key, present, number)
    for rank in missing or ranks:
        reason = explain_missing_rank(host_state, rank)
        if reason or _is_lost(host_state, rank, has_come=not missing):
            waiting = [other for other in ranks if other not in missing and other != rank]
            needed = f"{format_ranks(waiting)} {'needs' if len(waiting) == 1 else 'need'} it for {text}"
            return diagnose_lost_rank(host_state, rank, needed, reason)
    return _diagnose_cycle(host_state)


def explain_c10d_wait(host_state: HostState) -> Diagnosis | None:
    """Return the diagnosis why the wait of this rank in a torch.distributed call cannot end; None if it may end.

    Either a rank that it needs has ended, or is part of a deadlock.
    """
    wait = _current_wait(host_state, host_state.rank)
    if wait is None or wait.key or time.monotonic_ns() - wait.since < PATIENCE_S * 1e9:
        return None
    needed_ranks = C10dCall.read(wait.call).ranks
    ended = next((rank for rank in needed_ranks if rank != host_state.rank and host_state.has_ended(rank)), None)
    if ended is None:
        return _diagnose_cycle(host_state)
    time.sleep(_CONFIRM_S)  # messages that the ended rank sent arrive meanwhile
    if wait != _current_wait(host_state, host_state.rank):
        return None
    return diagnose_lost_rank(
        host_state, ended, f"{format_ranks([host_state.rank])} needs it for {_format_wait(host_state, wait)}"
    )


def find_failed_rank(host_state: HostState) -> Diagnosis | None:
    """Return the diagnosis for a rank that has failed while this rank stays at one line of user code; None if there is none.

    This rank may wait for a message in a way that the watchdog does not recognize.
    """
    if time.monotonic_ns() - host_state.slots[LOCATION_SINCE] < PATIENCE_S * 1e9:
        return None
    for rank in range(host_state.size):
        file = host_state.rank_file(rank)
        if rank != host_state.rank and file is not None and file.slots[STATE] == FAILED:
            line = host_state.file.read_text(host_state.slots[LOCATION])
            return diagnose_lost_rank(host_state, rank, f"{format_ranks([host_state.rank])} is at {line}")
    return None


def ranks_awaited_in_c10d(host_state: HostState) -> Sequence[int]:
    """Return the ranks that this rank needs in a function of torch.distributed."""
    return C10dCall.read(host_state.file.read_text(host_state.slots[C10D_CALL])).ranks


def explain_broken_connection(host_state: HostState, ranks: tuple[int, ...], key: int, number: int) -> Diagnosis | None:
    """Return the diagnosis why a connection broke in collective ``number``; None if nothing is known.

    In contrast to :func:`explain_wait`, a rank that has come to the collective and has ended since counts as lost.
    """
    for rank in ranks:
        is_remote = host_state.rank_file(rank) is None and host_state.spans_hosts
        is_silent = is_remote and host_state.remote_states.silent_s(rank) > _SILENT_AFTER_BREAK_S
        if rank != host_state.rank and (host_state.has_ended(rank) or is_silent):
            text = format_event(host_state, key, host_state.rank, number)
            return diagnose_lost_rank(host_state, rank, f"{format_ranks([host_state.rank])} needs it for {text}")
    return explain_wait(host_state, ranks, key, number)


def has_reached(host_state: HostState, key: int, rank: int, number: int) -> bool:
    """Return True if a rank has come to a collective. A rank that has ended must have done its part in it."""
    log, remote = open_log(host_state, "log", key, rank), host_state.remote_state_of(rank)
    if log is None:
        count, completed = (0, 0) if remote is None else remote.logs.get(f"{key:016x}", [0, 0])[:2]
        return bool((completed if host_state.has_ended(rank) else count) >= number)
    file = host_state.rank_file(rank)
    if file is not None and has_rank_ended(file):
        return last_completed(log) >= number
    return log.slots[0] >= number


def has_issued(host_state: HostState, key: int, rank: int, number: int) -> bool:
    """Return True if a rank has issued a collective, and has not interrupted its wait in it."""
    log, remote = open_log(host_state, "log", key, rank), host_state.remote_state_of(rank)
    if log is None:
        return remote is not None and bool(remote.logs.get(f"{key:016x}", [0, 0])[1] >= number)
    return last_completed(log) >= number


def _is_lost(host_state: HostState, rank: int, has_come: bool) -> bool:
    """Return True if a rank will never do its part in a collective: it ended, was killed, is silent or gave up.

    A rank that has come to the collective is lost only if it was killed: it may have sent a part of its messages.
    """
    file = host_state.rank_file(rank)
    if file is not None:
        return was_killed(file) if has_come else has_rank_ended(file) or _has_given_up(host_state, file)
    is_silent = host_state.remote_state_of(rank) is not None and host_state.remote_states.silent_s(rank) > _SILENT_S
    return is_silent or (not has_come and host_state.has_ended(rank))


def explain_missing_rank(host_state: HostState, rank: int) -> str:
    """Return the text why a rank that published no state is gone; empty if it has a state, or may still come."""
    world, now = host_state.world(), time.monotonic()
    has_state = host_state.rank_file(rank) is not None or host_state.remote_state_of(rank) is not None
    if has_state or now - host_state.probe_times.get(rank, 0.0) < _PROBE_S:
        return ""
    host_state.probe_times[rank] = now
    is_gone = world and is_disconnected(world, rank)
    return "is gone: its connections are closed, and it had made no mesh" if is_gone else ""


def _has_given_up(host_state: HostState, file: StateFile) -> bool:
    """Return True if a rank had an error that this one did not, and no code of its program runs any more, as in a notebook."""
    slots, now = file.slots, time.monotonic_ns()
    is_old = now - slots[ERROR_TIME] > _GAVE_UP_S * 1e9
    if not is_old or slots[ERROR_COUNT] <= host_state.slots[ERROR_COUNT] or slots[WAIT_COUNT] != slots[ERROR_WAIT_COUNT]:
        return False
    return not slots[LOCATION] and now - slots[HEARTBEAT] < _FRESH_S * 1e9


# --- deadlocks -----------------------------------------------------------------------------------------------------------
def _diagnose_cycle(host_state: HostState) -> Diagnosis | None:
    """Return the diagnosis of a deadlock if ranks wait for each other just as in an earlier call; else None."""
    waits, now = _find_cycle(host_state), time.monotonic()
    if waits is None or host_state.cycle_candidate is None or host_state.cycle_candidate[1] != waits:
        host_state.cycle_candidate = None if waits is None else (now, waits)
        return None
    is_local = all(host_state.rank_file(rank) is not None for rank in waits)
    if now - host_state.cycle_candidate[0] < (_CONFIRM_S if is_local else _CONFIRM_REMOTE_S):
        return None
    return diagnose_deadlock({wait.rank: _format_wait(host_state, wait) for wait in waits.values()})


def _find_cycle(host_state: HostState) -> dict[int, Wait] | None:
    """Return the waits of all ranks for which this rank waits, directly or indirectly; None unless all of them are stuck.

    A rank is stuck if it has waited for ``PATIENCE_S``, and a rank that it waits for has not come.
    """
    waits: dict[int, Wait] = {}
    stack = [host_state.rank]
    while stack:
        rank = stack.pop()
        if rank in waits:
            continue
        wait = _current_wait(host_state, rank)
        if wait is None or time.monotonic_ns() - wait.since < PATIENCE_S * 1e9:
            return None
        awaited = list(_awaited_ranks(host_state, wait))
        if not awaited:  # all ranks have come: the transfer is in flight
            return None
        waits[rank] = wait
        stack += awaited
    return waits


def _current_wait(host_state: HostState, rank: int) -> Wait | None:
    """Return what a rank waits in; None if it may be computing, or its state is old."""
    file = host_state.rank_file(rank)
    if file is None:
        return _remote_wait(host_state, rank)
    if file.slots[MULTI_THREADED]:  # while one thread waits, another one may compute
        return None
    slots, started = file.slots, file.read_text(file.slots[C10D_STARTED])
    if slots[STATE] == WAITING:
        return Wait(rank, slots[WAIT_LOG], slots[WAIT_NUMBER], slots[WAIT_SINCE], slots[WAIT_COUNT], "", started)
    is_fresh = time.monotonic_ns() - slots[HEARTBEAT] <= _FRESH_S * 1e9
    if not slots[C10D_CALL] or not is_fresh:
        return None
    call = file.read_text(slots[C10D_CALL])
    since = slots[C10D_CALL_SINCE] + C10dCall.read(call).patience_ns
    return Wait(rank, 0, slots[C10D_CALL], since, slots[WAIT_COUNT], call, started)


def _remote_wait(host_state: HostState, rank: int) -> Wait | None:
    """Return what a rank of another host waits in, if it has done so for ``PATIENCE_S`` by its own clock; else None."""
    remote = host_state.remote_state_of(rank)
    if remote is None or remote.multi_threaded or host_state.remote_states.silent_s(rank) > _FRESH_REMOTE_S:
        return None
    if remote.state == WAITING:
        wait = Wait(rank, int(remote.log, 16), remote.number, 0, remote.waits, "", remote.started)
        return wait if remote.waited_s > PATIENCE_S else None
    if not remote.call or remote.call_s - C10dCall.read(remote.call).patience_ns / 1e9 < PATIENCE_S:
        return None
    return Wait(rank, 0, remote.call_since, 0, remote.waits, remote.call, remote.started)


def _awaited_ranks(host_state: HostState, wait: Wait) -> Iterator[int]:
    """Yield the ranks that have not come to what ``wait`` waits in."""
    if wait.key:
        ranks = ast.literal_eval((host_state.folder / f"log-{wait.key:016x}").read_text())
        yield from (rank for rank in ranks if not has_reached(host_state, wait.key, rank, wait.number))
        return
    call = C10dCall.read(wait.call)
    for rank in call.ranks:
        other = _current_wait(host_state, rank)
        if rank != wait.rank and not _may_complete(call, wait, other):
            yield rank


def _may_complete(call: C10dCall, wait: Wait, other: Wait | None) -> bool:
    """Return True if the rank that waits in ``other`` may have done its part in ``call``, there or before."""
    if other is None:
        return False
    other_call = C10dCall.read(other.call)
    if call.is_message:
        return other_call.may_complete(wait.rank, call)
    return not is_behind(other.started, other_call, wait.started)


def _format_wait(host_state: HostState, wait: Wait) -> str:
    """Return the call in which a rank waits, and its line."""
    if wait.key:
        return format_event(host_state, wait.key, wait.rank, wait.number)
    return f"torch.distributed.{C10dCall.read(wait.call).name}   {host_state.location_of(wait.rank)[0]}"
