"""The chain of one group: each collective's fingerprint is mixed into a hash, which the ranks of the group compare.

A rank writes its hash down *before* it looks at the others', and sends nothing before it has looked. So of two ranks that differ
at the same number the later one sees it and refuses, before anything is exchanged: no message of one collective arrives
in another, and none of a wrong length (gloo ends a process that gets one that is too long, and takes one that is too short).
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import weakref
from typing import Any

from ..base.callers import users_frame
from . import lines
from .board import CHAIN, COUNT, NUMBER, RUNNING, SINCE, STATE, THREADS, WAITING, Board
from .levels import Level
from .pages import Page

DEPTH = 4096  # collectives that are remembered
_SLOT = 6  # words of each: its number, the hash after it, what it was, the line, when, the operation before it
_HEAD = 4  # words before them: how many there were
_MIX, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
WORDS = _HEAD + DEPTH * _SLOT


def fingerprint(said: str) -> int:
    """64 bits of what was said, the same in all processes."""
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


class Chain:
    """The collectives of the processes ``ranks``, in order, as this one sees them.

    Attributes:
        count: how many there were.
    """

    def __init__(self, board: Board, ranks: tuple[int, ...], handle: Any, backend: str) -> None:
        self.board, self.ranks, self.handle, self.backend = board, ranks, weakref.ref(handle), backend
        self.key = fingerprint(repr(ranks))
        self.name = f"chain-{self.key:016x}"
        (board.folder / f".{self.name}.{board.rank}").write_text(repr(ranks))
        (board.folder / f".{self.name}.{board.rank}").rename(board.folder / self.name)
        self.apart = False  # whether its ranks are on several hosts
        self.page = board.own(f"{self.name}-{board.rank}", WORDS)
        self.words, self.count, self.hash = self.page.words, 0, 0
        self.kept: dict[Any, Any] = {}  # what the exchange of hashes is bound to
        self._to_come = [rank for rank in ranks if rank != board.rank]
        self._others: list[memoryview] = []

    def described(self, said: str) -> tuple[int, int]:
        """A collective as :meth:`take_down` takes it."""
        return fingerprint(said), self.page.keep(said)

    def take_down(self, hashed: int, text: int) -> bool:
        """Takes down the next collective; whether all who have come to its number mean the same."""
        if self.board.failed is not None:
            self.board.failed()
        number = self.count = self.count + 1
        mixed = self.hash = ((self.hash ^ hashed) * _MIX + number) & _MASK
        if Level.operations:
            mixed = self.hash = mixed ^ self._operations()
        words, at = self.words, _HEAD + (number & (DEPTH - 1)) * _SLOT
        words[at] = 0
        words[at + 1] = mixed
        words[at + 2] = text
        words[at + 3] = self._line()
        words[at + 4] = time.monotonic_ns()
        words[at + 5] = self.page.keep(Level.last)
        words[at] = number
        words[0] = number
        if self._to_come:
            self._look()
        return not any(theirs[at] == number and theirs[at + 1] != mixed for theirs in self._others)

    def last(self) -> str:
        """The last collective that was taken down, and the line."""
        return str(Entry(self.page, self.count))

    def begin_wait(self, number: int) -> None:
        """Says what this rank waits for from now on."""
        words = self.board.words
        words[CHAIN] = self.key
        words[NUMBER] = number
        words[SINCE] = time.monotonic_ns()
        words[STATE] = WAITING
        if threading.get_ident() != self.board.thread:
            words[THREADS] = 1

    def end_wait(self) -> None:
        words = self.board.words
        words[STATE] = RUNNING
        words[COUNT] += 1

    def _line(self) -> int:
        frame = users_frame(sys._getframe(3))
        return 0 if frame is None else self.page.keep(lines.line_of(frame.f_code.co_filename, frame.f_lineno))

    def _operations(self) -> int:
        """The hash of what all ranks of the group have computed together."""
        found = 0
        for ranks, hashed in Level.operations.items():
            if ranks.issuperset(self.ranks):
                found ^= hashed
        return found

    def _look(self) -> None:
        """Finds the pages of ranks that have come meanwhile."""
        for rank in list(self._to_come):
            page = self.board.of(f"{self.name}-{rank}", WORDS)
            if page is not None:
                self._others.append(page.words)
                self._to_come.remove(rank)


def count(ranks: frozenset[int], operation: str) -> None:
    """Mixes an operation of these ranks into what they compare at their next collective."""
    if ranks:
        Level.operations[ranks] = ((Level.operations.get(ranks, 0) ^ fingerprint(operation)) * _MIX + 1) & _MASK
        Level.last = operation


class Entry:
    """A collective as it was taken down by one rank."""

    def __init__(self, page: Page, number: int) -> None:
        at = _HEAD + (number & (DEPTH - 1)) * _SLOT
        words = page.words
        self.there = words[at] == number
        self.hash, self.time = words[at + 1], words[at + 4]
        self.what, self.line, self.after = (page.text(words[at + k]) for k in (2, 3, 5))

    def __str__(self) -> str:
        return f"{self.what}   {self.line}" + (f"   after {self.after}" if self.after else "")


def entry_of(board: Board, key: int, rank: int, number: int) -> Entry | None:
    """What a rank has taken down under a number of a chain; None if nothing."""
    page = board.of(f"chain-{key:016x}-{rank}", WORDS)
    found = None if page is None else Entry(page, number)
    return found if found is not None and found.there else None


def has_come(board: Board, key: int, rank: int, number: int) -> bool:
    """Whether a rank has come to a collective, perhaps long ago."""
    page = board.of(f"chain-{key:016x}-{rank}", WORDS)
    return page is not None and page.words[0] >= number


def last_of(board: Board, key: int, rank: int) -> Entry | None:
    """What a rank has taken down last in a chain."""
    page = board.of(f"chain-{key:016x}-{rank}", WORDS)
    return None if page is None or not page.words[0] else Entry(page, page.words[0])
