"""What torch does from a version on."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

WHOLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # ``linear`` and ``matmul`` reach a DTensor as they are
needs_whole = pytest.mark.skipif(
    not WHOLE, reason="older torch takes linear, matmul and others apart above DTensors, where none can be taken over"
)


def needing_whole(values: Iterable[Any], those: Container[Any]) -> list[Any]:
    """Parameters of a test; ``those`` among them need it."""
    return [pytest.param(value, marks=[needs_whole] * (value in those)) for value in values]
