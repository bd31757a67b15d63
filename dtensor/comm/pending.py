"""``Pending``: a collective under way, which is what every collective gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from ..base.recorder_hooks import ACTIVE, current

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[T]):
    """A collective under way. Its inputs must not be written to before ``wait()``."""

    __slots__ = ("_begin", "_finish", "_rest", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._begin: Callable[[], Callable[[], T]] | None = None
        self._rest: Callable[[], T] | None = None
        self._result: Any = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """One that has ended."""
        made = cls.__new__(cls)
        made._begin, made._rest, made._finish, made._result = None, None, None, value
        return made

    @classmethod
    def of_two_rounds(cls, begin: Callable[[], Callable[[], T]]) -> Pending[T]:
        """One whose first round is under way; ``begin()`` ends that, starts the second, and gives what ends it all."""
        made = cls.of(cast(T, None))
        made._begin, made._finish = begin, made._both
        return made

    def _both(self) -> T:
        self.advance()
        rest, self._rest = self._rest, None
        assert rest is not None
        return rest()

    def advance(self) -> bool:
        """Starts the second round, where there is one that is not under way; all ranks call it at the same point, or none.

        Returns:
            Whether it was started. While somebody records, what is waited for is one thing.
        """
        if self._begin is None or (ACTIVE and (recorder := current()) is not None and recorder.knows(self)):
            return False
        begin, self._begin = self._begin, None
        self._rest = begin()
        return True

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return self._finish is None

    def wait(self) -> T:
        """The result; may be called again."""
        if ACTIVE and (recorder := current()) is not None and recorder.knows(self):
            return cast(T, recorder.site(Pending.wait, (self,), {}))
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # a T once _finish is gone

    def within(self, around: Callable[[Callable[[], Any]], Any], rounds: bool = False) -> Pending[T]:
        """Itself: what ends it runs as ``around(finish)``; with ``rounds`` each of two rounds by itself."""
        finish, begin = self._finish, self._begin
        if rounds and begin is not None:
            self._begin = lambda: partial(around, around(begin))
        elif finish is not None:
            self._finish = lambda: around(finish)
        return self

    def then(self, make: Callable[[T], R]) -> Pending[R]:
        """``make(result)``, made by whoever waits first."""
        return Pending(lambda: make(self.wait()))
