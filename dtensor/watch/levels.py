"""``check_ranks``: how closely ranks are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ClassVar

from ..errors import ArgumentError, DTensorError
from .ring import Ring

LEVELS = ("off", "watch", "strict")
VARIABLE = "DTENSOR_CHECK_RANKS"


class Level:
    """Of this process; ``now`` is "forked" in a child that has inherited its parent's groups.

    Attributes:
        operations: under "strict" those so far, by the ranks that do them together.
        changed: who is told when operations begin or cease to count.
    """

    now = "watch"
    operations: ClassVar[dict[frozenset[int], Ring]] = {}
    changed: ClassVar[list[Callable[[], None]]] = []


def check_ranks(level: str) -> None:
    """How closely the ranks of process groups are compared from now on; all ranks say it in the same place.

    Args:
        level: ``"watch"``, the default: each collective is written down and compared with what the other ranks of this host
            wrote, before anything is sent; a rank that does something else, fails, leaves or dies ends the waits of all, which
            raise the same. ``"strict"``: what is computed without communication is compared too, with the next collective,
            before which the ranks of its group exchange 16 bytes, wherever they are. ``"off"``: nothing.
            The environment variable ``DTENSOR_CHECK_RANKS`` says with which one a process begins.

    Cost: none by itself; that of the levels stands in docs/reliability.md.

    Raises:
        ArgumentError: no such level.

    >>> dt.check_ranks("watch")
    """
    if level not in LEVELS:
        raise ArgumentError(f"check_ranks takes one of {LEVELS}, got {level!r}")
    counted, Level.now = Level.now == "strict", level
    if counted != (level == "strict"):
        Level.operations.clear()
        for tell in Level.changed:
            tell()


def refuse_child() -> None:
    """Raises in a forked child, whose messages would arrive as its parent's."""
    raise DTensorError(
        "a process that was forked from a rank takes part in a collective (a DataLoader's worker?): it is no rank, and its "
        "messages would be taken for its parent's; do this in the rank itself"
    )


check_ranks(os.environ.get(VARIABLE, "watch"))
