"""Torch version marks: pytest marks for tests that need a version of torch."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

LINEAR_REACHES_DTENSOR = tuple(map(int, torch.__version__.split(".")[:2])) >= (
    2,
    13,
)  # ``linear`` and ``matmul`` reach a DTensor as they are
needs_undecomposed_linear = pytest.mark.skipif(
    not LINEAR_REACHES_DTENSOR,
    reason="older torch takes linear, matmul and others apart above DTensors, where none can be taken over",
)


def mark_undecomposed_linear(values: Iterable[Any], those: Container[Any]) -> list[Any]:
    """Return the parameters of a test; those in ``those`` run only where torch passes ``linear`` and ``matmul`` undecomposed."""
    return [pytest.param(value, marks=[needs_undecomposed_linear] * (value in those)) for value in values]
