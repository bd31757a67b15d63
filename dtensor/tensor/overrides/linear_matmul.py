"""``linear`` and ``matmul``, kept as one operator with one autograd node.

Above autograd torch decomposes ``linear`` into views and products: three or four operators, each with a plan to look up and a
tensor to wrap, and as many in backward. For nested tensors torch has a derivative of the operator itself, under their own
autograd key. DTensors have a rule for the operator too, so they are sent to that key.
Torch's decomposition is used before torch 2.13, and where a dispatch mode records operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ...base.torch_internals import DispatchKey, DispatchKeySet, forward_ad, functorch_active
from ...base.tracing import has_only_observers, is_tracing
from ..dtensor import DTensor
from .register import KEYS_BELOW, register_kernel

_AUTOGRAD, _UNDECOMPOSED = DispatchKey.AutogradFunctionality, DispatchKey.AutogradNestedTensor


def _needs_decomposition() -> bool:
    """Return True if a dispatch mode or forward-mode AD needs ``linear`` and ``matmul`` decomposed.

    Such modes know the operators of torch's decomposition, and only those have forward-mode derivatives.
    """
    return forward_ad._current_level >= 0 or not has_only_observers(of_dtensors=True)


def _saves_no_extra_activation(x: Tensor, y: Tensor, *_: Tensor | None) -> bool:
    """Return True if one undecomposed operator saves no activation for backward that its decomposition would not save.

    It always saves both operands. An activation multiplied by a frozen weight would stay in memory, and could not be written to.
    """
    if x.requires_grad is y.requires_grad:
        return True
    return (x if x.requires_grad else y).is_leaf or not torch.is_grad_enabled()


def _needs_one_node(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if a decomposed operator gets one autograd node, so that it saves the same tensors as without the mode.

    A checkpointed block may run without a dispatch mode and be recomputed inside one. Torch compares what both runs save.
    """
    if not torch.is_grad_enabled() or forward_ad._current_level >= 0 or functorch_active() or is_tracing():
        return False
    return any(other is not None and other.requires_grad for other in (x, *others))


class _OneNode(torch.autograd.Function):
    """Autograd function of a decomposed operator, with the saved tensors of the operator itself."""

    @staticmethod
    def forward(ctx: Any, operator: Any, gradient: Callable[..., Any], weight_first: bool, x: Tensor, *others: Any) -> Tensor:
        """Run the operator as one autograd node, which saves its operands."""
        ctx.gradient, ctx.weight_first = gradient, weight_first
        ctx.save_for_backward(*((others[0], x) if weight_first else (x, others[0])))
        ctx.set_materialize_grads(False)
        result: Tensor = operator(x, *others)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Return the gradients by the operator's own gradient function."""
        mask = list(ctx.needs_input_grad[3:])
        if grad is None:
            return (None,) * (3 + len(mask))
        first, second = ctx.saved_tensors
        if ctx.weight_first:
            return None, None, None, *ctx.gradient(grad, second, first, mask)
        return None, None, None, *ctx.gradient(first, grad, second, [*mask, *[False] * (3 - len(mask))])[: len(mask)]


def keep_undecomposed(
    name: str, backward_name: str, composed_backward: Callable[..., Any], is_supported: Callable[..., bool]
) -> None:
    """Register kernels that keep an operator and its backward operator undecomposed for DTensors.

    Args:
        name: the operator, for example ``"linear"``.
        backward_name: the operator that its derivative calls.
        composed_backward: computes the backward operator by differentiable operators, for second derivatives.
        is_supported: returns True if torch's derivative is right for these operands.
    """
    operator, backward = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, backward_name).default

    def run_undecomposed(keys: DispatchKeySet, x: Tensor, *args: Any) -> Any:
        """Redispatch ``linear`` or ``matmul`` of DTensors as one operator, or decomposed with one autograd node."""
        below = keys & KEYS_BELOW
        has_dtensor = isinstance(x, DTensor) or isinstance(args[0], DTensor)
        if has_dtensor and below.has(_AUTOGRAD) and is_supported(x, *args) and _saves_no_extra_activation(x, *args):
            if not _needs_decomposition():
                below = below.add(_UNDECOMPOSED)
            elif _needs_one_node(x, *args):
                return _OneNode.apply(operator, backward, name == "matmul", x, *args)
        return operator.redispatch(below, x, *args)

    def run_backward(keys: DispatchKeySet, *args: Any) -> Any:
        """Run the backward operator undecomposed, or ``composed_backward`` if it must be differentiated or recorded."""
        kinds = set(map(type, args))
        if NoneType in kinds:
            return (None,) * len(args[-1])  # there is no incoming gradient
        if (torch.is_grad_enabled() or _needs_decomposition()) and any(issubclass(kind, DTensor) for kind in kinds):
            return composed_backward(*args)
        return backward.redispatch(keys & KEYS_BELOW, *args)

    register_kernel(operator.name(), run_undecomposed)
    register_kernel(backward.name(), run_backward)


def is_linear_supported(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if ``linear`` of these operands may stay one operator: a strided weight matrix of real floats."""
    return weight.ndim == 2 and x.dtype.is_floating_point and _is_strided(x) and _is_strided(weight)


def is_matmul_supported(x: Tensor, y: Tensor) -> bool:
    """Return True if ``matmul`` of these strided real operands may stay one operator, without flattened batch dims.

    In that case the memory order of the result depends on which operand requires a gradient.
    """
    batched = (x.ndim > 2 or y.ndim == x.ndim) and y.ndim > 1 and x.ndim > 1
    return batched and x.dtype.is_floating_point and _is_strided(x) and _is_strided(y)


def _is_strided(x: Tensor) -> bool:
    return isinstance(x, DTensor) or x.layout is torch.strided
