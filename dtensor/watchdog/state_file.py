"""Pages: mapped files of whole numbers and texts, written by one process and read by others, also after it was killed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from struct import Struct

TEXT = 1 << 18  # bytes for texts that are kept: the oldest give way
_HEAD = Struct("<QI")  # before each: its place among all that were ever kept, its length
_LONGEST = 2000
_CHANGING = 5  # texts that are written over: each has a place of its own before all others


class Page:
    """``words``: numbers below 2^64, each written and read whole. A text is known by its place; 0 is the empty one.

    Without a path it is in this process's memory alone.
    """

    def __init__(self, path: Path | None, count: int, *, ours: bool) -> None:
        self._start = 8 * count
        self._kept = self._start + _CHANGING * (_HEAD.size + _LONGEST)
        size = self._kept + TEXT
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            if ours:
                _create(path, size)
            with open(path, "r+b" if ours else "rb") as file:
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if ours else mmap.ACCESS_READ)
        self.words = memoryview(self._map)[: self._start].cast("Q")
        self._end = TEXT  # those below are the places of texts that change
        self._texts: dict[str, int] = {"": 0}

    def keep(self, text: str) -> int:
        """The place of ``text`` until so much was kept after it that it gives way."""
        found = self._texts.get(text)
        if found is not None and (not found or found >= self._end - TEXT):
            return found
        data = text.encode()[:_LONGEST]
        length, round_ = _HEAD.size + len(data), self._end // TEXT
        if self._end % TEXT + length > TEXT:  # none goes over the edge
            self._end = (round_ + 1) * TEXT
        found, self._end = self._end, self._end + length
        self._write(self._kept + found % TEXT, found, data)
        self._texts[text] = found
        if self._end // TEXT != round_:
            self._texts = {known: place for known, place in self._texts.items() if not place or place >= self._end - TEXT}
        return found

    def put(self, place: int, text: str) -> int:
        """The place of ``text``: over what stood there; 0 if it is empty."""
        self._write(self._start + place * (_HEAD.size + _LONGEST), place + 1, text.encode()[:_LONGEST])
        return place + 1 if text else 0

    def _write(self, at: int, place: int, data: bytes) -> None:
        self._map[at : at + _HEAD.size + len(data)] = _HEAD.pack(place, len(data)) + data

    def text(self, place: int) -> str:
        """The text of that place; empty where it has given way."""
        if not 0 < place <= _CHANGING and place < TEXT:
            return ""
        at = self._start + (place - 1) * (_HEAD.size + _LONGEST) if place < TEXT else self._kept + place % TEXT
        found, length = _HEAD.unpack_from(self._map, at)
        at += _HEAD.size
        return self._map[at : at + min(length, _LONGEST)].decode(errors="replace") if found == place else ""


def _create(path: Path, size: int) -> None:
    """The file, whole before it has its name: who finds it can read it."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    with open(unnamed, "wb") as file:
        file.write(bytes(size))  # all of it: where there is no room, an error is better than a signal later
    unnamed.rename(path)
