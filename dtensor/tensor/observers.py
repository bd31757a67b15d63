"""Observers: listeners for explicit redistributions, gradients of leaves and reads of layouts.

Without an observer each event costs one truth test.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..base.mode_stack import ModeStack
from ..layout.layout import Layout
from ..state.shared_memory import mark_local_exposed


class Observer(Protocol):
    """Interface of an observer."""

    def on_redistribution(self, x: Any, made: Any) -> None:
        """Handle that ``made`` is ``x`` redistributed."""

    def on_leaf_gradient(self, grad: Any, leaf: list[Layout]) -> None:
        """Handle that ``grad`` is the gradient of the leaf with the layout ``leaf[0]``, which it gets next.

        The list identifies the leaf.
        """

    def on_layout_read(self, x: Any) -> None:
        """Handle that the program reads the placements or the local tensors of ``x``, and so depends on its layout."""


OBSERVERS: ModeStack[Observer] = ModeStack("observers")
ACTIVE_OBSERVERS = OBSERVERS.held  # empty: no observer in any thread


def notify_redistributed(x: Any, made: Any) -> Any:
    """Report a redistribution of ``x`` to observers. Return ``made``, the result."""
    for observer in OBSERVERS.values():
        observer.on_redistribution(x, made)
    return made


def notify_gradient(grad: Any, leaf: list[Layout]) -> None:
    """Report to observers a gradient of a leaf, unless it is plain or on another mesh."""
    if hasattr(grad, "_layout") and grad._layout.mesh is leaf[0].mesh:
        for observer in OBSERVERS.values():
            observer.on_leaf_gradient(grad, leaf)


def notify_layout_read(x: Any) -> None:
    """Report to observers that the program reads the placements or the local tensors of ``x``."""
    for observer in OBSERVERS.values():
        observer.on_layout_read(x)


def expose_local(x: Any) -> Any:
    """Return ``x``, marked as exposed: the user gets its local tensors and may write to them."""
    if ACTIVE_OBSERVERS:
        notify_layout_read(x)
    return mark_local_exposed(x)
