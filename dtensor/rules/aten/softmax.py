"""Softmax and its kin along a sharded dim: (maximum, sum of exponentials) of each block combine in one small collective.

The backward passes need one sum over the dim each, so one small all-reduce. Nothing of the size of the operand is ever moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...placement import Monoid
from ..declare import fold
from ..folds import ALONG, REDUCED, Part


def _combine(a: Tensor, b: Tensor) -> Tensor:
    """exp-sums relative to the larger maximum; equal maxima keep theirs, also infinite ones, whose difference is NaN."""
    top = torch.maximum(a[0], b[0])
    total = sum(torch.where(pair[0] == top, pair[1], pair[1] * (pair[0] - top).exp()) for pair in (a, b))
    return torch.stack([top, total])  # type: ignore[list-item]  # sum() of two tensors is one


def _no_terms(like: Tensor) -> Tensor:
    return torch.stack([torch.full_like(like[0], -torch.inf), torch.zeros_like(like[1])])


def _combine_all(stack: Tensor) -> Tensor:
    """The same of states stacked along dim 0."""
    tops, totals = stack.unbind(1)
    top = tops.amax(0)
    return torch.stack([top, (tops - finite(top)).exp_().mul_(totals).sum(0)])


LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
EXP_SUM = Monoid("expsum", _combine, _no_terms, combine_all=_combine_all)


def exp_sum(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum, and the sum of exponentials relative to it; one of infinity makes the sum NaN."""
    top = x.amax(part.dims, keepdim=True)
    return top, (x - top.clamp(min=-LARGEST[top.dtype])).exp_().sum(part.dims, keepdim=True)


def sane_exp_sum(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    """As ``exp_sum``, but a maximum of infinity makes the sum infinite."""
    top = x.amax(part.dims, keepdim=True)
    return top, (x - finite(top)).exp_().sum(part.dims, keepdim=True)


def finite(x: Tensor) -> Tensor:
    """``x``, the largest and least numbers in place of infinities: what is as large differs from it by 0 or by infinity."""
    most = LARGEST[x.dtype]
    return x.clamp(-most, most)


# --- forward: integers reach the operator, which raises -----------------------------------------------------------------
FINISH = {
    "_softmax": lambda part, x, top, total: (x - top).exp_().div_(total),
    "_log_softmax": lambda part, x, top, total: (x - top).sub_(total.log()),
    # rows with nothing to attend to give zeros
    "_safe_softmax": lambda part, x, top, total: (x - top).exp_().div_(total).masked_fill_(top == -torch.inf, 0.0),
}
for _name, _finish in FINISH.items():
    fold(_name, ALONG, block=exp_sum, monoid=EXP_SUM, numbers=2, finish=_finish, takes="floating")
fold(
    "logsumexp",
    REDUCED,
    block=sane_exp_sum,
    monoid=EXP_SUM,
    numbers=2,
    finish=lambda part, x, top, total: top.masked_fill(top.isinf(), 0.0) + total.log(),
    takes="real",
)

# --- backward: linear in the incoming gradient --------------------------------------------------------------------------
fold(
    "_softmax_backward_data",
    ALONG,
    block=lambda part, grad, y: (grad * y).sum(part.dims, keepdim=True),
    monoid="sum",
    finish=lambda part, grad, y, total: y * (grad - total),
)
fold(
    "_log_softmax_backward_data",
    ALONG,
    block=lambda part, grad, y: grad.sum(part.dims, keepdim=True),
    monoid="sum",
    finish=lambda part, grad, y, total: grad - y.exp().mul_(total),
)
