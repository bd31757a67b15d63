"""Collective log: the collectives of one group of ranks, with a rolling hash that the ranks of the group compare.

A rank logs a collective *before* it reads the logs of the others, and sends nothing before it has read them. So if two ranks log
different collectives under one number, the later one sees it and raises an error, before anything is exchanged. No message of one
collective arrives in another one, and none has a wrong length. Gloo aborts a process that receives a message that is too long,
and accepts one that is too short.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.user_frames import find_user_frame
from . import source_location
from .flight_recorder import (
    FAILED_MARK,
    HASH,
    LAST_INTERRUPTED,
    LENGTHS,
    LOG_SLOTS,
    EventLog,
    LoggedEvent,
    StateFile,
    fingerprint,
    mix_hash,
    slot_of,
)
from .host_state import (
    EXITED,
    MULTI_THREADED,
    RUNNING,
    STATE,
    WAIT_COUNT,
    WAIT_LOG,
    WAIT_NUMBER,
    WAIT_SINCE,
    WAITING,
    HostState,
    open_log,
)
from .levels import operation_records_of

Lengths = tuple[list[int], list[int]]  # elements that a rank sends to each rank of a group, and that it receives from each


class CollectiveRecord(NamedTuple):
    """A collective as ranks compare it.

    Attributes:
        hash: fingerprint of what must be equal on all ranks of the group.
        text, mesh_dims: description of the collective, and the mesh dims of the group.
        lengths: elements that this rank sends to and receives from each rank, in the order of the log's ranks, see
            :func:`format_lengths`. Empty if ``text`` determines them.
    """

    hash: int
    text: str
    mesh_dims: str
    lengths: str = ""

    @classmethod
    def of(cls, text: str, mesh_dims: str, lengths: str = "") -> CollectiveRecord:
        """Make a record with the fingerprint of its text and mesh dims."""
        return cls(fingerprint(f"{text} {mesh_dims}"), text, mesh_dims, lengths)


def format_lengths(send_lengths: Sequence[int], recv_lengths: Sequence[int]) -> str:
    """Return the send and receive lengths of a record as text."""
    return f"{','.join(map(str, send_lengths))};{','.join(map(str, recv_lengths))}"


def parse_lengths(text: str) -> Lengths:
    """Return the send and receive lengths in a text of :func:`format_lengths`."""
    send_lengths, recv_lengths = ([int(length) for length in part.split(",")] for part in text.split(";"))
    return send_lengths, recv_lengths


class CollectiveLog(EventLog):
    """The collectives of the processes ``ranks``, in order, as this rank issues them.

    Attributes:
        ranks: the ranks of the group, ascending.
        handles: the process groups of torch over which the ranks communicate.
        spans_hosts: whether the ranks are on several hosts.
        skipped: number of the last collective that this rank logged and could not issue, until all ranks have reached the next
            one; 0: none.
        bound_exchanges: the bound exchanges of hashes, by length and order of ranks.
    """

    def __init__(self, host_state: HostState, ranks: tuple[int, ...], backend: str) -> None:
        self.host_state, self.ranks, self.backend = host_state, ranks, backend
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()
        self.key = fingerprint(repr(ranks))
        self.name = f"log-{self.key:016x}"
        unnamed = host_state.folder / f".{self.name}.{host_state.rank}"
        unnamed.write_text(repr(ranks))
        unnamed.rename(host_state.folder / self.name)
        super().__init__(host_state.create_file(f"{self.name}-{host_state.rank}", LOG_SLOTS))
        self._records = operation_records_of(host_state.world())
        self.spans_hosts = False
        self.skipped = 0
        self.bound_exchanges: dict[Any, Any] = {}
        self._missing_ranks = [rank for rank in ranks if rank != host_state.rank]
        self._peer_files: list[tuple[int, StateFile]] = []

    def log_and_compare(self, record: CollectiveRecord) -> bool:
        """Log the next collective. Return True if it matches that of all ranks that have logged the same number."""
        self.host_state.raise_diagnosis()
        operations, last_operation = self._mix_logged_operations(), self._mix_operation_hashes()
        frame = find_user_frame(sys._getframe(2))
        line = "" if frame is None else source_location.format_line(frame.f_code.co_filename, frame.f_lineno)
        at = self.add_event(record.hash, record.text, record.mesh_dims, line, operations, record.lengths, last_operation)
        number, hashed = self.count, self.hash
        if self._missing_ranks:
            self._find_peers()
        for _, file in self._peer_files:
            if file.slots[at] == number and file.slots[at + HASH] != hashed:
                return False
        return not record.lengths or not any(self._lengths_differ(rank, file, record.lengths) for rank, file in self._peer_files)

    def _lengths_differ(self, rank: int, file: StateFile, own_lengths: str) -> bool:
        """Return True if another rank logged this collective with lengths that do not match those of this rank."""
        lengths = read_lengths(file, self.count)
        if lengths is None:
            return False
        return bool(find_length_mismatches(self.ranks, {self.host_state.rank: parse_lengths(own_lengths), rank: lengths}))

    def mark_skipped(self, number: int) -> None:
        """Record that this rank did not issue a collective that it logged."""
        self.skipped = self.slots[LAST_INTERRUPTED] = number
        self.mix(FAILED_MARK)

    def last_event(self) -> LoggedEvent:
        """Return the last collective that this rank logged."""
        return LoggedEvent(self.file, self.count)

    def begin_wait(self, number: int) -> None:
        """Publish that this rank waits for collective ``number``."""
        slots = self.host_state.slots
        slots[WAIT_LOG] = self.key
        slots[WAIT_NUMBER] = number
        slots[WAIT_SINCE] = time.monotonic_ns()
        slots[STATE] = WAITING
        if threading.get_ident() != self.host_state.thread:
            slots[MULTI_THREADED] = 1

    def end_wait(self) -> None:
        """Publish that this rank waits no more."""
        slots = self.host_state.slots
        slots[STATE] = EXITED if self.host_state.has_ended_here else RUNNING
        slots[WAIT_COUNT] += 1

    def _mix_logged_operations(self) -> int:
        """Mix the logged operations that all ranks of the group did together into the hash, and return their number.

        See [Note: Operations that a group compares]. The hashes of the sets of ranks are combined by xor, since ranks may have
        met the sets in another order.
        """
        count = hashed = 0
        for ranks, log in list(self._records.logs.items()):
            if ranks.issuperset(self.ranks):
                hashed ^= mix_hash(log.read_hash(), fingerprint(repr(sorted(ranks))), 0)
                count += log.count
        if hashed:  # else the hash must stay as it is, since other ranks of the group may be in no other set
            self.mix(hashed)
        return count

    def _mix_operation_hashes(self) -> str:
        """Mix the unlogged operations that all ranks of the group did together into the hash; return the text of the last one.

        The text is empty if there is none. See [Note: Operations that a group compares].
        """
        text, hashed = "", 0
        for ranks, operations in list(self._records.hashes.items()):
            if ranks.issuperset(self.ranks):
                text = operations.take_texts() or text
                hashed ^= mix_hash(value, operations.key, 0) if (value := operations.read_hash()) else 0
        if hashed:
            self.mix(hashed)
        return text

    def _find_peers(self) -> None:
        """Open the logs of ranks that have created theirs since the last call."""
        for rank in list(self._missing_ranks):
            file = open_log(self.host_state, "log", self.key, rank)
            if file is not None:
                self._peer_files.append((rank, file))
                self._missing_ranks.remove(rank)


def read_lengths(file: StateFile, number: int) -> Lengths | None:
    """Return the message lengths of a logged collective; None if the log has no such collective, or it has no lengths."""
    at = slot_of(number)
    text = file.read_text(file.slots[at + LENGTHS]) if file.slots[at] == number else ""
    return parse_lengths(text) if text and file.slots[at] == number else None


def find_length_mismatches(ranks: Sequence[int], lengths: dict[int, Lengths]) -> list[tuple[int, int, int, int]]:
    """Return (sender, receiver, elements sent, elements expected) for each message with different lengths on both sides."""
    positions = {rank: position for position, rank in enumerate(ranks)}
    return [
        (sender, receiver, sent, expected)
        for sender, (send_lengths, _) in lengths.items()
        for receiver, (_, recv_lengths) in lengths.items()
        if sender != receiver and (sent := send_lengths[positions[receiver]]) != (expected := recv_lengths[positions[sender]])
    ]
