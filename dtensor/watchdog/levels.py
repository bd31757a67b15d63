"""``check_ranks``: how closely ranks are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from ..errors import ArgumentError, DTensorError
from .flight_recorder import Ring, Trail

LEVELS = ("off", "watch", "strict")
VARIABLE = "DTENSOR_CHECK_RANKS"


class Computed:
    """What sets of ranks have computed together in one world, which lasts from one ``init_process_group`` to its end.

    [Note: What is compared on a group]
    An operation belongs to one set of ranks of one world: those that hold its tensors together, as its mesh says. Each rank of
    the set derives the same set. A collective of a group compares exactly the sets of its own world that contain the whole
    group, since all ranks of the group take part in those operations. What some of them compute with others, or by
    themselves, or did in a world that has ended, does not change what the group compares.

    Attributes:
        operations: under "strict", each operation, by set of ranks.
        trails: under "watch", a hash of the operations, by set of ranks.
    """

    def __init__(self) -> None:
        self.operations: dict[frozenset[int], Ring] = {}
        self.trails: dict[frozenset[int], Trail] = {}

    def trail_of(self, ranks: frozenset[int]) -> Trail:
        """Return the trail of what these ranks compute together."""
        return self.trails.get(ranks) or self.trails.setdefault(ranks, Trail(ranks))

    def begin_anew(self) -> None:
        """Forget all operations. Plans that are kept hold the trails, so these stay and are emptied."""
        self.operations.clear()
        for trail in list(self.trails.values()):
            trail.begin_anew()


class Level:
    """Of this process; ``now`` is "forked" in a child that has inherited its parent's groups.

    Attributes:
        computed: what ranks have computed together, by the default process group of their world.
        armed: whether this process has been a rank among others.
        replicas: after how many steps of an optimizer its copies are compared; 0: never.
        changed: who is told of another level.
    """

    now = "watch"
    replicas = 0
    computed: ClassVar[WeakKeyDictionary[Any, Computed]] = WeakKeyDictionary()
    armed = False
    changed: ClassVar[list[Callable[[], None]]] = []


def check_ranks(level: str, *, replicas: int = 0) -> None:
    """How closely the ranks of process groups are compared from now on; all ranks say it in the same place.

    Args:
        level: ``"watch"``, the default: each collective is written down and compared with what the other ranks of this host
            wrote, before anything is sent; a rank that does something else, fails, leaves or dies ends the waits of all, which
            raise the same. ``"strict"``: what is computed without communication is compared too, with the next collective,
            before which the ranks of its group exchange 16 bytes, wherever they are. ``"off"``: nothing.
            The environment variable ``DTENSOR_CHECK_RANKS`` says with which one a process begins.

        replicas: after so many steps of an optimizer, and again after as many, the copies of its distributed parameters and of
            their state are compared by checksums, and the state of the random generator where a draw has made it the same; 0:
            never. In the environment variable: ``watch,replicas=100``.

    Cost: none by itself; that of the levels stands in docs/reliability.md.

    Raises:
        ArgumentError: no such level, or no number of steps.

    >>> dt.check_ranks("watch", replicas=100)
    >>> dt.check_ranks("watch")
    """
    if level not in LEVELS:
        raise ArgumentError(f"check_ranks takes one of {LEVELS}, got {level!r}")
    if type(replicas) is not int or replicas < 0 or (replicas and level == "off"):
        raise ArgumentError(f"check_ranks takes replicas= as a number of steps, and 0 with 'off'; got {replicas!r}")
    before = Level.now, Level.replicas
    Level.now, Level.replicas = level, replicas
    if before != (level, replicas):
        for computed in list(Level.computed.values()):
            computed.begin_anew()
        for tell in Level.changed:
            tell()


def arm() -> None:
    """Says that there are other ranks with which operations are compared."""
    if not Level.armed:
        Level.armed = True
        for tell in Level.changed:
            tell()


def computed_in(world: Any) -> Computed:
    """Return what ranks have computed together in the world of this default process group."""
    return Level.computed.get(world) or Level.computed.setdefault(world, Computed())


def refuse_child() -> None:
    """Raises in a forked child, whose messages would arrive as its parent's."""
    raise DTensorError(
        "a process forked from a rank (a DataLoader worker?) called a collective. It is not a rank, and "
        "its messages would be taken for those of its parent; call the collective in the rank itself"
    )


def set_level_from_environment() -> None:
    """Set the level that the environment variable names, ``"watch"`` by default."""
    value = os.environ.get(VARIABLE, "watch")
    level, _, steps = value.partition(",replicas=")
    try:
        check_ranks(level, replicas=int(steps or 0))
    except ValueError:
        raise ArgumentError(f'{VARIABLE} must be a level, or for example "watch,replicas=100"; got {value!r}') from None
