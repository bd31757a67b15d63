"""The states of torch's random generators, read and set by one thread at a time.

Torch holds a generator's lock while it makes the tensor that it answers with. Python may collect garbage then, and let another
thread run: if that one asks the generator too, it waits for the lock and keeps the interpreter, for ever.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

import torch

_ONE_AT_A_TIME = RLock()


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operations without ``generator=`` draw from on this device; the CPU's where the device has none of its own."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    own = getattr(module, "default_generators", ())
    return own[module.current_device() if device.index is None else device.index] if own else torch.default_generator


def state_now(generator: torch.Generator) -> torch.Tensor:
    """Where the generator is."""
    with _ONE_AT_A_TIME:
        return generator.get_state()


def go_to(generator: torch.Generator, state: torch.Tensor) -> None:
    """Bring the generator to a state."""
    with _ONE_AT_A_TIME:
        generator.set_state(state)
