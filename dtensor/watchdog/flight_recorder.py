"""Rings: the last things of one kind that a rank has done, on a page that others read, also after it was killed.

Each thing has a number and a hash that goes over all that came before, so that the first number at which two ranks differ is
where they parted.
"""

from __future__ import annotations

import hashlib
import marshal
import time
import zlib
from typing import Any

from .state_file import Page

DEPTH = 4096  # things that are remembered
# Words of each: its number, the hash after it, what it was, the mesh dims, the line, when, operations before it, what it sends,
# and the last operation before it where those are not taken down one by one.
NUMBER, HASH, WHAT, OVER, LINE, WHEN, OPERATIONS, LENGTHS, AFTER = range(9)
SLOT = 9
HEAD = 4  # words before them: how many there were; of collectives the last one issued, and the last one broken off
ISSUED, BROKEN_OFF = 1, 2
_MIX, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
FAILED = 0x6661696C6564  # what an error leaves in a hash
UNORDERED = 0x756E6F726465  # what a thing without an order leaves in a hash, whichever it is
WORDS = HEAD + DEPTH * SLOT
_LIST = 5  # bytes before the elements of a list


def fingerprint(said: str | bytes) -> int:
    """64 bits of what was said, the same in all processes."""
    data = said.encode() if isinstance(said, str) else said
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def mixed(hashed: int, more: int, number: int) -> int:
    """A hash after one more thing."""
    return ((hashed ^ more) * _MIX + number) & MASK


def place_of(number: int) -> int:
    """Where a thing stands among the words."""
    return HEAD + (number & (DEPTH - 1)) * SLOT


class Ring:
    """What this rank has done; ``count`` things."""

    def __init__(self, page: Page) -> None:
        self.page, self.words = page, page.words
        self.count = self.hash = self.unordered = 0

    def add(self, hashed: int, what: str, over: str, line: str, operations: int = 0, lengths: str = "", after: str = "") -> int:
        """Takes a thing down; its place among the words."""
        number = self.count = self.count + 1
        self.hash = mixed(self.hash, hashed, number)
        words, keep, at = self.words, self.page.keep, HEAD + (number & (DEPTH - 1)) * SLOT
        words[at] = 0
        words[at + HASH] = self.hash
        words[at + WHAT] = keep(what)
        words[at + OVER] = keep(over)
        words[at + LINE] = keep(line)
        words[at + WHEN] = time.monotonic_ns()
        words[at + OPERATIONS] = operations
        words[at + LENGTHS] = keep(lengths)
        words[at + AFTER] = keep(after)
        words[at] = number
        words[0] = number
        return at

    def add_unordered(self, hashed: int, what: str, over: str, line: str) -> None:
        """Take down a thing that ranks may do in another order than other such things next to it."""
        self.add(UNORDERED, what, over, line)
        self.unordered += hashed

    def settle(self) -> int:
        """Return the hash, with what has no order."""
        return self.hash ^ (self.unordered & MASK)

    def mix(self, more: int) -> None:
        """Makes something that is no thing of its own a part of the hash."""
        self.hash = mixed(self.hash, more, self.count)


class Trail:
    """Operations that ``ranks`` do together and that are not taken down: a hash of all so far, in words the last one and the last
    that raised, and numbers that entered them, which are no part of the hash yet. ``unordered`` is the sum of the fingerprints
    of operations that ranks may do in any order.
    """

    __slots__ = ("_counted", "hash", "key", "last", "numbers", "raised", "unordered")
    MANY = 1 << 12  # numbers that are made a part of it at once

    def __init__(self, ranks: frozenset[int]) -> None:
        self.key = fingerprint(repr(sorted(ranks)))
        self.begin_anew()

    def begin_anew(self) -> None:
        """As in a new world."""
        self.hash, self.last, self.raised, self._counted, self.unordered = 0, "", "", 0, 0
        self.numbers: list[Any] = []

    def fail(self, words: str) -> None:
        """An operation has raised an error: however it ends elsewhere, ranks on which it ended otherwise have parted."""
        self.hash, self.raised = hash((self.hash, FAILED)), words

    def settle(self) -> int:
        """A hash of operations and numbers, wherever it was asked for before; 0 of none."""
        if self.numbers:
            self._counted = zlib.crc32(marshal.dumps(self.numbers, 2)[_LIST:], self._counted)
            self.numbers.clear()
        return self.hash ^ (self._counted << 16) ^ (self.unordered & MASK)

    def latest(self) -> str:
        """The last operation since this was asked before, the last numbers that entered one, and the last that raised."""
        last, raised, self.last, self.raised = self.last, self.raised, "", ""
        last = f"{last}, with {', '.join(map(repr, self.numbers[-3:]))}" if self.numbers else last
        return f"{last}, and {raised}" if raised else last


class Entry:
    """A thing as it was taken down by one rank."""

    def __init__(self, page: Page, number: int) -> None:
        at = place_of(number)
        words = page.words
        written = words[at] == number  # it is put there last
        self.hash, self.time, self.operations = words[at + HASH], words[at + WHEN], words[at + OPERATIONS]
        self.what, self.over, self.line, self.after = (page.text(words[at + k]) for k in (WHAT, OVER, LINE, AFTER))
        self.there = written and words[at] == number  # and taken away before it is written over

    @classmethod
    def told(cls, hashed: int, what: str, over: str, line: str, after: str) -> Entry:
        """One of another host."""
        made = cls.__new__(cls)
        made.hash, made.time, made.operations, made.there = hashed, 0, 0, True
        made.what, made.over, made.line, made.after = what, over, line, after
        return made

    def __str__(self) -> str:
        return f"{self.what}   {self.line}"


def entry_in(page: Page | None, number: int) -> Entry | None:
    """What stands in a ring under a number."""
    if page is None:
        return None
    found = Entry(page, number)
    return found if found.there else None


def done_in(page: Page) -> int:
    """The last collective of a chain in which a rank that has ended did its part."""
    issued = page.words[ISSUED]
    return issued - (page.words[BROKEN_OFF] == issued)
