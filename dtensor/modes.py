"""The few switches that change how operations on distributed tensors behave. All ranks must enter them alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Modes:
    """The current switches."""

    implicit_replication: bool = False
    explicit: bool = False
    plain_targets: bool = False  # inside loss_parallel()


MODES = Modes()


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors mixed with DTensors count as replicated: every rank must hold the same value.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.implicit_replication():
    ...     (x + torch.arange(4.0)).full_tensor()
    tensor([1., 2., 3., 4.])
    """
    before, MODES.implicit_replication = MODES.implicit_replication, True
    try:
        yield
    finally:
        MODES.implicit_replication = before


@contextmanager
def explicit() -> Iterator[None]:
    """Inside, an operation that would communicate raises; only ``redistribute`` and ``full_tensor`` may.

    Raises:
        ImplicitCommunicationError: from the operation, naming the redistribution that it needs.
    """
    before, MODES.explicit = MODES.explicit, True
    try:
        yield
    finally:
        MODES.explicit = before
