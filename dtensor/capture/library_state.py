"""What the library keeps between calls, as a recording meets it: each starts with nothing kept, and leaves what was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import CaptureError


class Keeping:
    """A recorder's part of it; see :class:`..base.recorder_hooks.Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self._apart: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._undo: list[Callable[[], Any]] = []

    def apart(self, owner: Any, empty: Mapping[str, Any]) -> None:
        if id(owner) not in self._apart:
            self._apart[id(owner)] = owner, {name: getattr(owner, name) for name in empty}
            _set(owner, empty)

    def undo(self, fn: Callable[[], Any]) -> None:
        self._undo.append(fn)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Afterwards the library keeps what it kept before."""
        self._undo.clear()
        try:
            yield
        except CaptureError:
            for fn in reversed(self._undo):
                fn()
            raise
        finally:
            for owner, attributes in self._apart.values():
                _set(owner, attributes)
            self._apart.clear()


def _set(owner: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)
