"""Init world: detect whether a launcher started several processes, and initialize the world process group."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MeshError

_MEETING_KEY = "dtensor/start"  # key in the agents' store by which the ranks of one start find each other
_POLL_SECONDS = 0.01
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by every launcher for torch
_PREFIX_STORE: Any = dist.PrefixStore  # type: ignore[attr-defined]  # torch leaves it out of __all__


def has_processes() -> bool:
    """Return True if ranks are processes: a group is initialized, or torchrun or another launcher started this process."""
    return dist.is_initialized() or dist.is_torchelastic_launched() or all(name in os.environ for name in _LAUNCHER_VARIABLES)


def ensure_world(device_type: str) -> None:
    """Initialize torch's world process group unless it is: NCCL for ``"cuda"``, of which the device is set, else gloo."""
    if dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device_type == "cuda" else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend)
        return
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]  # torch leaves it out of __all__
    dist.init_process_group(backend, store=restart_store(store, rank, size), rank=rank, world_size=size)


def restart_store(store: Any, rank: int, size: int) -> Any:
    """Return a part of the store that no earlier start of these ranks has written to.

    torchrun's agents keep one store for all restarts of their workers. The addresses of killed workers remain in it, and
    restarted workers would read them. No name from an agent identifies a restart on all nodes, because each agent counts its
    own failures. So rank 0 generates a name. The other ranks may read the name of an earlier rank 0. They detect this because
    their own token is not among those that this rank 0 collected.

    Raises:
        MeshError: rank 0 has not come within the timeout of the store.
    """
    if rank == 0:
        name = f"{_MEETING_KEY}/{uuid.uuid4().hex}"
        store.set(_MEETING_KEY, name)
        others = [f"{name}/{other}" for other in range(1, size)]
        store.set(f"{name}/met", b" ".join(store.multi_get(others)) if others else b"")
        return _PREFIX_STORE(name, store)
    token, last_name, deadline = uuid.uuid4().hex, "", time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(_MEETING_KEY).decode()
        if name != last_name:
            store.set(f"{name}/{rank}", token)
            last_name = name
        if store.check([f"{name}/met"]) and token.encode() in store.get(f"{name}/met"):
            return _PREFIX_STORE(name, store)
        time.sleep(_POLL_SECONDS)
    raise MeshError(
        f"rank {rank} has waited {store.timeout.total_seconds():.0f} s for rank 0 to start; see what that rank printed"
    )
