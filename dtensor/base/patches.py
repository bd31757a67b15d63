"""Patches: registry of the monkeypatches on torch that are applied now. ``interop.patch_catalog`` documents every patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock

IN_FORCE: dict[str, int] = {}  # location as in interop.patch_catalog -> how often it is applied


def changed(where: str) -> None:
    """Record that the torch attribute ``where`` was patched. Calls nest."""
    IN_FORCE[where] = IN_FORCE.get(where, 0) + 1


def restored(where: str) -> None:
    """Undo one :func:`changed` of ``where``. The entry is removed when its count reaches zero."""
    IN_FORCE[where] -= 1
    if not IN_FORCE[where]:
        del IN_FORCE[where]


class Together:
    """Process-wide patch with a reference count: the first thread that enters runs ``change()``, the last that leaves ends it."""

    def __init__(self, make_patch: Callable[[], AbstractContextManager[None]]) -> None:
        self._make_patch, self._lock, self._depth = make_patch, Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._patch = self._make_patch()
                self._patch.__enter__()
            self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._patch.__exit__(None, None, None)
