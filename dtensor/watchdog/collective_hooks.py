"""Collective hooks: what runs around each collective to log it, to compare it with other ranks, and to end waits that cannot
end.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..base.torch_internals import default_store
from ..errors import DivergenceError, DTensorError
from . import source_location
from .collective_log import CollectiveLog, CollectiveRecord
from .deadlock import explain_broken_connection, explain_missing_rank, has_issued, has_reached
from .diagnosis import (
    SAME_REPLICAS,
    Diagnosis,
    RankReport,
    diagnose_difference,
    diagnose_lost_rank,
    diagnose_own_error,
    find_event,
    format_difference,
    format_ranks,
)
from .flight_recorder import FAILED_MARK, LAST_INTERRUPTED, LAST_ISSUED, LOG_SLOTS, EventLog, fingerprint
from .host_state import HostState, has_rank_ended, make_diagnosis_error
from .levels import CheckLevel, enable_comparison, operation_records_of
from .watchdog import Watchdog

T = TypeVar("T")

_UNWATCHED_BACKENDS = {"fake", "threaded"}  # backends with ranks that are not processes
_BROKEN_CONNECTION_TEXTS = (  # in the messages of gloo for a broken connection, for which torch has no class
    "Connection",
    "pair closure",
    "Timed out waiting",
    "Broken pipe",
    "gloo/transport",
)
_POLL_S = 0.002  # interval at which the logs of other ranks are read while this rank waits for them
_STORE_POLL_S = 0.5  # interval at which the store is read meanwhile
_DIAGNOSIS_TIMEOUT_S = 3.0  # time to find the reason of a broken connection
_GROUP_COUNTS: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # by world: groups made, by their ranks
_LOCK = threading.Lock()


class _ActiveWatchdog:
    """The watchdog of the present world, None if there is none."""

    watchdog: Watchdog | None = None


def _mark_forked() -> None:
    """Set the level "forked" in a forked child, which has the process groups of its parent and is not a rank."""
    if _ActiveWatchdog.watchdog is not None:
        CheckLevel.now = "forked"


os.register_at_fork(after_in_child=_mark_forked)


def _publish_exit_without_mesh() -> None:
    """Publish the end of a rank that ends before it has made a mesh: other ranks may wait for it in theirs."""
    if _ActiveWatchdog.watchdog is None and dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(Exception):  # the process that serves the store may be gone
            if dist.get_backend() not in _UNWATCHED_BACKENDS and CheckLevel.now in ("watch", "strict"):
                HostState(dist.group.WORLD).mark_ended()


atexit.register(_publish_exit_without_mesh)
util.Finalize(None, _publish_exit_without_mesh, exitpriority=100)  # a process of multiprocessing ends without atexit


def get_or_make_log(ranks: Iterable[int], handle: Any, backend: str) -> CollectiveLog | None:
    """Return the log of the group of these ranks, and add its process group ``handle``; None if ranks are not processes."""
    if dist.get_backend() in _UNWATCHED_BACKENDS or backend in _UNWATCHED_BACKENDS:
        return None
    with _LOCK:
        watchdog, ranks = _get_or_make_watchdog(), tuple(sorted(ranks))
        log = watchdog.logs.get(ranks)
        if log is None:
            log = watchdog.logs[ranks] = CollectiveLog(watchdog.host_state, ranks, backend)
            watchdog.host_state.logs.append(log.key)
            log.spans_hosts = _wait_for_hosts(watchdog.host_state, ranks)
            if log.spans_hosts:
                watchdog.host_state.spans_hosts = True
                watchdog.host_state.publish_state()
        if handle is not None:  # None: torch has not made it yet
            log.handles.add(handle)
        return log


def wait_for_group_members(ranks: list[int], backend: str) -> None:
    """Wait until all ranks of a new process group have come to make it: no wait inside torch's ``new_group`` can be ended.

    Raises:
        DivergenceError: a rank does something else. RankLostError: a rank has ended.
    """
    members = tuple(sorted(ranks))
    counts = _GROUP_COUNTS.setdefault(dist.group.WORLD, Counter())
    counts[members] += 1
    key = f"dtensor/unwatched/{members}/{counts[members]}"
    if CheckLevel.now == "off" and not {dist.get_backend(), backend} & _UNWATCHED_BACKENDS:
        default_store().set(f"{key}/{dist.get_rank()}", "")  # ranks that compare would wait for this one here
    log = None if CheckLevel.now == "off" else get_or_make_log(ranks, None, backend)
    if log is None:
        return
    text = f"a process group of ranks {', '.join(map(str, log.ranks))} is made"
    if not log.log_and_compare(CollectiveRecord.of(text, "")):
        raise make_divergence_error(log)
    host_state, number, hashed = log.host_state, log.count, log.hash

    def has_logged_same(rank: int) -> bool:
        """Return True if the rank has logged this event, or one so much later that it was overwritten."""
        if not has_reached(host_state, log.key, rank, number):
            return False
        event = find_event(host_state, log.key, rank, number)  # after has_reached: a later event may have overwritten it
        return event is None or event.hash == hashed

    def check_levels() -> None:
        """Raise if a rank makes this process group under another ``check_ranks`` level, so that it compares nothing."""
        for rank in log.ranks:
            if not has_logged_same(rank) and host_state.has_store_key(f"{key}/{rank}"):
                own = f"{format_ranks([host_state.rank])} is under {CheckLevel.now!r}"
                needed = f"{own}: all ranks must call check_ranks with one level"
                reason = "compares nothing, under check_ranks('off')"
                raise make_divergence_error(log, diagnose_lost_rank(host_state, rank, needed, reason))

    def wait_for_members() -> None:
        """Wait until all ranks have logged this event, or one has diverged; all ranks take one decision to go on or stop."""
        all_are_here, deadline = False, time.monotonic() + _STORE_POLL_S
        try:
            while not all_are_here and host_state.diagnosis is None:
                time.sleep(_POLL_S)
                all_are_here = all(map(has_logged_same, log.ranks))
                if not all_are_here and time.monotonic() > deadline:
                    deadline = time.monotonic() + _STORE_POLL_S
                    check_levels()
        finally:  # all ranks take one answer: a rank that made the group alone would wait forever
            may_make = host_state.elect_value(f"{log.name}/{number}", "go" if all_are_here else "stop") == "go"
        while not may_make:
            host_state.raise_diagnosis()
            time.sleep(_POLL_S)

    run_wait(log, number, wait_for_members)
    log.slots[LAST_ISSUED] = number


def start_watchdog() -> None:
    """Start the watchdog of this world, which publishes this rank's state, and enable comparison, unless the level is "off"."""
    if dist.get_backend() not in _UNWATCHED_BACKENDS and CheckLevel.now != "off":
        with _LOCK:
            _get_or_make_watchdog()
        enable_comparison()


def _wait_for_hosts(host_state: HostState, ranks: Iterable[int]) -> bool:
    """Wait until all ranks have published their host. Return True if they are on several hosts.

    Raises:
        RankLostError: a rank has ended, or has published nothing within the timeout of the store.
    """
    deadline = time.monotonic() + host_state.timeout_s
    for rank in ranks:
        while host_state.host_of(rank) is None:
            file = host_state.rank_file(rank)
            if (diagnosis := host_state.find_diagnosis()) is not None:
                raise make_diagnosis_error(diagnosis)
            reason = explain_missing_rank(host_state, rank)
            if time.monotonic() > deadline:
                reason = f"has not come to a collective for {host_state.timeout_s:.0f} s"
            if reason or (file is not None and has_rank_ended(file)):
                needed = f"{format_ranks([host_state.rank])} needs it"
                raise make_diagnosis_error(host_state.publish_diagnosis(diagnose_lost_rank(host_state, rank, needed, reason)))
            time.sleep(0.005)
    return len({host_state.host_of(rank) for rank in ranks}) > 1


def _get_or_make_watchdog() -> Watchdog:
    """Return the watchdog of the current world, started at the first call."""
    world, watchdog = dist.group.WORLD, _ActiveWatchdog.watchdog
    if watchdog is not None and watchdog.host_state.world() is world:
        return watchdog
    if watchdog is not None:
        watchdog.stop()
    _ActiveWatchdog.watchdog = watchdog = Watchdog(HostState(world))
    return watchdog


def _log_level_change() -> None:
    """Log a change of the ``check_ranks`` level in each group.

    Ranks with another level are so found before their hashes differ.
    """
    watchdog = _ActiveWatchdog.watchdog
    if watchdog is None or watchdog.level == CheckLevel.now or not watchdog.host_state.is_current:
        return
    if os.getpid() != watchdog.host_state.pid:
        return
    watchdog.level = CheckLevel.now
    for log in [log for log in list(watchdog.logs.values()) if log.count and watchdog.host_state.diagnosis is None]:
        _log_event(log, f"check_ranks({CheckLevel.now!r})")


CheckLevel.changed.append(_log_level_change)


def log_event(ranks: Iterable[int], text: str) -> None:
    """Log and compare the begin of a step of these ranks that is no collective (a checkpoint), in the log of their group.

    No rank waits. A rank that logs something else under this number is found by the rank that comes later. Calls of other threads
    than the main one have no order, so they log nothing.
    """
    watchdog = _ActiveWatchdog.watchdog
    if watchdog is None or CheckLevel.now not in ("watch", "strict") or threading.current_thread() is not threading.main_thread():
        return
    log = watchdog.logs.get(tuple(sorted(ranks)))
    if log is not None and watchdog.host_state.is_current:
        _log_event(log, text)


def _log_event(log: CollectiveLog, text: str) -> None:
    """Log an event that is no collective and compare it with other ranks; raise if they diverge."""
    if not log.log_and_compare(CollectiveRecord.of(text, "")):
        raise make_divergence_error(log)
    log.slots[LAST_ISSUED] = log.count


def get_or_make_operation_log(world: Any, ranks: frozenset[int]) -> EventLog | None:
    """Return the log of the operations that these ranks of ``world`` do together.

    None if there are no ranks, if the world has ended, and if its ranks are not processes.
    """
    if not ranks or not dist.is_initialized() or world is not dist.group.WORLD or dist.get_backend() in _UNWATCHED_BACKENDS:
        return None
    logs = operation_records_of(world).logs
    log = logs.get(ranks)
    if log is None:
        with _LOCK:
            host_state, key = _get_or_make_watchdog().host_state, fingerprint(repr(sorted(ranks)))
            log = logs[ranks] = EventLog(host_state.create_file(f"operations-{key:016x}-{host_state.rank}", LOG_SLOTS))
            host_state.operations.append(key)
    return log


def record_operation_error(error: BaseException) -> None:
    """Write an error of an operation to this rank's state file: other ranks diagnose it if theirs did not fail."""
    watchdog = _ActiveWatchdog.watchdog
    if watchdog is not None and CheckLevel.now in ("watch", "strict") and not isinstance(error, DivergenceError):
        watchdog.host_state.write_operation_error(error)


def make_divergence_error(log: CollectiveLog, diagnosis: Diagnosis | None = None) -> Exception:
    """Return the error of a rank that logged another collective than other ranks; publish its diagnosis unless there is one."""
    host_state = log.host_state
    published = host_state.find_diagnosis() or host_state.publish_diagnosis(
        diagnosis or diagnose_difference(host_state, log.key, log.ranks, log.count)
    )
    return make_diagnosis_error(published)


def make_issue_error(log: CollectiveLog, number: int, error: BaseException) -> BaseException:
    """Return the error to raise when this rank could not issue a collective that it logged, and mark it as skipped."""
    record_operation_error(error)
    log.mark_skipped(number)
    return diagnose_transfer_error(log, number, error)


def wait_after_skip(log: CollectiveLog) -> None:
    """Wait, in the collective after a skipped one, until all ranks have come to it without having issued the skipped one.

    Raises:
        DivergenceError: another rank did something else. The error of this rank, on all ranks: another rank issued it.
    """
    host_state, number, hashed = log.host_state, log.count, log.hash

    def wait_for_ranks() -> None:
        """Wait until all other ranks have logged this collective; raise if one logged another, or issued the skipped one."""
        missing_ranks = [rank for rank in log.ranks if rank != host_state.rank]
        while missing_ranks:
            host_state.raise_diagnosis()
            for rank in list(missing_ranks):
                event = find_event(host_state, log.key, rank, number)
                if event is not None and event.hash != hashed:
                    raise make_divergence_error(log)
                if event is None and has_issued(host_state, log.key, rank, log.skipped):
                    raise make_divergence_error(log, diagnose_own_error(host_state))
                if event is not None or has_reached(host_state, log.key, rank, number):
                    missing_ranks.remove(rank)
            time.sleep(_POLL_S)

    run_wait(log, number, wait_for_ranks)
    log.skipped = 0


def raise_replicas_differ(step: int, mesh_dims: str, states: dict[int, tuple[int, str]]) -> NoReturn:
    """Raise DivergenceError on all ranks: replicas of parameters or optimizer state differ between ranks.

    Args:
        states: by rank: a hash of its replicas, and a description of the state that differs.
    """
    line = source_location.current_line()
    reports = {rank: RankReport(hashed, mesh_dims, f"{text}   {line}") for rank, (hashed, text) in states.items()}
    host_state = _get_or_make_watchdog().host_state
    diagnosis = format_difference(step, reports, SAME_REPLICAS)
    raise make_diagnosis_error(host_state.find_diagnosis() or host_state.publish_diagnosis(diagnosis))


def run_wait(log: CollectiveLog, number: int, wait: Callable[[], T]) -> T:
    """Return ``wait()``, published as a wait for other ranks in collective ``number``. The watchdog ends it if it never would."""
    log.begin_wait(number)
    try:
        return wait()
    except Exception as error:
        log.mix(FAILED_MARK)  # the wait may have succeeded on other ranks
        raise diagnose_transfer_error(log, number, error) from error
    except BaseException:  # an interrupt: other ranks may wait for messages that this rank has not sent
        log.slots[LAST_INTERRUPTED] = number
        raise
    finally:
        log.end_wait()


def wait_abandonably(works: list[Any], handle: Any) -> None:
    """Wait for work handles of a group in a helper thread, so that a diagnosis can end the wait of this thread."""
    watchdog = _ActiveWatchdog.watchdog
    if watchdog is not None and CheckLevel.now in ("watch", "strict") and not all(work.is_completed() for work in works):
        watchdog.wait_threads.wait_for(works, handle)
    while works:
        works.pop(0).wait()


def diagnose_transfer_error(log: CollectiveLog, number: int, error: BaseException) -> BaseException:
    """Return the error to raise for a failed transfer: the diagnosis if a connection broke, else ``error`` itself."""
    if isinstance(error, DTensorError) or not any(text in str(error) for text in _BROKEN_CONNECTION_TEXTS):
        return error
    host_state = log.host_state

    def find() -> Diagnosis | None:
        diagnosis = explain_broken_connection(host_state, log.ranks, log.key, number)
        return None if diagnosis is None else host_state.publish_diagnosis(diagnosis)

    diagnosis = _poll_diagnosis(host_state, find)
    return error if diagnosis is None else make_diagnosis_error(diagnosis)


def diagnose_lost_ranks(ranks: Iterable[int]) -> Diagnosis | None:
    """Return the published diagnosis, or one for the first of ``ranks`` that has ended; None if nothing is known.

    Call it when messages with these ranks broke.
    """
    watchdog = _ActiveWatchdog.watchdog
    if watchdog is None or CheckLevel.now not in ("watch", "strict"):
        return None
    host_state = watchdog.host_state

    def find() -> Diagnosis | None:
        ended = next((rank for rank in ranks if host_state.has_ended(rank)), None)
        return None if ended is None else diagnose_lost_rank(host_state, ended, "others need it")

    return _poll_diagnosis(host_state, find)


def _poll_diagnosis(host_state: HostState, find: Callable[[], Diagnosis | None]) -> Diagnosis | None:
    """Poll for the published diagnosis or that of ``find()``, and return it; None after ``_DIAGNOSIS_TIMEOUT_S``."""
    deadline = time.monotonic() + _DIAGNOSIS_TIMEOUT_S
    while time.monotonic() < deadline:
        diagnosis = host_state.find_diagnosis() or find()
        if diagnosis is not None:
            return diagnosis
        time.sleep(0.05)
    return None
