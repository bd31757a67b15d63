"""Tensor text: the dtype and the shape of a tensor, for messages and reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def tensor_text(dtype: torch.dtype, shape: Iterable[Any]) -> str:
    """Return dtype and shape as text.

    >>> tensor_text(torch.float32, (4, 6))
    'float32[4, 6]'
    """
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
