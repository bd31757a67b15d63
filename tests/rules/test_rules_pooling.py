"""Rules of pooling and interpolation: linear in floating-point values, rounded in integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import dtensor as dt
from dtensor import Partial, Shard
from dtensor.testing.oracle import check

BYTES = torch.arange(2 * 3 * 4 * 5).mul(7).remainder(251).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda x: F.avg_pool2d(x, 2), torch.int64),
        (lambda x: F.avg_pool3d(x, 2), torch.int64),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), torch.uint8),
        (lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True), torch.uint8),
        (lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest"), torch.uint8),
        (lambda x: F.max_pool2d(x, 2), torch.int64),
    ],
    ids=["avg 2d", "avg 3d", "bilinear", "antialiased", "nearest", "max"],
)
def test_pooling_of_partial_integers_reduces_before_rounding(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    for where in (Partial(), Partial("max"), Shard(1), Shard(3)):
        check(fn, BYTES.to(dtype), mesh=mesh, placements=[[where]])
