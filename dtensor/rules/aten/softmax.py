"""Softmax and its kin along a sharded dim: (maximum, sum of exponentials) of each block combine in one small collective.

The backward passes need one sum over the dim each, so one small all-reduce. Nothing of the size of the operand is ever moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...placement import Monoid
from ..call import Call
from ..kernels import KernelContext
from ..rule import Factors, Kernel
from ..verbs import MakeKernel, along, kernel_rule, reduction_factors
from .reduction import reduced_dims


def _combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """exp-sums relative to the larger maximum; equal maxima keep theirs, also infinite ones, whose difference is NaN."""
    top = torch.maximum(a[0], b[0])
    total = sum(torch.where(pair[0] == top, pair[1], pair[1] * (pair[0] - top).exp()) for pair in (a, b))
    return torch.stack([top, total])  # type: ignore[list-item]  # sum() of two tensors is one


def _no_terms(like: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.full_like(like[0], -torch.inf), torch.zeros_like(like[1])])


EXP_SUM = Monoid("expsum", _combine, _no_terms)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in."""
    return torch.promote_types(dtype, torch.float32)


def exp_sums(at: KernelContext, x: Any, dims: tuple[int, ...], dtype: torch.dtype, *, sane: bool) -> Any:
    """(maximum, sum of exponentials relative to it) over ``dims`` of the whole, stacked, dims kept.

    ``sane``: a maximum of infinity gives an infinite sum, as ``logsumexp`` has it, and not NaN, as softmax has it.
    """

    def one(_: Any, block: torch.Tensor) -> torch.Tensor:
        block = block.to(dtype)
        shape = [1 if d in dims else size for d, size in enumerate(block.shape)]
        if not block.numel():
            return torch.stack([block.new_full(shape, -torch.inf), block.new_zeros(shape)])
        top = block.amax(dims, keepdim=True)
        unsafe = top.isinf() if sane else top == -torch.inf
        return torch.stack([top, (block - top.masked_fill(unsafe, 0.0)).exp().sum(dims, keepdim=True)])

    return at.all_reduce(at.map(one, x), EXP_SUM)


# --- forward ------------------------------------------------------------------------------------------------------------
def _softmax(finish: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def run(at: KernelContext, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        result = at.results[0]
        assert result is not None
        dtype = wide(result.dtype)
        pair = exp_sums(at, x, at.call.dims("dim", len(at.call.shape(0))), dtype, sane=False)
        return at.map(lambda _, block, both: finish(block.to(dtype), both[0], both[1]).to(result.dtype), x, pair)

    return run


def _plain(x: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (x - top).exp() / total


def _log(x: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return x - top - total.log()


def _safe(x: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Rows with nothing to attend to give zeros."""
    return _plain(x, top, total).masked_fill(top == -torch.inf, 0.0)


def row_bytes(call: Call, count: int = 2) -> int:
    """Bytes of ``count`` numbers for each row."""
    shape, result = call.shape(0), call.results[0]
    gone = call.dims("dim", len(shape))
    rows = math.prod(size for d, size in enumerate(shape) if d not in gone)
    return 0 if result is None else rows * wide(result.dtype).itemsize * count


def _if_floating(finish: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> MakeKernel:
    """A kernel for results that softmax exists for; integers reach the operator, which raises."""
    kernel = Kernel(_softmax(finish), collectives=1, nbytes=row_bytes)
    return lambda call: kernel if call.results[0] is not None and call.results[0].dtype.is_floating_point else None


along("_softmax", kernel=_if_floating(_plain))
along("_log_softmax", kernel=_if_floating(_log))
along("_safe_softmax", kernel=_if_floating(_safe))


# --- backward: linear in the incoming gradient -----------------------------------------------------------------------------
def _softmax_backward(at: KernelContext, grad: Any, output: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    result = at.results[0]
    assert result is not None
    dtype = wide(result.dtype)
    term = at.map(lambda _, g, y: (g.to(dtype) * y.to(dtype)).sum(dim, keepdim=True), grad, output)
    total = at.all_reduce(term, "sum")
    return at.map(lambda _, g, y, t: (y.to(dtype) * (g.to(dtype) - t)).to(result.dtype), grad, output, total)


def _log_softmax_backward(at: KernelContext, grad: Any, output: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    result = at.results[0]
    assert result is not None
    dtype = wide(result.dtype)
    total = at.all_reduce(at.map(lambda _, g: g.to(dtype).sum(dim, keepdim=True), grad), "sum")
    return at.map(lambda _, g, y, t: (g.to(dtype) - y.to(dtype).exp() * t).to(result.dtype), grad, output, total)


def sum_bytes(call: Call) -> int:
    return row_bytes(call, 1)


along("_softmax_backward_data", kernel=Kernel(_softmax_backward, collectives=1, nbytes=sum_bytes))
along("_log_softmax_backward_data", kernel=Kernel(_log_softmax_backward, collectives=1, nbytes=sum_bytes))


# --- logsumexp ----------------------------------------------------------------------------------------------------------------
def _log_sum_exp(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    result = at.results[0]
    assert result is not None
    pair = exp_sums(at, x, reduced_dims(at.call), wide(result.dtype), sane=True)

    def finish(here: Any, both: torch.Tensor) -> torch.Tensor:
        value = both[0].masked_fill(both[0].isinf(), 0.0) + both[1].log()
        return value.reshape(result.local_shape(at.call.mesh.coordinates[here.member])).to(result.dtype)

    return at.map(finish, pair)


def log_sum_exp_factors(call: Call) -> Factors:
    kernel = None if call.operands[0].dtype.is_complex else Kernel(_log_sum_exp, collectives=1, nbytes=row_bytes, joint=True)
    return reduction_factors(call, reduced_dims(call), None, kernel)


kernel_rule("logsumexp", log_sum_exp_factors)
