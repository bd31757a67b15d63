"""The states of torch's random generators, read and set by one thread at a time.

Torch holds a generator's lock while it makes the tensor that it answers with. Python may collect garbage then, and let another
thread run: if that one asks the generator too, it waits for the lock and keeps the interpreter, for ever.
"""

from __future__ import annotations

from threading import RLock

import torch

_ONE_AT_A_TIME = RLock()


def state_now(generator: torch.Generator) -> torch.Tensor:
    """Where the generator is."""
    with _ONE_AT_A_TIME:
        return generator.get_state()


def go_to(generator: torch.Generator, state: torch.Tensor) -> None:
    """Bring the generator to a state."""
    with _ONE_AT_A_TIME:
        generator.set_state(state)
