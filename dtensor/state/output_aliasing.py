"""Output aliasing: results share no memory with a redistributed operand; pending ones raise if their source was written to.

A redistributed operand may be a cached copy, and users write to results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..comm import Pending, PerRank, shards_of
from ..errors import DTensorError
from .version_counters import WriteCheck


def clone_if_aliased(local: Any, addresses: Collection[int]) -> Any:
    """Return the local value ``local``, cloned on ranks where its storage starts at one of ``addresses``."""
    if not isinstance(local, torch.Tensor) or set(storage_addresses(local)).isdisjoint(addresses):
        return local
    if isinstance(local, PerRank):
        shards = zip(local.shards, storage_addresses(local), strict=True)
        return PerRank(x.clone() if address in addresses else x for x, address in shards)
    return local.clone()


def storage_addresses(local: torch.Tensor) -> list[int]:
    """Return the address of the storage of each shard; 0 for tensors without one (fake, meta and sparse tensors)."""
    shards = (local,) if type(local) is torch.Tensor else shards_of(local)
    return [x.untyped_storage().data_ptr() if type(x) is torch.Tensor and x.layout is torch.strided else 0 for x in shards]


def check_unwritten(pending: Pending[Any], sources: Sequence[Any]) -> Pending[Any]:
    """Return ``pending``, which raises if one of ``sources`` (DTensors) was written to while messages read from it.

    Raises:
        DTensorError: when the result is waited for.
    """
    check = WriteCheck(t for x in sources for t in (x, *shards_of(x._local)))

    def wait_and_check() -> Any:
        """Return the received value; raise if a source was written to while it was sent."""
        value = pending.wait()
        if check.was_written():
            raise DTensorError(
                "a tensor was written to in place while redistribute(..., async_op=True) was still sending it: the result may "
                "hold old values or new ones; use the result before writing, or redistribute a copy: x.clone().redistribute(...)"
            )
        return value

    return Pending(wait_and_check)
