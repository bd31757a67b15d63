"""The watcher: a thread that asks, while this rank waits, whether its wait can end, and ends it if it cannot."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import util
from typing import Any

import torch.distributed as dist

from . import source_location
from .abandonable_wait import Waiters
from .blocked_call import begin_unsent, begun, groups_of_program, in_torch
from .collective_log import Chain
from .deadlock import failed_elsewhere, has_come, needed_in_torch, why, why_in_torch
from .diagnosis import Verdict, lost, named
from .host_state import (
    BEAT,
    BEGUN,
    BEGUN_TEXT,
    CALL_TEXT,
    CHAIN,
    IN_TORCH,
    IN_TORCH_SINCE,
    NUMBER,
    PID,
    SINCE,
    STATE,
    WAITING,
    WHERE,
    WHERE_SINCE,
    WHERE_TEXT,
    Board,
    error_of,
    process_state,
)
from .levels import Level

_PERIOD_S = 0.1
_NOTHING_YET_S = 0.3  # a wait shorter than this is none of anybody's business
_SLOW_S = 10.0
_STOPPED_S = 2.5
_JOIN_S = 20.0
_LOG = logging.getLogger("dtensor.ranks")


class Watcher:
    """Of one world; ``chains`` by their ranks, ``level`` as it was last told in them."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.chains: dict[tuple[int, ...], Chain] = {}
        self.waiters, self.level = Waiters(), Level.now
        self._stopped = threading.Event()
        self._told, self._call, self._where, self._begun = _SLOW_S, (0, ""), "-", "-"
        self._looks: dict[int, int] = {}  # by rank, how often one after the other it was seen to be stopped
        self._thread = threading.Thread(target=self._run, name="dtensor-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._at_end = util.Finalize(None, self.stop, exitpriority=100)  # a process of multiprocessing ends without atexit

    def stop(self) -> None:
        """Says on the board that this rank leaves, and ends the thread: one that is inside of torch when Python is finalized
        ends the process by ``std::terminate``.
        """
        self.board.leave()
        self._stopped.set()
        if threading.current_thread() is not self._thread and os.getpid() == self.board.pid:
            self._thread.join(_JOIN_S)
            self.waiters.stop(self._end_waits)
            atexit.unregister(self.stop)  # which would keep this world's pages as long as the process
            self._at_end.cancel()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            try:
                if self._look():
                    return
            except Exception:  # a page of a rank that goes away meanwhile
                _LOG.debug("the ranks could not be looked at", exc_info=True)

    def _look(self) -> bool:
        """Whether all is over."""
        board = self.board
        if not board.present:
            board.leave()
            if not any(chain.handles for chain in list(self.chains.values())):
                return True  # else a mesh keeps its groups, and may wait in them
        self._say_where()
        verdict = board.found()
        if board.spread:
            board.tell()
            verdict = verdict or board.posts.verdict()
        waits = self._waits()
        if verdict is None and waits is None and board.words[IN_TORCH]:
            verdict = why_in_torch(board) or self._stopped_rank(needed_in_torch(board))
            verdict = None if verdict is None else board.judge(verdict)
        unseen = None if waits is not None or verdict is not None else failed_elsewhere(board)
        if unseen is not None:
            verdict = board.judge(unseen)
        if verdict is None and waits is not None:
            chain, number = waits
            verdict = why(board, chain.ranks, chain.key, number) or self._stopped_rank(chain.ranks)
            if verdict is not None and self._waits() == waits:
                verdict = board.judge(verdict)
        if verdict is None:
            return False
        board.verdict = verdict
        if board.words[IN_TORCH] or unseen is not None:  # which will raise in words of its own
            _LOG.error("%s", verdict["words"])
        if not self._stopped.wait(_PERIOD_S):  # others have the verdict before their connections break
            self._end_waits()
            self.waiters.let_go(lambda: error_of(verdict))
        return True

    def _stopped_rank(self, ranks: Sequence[int]) -> Verdict | None:
        """That a rank is needed which a signal has stopped: at each of so many looks, for all may have been stopped together."""
        for rank in ranks:
            page = self.board.rank_page(rank)
            stopped = page is not None and process_state(page.words[PID]) == "T"
            self._looks[rank] = self._looks.get(rank, 0) + 1 if stopped else 0
            if self._looks[rank] * _PERIOD_S > _STOPPED_S:
                return lost(self.board, rank, f"{named([self.board.rank])} needs it", "is stopped by a signal")
        return None

    def _waits(self) -> tuple[Chain, int] | None:
        """The collective that this rank has waited in for a while."""
        words = self.board.words
        key, number, since = words[CHAIN], words[NUMBER], words[SINCE]
        seconds = (time.monotonic_ns() - since) / 1e9
        if words[STATE] != WAITING or seconds < _NOTHING_YET_S:
            self._told = _SLOW_S
            return None
        chain = next((chain for chain in list(self.chains.values()) if chain.key == key), None)
        if chain is not None and seconds > self._told:
            self._told *= 2
            self._say_slow(chain, number, seconds)
        return None if chain is None else (chain, number)

    def _say_where(self) -> None:
        """Leaves on the board where the main thread is, and whether it waits in one of torch's own collectives."""
        words, page = self.board.words, self.board.page
        words[BEAT] = time.monotonic_ns()
        places = source_location.main_places()
        where = source_location.in_places(places)
        if where != self._where:
            self._where, words[WHERE_SINCE] = where, time.monotonic_ns()
            words[WHERE] = page.put(WHERE_TEXT, where)
        if (now := begun(handle for chain in list(self.chains.values()) for handle in list(chain.handles))) != self._begun:
            self._begun, words[BEGUN] = now, page.put(BEGUN_TEXT, now)
        found = None if words[STATE] == WAITING else in_torch(places)
        if found is None:
            words[IN_TORCH], self._call = 0, (0, "")
        elif (found[1], now) != self._call:
            self._call = found[1], now
            words[IN_TORCH_SINCE] = time.monotonic_ns()
            words[IN_TORCH] = page.put(CALL_TEXT, found[0])

    def _say_slow(self, chain: Chain, number: int, seconds: float) -> None:
        for rank in chain.ranks:
            if not has_come(self.board, chain.key, rank, number):
                where, long = self.board.where(rank)
                said = f"rank {rank} {where and 'is at '}{where or 'says nothing'} for {long:.0f} s"
                _LOG.warning("%s; rank %d has waited %.0f s for it", said, self.board.rank, seconds)

    def _end_waits(self) -> None:
        """Ends what this process waits for, in each group. Gloo has no other way than a wait of its own that runs out of time:
        it breaks the group's connections, and with them all waits.
        """
        world = self.board.world()
        found = {handle: chain.backend for chain in list(self.chains.values()) for handle in list(chain.handles)}
        if world is not None and world is dist.group.WORLD:
            found |= {handle: str(dist.get_backend_config(handle)) for handle in groups_of_program(found)}
        for handle, backend in found.items():
            with contextlib.suppress(Exception):
                _end_waits_of(handle, backend)


def _end_waits_of(handle: Any, backend: str) -> None:
    size, rank = handle.size(), handle.rank()
    if size == 1:
        return
    if "gloo" not in backend:
        handle.abort()
        return
    for step in range(1, size):  # one whose connection is closed already breaks no other
        with contextlib.suppress(RuntimeError):
            begin_unsent(handle, (rank + step) % size).wait(timedelta(milliseconds=1))
