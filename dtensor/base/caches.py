"""Caches: bounded tables that report how full they are. A table that a program can grow without limit must use one of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from threading import RLock
from typing import Any, Generic, ParamSpec, TypeVar, cast

ParamsT = ParamSpec("ParamsT")
ValueT = TypeVar("ValueT")
KeyT = TypeVar("KeyT")
Fullness = Callable[[], tuple[int, int]]

_CACHES: dict[str, Fullness] = {}


def memoize(limit: int) -> Callable[[Callable[ParamsT, ValueT]], Callable[ParamsT, ValueT]]:
    """Memoize a function of hashable arguments with an LRU cache of ``limit`` results."""

    def memoize_function(function: Callable[ParamsT, ValueT]) -> Callable[ParamsT, ValueT]:
        """Return ``function`` with an LRU cache, which is registered under its name for ``cache_info``."""
        cached = lru_cache(maxsize=limit)(function)

        def fullness() -> tuple[int, int]:
            return cached.cache_info().currsize, limit

        register_cache(f"{function.__module__.removeprefix('dtensor.')}.{function.__name__}", fullness)
        return cast(Any, cached)  # lru_cache forgets the signature

    return memoize_function


def register_cache(name: str, fullness: Fullness) -> None:
    """Register a cache for ``dtensor.cache_info()``, which prints it under ``name``.

    Args:
        fullness: returns the number of entries and the greatest number of entries.
    """
    _CACHES[name] = fullness


def cache_fullness() -> dict[str, tuple[int, int]]:
    """Return (number of entries, limit) of each registered cache, by name."""
    return {name: count_entries() for name, count_entries in sorted(_CACHES.items())}


def _typed_value(value: Any) -> Any:
    return type(value), value


def nested_key(value: Any, leaf: Callable[[Any], Any] = _typed_value) -> Any:
    """Return nested lists, tuples and dicts as a hashable key. Numbers are keyed with their type, as ``True == 1 == 1.0``.

    >>> nested_key([1, {"dim": True}])
    ((<class 'int'>, 1), (('dim', (<class 'bool'>, True)),))
    """
    if isinstance(value, dict):
        return tuple([(name, nested_key(item, leaf)) for name, item in value.items()])
    return tuple([nested_key(item, leaf) for item in value]) if isinstance(value, (list, tuple)) else leaf(value)


class BoundedDict(dict[KeyT, ValueT]):
    """Dict for values that can be computed again. At ``limit`` entries the older half is dropped.

    A dict with a ``name`` is registered in ``dtensor.cache_info()``.
    """

    def __init__(self, limit: int, name: str | None = None) -> None:
        super().__init__()
        self.limit = limit
        if name is not None:
            register_cache(name, lambda: (len(self), self.limit))

    def keep(self, key: KeyT, value: ValueT) -> ValueT:
        """Store ``value`` under ``key``, and return it; at ``limit`` entries first drop the older half."""
        if len(self) >= self.limit:
            for oldest in list(self)[: max(1, self.limit // 2)]:
                self.pop(oldest, None)  # another thread may have removed it
        self[key] = value
        return value


class PooledDicts(Generic[KeyT, ValueT]):
    """Dicts with a common bound: at most ``each`` entries per dict and ``together`` in all.

    A dict that changes often evicts its own entries first. The oldest half of the entries is dropped at once. A dropped entry
    that is still needed is computed again and is then the newest. A lookup is a plain ``dict.get`` and needs no lock in any
    thread.
    """

    def __init__(self, each: int, together: int) -> None:
        self.each, self.together = each, together
        self._entries: deque[tuple[dict[KeyT, ValueT], KeyT]] = deque()  # oldest first; some are dropped from their dict already
        self._lock = RLock()

    def make_part(self) -> dict[KeyT, ValueT]:
        """Return a new dict of the pool. Add entries to it by :meth:`keep`."""
        return {}

    def keep(self, part: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> ValueT:
        """Store ``value`` under ``key`` of the dict ``part``, and return it; drop the oldest entries of a full dict or pool."""
        with self._lock:
            if len(part) >= self.each:
                for oldest in list(islice(part, max(1, self.each // 2))):
                    del part[oldest]
            if len(self._entries) >= self.together:
                for _ in range(max(1, len(self._entries) // 2)):
                    owner, oldest = self._entries.popleft()
                    owner.pop(oldest, None)
            self._entries.append((part, key))
            part[key] = value
        return value

    def clear(self) -> None:
        """Remove all entries of all dicts."""
        with self._lock:
            for part, _ in self._entries:
                part.clear()
            self._entries.clear()

    def fullness(self) -> tuple[int, int]:
        """Return the number of entries and the bound. Entries that were dropped from their dict may still count."""
        return len(self._entries), self.together
