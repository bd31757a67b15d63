"""What a local is made of, seen the same way whether it is one tensor or those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .per_rank import PerRank


def each_shard(fn: Callable[..., Tensor], local: Any, *rest: Any) -> Any:
    """``fn(shard, *rest)`` of each tensor that a local is made of, as a local again."""
    return PerRank(fn(shard, *rest) for shard in local.shards) if isinstance(local, PerRank) else fn(local, *rest)


def reordered(local: Any, order: Sequence[int]) -> Any:
    """The shards at these positions, where a local has several."""
    return PerRank(local.shards[k] for k in order) if isinstance(local, PerRank) else local
