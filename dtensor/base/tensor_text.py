"""Tensor text: the dtype and the shape of a tensor, for messages and reports, and the parser of this text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import LayoutError


def tensor_text(dtype: torch.dtype, shape: Iterable[Any]) -> str:
    """Return dtype and shape of a tensor as text.

    >>> tensor_text(torch.float32, (4, 6))
    'float32[4, 6]'
    """
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def parse_tensor_text(text: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Parse the text of :func:`tensor_text` to (dtype, shape).

    Raises:
        LayoutError: torch has no such dtype.

    >>> parse_tensor_text("float32[4, 6]")
    (torch.float32, (4, 6))
    """
    name, _, sizes = text.partition("[")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"{text!r}: torch has no dtype {name!r}; write for example float32[4, 6]")
    return dtype, tuple(map(int, re.findall(r"\d+", sizes)))
