"""Flight recorder: logs of the last events of a rank in memory-mapped files, and hashes of all events so far.

Other processes read the files, also after the writing process was killed. Each event has a number and a hash of all events up to
it. So the first number at which the hashes of two ranks differ is the event at which they diverged.
"""

from __future__ import annotations

import hashlib
import marshal
import mmap
import os
import time
import zlib
from pathlib import Path
from struct import Struct
from typing import Any

LOG_TEXT_BYTES = 1 << 18  # size of the ring buffer of texts, in which new texts overwrite the oldest
_TEXT_HEADER = Struct("<QI")  # precedes each text: its id, its length in bytes
_MAX_TEXT_BYTES = 2000
_FIXED_TEXTS = 5  # number of texts with a fixed place, which a new value overwrites; they precede the ring buffer


class StateFile:
    """A memory-mapped file of 8-byte integers (``slots``) and texts, with one writing process and any number of readers.

    Without a path it is anonymous memory of this process.

    Attributes:
        slots: unsigned integers below 2^64, each of which is read and written atomically. A slot refers to a text by its id;
            0 is the id of the empty text.
    """

    def __init__(self, path: Path | None, slot_count: int, *, writable: bool) -> None:
        self._fixed_start = 8 * slot_count
        self._ring_start = self._fixed_start + _FIXED_TEXTS * (_TEXT_HEADER.size + _MAX_TEXT_BYTES)
        size = self._ring_start + LOG_TEXT_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            if writable:
                _create_file(path, size)
            with open(path, "r+b" if writable else "rb") as file:
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.slots = memoryview(self._map)[: self._fixed_start].cast("Q")
        self._next_id = LOG_TEXT_BYTES  # smaller ids are those of fixed places
        self._ids: dict[str, int] = {"": 0}

    def add_text(self, text: str) -> int:
        """Return the id of ``text``, and write it to the ring buffer unless it is still there."""
        text_id = self._ids.get(text)
        if text_id is not None and (not text_id or text_id >= self._next_id - LOG_TEXT_BYTES):
            return text_id
        data = text.encode()[:_MAX_TEXT_BYTES]
        length, lap = _TEXT_HEADER.size + len(data), self._next_id // LOG_TEXT_BYTES
        if self._next_id % LOG_TEXT_BYTES + length > LOG_TEXT_BYTES:  # a text does not wrap around the end of the buffer
            self._next_id = (lap + 1) * LOG_TEXT_BYTES
        text_id, self._next_id = self._next_id, self._next_id + length
        self._write(self._ring_start + text_id % LOG_TEXT_BYTES, text_id, data)
        self._ids[text] = text_id
        if self._next_id // LOG_TEXT_BYTES != lap:
            oldest = self._next_id - LOG_TEXT_BYTES
            self._ids = {known: place for known, place in self._ids.items() if not place or place >= oldest}
        return text_id

    def replace_text(self, place: int, text: str) -> int:
        """Overwrite the text at the fixed ``place``, and return its id; 0 if ``text`` is empty."""
        self._write(self._fixed_start + place * (_TEXT_HEADER.size + _MAX_TEXT_BYTES), place + 1, text.encode()[:_MAX_TEXT_BYTES])
        return place + 1 if text else 0

    def _write(self, offset: int, text_id: int, data: bytes) -> None:
        self._map[offset : offset + _TEXT_HEADER.size + len(data)] = _TEXT_HEADER.pack(text_id, len(data)) + data

    def read_text(self, text_id: int) -> str:
        """Return the text with this id; empty if it was overwritten by another one."""
        if not 0 < text_id <= _FIXED_TEXTS and text_id < LOG_TEXT_BYTES:
            return ""
        if text_id < LOG_TEXT_BYTES:
            offset = self._fixed_start + (text_id - 1) * (_TEXT_HEADER.size + _MAX_TEXT_BYTES)
        else:
            offset = self._ring_start + text_id % LOG_TEXT_BYTES
        stored_id, length = _TEXT_HEADER.unpack_from(self._map, offset)
        offset += _TEXT_HEADER.size
        data = self._map[offset : offset + min(length, _MAX_TEXT_BYTES)]
        return data.decode(errors="replace") if stored_id == text_id else ""


def _create_file(path: Path, size: int) -> None:
    """Create a file of zeros at ``path``. It gets its name when it is complete, so that no reader finds a part of it."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    with open(unnamed, "wb") as file:
        file.write(bytes(size))  # allocate all of it: a full file system raises an error here instead of SIGBUS at a later write
    unnamed.rename(path)


# --- logs of events ------------------------------------------------------------------------------------------------------
MAX_EVENTS = 4096  # events in the ring buffer of one log
# Slots of one event: its number, the hash up to it, ids of text, mesh dims and user line, time in ns, number of operations before
# a collective, ids of the message lengths of a collective, and of the last operation before it that has no event of its own.
NUMBER, HASH, TEXT, MESH_DIMS, LINE, TIME, OPERATIONS, LENGTHS, LAST_OPERATION = range(9)
SLOTS_PER_EVENT = 9
HEADER_SLOTS = 4  # slot 0 holds the number of events
LAST_ISSUED, LAST_INTERRUPTED = 1, 2  # header slots: the last collective that was issued, and the last with an interrupted wait
_HASH_MULTIPLIER, _UINT64_MASK = 0x9E3779B97F4A7C15, 2**64 - 1
FAILED_MARK = 0x6661696C6564  # mixed into the hash when an operation or a wait raises an error
_UNORDERED_MARK = 0x756E6F726465  # mixed into the hash for each event without an order
LOG_SLOTS = HEADER_SLOTS + MAX_EVENTS * SLOTS_PER_EVENT
_MARSHAL_HEADER_BYTES = 5  # bytes before the elements of a marshalled list


def fingerprint(content: str | bytes) -> int:
    """Return a 64-bit hash of ``content`` that is equal in all processes."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def mix_hash(hashed: int, value: int, number: int) -> int:
    """Return the rolling hash ``hashed`` after event ``number`` with hash ``value``."""
    return ((hashed ^ value) * _HASH_MULTIPLIER + number) & _UINT64_MASK


def slot_of(number: int) -> int:
    """Return the first slot of the event with this number."""
    return HEADER_SLOTS + (number & (MAX_EVENTS - 1)) * SLOTS_PER_EVENT


class EventLog:
    """The log of events of one kind of this rank.

    Attributes:
        count: number of events so far.
        hash: rolling hash of all events with an order.
        unordered: sum of the fingerprints of all events that ranks may do in any order.
    """

    def __init__(self, file: StateFile) -> None:
        self.file, self.slots = file, file.slots
        self.count = self.hash = self.unordered = 0

    def add_event(
        self,
        hashed: int,
        text: str,
        mesh_dims: str,
        line: str,
        operations: int = 0,
        lengths: str = "",
        last_operation: str = "",
    ) -> int:
        """Log an event with fingerprint ``hashed``, mix it into the rolling hash, and return its first slot."""
        number = self.count = self.count + 1
        self.hash = mix_hash(self.hash, hashed, number)
        slots, add_text, at = self.slots, self.file.add_text, HEADER_SLOTS + (number & (MAX_EVENTS - 1)) * SLOTS_PER_EVENT
        slots[at] = 0  # readers take an event as complete when its number is in its first slot
        slots[at + HASH] = self.hash
        slots[at + TEXT] = add_text(text)
        slots[at + MESH_DIMS] = add_text(mesh_dims)
        slots[at + LINE] = add_text(line)
        slots[at + TIME] = time.monotonic_ns()
        slots[at + OPERATIONS] = operations
        slots[at + LENGTHS] = add_text(lengths)
        slots[at + LAST_OPERATION] = add_text(last_operation)
        slots[at] = number
        slots[0] = number
        return at

    def add_unordered_event(self, hashed: int, text: str, mesh_dims: str, line: str) -> None:
        """Log an event that ranks may do in another order than adjacent events of the same kind."""
        self.add_event(_UNORDERED_MARK, text, mesh_dims, line)
        self.unordered += hashed

    def read_hash(self) -> int:
        """Return the hash of all events so far, with and without an order."""
        return self.hash ^ (self.unordered & _UINT64_MASK)

    def mix(self, value: int) -> None:
        """Mix ``value`` into the hash without an event of its own."""
        self.hash = mix_hash(self.hash, value, self.count)


class OperationHash:
    """A rolling hash of the operations of a set of ranks, which are not logged one by one.

    Attributes:
        key: hash of the set of ranks.
        hash: rolling hash of all operations with an order.
        unordered: sum of the fingerprints of operations that ranks may do in any order.
        numbers: Python numbers that entered operations since the last :meth:`read_hash`, not yet in the hash.
        last, raised: texts of the last operation, and of the last that raised an error, since the last :meth:`take_texts`.
    """

    __slots__ = ("_number_hash", "hash", "key", "last", "numbers", "raised", "unordered")
    MANY = 1 << 12  # length of ``numbers`` at which a caller hashes them, by :meth:`read_hash`

    def __init__(self, ranks: frozenset[int]) -> None:
        self.key = fingerprint(repr(sorted(ranks)))
        self.reset()

    def reset(self) -> None:
        """Set the hash and the texts to those of no operation, and drop the numbers. The log of events stays."""
        self.hash, self.last, self.raised, self._number_hash, self.unordered = 0, "", "", 0, 0
        self.numbers: list[Any] = []

    def fail(self, text: str) -> None:
        """Mix in that an operation raised an error, so that ranks on which it did not raise have another hash."""
        self.hash, self.raised = hash((self.hash, FAILED_MARK)), text

    def read_hash(self) -> int:
        """Return a hash of all operations and numbers so far, 0 if there were none. Calls of this method do not change it."""
        if self.numbers:
            self._number_hash = zlib.crc32(marshal.dumps(self.numbers, 2)[_MARSHAL_HEADER_BYTES:], self._number_hash)
            self.numbers.clear()
        return self.hash ^ (self._number_hash << 16) ^ (self.unordered & _UINT64_MASK)

    def take_texts(self) -> str:
        """Return and clear the text of the last operation, the last numbers that entered one, and the last that raised."""
        last, raised, self.last, self.raised = self.last, self.raised, "", ""
        last = f"{last}, with {', '.join(map(repr, self.numbers[-3:]))}" if self.numbers else last
        return f"{last}, and {raised}" if raised else last


class LoggedEvent:
    """An event as it is read from a log.

    Attributes:
        is_complete: whether the event was in the log, and was not overwritten while it was read.
    """

    def __init__(self, file: StateFile, number: int) -> None:
        at = slot_of(number)
        slots = file.slots
        written = slots[at] == number  # the writer sets the number last
        self.hash, self.time, self.operations = slots[at + HASH], slots[at + TIME], slots[at + OPERATIONS]
        self.text, self.mesh_dims, self.line, self.last_operation = (
            file.read_text(slots[at + k]) for k in (TEXT, MESH_DIMS, LINE, LAST_OPERATION)
        )
        self.is_complete = written and slots[at] == number  # the writer clears the number before it overwrites the event

    @classmethod
    def from_store(cls, hashed: int, text: str, mesh_dims: str, line: str, last_operation: str) -> LoggedEvent:
        """Make the event of a rank on another host from the fields that it published."""
        event = cls.__new__(cls)
        event.hash, event.time, event.operations, event.is_complete = hashed, 0, 0, True
        event.text, event.mesh_dims, event.line, event.last_operation = text, mesh_dims, line, last_operation
        return event

    def __str__(self) -> str:
        return f"{self.text}   {self.line}"


def read_event(file: StateFile | None, number: int) -> LoggedEvent | None:
    """Return the event with this number, None if the file does not have it (any more)."""
    if file is None:
        return None
    event = LoggedEvent(file, number)
    return event if event.is_complete else None


def last_completed(file: StateFile) -> int:
    """Return the number of the last collective that a rank issued and did not interrupt, from its log file."""
    issued = file.slots[LAST_ISSUED]
    return issued - (file.slots[LAST_INTERRUPTED] == issued)
