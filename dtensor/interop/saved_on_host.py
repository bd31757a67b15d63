"""Saved tensors on the host: ``torch.autograd.graph.save_on_cpu(pin_memory=True)`` and torch's ``offload_wrapper`` for DTensors.

Torch copies a saved tensor into a plain tensor of its size. A DTensor has no such value on one rank. Instead its local tensors
move to the host, and move back under the same layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

from ..base.patches import patch_applied
from ..tensor.dtensor import DTensor

_torch_init: Any = save_on_cpu.__init__


def install_save_on_cpu() -> None:
    """Patch ``save_on_cpu`` to move the local tensors of a DTensor to host memory."""
    patch_applied("torch.autograd.graph.save_on_cpu.__init__")
    save_on_cpu.__init__ = _init_save_on_cpu  # type: ignore[method-assign]


def _init_save_on_cpu(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
    """Initialize ``save_on_cpu`` with a pack hook that accepts DTensors, in place of torch's ``__init__``."""
    _torch_init(self, pin_memory, device_type)
    pack = self.pack_hook
    pins = pin_memory and getattr(torch, device_type, torch.cuda).is_available()

    def pack_any(tensor: torch.Tensor) -> Any:
        """Return a saved tensor's device and its copy in host memory; for a DTensor local tensors move."""
        if not isinstance(tensor, DTensor):
            return pack(tensor)
        on_host = tensor.cpu()
        return tensor.device, on_host.pin_memory() if pins else on_host

    self.pack_hook = pack_any
