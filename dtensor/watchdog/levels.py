"""Levels of ``check_ranks``: how closely ranks are compared, and the operations that sets of ranks did together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ..errors import ArgumentError, DTensorError
from .flight_recorder import EventLog, OperationHash

LEVELS = ("off", "watch", "strict")
VARIABLE = "DTENSOR_CHECK_RANKS"


class OperationRecords:
    """The operations that sets of ranks did together in one world, which exists from one ``init_process_group`` to its end.

    [Note: Operations that a group compares]
    Each operation belongs to one set of ranks of one world: the ranks that store its tensors together, which follow from its
    mesh. Each rank of the set derives the same set. A collective of a group compares exactly the sets of its own world that
    contain the whole group, since all ranks of the group take part in those operations. Operations of some ranks of the group
    with others, of one rank alone, or of a world that has ended do not change what the group compares.

    Attributes:
        logs: under "strict", the log of operations, by set of ranks.
        hashes: under "watch", a rolling hash of operations, by set of ranks.
    """

    def __init__(self) -> None:
        self.logs: dict[frozenset[int], EventLog] = {}
        self.hashes: dict[frozenset[int], OperationHash] = {}

    def operation_hash_of(self, ranks: frozenset[int]) -> OperationHash:
        """Return the rolling hash of the operations of these ranks, made at the first call."""
        return self.hashes.get(ranks) or self.hashes.setdefault(ranks, OperationHash(ranks))

    def reset(self) -> None:
        """Forget all operations. The hashes are emptied and kept, since cached plans refer to them."""
        self.logs.clear()
        for op_hash in list(self.hashes.values()):
            op_hash.reset()


class CheckLevel:
    """The level of ``check_ranks`` in this process.

    Attributes:
        now: "off", "watch", "strict", or "forked" in a child process that inherited the process groups of its parent.
        replicas: number of optimizer steps after which replicas are compared; 0: never.
        records: the operations of each world, by its default process group.
        has_peers: whether this process has been one of several ranks.
        changed: callbacks that are called when the level changes.
    """

    now = "watch"
    replicas = 0
    records: ClassVar[WeakKeyDictionary[Any, OperationRecords]] = WeakKeyDictionary()
    has_peers = False
    changed: ClassVar[list[Callable[[], None]]] = []


def check_ranks(level: str, *, replicas: int = 0) -> None:
    """Set how closely the ranks of process groups are compared from now on. All ranks call it at the same point.

    Args:
        level: ``"watch"``, the default: each collective is logged, and compared with what the other ranks of this host logged,
            before anything is sent. If a rank calls something else, fails, ends or dies, all waits end, and all ranks raise the
            same error. ``"strict"``: also compares operations without communication, at the next collective, before which the
            ranks of its group exchange 16 bytes, also between hosts. ``"off"``: compares nothing. The environment variable
            ``DTENSOR_CHECK_RANKS`` sets the initial level.
        replicas: number of optimizer steps after which replicas of distributed parameters and optimizer state are compared by
            checksums, and so is the state of the random generator where all ranks must draw alike. 0: never. In the environment
            variable: ``watch,replicas=100``.

    Cost: the call itself communicates nothing. For the cost of each level see docs/reliability.md.

    Raises:
        ArgumentError: the level does not exist, or ``replicas`` is not a number of steps.

    >>> dt.check_ranks("watch", replicas=100)
    >>> dt.check_ranks("watch")
    """
    if level not in LEVELS:
        raise ArgumentError(f"check_ranks takes one of {LEVELS}, got {level!r}")
    if type(replicas) is not int or replicas < 0 or (replicas and level == "off"):
        raise ArgumentError(f"check_ranks takes replicas= as a number of steps, and 0 with 'off'; got {replicas!r}")
    before = CheckLevel.now, CheckLevel.replicas
    CheckLevel.now, CheckLevel.replicas = level, replicas
    if before != (level, replicas):
        for records in list(CheckLevel.records.values()):
            records.reset()
        for callback in CheckLevel.changed:
            callback()


def enable_comparison() -> None:
    """Enable the comparison of operations, since this process is one of several ranks; run the level-change callbacks once."""
    if not CheckLevel.has_peers:
        CheckLevel.has_peers = True
        for callback in CheckLevel.changed:
            callback()


def operation_records_of(world: Any) -> OperationRecords:
    """Return the operation records of the world of this default process group, made at the first call."""
    return CheckLevel.records.get(world) or CheckLevel.records.setdefault(world, OperationRecords())


def raise_in_forked_child() -> None:
    """Raise DTensorError in a forked child of a rank: other ranks would take its messages for those of its parent."""
    raise DTensorError(
        "a process forked from a rank (a DataLoader worker?) called a collective. It is not a rank, and "
        "its messages would be taken for those of its parent; call the collective in the rank itself"
    )


def set_level_from_environment() -> None:
    """Set the level and the interval of replica checks from ``DTENSOR_CHECK_RANKS``, ``"watch"`` by default."""
    value = os.environ.get(VARIABLE, "watch")
    level, _, steps = value.partition(",replicas=")
    try:
        check_ranks(level, replicas=int(steps or 0))
    except ValueError:
        raise ArgumentError(f'{VARIABLE} must be a level, or for example "watch,replicas=100"; got {value!r}') from None
