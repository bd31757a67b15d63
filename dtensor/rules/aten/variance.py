"""Variances over sharded dims: each rank's (count, mean, sum of squared deviations) combine in one collective.

The combination is that of Chan, Golub and LeVeque (1979), which does not cancel as sums of squares do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...placement import Monoid
from ..call import Call
from ..kernels import KernelContext, statistics_bytes
from ..rule import Factors, Kernel
from ..verbs import kernel_rule, reduction_factors


def _combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    count = a[0] + b[0]
    delta = b[1] - a[1]
    share = b[0] / count.clamp(min=1)
    return torch.stack([count, a[1] + delta * share, a[2] + b[2] + delta * delta * a[0] * share])


MOMENTS = Monoid("moments", _combine, torch.zeros_like)


def _moments(at: KernelContext, x: Any) -> Any:
    """(count, mean, sum of squared deviations) of the whole, stacked."""
    result = at.results[0]
    assert result is not None
    wide = torch.promote_types(result.dtype, torch.float32)
    dims = at.call.dims("dim", len(at.call.shape(0)))
    keepdim = bool(at.call.get("keepdim", False))

    def one(here: Any, block: torch.Tensor) -> torch.Tensor:
        count = math.prod(block.shape[d] for d in dims)
        if not count:
            return block.new_zeros((3, *result.local_shape(at.call.mesh.coordinates[here.member])), dtype=wide)
        variance, mean = torch.var_mean(block.to(wide), dims, correction=0, keepdim=keepdim)
        return torch.stack([torch.full_like(mean, count), mean, variance * count])

    return at.all_reduce(at.map(one, x), MOMENTS)


def _variance(root: bool, with_mean: bool) -> Callable[..., Any]:
    def run(at: KernelContext, x: Any, *args: Any, correction: Any = None, **kwargs: Any) -> Any:
        result = at.results[0]
        assert result is not None
        dtype, shape = result.dtype, at.call.shape(0)
        count = math.prod(shape[d] for d in at.call.dims("dim", len(shape)))
        freedom = max(0.0, count - (1 if correction is None else float(correction)))

        def one(_: Any, moments: torch.Tensor) -> Any:
            variance = moments[2] / freedom
            spread = (variance.sqrt() if root else variance).to(dtype)
            return (spread, moments[1].to(dtype)) if with_mean else spread

        return at.map(one, _moments(at, x))

    return run


def _factors(kernel: Kernel) -> Callable[[Call], Factors]:
    def factors(call: Call) -> Factors:
        # of complex numbers the real and the imaginary part vary together; integers the operator itself refuses
        known = kernel if call.operands[0].dtype.is_floating_point else None
        return reduction_factors(call, call.dims("dim", len(call.shape(0))), None, known)

    return factors


def moment_bytes(call: Call) -> int:
    result = call.results[0]
    assert result is not None
    return statistics_bytes(call, 3 * math.prod(result.shape))


for _name, _root, _with_mean in (
    ("var", False, False),
    ("std", True, False),
    ("var_mean", False, True),
    ("std_mean", True, True),
):
    kernel_rule(_name, _factors(Kernel(_variance(_root, _with_mean), collectives=1, nbytes=moment_bytes, joint=True)))
