"""Composite operators that torch has a derivative of, served as one operator with one node of autograd's.

Above autograd torch takes ``linear`` apart into views and products: three operators, four where rows are folded, each with a
plan to look up and a tensor to wrap, and as many on the way back. For kinds of tensors whose kernels are whole (nested ones)
it has a derivative of the operator itself, under their key of autograd's. DTensors, whose rules are whole too, are sent there.
Where some dispatch mode takes operators down, they come as torch would have them; before torch 2.13 always.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ...base.torch_internals import DispatchKey, DispatchKeySet, forward_ad, functorch_active
from ...base.tracing import only_looked_at, under_way
from ...rules.aten.contraction import linear_gradients, matmul_gradients
from ..dtensor import DTensor
from .above_autograd import BELOW, GOES_ON, implemented

_RECORDS, _WHOLE = DispatchKey.AutogradFunctionality, DispatchKey.AutogradNestedTensor


def _in_parts() -> bool:
    """Whether somebody takes operators down who knows those of a decomposition, or derivatives are carried forward, which
    only those have."""
    return forward_ad._current_level >= 0 or not only_looked_at(of_dtensors=True)


def _keeps_no_more(x: Tensor, y: Tensor, *_: Tensor | None) -> bool:
    """Whether nothing is kept for backward that is not needed there, but a parameter: torch's derivative keeps both operands,
    also an activation that goes into a frozen weight, which would stay in memory and could not be written to."""
    if x.requires_grad is y.requires_grad:
        return True
    return (x if x.requires_grad else y).is_leaf or not torch.is_grad_enabled()


def _takes_one_node(x: Tensor, *others: Tensor | None) -> bool:
    """Whether operators that a mode sees in parts get one node of autograd's, so that as much is saved as without the mode.

    A checkpointed block may be computed without a mode and again inside of one: torch compares what both passes save.
    """
    if not torch.is_grad_enabled() or forward_ad._current_level >= 0 or functorch_active() or under_way():
        return False
    return any(other is not None and other.requires_grad for other in (x, *others))


class _OneNode(torch.autograd.Function):
    """An operator computed in parts, with the node and the saved tensors that torch's derivative of the whole has."""

    @staticmethod
    def forward(ctx: Any, operator: Any, gradient: Callable[..., Any], weight_first: bool, x: Tensor, *others: Any) -> Tensor:
        ctx.gradient, ctx.weight_first = gradient, weight_first
        ctx.save_for_backward(*((others[0], x) if weight_first else (x, others[0])))
        ctx.set_materialize_grads(False)
        made: Tensor = operator(x, *others)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        mask = list(ctx.needs_input_grad[3:])
        if grad is None:
            return (None,) * (3 + len(mask))
        first, second = ctx.saved_tensors
        if ctx.weight_first:
            return None, None, None, *ctx.gradient(grad, second, first, mask)
        return None, None, None, *ctx.gradient(first, grad, second, [*mask, *[False] * (3 - len(mask))])[: len(mask)]


def whole(name: str, gradient: str, in_parts: Callable[..., Any], fits: Callable[..., bool]) -> None:
    """Serve operator ``name`` whole, and ``gradient``, which its derivative calls: in other words where that has one itself.

    Args:
        in_parts: computes ``gradient`` of operators that have derivatives.
        fits: whether torch's derivative is right for these operands.
    """
    operator, backward = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, gradient).default

    def run(keys: DispatchKeySet, x: Tensor, *args: Any) -> Any:
        below = keys & BELOW
        distributed = isinstance(x, DTensor) or isinstance(args[0], DTensor)
        if distributed and below.has(_RECORDS) and fits(x, *args) and _keeps_no_more(x, *args):
            if not _in_parts():
                below = below.add(_WHOLE)
            elif _takes_one_node(x, *args):
                return _OneNode.apply(operator, backward, name == "matmul", x, *args)
        return operator.redispatch(below, x, *args)

    def run_backward(keys: DispatchKeySet, *args: Any) -> Any:
        kinds = set(map(type, args))
        if NoneType in kinds:
            return (None,) * len(args[-1])  # of no gradient
        if (torch.is_grad_enabled() or _in_parts()) and any(issubclass(kind, DTensor) for kind in kinds):
            return in_parts(*args)
        return backward.redispatch(keys & BELOW, *args)

    implemented(operator.name(), run)
    implemented(backward.name(), run_backward)


def of_a_matrix(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Not of complex numbers, whose conjugates torch's derivative forgets, nor of a vector of weights, nor of sparse ones."""
    return weight.ndim == 2 and x.dtype.is_floating_point and _strided(x) and _strided(weight)


def of_matrices(x: Tensor, y: Tensor) -> bool:
    """Nor where a stack is folded behind a matrix, so that memory follows who needs a gradient."""
    stacked = (x.ndim > 2 or y.ndim == x.ndim) and y.ndim > 1 and x.ndim > 1
    return stacked and x.dtype.is_floating_point and _strided(x) and _strided(y)


def _strided(x: Tensor) -> bool:
    return isinstance(x, DTensor) or x.layout is torch.strided


if GOES_ON:
    whole("linear", "linear_backward", linear_gradients, of_a_matrix)
    whole("matmul", "matmul_backward", matmul_gradients, of_matrices)
