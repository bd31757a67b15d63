"""``check_ranks``: how closely ranks are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from ..errors import ArgumentError, DTensorError
from .ring import Ring, Trail

LEVELS = ("off", "watch", "strict")
VARIABLE = "DTENSOR_CHECK_RANKS"


class Level:
    """Of this process; ``now`` is "forked" in a child that has inherited its parent's groups.

    Attributes:
        operations: under "strict" those so far, by the ranks that do them together.
        trails: the same under "watch", where no words are made of them.
        armed: whether this process has been a rank among others.
        replicas: after how many steps of an optimizer its copies are compared; 0: never.
        changed: who is told of another level.
    """

    now = "watch"
    replicas = 0
    operations: ClassVar[dict[frozenset[int], Ring]] = {}
    trails: ClassVar[dict[frozenset[int], Trail]] = {}
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
        begin_anew()
        for tell in Level.changed:
            tell()


def arm() -> None:
    """Says that there are other ranks with which operations are compared."""
    if not Level.armed:
        Level.armed = True
        for tell in Level.changed:
            tell()


def trail_of(ranks: frozenset[int]) -> Trail:
    """What these ranks compute together."""
    return Level.trails.get(ranks) or Level.trails.setdefault(ranks, Trail(ranks))


def begin_anew() -> None:
    """Nothing has been computed together so far."""
    Level.operations.clear()
    for trail in Level.trails.values():  # dispatch has them by now
        trail.begin_anew()


def refuse_child() -> None:
    """Raises in a forked child, whose messages would arrive as its parent's."""
    raise DTensorError(
        "a process forked from a rank (a DataLoader worker?) called a collective. It is not a rank, and "
        "its messages would be taken for those of its parent; call the collective in the rank itself"
    )


def _from_environment(said: str) -> None:
    level, _, steps = said.partition(",replicas=")
    try:
        check_ranks(level, replicas=int(steps or 0))
    except ValueError:
        raise ArgumentError(f'{VARIABLE} must be a level, or for example "watch,replicas=100"; got {said!r}') from None


_from_environment(os.environ.get(VARIABLE, "watch"))
