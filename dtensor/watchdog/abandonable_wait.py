"""Threads that wait inside of the backend for those that asked them, who can be let go.

Gloo does not tell who waits for a message of which a part is there already that its connection broke: a rank was killed, or
connections were closed after a verdict. Such a wait ends with the group's timeout, and nothing else ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

_GRACE_S = 1.0  # in which waits end by themselves whose connections are closed
_LET_GO = object()


class _Waiter:
    def __init__(self) -> None:
        self.asked: SimpleQueue[Any] = SimpleQueue()
        self.told: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="dtensor-waits", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (given := self.asked.get()) is not None:
            self.told.put(_ended(*given))
            given = None


class Waiters:
    """Of one world."""

    def __init__(self) -> None:
        self._idle: list[_Waiter] = []
        self._busy: set[_Waiter] = set()
        self._why: Callable[[], BaseException] | None = None

    def end(self, works: list[Any], handle: Any) -> None:
        """Waits for all of these works of a group: what breaks them is raised, and what :meth:`let_go` says."""
        waiter = self._idle.pop() if self._idle else _Waiter()
        self._busy.add(waiter)
        waiter.asked.put((works, handle))
        try:
            error = waiter.told.get(timeout=None if self._why is None else _GRACE_S)
        except Empty:
            error = _LET_GO
        if error is _LET_GO:  # it stays where it is, and will not be asked again
            assert self._why is not None
            raise self._why()
        self._busy.discard(waiter)
        self._idle.append(waiter)
        if error is not None:
            raise error

    def let_go(self, why: Callable[[], BaseException]) -> None:
        """Raises ``why()`` in all who wait, now and later, but for what ends by itself."""
        self._why = why
        self._settle()
        for waiter in list(self._busy):
            waiter.told.put(_LET_GO)

    def stop(self, end_waits: Callable[[], None]) -> None:
        """Ends the threads: one that comes back from the backend when Python is finalized ends the process."""
        for waiter in [*self._idle, *self._busy]:
            waiter.asked.put(None)
        if any(waiter.told.empty() for waiter in self._busy):
            end_waits()
            self._settle()

    def _settle(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for waiter in list(self._busy):
            while waiter.told.empty() and time.monotonic() < deadline:
                time.sleep(0.01)


def _ended(works: list[Any], handle: Any) -> BaseException | None:
    """What broke one of them. While one is under way its group is held: to destroy it is to wait, too."""
    try:
        while works:  # they hold what they send, so they go first
            works.pop(0).wait()
    except BaseException as error:
        return error.with_traceback(None)
    return None
