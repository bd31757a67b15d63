"""Cache info: entries and limits of the caches of layouts, redistribution plans, operator plans and others."""

from __future__ import annotations

from typing import NamedTuple

from ..base.caches import cache_fullness
from ..layout.layout import count_layouts
from .dispatcher import PLANS, plans_of_operators


class CacheInfo(NamedTuple):
    """The fill of one cache of this process: entries, the limit, and (for plans of operators) how many were made so far.

    No communication.

    >>> CacheInfo(3, 1024, 5).limit
    1024
    """

    kept: int
    limit: int | None
    made: int | None


def cache_info() -> dict[str, CacheInfo]:
    """Return the number of entries and the limit of each cache of this process, by name.

    The keys are ``"layouts"`` (all that are alive), ``"redistributions"``, ``"plans"`` (of all operators together), the module
    and function of each smaller cache, and the name of each operator. ``"dispatch.cached_copies_bytes"`` has bytes in place of
    entries: those of the cached redistributed copies, and their budget.

    If plans of one operator are made again and again, its sizes or numbers change at each call.

    >>> import torch, dtensor as dt
    >>> x = dt.zeros(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> y = x.cos().cos().cos()
    >>> dt.cache_info()["aten.cos.default"].limit
    1024

    Raises:
        ArgumentError: the environment variable ``DTENSOR_CACHED_COPIES_BYTES`` is not a whole number.

    No communication: numbers of this process.
    """
    return {
        "layouts": CacheInfo(count_layouts(), None, None),
        **{name: CacheInfo(*fullness, None) for name, fullness in cache_fullness().items()},
        **{name: CacheInfo(kept, PLANS.each, made) for name, (kept, made) in plans_of_operators().items()},
    }
