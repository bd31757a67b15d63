"""Selective checkpointing (``create_selective_checkpoint_contexts``): torch's two dispatch modes, and work hidden from them.

The first mode asks a policy about each operator of a forward pass. The second answers the operators of the recomputation by what
was saved, by position: it takes the k-th ``mm`` for the k-th ``mm`` of the forward pass. So both must see the same operators.
Work that one pass does and the other does not (a gather that is still valid, a value that is cached) is hidden from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .torch_internals import (
    CachedMode,
    CachingMode,
    count_dispatch_modes,
    current_dispatch_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)

P = ParamSpec("P")
R = TypeVar("R")


def policy_mode() -> Any:
    """Return the innermost selective checkpointing mode of this thread; None where there is none."""
    if not count_dispatch_modes():
        return None
    return next((mode for mode in reversed(current_dispatch_modes()) if isinstance(mode, (CachingMode, CachedMode))), None)


@contextmanager
def hidden_from_policies() -> Iterator[None]:
    """Run a block without the selective checkpointing modes of this thread; other modes see it."""
    popped: list[Any] = []
    while policy_mode() is not None:
        popped.append(pop_dispatch_mode())
    others = [mode for mode in popped if not isinstance(mode, (CachingMode, CachedMode))]
    for mode in reversed(others):
        push_dispatch_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            pop_dispatch_mode()
        for mode in reversed(popped):
            push_dispatch_mode(mode)


def hides_from_policies(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` such that selective checkpointing does not see what it runs."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if policy_mode() is None:
            return function(*args, **kwargs)
        with hidden_from_policies():
            return function(*args, **kwargs)

    return run
