"""Watchdog: a thread that examines, while this rank waits, whether the wait can end, and ends it if it cannot."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import util
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from . import source_location
from .blocked_call import count_started, find_c10d_call, list_user_groups, start_unmatched_recv
from .collective_log import CollectiveLog
from .deadlock import explain_c10d_wait, explain_wait, find_failed_rank, has_reached, ranks_awaited_in_c10d
from .diagnosis import Diagnosis, diagnose_lost_rank, format_ranks
from .host_state import (
    C10D_CALL,
    C10D_CALL_SINCE,
    C10D_STARTED,
    CALL_TEXT,
    HEARTBEAT,
    LOCATION,
    LOCATION_SINCE,
    LOCATION_TEXT,
    PID,
    STARTED_TEXT,
    STATE,
    WAIT_LOG,
    WAIT_NUMBER,
    WAIT_SINCE,
    WAITING,
    HostState,
    make_diagnosis_error,
    process_state,
)
from .levels import CheckLevel

_PERIOD_S = 0.1  # interval between two looks
_MIN_WAIT_S = 0.3  # shorter waits are not examined
_FIRST_WARNING_S = 10.0  # duration of a wait at which a first warning is logged; each further one after twice the time
_STOPPED_PATIENCE_S = 2.5  # a rank that a signal has stopped for so long is lost
_JOIN_S = 20.0
_GRACE_S = 1.0  # time in which waits over closed connections end by themselves
_ABANDONED = object()
_LOG = logging.getLogger("dtensor.ranks")


class _WaitThread:
    """A thread that waits for work handles, and puts the error of the wait (or None) into ``results``."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.results: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve_requests, name="dtensor-waits", daemon=True)
        self.thread.start()

    def _serve_requests(self) -> None:
        """Wait for the work handles of each request, and put the error into ``results``, until a request is None."""
        while (request := self.requests.get()) is not None:
            self.results.put(_wait_for_works(*request))
            request = None


class WaitThreads:
    """Threads of one world that wait inside the backend, so that the threads that need the result can abandon the wait.

    If a part of a message has arrived when its connection breaks, gloo does not wake the thread that waits for it. That happens
    if a rank was killed, or if connections were closed after a diagnosis. Such a wait ends only with the timeout of the group.
    """

    def __init__(self) -> None:
        self._idle: list[_WaitThread] = []
        self._busy: set[_WaitThread] = set()
        self._make_error: Callable[[], BaseException] | None = None

    def wait_for(self, works: list[Any], handle: Any) -> None:
        """Wait for all work handles of a group in an idle or new thread.

        Raises:
            BaseException: the error of a work handle, or that of :meth:`abandon`.
        """
        waiter = self._idle.pop() if self._idle else _WaitThread()
        self._busy.add(waiter)
        waiter.requests.put((works, handle))
        try:
            error = waiter.results.get(timeout=None if self._make_error is None else _GRACE_S)
        except Empty:
            error = _ABANDONED
        if error is _ABANDONED:  # the thread stays in its wait, and gets no further request
            assert self._make_error is not None
            raise self._make_error()
        self._busy.discard(waiter)
        self._idle.append(waiter)
        if error is not None:
            raise error

    def abandon(self, make_error: Callable[[], BaseException]) -> None:
        """Raise ``make_error()`` in all present and future callers of :meth:`wait_for` with a wait that does not end soon."""
        self._make_error = make_error
        self._await_results()
        for waiter in list(self._busy):
            waiter.results.put(_ABANDONED)

    def stop(self, end_waits: Callable[[], None]) -> None:
        """End the threads; if some wait in the backend, call ``end_waits`` first.

        A thread that returns from the backend while Python is finalized would abort the process.
        """
        for waiter in [*self._idle, *self._busy]:
            waiter.requests.put(None)
        if any(waiter.results.empty() for waiter in self._busy):
            end_waits()
            self._await_results()

    def _await_results(self) -> None:
        """Sleep until the busy threads have ended their waits, at most ``_GRACE_S``."""
        deadline = time.monotonic() + _GRACE_S
        for waiter in list(self._busy):
            while waiter.results.empty() and time.monotonic() < deadline:
                time.sleep(0.01)


def _wait_for_works(works: list[Any], handle: Any) -> BaseException | None:
    """Wait for the work handles, and return the first error, None if there is none.

    ``handle`` keeps their group alive meanwhile: destroying a group with work in flight blocks.
    """
    try:
        while works:  # a work handle keeps the tensors that it sends, so it is released first
            works.pop(0).wait()
    except BaseException as error:
        return error.with_traceback(None)
    return None


class Watchdog:
    """A thread of one world that publishes where this rank is, and ends waits that cannot end.

    Attributes:
        logs: the collective logs of this rank, by their ranks.
        wait_threads: the threads in which this rank waits for large messages.
        level: the level of ``check_ranks`` that was last logged.
    """

    def __init__(self, host_state: HostState) -> None:
        self.host_state = host_state
        self.logs: dict[tuple[int, ...], CollectiveLog] = {}
        self.wait_threads, self.level = WaitThreads(), CheckLevel.now
        self._stopped = threading.Event()
        self._next_warning_s, self._call, self._location, self._started = _FIRST_WARNING_S, (0, ""), "-", "-"
        self._stopped_looks: dict[int, int] = {}  # by rank: number of consecutive looks at which a signal had stopped it
        self._thread = threading.Thread(target=self._run_periodically, name="dtensor-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._at_end = util.Finalize(None, self.stop, exitpriority=100)  # a process of multiprocessing ends without atexit

    def stop(self) -> None:
        """Publish that this rank has ended, and end this thread and the wait threads.

        A thread that is inside torch while Python is finalized would end the process by ``std::terminate``.
        """
        self.host_state.mark_ended()
        self._stopped.set()
        if threading.current_thread() is not self._thread and os.getpid() == self.host_state.pid:
            self._thread.join(_JOIN_S)
            self.wait_threads.stop(self._end_waits)
            atexit.unregister(self.stop)  # atexit would keep the state files of this world as long as the process runs
            self._at_end.cancel()

    def _run_periodically(self) -> None:
        """Examine this rank's wait every ``_PERIOD_S``, until the watch is over or :meth:`stop` is called."""
        while not self._stopped.wait(_PERIOD_S):
            try:
                if self._examine_wait():
                    return
            except Exception:  # a state file may be removed meanwhile
                _LOG.debug("the watchdog could not read the states of the ranks", exc_info=True)

    def _examine_wait(self) -> bool:
        """Publish this rank's state, examine its wait, and end all waits after a diagnosis. Return True if the watch is over."""
        host_state = self.host_state
        if not host_state.is_current:
            host_state.mark_ended()
            if not any(log.handles for log in list(self.logs.values())):
                return True  # else a mesh keeps its groups, and may wait in them
        self._publish_location()
        diagnosis = host_state.find_diagnosis()
        if host_state.spans_hosts:
            host_state.publish_state()
            diagnosis = diagnosis or host_state.remote_states.read_diagnosis()
        wait = self._find_wait()
        if diagnosis is None and wait is None and host_state.slots[C10D_CALL]:
            diagnosis = explain_c10d_wait(host_state) or self._find_stopped_rank(ranks_awaited_in_c10d(host_state))
            diagnosis = None if diagnosis is None else host_state.publish_diagnosis(diagnosis)
        failed_elsewhere = None if wait is not None or diagnosis is not None else find_failed_rank(host_state)
        if failed_elsewhere is not None:
            diagnosis = host_state.publish_diagnosis(failed_elsewhere)
        if diagnosis is None and wait is not None:
            log, number = wait
            diagnosis = explain_wait(host_state, log.ranks, log.key, number) or self._find_stopped_rank(log.ranks)
            if diagnosis is not None and self._find_wait() == wait:
                diagnosis = host_state.publish_diagnosis(diagnosis)
        if diagnosis is None:
            return False
        host_state.diagnosis = diagnosis
        if host_state.slots[C10D_CALL] or failed_elsewhere is not None:  # torch will raise an error with another text
            _LOG.error("%s", diagnosis["words"])
        if not self._stopped.wait(_PERIOD_S):  # other ranks read the diagnosis before their connections break
            self._end_waits()
            self.wait_threads.abandon(lambda: make_diagnosis_error(diagnosis))
        return True

    def _find_stopped_rank(self, ranks: Sequence[int]) -> Diagnosis | None:
        """Return the diagnosis for a rank that a signal has stopped for ``_STOPPED_PATIENCE_S``; None if there is none.

        The looks of this thread are counted instead of the time: this process may have been stopped together with the rank.
        """
        for rank in ranks:
            file = self.host_state.rank_file(rank)
            is_stopped = file is not None and process_state(file.slots[PID]) == "T"
            self._stopped_looks[rank] = self._stopped_looks.get(rank, 0) + 1 if is_stopped else 0
            if self._stopped_looks[rank] * _PERIOD_S > _STOPPED_PATIENCE_S:
                needed = f"{format_ranks([self.host_state.rank])} needs it"
                return diagnose_lost_rank(self.host_state, rank, needed, "is stopped by a signal")
        return None

    def _find_wait(self) -> tuple[CollectiveLog, int] | None:
        """Return log and number of the collective in which this rank has waited for ``_MIN_WAIT_S``; None if there is none."""
        slots = self.host_state.slots
        key, number, since = slots[WAIT_LOG], slots[WAIT_NUMBER], slots[WAIT_SINCE]
        seconds = (time.monotonic_ns() - since) / 1e9
        if slots[STATE] != WAITING or seconds < _MIN_WAIT_S:
            self._next_warning_s = _FIRST_WARNING_S
            return None
        log = next((log for log in list(self.logs.values()) if log.key == key), None)
        if log is not None and seconds > self._next_warning_s:
            self._next_warning_s *= 2
            self._warn_slow_wait(log, number, seconds)
        return None if log is None else (log, number)

    def _publish_location(self) -> None:
        """Write to the state file where the main thread is, and in which call of torch.distributed it waits, if in any."""
        slots, file = self.host_state.slots, self.host_state.file
        slots[HEARTBEAT] = time.monotonic_ns()
        locations = source_location.main_thread_locations()
        location = source_location.innermost_user_line(locations)
        if location != self._location:
            self._location, slots[LOCATION_SINCE] = location, time.monotonic_ns()
            slots[LOCATION] = file.replace_text(LOCATION_TEXT, location)
        started = count_started(handle for log in list(self.logs.values()) for handle in list(log.handles))
        if started != self._started:
            self._started, slots[C10D_STARTED] = started, file.replace_text(STARTED_TEXT, started)
        call = None if slots[STATE] == WAITING else find_c10d_call(locations)
        if call is None:
            slots[C10D_CALL], self._call = 0, (0, "")
        elif (call[1], started) != self._call:
            self._call = call[1], started
            slots[C10D_CALL_SINCE] = time.monotonic_ns()
            slots[C10D_CALL] = file.replace_text(CALL_TEXT, call[0])

    def _warn_slow_wait(self, log: CollectiveLog, number: int, seconds: float) -> None:
        """Log a warning for each rank that this rank waits for, with the line of user code of that rank."""
        for rank in log.ranks:
            if not has_reached(self.host_state, log.key, rank, number):
                line, line_s = self.host_state.location_of(rank)
                where = f"has been at {line} for {line_s:.0f} s" if line else "has published no line of user code"
                _LOG.warning("rank %d has waited %.0f s for rank %d, which %s", self.host_state.rank, seconds, rank, where)

    def _end_waits(self) -> None:
        """End all waits of this process, in each process group, so that they raise.

        Gloo has no other way than a wait that times out: it breaks the connections of the group, and so all waits in it.
        """
        world = self.host_state.world()
        backends = {handle: log.backend for log in list(self.logs.values()) for handle in list(log.handles)}
        if world is not None and world is dist.group.WORLD:
            backends |= {handle: str(dist.get_backend_config(handle)) for handle in list_user_groups(backends)}
        for handle, backend in backends.items():
            with contextlib.suppress(Exception):
                _break_group(handle, backend)


def _break_group(handle: Any, backend: str) -> None:
    """End all waits of this process in a group: abort it; on gloo break its connections by receives that time out."""
    size, rank = handle.size(), handle.rank()
    if size == 1:
        return
    if "gloo" not in backend:
        handle.abort()
        return
    for step in range(1, size):  # with all ranks: a wait over a connection that is closed already breaks no other one
        with contextlib.suppress(RuntimeError):
            start_unmatched_recv(handle, (rank + step) % size).wait(timedelta(milliseconds=1))
