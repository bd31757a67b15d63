"""Patches: registry of the monkeypatches on torch that are applied now. ``interop.patch_catalog`` documents every patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Lock

APPLIED_PATCHES: dict[str, int] = {}  # location as in interop.patch_catalog -> how often it is applied


def patch_applied(where: str) -> None:
    """Record that the torch attribute ``where`` was patched. Calls nest."""
    APPLIED_PATCHES[where] = APPLIED_PATCHES.get(where, 0) + 1


def patch_removed(where: str) -> None:
    """Undo one :func:`patch_applied` of ``where``. The entry is removed when its count reaches zero."""
    APPLIED_PATCHES[where] -= 1
    if not APPLIED_PATCHES[where]:
        del APPLIED_PATCHES[where]


class RefCountedPatch:
    """Process-wide patch with a reference count: the first thread that enters runs ``change()``, the last that leaves ends it."""

    def __init__(self, make_patch: Callable[[], AbstractContextManager[None]]) -> None:
        self._make_patch, self._lock, self._depth = make_patch, Lock(), 0

    def __enter__(self) -> None:
        """Apply the patch if no thread has entered."""
        with self._lock:
            if not self._depth:
                self._patch = self._make_patch()
                self._patch.__enter__()
            self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        """Remove the patch if this is the last thread that leaves."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._patch.__exit__(None, None, None)
