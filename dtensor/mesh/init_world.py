"""The world of processes that a launcher has started: whether there is one, and how it comes to be."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MeshError

_MEETING = "dtensor/start"  # where in the store of the agents the ranks of a start find each other
_ASK_S = 0.01
_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by which any launcher tells torch of a world of processes
_PREFIXED: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch leaves it out of __all__


def distributed() -> bool:
    """Whether ranks are processes: a group is initialised, or torchrun or another launcher started us as one of them."""
    return dist.is_initialized() or dist.is_torchelastic_launched() or all(name in os.environ for name in _OF_A_RANK)


def ensure_world(device_type: str) -> None:
    """Initialise the world group where the launcher left that to us."""
    if dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device_type == "cuda" else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend)
        return
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]  # as above
    dist.init_process_group(backend, store=unwritten(store, rank, size), rank=rank, world_size=size)


def unwritten(store: Any, rank: int, size: int) -> Any:
    """A part of the store where no earlier start of these ranks has written.

    torchrun's agents hold one store for all restarts of their workers, who would read there under what addresses the killed ones
    listened. No name that an agent gives tells its restarts apart on all nodes (they count their own failures), so the first rank
    draws one. The others may find what an earlier first rank drew; they know by not being among those whom it met.

    Raises:
        MeshError: the first rank has not come in the store's timeout.
    """
    if rank == 0:
        name = f"{_MEETING}/{uuid.uuid4().hex}"
        store.set(_MEETING, name)
        others = [f"{name}/{other}" for other in range(1, size)]
        store.set(f"{name}/met", b" ".join(store.multi_get(others)) if others else b"")
        return _PREFIXED(name, store)
    mine, told, end = uuid.uuid4().hex, "", time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < end:
        name = store.get(_MEETING).decode()
        if name != told:
            store.set(f"{name}/{rank}", mine)
            told = name
        if store.check([f"{name}/met"]) and mine.encode() in store.get(f"{name}/met"):
            return _PREFIXED(name, store)
        time.sleep(_ASK_S)
    raise MeshError(
        f"rank {rank} has waited {store.timeout.total_seconds():.0f} s for rank 0 to start; see what that rank printed"
    )
