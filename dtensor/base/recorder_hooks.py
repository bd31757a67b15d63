"""What a recorder (see ``capture``) wants to know of the layers below it: which functions are one step of what it records.

``site`` marks functions that a recorder keeps as one step, called again at each replay: collectives, draws. ``effect`` marks
those that do something to the memory of their arguments. ``aside`` marks those whose work is done once for all: checks, what they
set up, and what ranks tell each other of the shapes of their tensors. With nobody recording each pays one truth test.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from ..base.torch_internals import current_dispatch_modes as _get_current_dispatch_mode_stack

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """Who is told.

    Attributes:
        paused: how many functions are running of which it wants to know nothing more.
    """

    paused: int

    def site(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, kept as one step."""

    def effect(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, kept as one step, which does something to the memory of the tensors that it is given."""

    def aside(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)``, not kept."""

    def knows(self, pending: Any) -> bool:
        """Whether a collective under way is one that it has seen begin."""

    def apart(self, owner: Any, empty: Mapping[str, Any]) -> None:
        """Attributes of ``owner`` that say what it keeps between calls, called before they are looked at: a recording starts with
        these, and leaves them as it found them."""

    def undo(self, fn: Callable[[], Any]) -> None:
        """``fn()`` is called if the recording is refused before it has ended."""


class Between(dict[Any, Any]):
    """What the library keeps from one call for a later one: tensors in nested values. To a recording it is given, as arguments
    are, and what is left in it is a result."""


ACTIVE: list[Recorder] = []  # in any thread; recorders are dispatch modes, which belong to a thread (and its backward passes)


def current() -> Recorder | None:
    """The recorder that listens in this thread."""
    if not ACTIVE:
        return None
    here: Any
    for here in reversed(_get_current_dispatch_mode_stack()):
        if here in ACTIVE:
            return None if here.paused else cast(Recorder, here)
    return None


def weakly(recorder: Any) -> weakref.ref[Any] | None:
    """Who recorded something (None: nobody), for what it leaves on tensors that outlive it: a recorder has all that it met."""
    return None if recorder is None else weakref.ref(recorder)


def recorded_by(who: weakref.ref[Any] | None, recorder: Any) -> bool:
    """Whether this is who recorded it; nobody is, when that one is gone."""
    return recorder is None if who is None else recorder is not None and who() is recorder


def site(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, one step to a recorder."""
    return _marked(fn, "site")


def effect(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, one step to a recorder, and one that writes to what it is given."""
    return _marked(fn, "effect")


def aside(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, no step to a recorder: what it finds out or sets up holds for every replay."""
    return _marked(fn, "aside")


def _marked(fn: Callable[P, T], how: str) -> Callable[P, T]:
    """``fn``, which goes through the recorder's method of this name where one listens."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        recorder = current() if ACTIVE else None
        return fn(*args, **kwargs) if recorder is None else cast(T, getattr(recorder, how)(fn, args, kwargs))

    return run
