"""Local tensors: the local tensors of a value in this process."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import shards_of
from .dtensor import DTensor


def local_tensors_of(x: Any) -> tuple[torch.Tensor, ...]:
    """Return the local tensors of ``x`` in this process. A plain tensor is its own local tensor."""
    return shards_of(x._local if isinstance(x, DTensor) else x)
