"""Copies that keep results apart from redistributed operands: an operand may be cached, and results are written to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..comm import Pending, PerRank, shards_of
from ..errors import DTensorError
from ..propagation.op_schema import Place


def kept_apart(call: Callable[..., Any], moved: Sequence[tuple[Place, int | None]]) -> Callable[..., Any]:
    """``call`` with results that share no memory with what was moved, by place and index in a list."""

    def run(*local_args: Any, **local_kwargs: Any) -> Any:
        made = call(*local_args, **local_kwargs)
        given: set[int] = set()
        for place, index in moved:
            x = local_args[place] if isinstance(place, int) else local_kwargs[place]
            given.update(memory_of(x if index is None else x[index]))
        given.discard(0)
        if isinstance(made, (tuple, list)):
            return type(made)(apart(x, given) for x in made)
        return apart(made, given)

    return run


def apart(local: Any, given: Collection[int]) -> Any:
    """``local``, copied where it is memory that begins at ``given``."""
    if not isinstance(local, torch.Tensor) or set(memory_of(local)).isdisjoint(given):
        return local
    if isinstance(local, PerRank):
        return PerRank(x.clone() if at in given else x for x, at in zip(local.shards, memory_of(local), strict=True))
    return local.clone()


def memory_of(local: torch.Tensor) -> list[int]:
    """Where the storage of each shard begins; 0 where there is none to tell by (fake, meta and sparse tensors)."""
    shards = (local,) if type(local) is torch.Tensor else shards_of(local)
    return [x.untyped_storage().data_ptr() if type(x) is torch.Tensor and x.layout is torch.strided else 0 for x in shards]


def unwritten(pending: Pending[Any], sources: Sequence[Any]) -> Pending[Any]:
    """``pending``, refusing its result if one of ``sources`` (DTensors) is written to while messages still read from it."""
    held = [t for x in sources for t in (x, *getattr(x._local, "shards", (x._local,)))]
    tracked = [t for t in held if not t.is_inference()]  # those of inference mode have no version
    versions = [t._version for t in tracked]

    def arrived() -> Any:
        value = pending.wait()
        if versions != [t._version for t in tracked]:
            raise DTensorError(
                "a tensor was written to in place while redistribute(..., async_op=True) was still sending it: the result may "
                "hold old values or new ones; use the result before writing, or redistribute a copy: x.clone().redistribute(...)"
            )
        return value

    return Pending(arrived)
