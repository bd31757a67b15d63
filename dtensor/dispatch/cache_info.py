"""How full the caches are that programs fill: layouts, redistribution plans, plans of operators."""

from __future__ import annotations

from typing import NamedTuple

from ..base.caches import fullness
from ..layout.layout import interned
from .dispatcher import PLANS, plans_of_operators


class CacheInfo(NamedTuple):
    """How full a cache is: entries kept, the most that are kept, and (of plans of operators) how many have been made.

    Of this process; no communication.

    >>> CacheInfo(3, 1024, 5).limit
    1024
    """

    kept: int
    limit: int | None
    made: int | None


def cache_info() -> dict[str, CacheInfo]:
    """The state of all caches: ``"layouts"`` (alive, whoever uses them), ``"redistributions"``, ``"plans"`` (of all operators
    together), the smaller ones by module and function, and one per operator.

    Plans that are made again and again for the same operator tell that its sizes or numbers change at each call.

    >>> import torch, dtensor as dt
    >>> x = dt.zeros(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> y = x.cos().cos().cos()
    >>> dt.cache_info()["aten.cos.default"].limit
    1024

    No communication, no errors: numbers of this process.
    """
    return {
        "layouts": CacheInfo(interned(), None, None),
        **{name: CacheInfo(*found, None) for name, found in fullness().items()},
        **{name: CacheInfo(kept, PLANS.each, made) for name, (kept, made) in plans_of_operators().items()},
    }
