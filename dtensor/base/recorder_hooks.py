"""Recorder hooks: how lower packages tell a recorder of ``capture`` what is one step of the program that it records.

``recorded_op`` marks functions that are one recorded step and run again at each replay: collectives, random generation.
``recorded_mutation`` marks functions that write to the memory of their arguments. ``untracked`` marks functions that run once and
are not replayed: checks, setup, and exchanges of tensor shapes between ranks. Without an active recorder each marker costs one
truth test.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from ..base.torch_internals import current_dispatch_modes as _get_current_dispatch_mode_stack

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class RecorderProtocol(Protocol):
    """Interface of a recorder.

    Attributes:
        paused: depth of running functions with inner operations that are not recorded.
    """

    paused: int

    def record_op(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn(*args, **kwargs)`` and record it as one step."""

    def record_mutation(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn(*args, **kwargs)`` and record it as one step that writes to the memory of its tensor arguments."""

    def run_untracked(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``fn(*args, **kwargs)`` without recording it."""

    def has_recorded(self, pending: Any) -> bool:
        """Return True if the pending collective began in this recording."""

    def isolate_state(self, owner: Any, empty: Mapping[str, Any]) -> None:
        """Announce attributes of ``owner`` with state between calls: a recording sets them to ``empty``, and restores them.

        Call it before they are read. The earlier values return at the end of the recording.
        """

    def on_refusal(self, fn: Callable[[], Any]) -> None:
        """Register ``fn`` to be called if the recording is refused before it ends."""


class CrossCallState(dict[Any, Any]):
    """State that the library carries from one call to a later one: tensors in nested values.

    A recording treats the state at its start as arguments, and the state at its end as results.
    """


# Recorders of all threads. Each is a dispatch mode of one thread and of its backward passes.
ACTIVE_RECORDERS: list[RecorderProtocol] = []


def current_recorder() -> RecorderProtocol | None:
    """Return the recorder that is active in this thread; None if there is none or it is paused."""
    if not ACTIVE_RECORDERS:
        return None
    mode: Any
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if mode in ACTIVE_RECORDERS:
            return None if mode.paused else cast(RecorderProtocol, mode)
    return None


def weak_recorder_ref(recorder: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to ``recorder``, or None for None.

    Metadata on tensors must use it: a strong reference would keep every tensor of the recording alive as long as that tensor
    lives.
    """
    return None if recorder is None else weakref.ref(recorder)


def is_recorded_by(reference: weakref.ref[Any] | None, recorder: Any) -> bool:
    """Return True if ``recorder`` is the recorder that ``reference`` refers to.

    ``reference`` None means "not recorded", ``recorder`` None means "no active recorder"; these match each other. A reference
    to a recorder that was freed matches no recorder.
    """
    return recorder is None if reference is None else recorder is not None and reference() is recorder


def recorded_op(fn: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Mark ``fn`` as one step of a recording, which each replay runs again."""
    return _wrap_for_recorder(fn, "record_op")


def recorded_mutation(fn: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Mark ``fn`` as one step of a recording that writes to its arguments."""
    return _wrap_for_recorder(fn, "record_mutation")


def untracked(fn: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
    """Mark ``fn`` as no step of a recording: it runs once, and its result is valid for every replay."""
    return _wrap_for_recorder(fn, "run_untracked")


def _wrap_for_recorder(fn: Callable[ParamsT, ResultT], method: str) -> Callable[ParamsT, ResultT]:
    """Wrap ``fn`` so that an active recorder runs it, by its method ``method``."""

    @wraps(fn)
    def run_by_recorder(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        recorder = current_recorder() if ACTIVE_RECORDERS else None
        return fn(*args, **kwargs) if recorder is None else cast(ResultT, getattr(recorder, method)(fn, args, kwargs))

    return run_by_recorder
