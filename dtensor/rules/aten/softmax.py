"""Softmax and related operators along a sharded dim: (maximum, sum of exponentials) of blocks combine in one small collective.

The backward passes need one sum over the dim, so one small all-reduce. Nothing of the operand's size is moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...placement import Monoid
from ..declare import fold
from ..folds import ALONG_PATTERN, REDUCED_PATTERN, FoldContext


def _combine_exp_sums(a: Tensor, b: Tensor) -> Tensor:
    """Combine two (maximum, sum of exponentials) states relative to the larger maximum."""
    top = torch.maximum(a[0], b[0])
    total = sum(torch.where(pair[0] == top, pair[1], pair[1] * (pair[0] - top).exp()) for pair in (a, b))
    return torch.stack([top, total])  # type: ignore[list-item]  # sum() of two tensors is one


def _empty_exp_sum(like: Tensor) -> Tensor:
    return torch.stack([torch.full_like(like[0], -torch.inf), torch.zeros_like(like[1])])


def _combine_all_exp_sums(stack: Tensor) -> Tensor:
    """Combine (maximum, sum of exponentials) states, stacked along dim 0, into one."""
    tops, totals = stack.unbind(1)
    top = tops.amax(0)
    return torch.stack([top, (tops - clamp_to_finite(top)).exp_().mul_(totals).sum(0)])


LARGEST_FINITE = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
EXP_SUM = Monoid("expsum", _combine_exp_sums, _empty_exp_sum, combine_all=_combine_all_exp_sums)


def exp_sum(part: FoldContext, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return one block's maximum, and its sum of exponentials relative to it, which is NaN if the maximum is infinite."""
    top = x.amax(part.dims, keepdim=True)
    return top, (x - top.clamp(min=-LARGEST_FINITE[top.dtype])).exp_().sum(part.dims, keepdim=True)


def exp_sum_with_infinity(part: FoldContext, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return one block's maximum, and its sum of exponentials relative to it, which is infinite if the maximum is."""
    top = x.amax(part.dims, keepdim=True)
    return top, (x - clamp_to_finite(top)).exp_().sum(part.dims, keepdim=True)


def clamp_to_finite(x: Tensor) -> Tensor:
    """Replace infinities by the largest and least finite numbers of the dtype."""
    most = LARGEST_FINITE[x.dtype]
    return x.clamp(-most, most)


# --- forward (for integers the operator raises) -------------------------------------------------------------------------
FINISH = {
    "_softmax": lambda part, x, top, total: (x - top).exp_().div_(total),
    "_log_softmax": lambda part, x, top, total: (x - top).sub_(total.log()),
    # rows that attend to nothing are zeros
    "_safe_softmax": lambda part, x, top, total: (x - top).exp_().div_(total).masked_fill_(top == -torch.inf, 0.0),
}
for _name, _finish in FINISH.items():
    fold(_name, ALONG_PATTERN, block=exp_sum, monoid=EXP_SUM, numbers=2, finish=_finish, takes="floating")
fold(
    "logsumexp",
    REDUCED_PATTERN,
    block=exp_sum_with_infinity,
    monoid=EXP_SUM,
    numbers=2,
    finish=lambda part, x, top, total: top.masked_fill(top.isinf(), 0.0) + total.log(),
    takes="real",
)

# --- backward: linear in the incoming gradient --------------------------------------------------------------------------
fold(
    "_softmax_backward_data",
    ALONG_PATTERN,
    block=lambda part, grad, y: (grad * y).sum(part.dims, keepdim=True),
    monoid="sum",
    finish=lambda part, grad, y, total: y * (grad - total),
)
fold(
    "_log_softmax_backward_data",
    ALONG_PATTERN,
    block=lambda part, grad, y: grad.sum(part.dims, keepdim=True),
    monoid="sum",
    finish=lambda part, grad, y, total: grad - y.exp().mul_(total),
)
