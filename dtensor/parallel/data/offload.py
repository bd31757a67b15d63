"""Copies between the device and host memory, where offloaded shards are kept.

From and to pinned memory a device copies by itself, while the host goes on. Shards themselves lie in ordinary memory, and what
travels to the device is a copy: an optimizer may write to them while an older value is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .policy import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory.

    Attributes:
        pinned: copies go through pinned memory and do not block; there has to be an accelerator for that.
    """

    pinned: bool

    @staticmethod
    def of(policy: OffloadPolicy, device_type: str) -> Host | None:
        """As ``policy`` says for parameters that are computed with on ``device_type``; None: they stay there."""
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return Host(policy.pin_memory and accelerator is not None and accelerator.type == device_type)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """``parts`` one behind the other, in memory of their own that a device may copy from at any time."""
        if not self.pinned:
            return torch.cat(parts)
        made = pinned_memory(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=made)

    def sent(self, x: Tensor, device: str) -> Tensor:
        """A copy of ``x`` on the device, soon: in time for what is asked of the device from now on."""
        return self.joined([x.detach().reshape(-1)]).to(device, non_blocking=True).view(x.shape)

    def fetched(self, x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """A flat copy of ``x`` in host memory, and what is to be called before it is read."""
        if not self.pinned or x.device.type == "cpu":
            return x.cpu(), lambda: None
        made = pinned_memory(x.numel(), x.dtype)
        made.copy_(x, non_blocking=True)
        event = torch.Event(x.device)
        event.record()
        return made, event.synchronize


def pinned_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that devices copy from and to by themselves; torch gives it to somebody else only when they are done."""
    return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")
