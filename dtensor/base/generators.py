"""Generators: access to the states of torch's random generators, by one thread at a time.

Torch holds the lock of a generator while it allocates the state tensor. The allocation may start Python's garbage collection,
which may switch to another thread. A second thread that asks the same generator then waits for the lock with the GIL: a
deadlock.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

import torch

_GENERATOR_LOCK = RLock()


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of random operations on ``device``: the CPU's for a device type that has none."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    if not generators:
        return torch.default_generator
    return generators[module.current_device() if device.index is None else device.index]


def get_generator_state(generator: torch.Generator) -> torch.Tensor:
    """Return the state of ``generator``, read under the lock that all threads use for generator states."""
    with _GENERATOR_LOCK:
        return generator.get_state()


def set_generator_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of ``generator``, under the lock that all threads use for generator states."""
    with _GENERATOR_LOCK:
        generator.set_state(state)
