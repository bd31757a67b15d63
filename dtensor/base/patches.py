"""What of torch is not as it was found by now: each place that changes something says so; ``interop.patch_catalog`` says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock

IN_FORCE: dict[str, int] = {}  # where, as in interop.changes, and how many times


def changed(where: str) -> None:
    """It is, once more."""
    IN_FORCE[where] = IN_FORCE.get(where, 0) + 1


def restored(where: str) -> None:
    """One change of it is undone."""
    IN_FORCE[where] -= 1
    if not IN_FORCE[where]:
        del IN_FORCE[where]


class Together:
    """A change of the whole process: the first who enters, in any thread, begins ``change()``; the last who leaves ends it."""

    def __init__(self, change: Callable[[], AbstractContextManager[None]]) -> None:
        self._change, self._lock, self._inside = change, Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._made = self._change()
                self._made.__enter__()
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._made.__exit__(None, None, None)
