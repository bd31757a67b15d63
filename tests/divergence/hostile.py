"""What goes wrong in the middle: of large messages, of modules that some ranks skip, of loaders of other lengths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from table import Program, R, Scene, Shard

from dtensor import DTensor, Partial

Deed = Callable[[Scene], Any]

# --- ends amid large messages --------------------------------------------------------------------------------------------
_LONG = 30_000_000  # numbers: a transfer of them takes tenths of a second


def _columns(x: DTensor) -> None:
    x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])


def _gathered(x: DTensor) -> None:
    x.redistribute(placements=[R])


def _summed(x: DTensor) -> None:
    DTensor.from_local(x.to_local(), x.device_mesh, [Partial()]).redistribute(placements=[R])


def _amid(act: Callable[[DTensor], None], sign: signal.Signals | None) -> Deed:
    """Large messages, amid which a signal comes to this rank."""

    def run(at: Scene) -> Any:
        size = dist.get_world_size()
        x = DTensor.from_local(torch.ones(size, _LONG // size), at.mesh, [Shard(0)])
        act(x)
        if sign is not None:
            threading.Timer(0.25, os.kill, (os.getpid(), sign)).start()
        for _ in range(200):
            act(x)

    return run


_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "is interrupted": signal.SIGINT}
_ENDED = {
    f"amid {name}/{what}": Program(_amid(act, None), _amid(act, sign), k % 3)
    for k, (name, act) in enumerate({"messages": _columns, "gathers": _gathered, "sums": _summed}.items())
    for what, sign in _SIGNALS.items()
}
DEADLY = {name: program for name, program in _ENDED.items() if "interrupted" not in name}
RAISING = {name: program for name, program in _ENDED.items() if "interrupted" in name}
