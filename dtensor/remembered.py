"""Caches that have a bound and say how full they are: nothing that a program can make ever more of is kept without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
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
