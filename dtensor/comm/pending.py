"""``Pending``: a collective under way, which is what every collective gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from ..base.recording import ACTIVE, current

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[T]):
    """A collective under way. Its inputs must not be written to before ``wait()``."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Any = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """One that has ended."""
        made = cls.__new__(cls)
        made._finish, made._result = None, value
        return made

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

    def within(self, around: Callable[[Callable[[], T]], T]) -> Pending[T]:
        """Itself: what ends it runs as ``around(finish)``."""
        finish = self._finish
        if finish is not None:
            self._finish = lambda: around(finish)
        return self

    def then(self, make: Callable[[T], R]) -> Pending[R]:
        """``make(result)``, made by whoever waits first."""
        return Pending(lambda: make(self.wait()))
