"""The chain of one group: each collective's fingerprint is mixed into a hash, which the ranks of the group compare.

A rank writes its hash down *before* it looks at the others', and sends nothing before it has looked. So of two ranks that differ
at the same number the later one sees it and refuses, before anything is exchanged: no message of one collective arrives
in another, and none of a wrong length (gloo ends a process that gets one that is too long, and takes one that is too short).
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.user_frames import users_frame
from . import source_location
from .flight_recorder import BROKEN_OFF, FAILED, HASH, LENGTHS, WORDS, Entry, Ring, fingerprint, mixed, place_of
from .host_state import CHAIN, COUNT, LEFT, NUMBER, RUNNING, SINCE, STATE, THREADS, WAITING, Board, ring_page
from .levels import computed_in
from .state_file import Page


class Deed(NamedTuple):
    """A collective as ranks compare it.

    Attributes:
        hash: of what all ranks of the group say of it.
        what, over: in words; the mesh dims.
        lengths: numbers that this rank sends to each rank of the group and that it expects of each, in the order of the chain's
            ranks; empty where ``what`` tells them.
    """

    hash: int
    what: str
    over: str
    lengths: str = ""

    @classmethod
    def of(cls, what: str, over: str, lengths: str = "") -> Deed:
        return cls(fingerprint(f"{what} {over}"), what, over, lengths)


def told_lengths(leaving: Sequence[int], arriving: Sequence[int]) -> str:
    """As a deed says them."""
    return f"{','.join(map(str, leaving))};{','.join(map(str, arriving))}"


def read_lengths(text: str) -> tuple[list[int], list[int]]:
    leaving, arriving = ([int(length) for length in part.split(",")] for part in text.split(";"))
    return leaving, arriving


class Chain(Ring):
    """The collectives of the processes ``ranks``, in order, as this one sees them."""

    def __init__(self, board: Board, ranks: tuple[int, ...], backend: str) -> None:
        self.board, self.ranks, self.backend = board, ranks, backend
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()
        self.key = fingerprint(repr(ranks))
        self.name = f"chain-{self.key:016x}"
        (board.folder / f".{self.name}.{board.rank}").write_text(repr(ranks))
        (board.folder / f".{self.name}.{board.rank}").rename(board.folder / self.name)
        super().__init__(board.own(f"{self.name}-{board.rank}", WORDS))
        self._computed = computed_in(board.world())
        self.apart = False  # whether its ranks are on several hosts
        self.left_out = 0  # the last one that this rank took down and did not issue, until all have come to the next one
        self.kept: dict[Any, Any] = {}  # what the exchange of hashes is bound to
        self._to_come = [rank for rank in ranks if rank != board.rank]
        self._others: list[tuple[int, Page]] = []

    def connect(self, handle: Any) -> None:
        """By which groups of torch they reach each other; None while one is not made."""
        if handle is not None:
            self.handles.add(handle)

    def take_down(self, deed: Deed) -> bool:
        """Takes down the next collective; whether all who have come to its number mean the same."""
        self.board.go_on()
        operations, after = self._operations(), self._trailed()
        frame = users_frame(sys._getframe(2))
        line = "" if frame is None else source_location.line_of(frame.f_code.co_filename, frame.f_lineno)
        at = self.add(deed.hash, deed.what, deed.over, line, operations, deed.lengths, after)
        number, hashed = self.count, self.hash
        if self._to_come:
            self._look()
        for _, page in self._others:
            if page.words[at] == number and page.words[at + HASH] != hashed:
                return False
        return not deed.lengths or not any(self._unfit(rank, page, deed.lengths) for rank, page in self._others)

    def _unfit(self, rank: int, page: Page, mine: str) -> bool:
        """Whether another rank that has come expects or sends other lengths than this one sends or expects."""
        theirs = lengths_in(page, self.count)
        return theirs is not None and bool(unfitting(self.ranks, {self.board.rank: read_lengths(mine), rank: theirs}))

    def leave_out(self, number: int) -> None:
        """Says that this rank did not issue a collective that it took down."""
        self.left_out = self.words[BROKEN_OFF] = number
        self.mix(FAILED)

    def last(self) -> Entry:
        """The last collective that was taken down."""
        return Entry(self.page, self.count)

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
        words[STATE] = LEFT if self.board.left else RUNNING
        words[COUNT] += 1

    def _operations(self) -> int:
        """Return how many operations all ranks of the group have done together, and make those a part of the hash.

        See [Note: What is compared on a group]. The sets are combined in any order, since ranks may have met them in another.
        """
        found = hashed = 0
        for ranks, ring in list(self._computed.operations.items()):
            if ranks.issuperset(self.ranks):
                hashed ^= mixed(ring.settle(), fingerprint(repr(sorted(ranks))), 0)
                found += ring.count
        if hashed:  # without such a set the hash stays as it is, whatever other sets this rank belongs to
            self.mix(hashed)
        return found

    def _trailed(self) -> str:
        """Return the last operation that all ranks of the group have done together and that was not taken down, in words, and
        make those operations a part of the hash. See [Note: What is compared on a group].
        """
        found, hashed = "", 0
        for ranks, trail in list(self._computed.trails.items()):
            if ranks.issuperset(self.ranks):
                found = trail.latest() or found
                hashed ^= mixed(settled, trail.key, 0) if (settled := trail.settle()) else 0
        if hashed:
            self.mix(hashed)
        return found

    def _look(self) -> None:
        """Finds the pages of ranks that have come meanwhile."""
        for rank in list(self._to_come):
            page = ring_page(self.board, "chain", self.key, rank)
            if page is not None:
                self._others.append((rank, page))
                self._to_come.remove(rank)


def lengths_in(page: Page, number: int) -> tuple[list[int], list[int]] | None:
    """The lengths that stand under a number of a chain, if any do."""
    text = page.text(page.words[place_of(number) + LENGTHS]) if page.words[place_of(number)] == number else ""
    return read_lengths(text) if text and page.words[place_of(number)] == number else None


def unfitting(ranks: Sequence[int], lengths: dict[int, tuple[list[int], list[int]]]) -> list[tuple[int, int, int, int]]:
    """Who sends how many numbers to whom that expects how many others."""
    at = {rank: position for position, rank in enumerate(ranks)}
    return [
        (one, other, sent, due)
        for one, (leaving, _) in lengths.items()
        for other, (_, arriving) in lengths.items()
        if one != other and (sent := leaving[at[other]]) != (due := arriving[at[one]])
    ]
