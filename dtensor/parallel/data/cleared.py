"""Who holds gradients that ``.grad`` does not show yet, so that ``optimizer.zero_grad()`` clears those as well.

A plain program has what its passes without synchronisation have come to in ``.grad``, where the optimizer finds it. Here that
is none until gradients are reduced: an accumulation that was given up would join the next step. Torch asks nobody when an
optimizer clears gradients, so its method is replaced once there may be something held.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim.optimizer import Optimizer

from ...base.told import changed


class Holder(Protocol):
    """What holds gradients for a later backward."""

    def drop(self, parameters: Container[int], to_none: bool) -> None:
        """Clear those of parameters with these ids: they are none, or zeros."""


_HOLDING: WeakSet[Any] = WeakSet()
_told = False


def expect_holders() -> None:
    """There may be some. From the first unit on: a recording shall end with the method that it began with."""
    global _told
    if _told:
        return
    _told, of_torch = True, Optimizer.zero_grad

    @functools.wraps(of_torch)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        of_torch(self, set_to_none)
        if _HOLDING:
            clear({id(parameter) for group in self.param_groups for parameter in group["params"]}, set_to_none)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # see interop.changes
    changed("torch.optim.optimizer.Optimizer.zero_grad")


def note_holding(holder: Holder) -> None:
    """It holds some now."""
    _HOLDING.add(holder)


def clear(parameters: Container[int], to_none: bool) -> None:
    """What anybody holds for parameters with these ids is none, or zeros."""
    for holder in list(_HOLDING):
        holder.drop(parameters, to_none)
