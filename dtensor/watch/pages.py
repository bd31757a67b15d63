"""Pages: mapped files of whole numbers and texts, written by one process and read by others, also after it was killed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

TEXT = 1 << 18  # bytes for texts
_LENGTH = 4  # bytes before each text
_LONGEST = 2000
_CHANGING = 4  # texts that are written over: each has a place of its own before all others


class Page:
    """``words``: numbers below 2^64, each written and read whole. A text is known by where it stands; 0 is the empty one."""

    def __init__(self, path: Path, count: int, *, ours: bool) -> None:
        size = 8 * count + TEXT
        if ours:
            _create(path, size)
        with open(path, "r+b" if ours else "rb") as file:
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if ours else mmap.ACCESS_READ)
        self.words = memoryview(self._map)[: 8 * count].cast("Q")
        self._start = 8 * count
        self._end = _LENGTH + _CHANGING * (_LENGTH + _LONGEST)
        self._texts: dict[str, int] = {"": 0}

    def keep(self, text: str) -> int:
        """Where ``text`` stands from now on; 0 where there is no room left."""
        found = self._texts.get(text)
        if found is None:
            data = text.encode()[:_LONGEST]
            found, end = self._end, self._end + _LENGTH + len(data)
            if end > TEXT:
                return 0
            self._write(found, data)
            self._texts[text], self._end = found, end
        return found

    def put(self, place: int, text: str) -> int:
        """Where ``text`` stands: over what stood in this place; 0 if it is empty."""
        at = _LENGTH + place * (_LENGTH + _LONGEST)
        self._write(at, text.encode()[:_LONGEST])
        return at if text else 0

    def _write(self, at: int, data: bytes) -> None:
        at += self._start
        self._map[at : at + _LENGTH + len(data)] = len(data).to_bytes(_LENGTH, "little") + data

    def text(self, at: int) -> str:
        """The text that stands at ``at``."""
        if not 0 < at < TEXT:
            return ""
        start = self._start + at
        length = min(_LONGEST, int.from_bytes(self._map[start : start + _LENGTH], "little"))
        return self._map[start + _LENGTH : start + _LENGTH + length].decode(errors="replace")


def _create(path: Path, size: int) -> None:
    """The file, whole before it has its name: who finds it can read it."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    with open(unnamed, "wb") as file:
        file.write(bytes(size))  # all of it: where there is no room, an error is better than a signal later
    unnamed.rename(path)
