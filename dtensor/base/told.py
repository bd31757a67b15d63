"""What of torch is not as it was found by now: each place that changes something says so; ``interop.changes`` says why."""

from __future__ import annotations

IN_FORCE: dict[str, int] = {}  # where, as in interop.changes, and how many times


def changed(where: str) -> None:
    """It is, once more."""
    IN_FORCE[where] = IN_FORCE.get(where, 0) + 1


def restored(where: str) -> None:
    """One change of it is undone."""
    IN_FORCE[where] -= 1
    if not IN_FORCE[where]:
        del IN_FORCE[where]
