"""Selective checkpointing: find torch's two modes of it, and hide from both the work that only one of the passes does.

``create_selective_checkpoint_contexts`` makes the modes. The first asks a policy about each operator of a forward pass. The
second answers the operators of the recomputation with saved results, by position: the k-th ``mm`` of the recomputation gets the
k-th saved ``mm``. So both must see the same operators. A gather that is still valid, and a value that is cached, are work of one
pass only.
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

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


def selective_checkpoint_mode() -> Any:
    """Return the innermost selective checkpointing mode of this thread, or None."""
    if not count_dispatch_modes():
        return None
    return next((mode for mode in reversed(current_dispatch_modes()) if isinstance(mode, (CachingMode, CachedMode))), None)


@contextmanager
def hidden_from_policies() -> Iterator[None]:
    """Run a ``with`` block without the selective checkpointing modes of this thread; other modes stay active."""
    popped: list[Any] = []
    while selective_checkpoint_mode() is not None:
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


def hides_from_policies(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Wrap ``function`` so that selective checkpointing does not see the operators that it runs."""

    @wraps(function)
    def run_hidden(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        """Run the function, hidden from the mode of selective checkpointing if one is active."""
        if selective_checkpoint_mode() is None:
            return function(*args, **kwargs)
        with hidden_from_policies():
            return function(*args, **kwargs)

    return run_hidden
