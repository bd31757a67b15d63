"""Marks for tests that need a version of torch."""

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
    """Return the parameters of a test, with the mark on ``those``."""
    return [pytest.param(value, marks=[needs_whole] * (value in those)) for value in values]
