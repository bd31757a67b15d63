"""Pending collective: the result of each collective, which may still be in flight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from ..base.recorder_hooks import ACTIVE_RECORDERS, current_recorder

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[T]):
    """The result of a collective in flight. Do not write to its inputs before ``wait()``."""

    __slots__ = ("_begin", "_finish", "_rest", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._begin: Callable[[], Callable[[], T]] | None = None
        self._rest: Callable[[], T] | None = None
        self._result: Any = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """Return a completed pending collective with this result."""
        pending = cls.__new__(cls)
        pending._begin, pending._rest, pending._finish, pending._result = None, None, None, value
        return pending

    @classmethod
    def of_two_rounds(cls, begin: Callable[[], Callable[[], T]]) -> Pending[T]:
        """Return a pending collective of two rounds. ``begin()`` completes the first one and starts the second.

        It returns the function that completes the second round."""
        pending = cls.of(cast(T, None))
        pending._begin, pending._finish = begin, pending._finish_both
        return pending

    def _finish_both(self) -> T:
        """Start the second round if that has not happened, complete it, and return its result."""
        self.advance()
        rest, self._rest = self._rest, None
        assert rest is not None
        return rest()

    def advance(self) -> bool:
        """Start the second round, if there is one that has not started. All ranks of the group call it at the same point.

        Returns:
            Whether it was started. Never while a recorder is active: it records the wait as one step.
        """
        if self._begin is None or (
            ACTIVE_RECORDERS and (recorder := current_recorder()) is not None and recorder.has_recorded(self)
        ):
            return False
        begin, self._begin = self._begin, None
        self._rest = begin()
        return True

    @property
    def ended(self) -> bool:
        """Whether the result is available."""
        return self._finish is None

    def wait(self) -> T:
        """Complete the collective, and return its result. Further calls return the same result."""
        if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None and recorder.has_recorded(self):
            return cast(T, recorder.record_op(Pending.wait, (self,), {}))
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # a T once _finish is gone

    def wrap_completion(self, around: Callable[[Callable[[], Any]], Any], rounds: bool = False) -> Pending[T]:
        """Make ``wait()`` run the completion as ``around(finish)``, and return self. ``rounds``: wrap each of two rounds."""
        finish, begin = self._finish, self._begin
        if rounds and begin is not None:
            self._begin = lambda: partial(around, around(begin))
        elif finish is not None:
            self._finish = lambda: around(finish)
        return self

    def then(self, make: Callable[[T], R]) -> Pending[R]:
        """Return a pending ``make(result)``, computed at the first ``wait()``."""
        return Pending(lambda: make(self.wait()))
