"""Random numbers: what one device would draw for the same seed, whatever the mesh and placements (see ``rules.draw``)."""

from __future__ import annotations

import torch

from .mesh import DeviceMesh
from .rules.draw import block_of, draw, synchronize

__all__ = ["block_of", "draw", "manual_seed", "synchronize"]


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seed the generators of this process (call it on every rank with the same seed), as ``torch.manual_seed`` does."""
    torch.manual_seed(seed)
    if device_mesh is not None:
        device_mesh._root.seeded = True
