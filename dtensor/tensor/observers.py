"""Who is told of what happens to DTensors beside operator calls: moves that the program asks for, and looks at pieces.

With nobody listening anywhere each of them pays one truth test.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..base.mode_stack import Scoped
from ..dispatch.version_counters import users
from ..layout.layout import Layout


class Observer(Protocol):
    """What a listener is told."""

    def moved(self, x: Any, made: Any) -> None:
        """``made`` is ``x`` redistributed."""

    def arrived(self, grad: Any, leaf: list[Layout]) -> None:
        """``grad`` is the gradient of the leaf that has this layout, and will be placed so; the list tells leaves apart."""

    def looked_at(self, x: Any) -> None:
        """Somebody takes the pieces of ``x`` as they lie."""


OBSERVERS: Scoped[Observer] = Scoped("observers")
observed = OBSERVERS.held  # empty: nobody listens anywhere


def tell_moved(x: Any, made: Any) -> Any:
    """``made``."""
    for observer in OBSERVERS.values():
        observer.moved(x, made)
    return made


def tell_arrived(grad: Any, leaf: list[Layout]) -> None:
    if hasattr(grad, "_layout") and grad._layout.mesh is leaf[0].mesh:
        for observer in OBSERVERS.values():
            observer.arrived(grad, leaf)


def tell_looked_at(x: Any) -> None:
    for observer in OBSERVERS.values():
        observer.looked_at(x)


def taken_apart(x: Any) -> Any:
    """``x``, whose pieces the user gets, and may write to."""
    if observed:
        tell_looked_at(x)
    return users(x)
