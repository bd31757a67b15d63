"""Caches that have a bound and say how full they are: nothing that a program can make ever more of is kept without one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from threading import RLock
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
Fullness = Callable[[], tuple[int, int]]

_CACHES: dict[str, Fullness] = {}


def remembered(limit: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep the results of a function of hashable arguments, the ``limit`` used last."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept = lru_cache(maxsize=limit)(function)

        def fullness() -> tuple[int, int]:
            return kept.cache_info().currsize, limit

        watched(f"{function.__module__.removeprefix('dtensor.')}.{function.__name__}", fullness)
        return cast(Any, kept)  # lru_cache forgets the signature

    return decorate


def watched(name: str, fullness: Fullness) -> None:
    """Tell how full a cache of another kind is: entries kept, and the most that are."""
    _CACHES[name] = fullness


def fullness() -> dict[str, tuple[int, int]]:
    """Entries kept, and the most that are kept, by cache."""
    return {name: found() for name, found in sorted(_CACHES.items())}


def _typed(value: Any) -> Any:
    return type(value), value


def nested_key(value: Any, leaf: Callable[[Any], Any] = _typed) -> Any:
    """Nested arguments as a key; of numbers their type too, as True is 1 and 1 is 1.0.

    >>> nested_key([1, {"dim": True}])
    ((<class 'int'>, 1), (('dim', (<class 'bool'>, True)),))
    """
    if isinstance(value, dict):
        return tuple([(name, nested_key(item, leaf)) for name, item in value.items()])
    return tuple([nested_key(item, leaf) for item in value]) if isinstance(value, (list, tuple)) else leaf(value)


class Bounded(dict[K, T]):
    """A dictionary of what is made again where it is missing: it keeps ``limit`` entries, and then forgets the older half.

    Without a name it is not :func:`watched`.
    """

    def __init__(self, limit: int, name: str | None = None) -> None:
        super().__init__()
        self.limit = limit
        if name is not None:
            watched(name, lambda: (len(self), self.limit))

    def keep(self, key: K, value: T) -> T:
        """``value``, kept."""
        if len(self) >= self.limit:
            for oldest in list(self)[: max(1, self.limit // 2)]:
                self.pop(oldest, None)  # another thread may have been faster
        self[key] = value
        return value


class Shared(Generic[K, T]):
    """Dictionaries that keep ``each`` entries, and ``together`` all of them: one that changes much forgets its own first.

    The oldest half goes at once. What is still in use is made again, and is then the newest: looking an entry up is a
    dictionary's ``get`` and nothing else, by any number of threads.
    """

    def __init__(self, each: int, together: int) -> None:
        self.each, self.together = each, together
        self._made: deque[tuple[dict[K, T], K]] = deque()  # in the order of their making; some are forgotten already
        self._changing = RLock()

    def part(self) -> dict[K, T]:
        """One of the dictionaries; entries are added by :meth:`keep`."""
        return {}

    def keep(self, part: dict[K, T], key: K, value: T) -> T:
        """``value``, kept."""
        with self._changing:
            if len(part) >= self.each:
                for oldest in list(islice(part, max(1, self.each // 2))):
                    del part[oldest]
            if len(self._made) >= self.together:
                for _ in range(max(1, len(self._made) // 2)):
                    whose, oldest = self._made.popleft()
                    whose.pop(oldest, None)
            self._made.append((part, key))
            part[key] = value
        return value

    def clear(self) -> None:
        """Forget all entries."""
        with self._changing:
            for part, _ in self._made:
                part.clear()
            self._made.clear()

    def fullness(self) -> tuple[int, int]:
        """Entries kept at most (those forgotten since among them), and the bound."""
        return len(self._made), self.together
