"""What torch does from a version on."""

from __future__ import annotations

import pytest
import torch

WHOLE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # ``linear`` and ``matmul`` reach a DTensor as they are
needs_whole = pytest.mark.skipif(
    not WHOLE, reason="older torch takes linear and matmul apart above DTensors: other names are told"
)
