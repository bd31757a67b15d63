"""Plain tensors in process: all ranks read and write one tensor, where on processes each rank has its own copy.

A rank's gradient with respect to a plain tensor, and the value that a rank writes to it, must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.recorder_hooks import recorded_op
from ..base.tensor_tree import as_sequence
from ..base.tracing import has_no_values
from ..errors import LayoutError, MixedTensorError
from .per_rank_functorch import unwrap_functorch

_INPLACE_METHODS = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__")
)
_INPLACE_METHODS |= frozenset(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__ipow__"))


class JoinEqualShards(torch.autograd.Function):
    """Autograd function from all ranks' equal tensors to one plain tensor. Each rank gets the full gradient."""

    @staticmethod
    def forward(*shards: Tensor) -> Tensor:
        return shards[0].view_as(shards[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *shards: Tensor) -> Any:
        return JoinEqualShards.apply(*shards), in_dims[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad,) * ctx.count


def list_written_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the plain tensors to which a call of the torch function ``func`` writes."""
    return [x for x in _list_written_arguments(func, args, kwargs) if is_plain(x)]


def check_no_dtensor_written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise MixedTensorError if a call with per-rank tensors writes to a DTensor."""
    if any(hasattr(x, "_layout") for x in _list_written_arguments(func, args, kwargs)):
        raise MixedTensorError(
            f"{_function_name(func)} would write a PerRank tensor into a DTensor, which is one global value. Make a DTensor "
            "first, with DTensor.from_local(x, mesh, placements), or, if all ranks have the same value, with "
            "distribute_tensor(t, mesh, placements)"
        )


def _function_name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", "")).partition(".")[0]


def _list_written_arguments(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a torch function writes: ``self`` if in place, ``out=``, and running statistics."""
    name = _function_name(func)
    is_inplace = name in _INPLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    values = (*(args[:1] if is_inplace else ()), kwargs.get("out"), *list_written_statistics(func, args, kwargs))
    return [x for value in values for x in as_sequence(value)]


_FUNCTIONAL_NORMS = (F.batch_norm, F.instance_norm)  # (input, running_mean, running_var, weight, bias, flag, ...)
# (input, weight, bias, running_mean, ..., flag, ...)
_OPERATOR_NORMS = (torch.batch_norm, torch.instance_norm, torch.native_batch_norm)
_OPERATOR_NORMS += tuple(
    getattr(torch.ops.aten, name).default
    for name in ("batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit")
)


def list_written_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the running statistics that a normalization function writes, which neither its name nor its schema shows."""
    if func not in _FUNCTIONAL_NORMS and func not in _OPERATOR_NORMS:
        return ()
    is_training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
    first = 1 if func in _FUNCTIONAL_NORMS else 3
    by_keyword = [kwargs[name] for name in ("running_mean", "running_var") if name in kwargs]
    return [*args[first : first + 2], *by_keyword] if is_training else ()


def is_plain(value: Any) -> bool:
    """Return True if ``value`` is a tensor of torch's own classes."""
    return type(value) is Tensor or type(value) is nn.Parameter


def write_equal_shards(target: Tensor, shards: Sequence[Tensor]) -> None:
    """Write to ``target`` the value that all ranks wrote to their copies of it, the ``shards``.

    Raises:
        LayoutError: the ranks have written different values.
    """
    first = shards[0]
    for shard in shards[1:]:
        is_equal = shard.shape == first.shape and bool(((shard == first) | ((shard != shard) & (first != first))).all())
        if not is_equal:
            raise LayoutError(
                f"the ranks write different values into one plain tensor of shape {tuple(target.shape)}. On "
                "processes each rank would have its own tensor. Make it per_rank([...]), or write x = x + y "
                "instead of x += y"
            )
    if target.shape != first.shape:
        target.resize_(first.shape)
    needs_grad = torch.is_grad_enabled() and any(shard.requires_grad for shard in shards)
    value = JoinEqualShards.apply(*shards) if needs_grad else first
    if value is not target:
        target.copy_(value)


class ReplicateToRanks(torch.autograd.Function):
    """Autograd function from a plain tensor to a copy for each rank, with a gradient of its own as on processes."""

    @staticmethod
    def forward(x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) if x.layout is torch.strided else x.clone() for _ in range(count))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for _ in range(ctx.count))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, count: int) -> Any:
        return ReplicateToRanks.apply(x, count), (in_dims[0],) * count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the gradient that all ranks have for their copies, after a check that it is equal; gradients are not summed.

        Raises:
            LayoutError: the gradients of the ranks differ.
        """
        return join_equal_gradients([grad for grad in grads if grad is not None]), None


def join_equal_gradients(grads: Sequence[Tensor], shape: Sequence[int] | None = None) -> Tensor | None:
    """Return the gradient that all ranks have for one plain tensor, first summed to ``shape`` as autograd does; None of none.

    Raises:
        LayoutError: the gradients of the ranks differ.
    """
    if shape is not None:
        grads = [grad.sum_to_size(shape) for grad in grads]
    check_equal_gradients(*[unwrap_functorch(grad.detach()) for grad in grads])
    if not grads or not torch.is_grad_enabled():
        return grads[0] if grads else None
    joined: Tensor = JoinEqualShards.apply(*grads)
    return joined


@recorded_op  # the check reads values, so each replay of a recording repeats it
def check_equal_gradients(*values: Tensor) -> None:
    """Raise LayoutError if the gradients that ranks have with respect to one value differ."""
    values = tuple(x if x.layout is torch.strided else x.to_dense() for x in values)
    for grad in values[1:]:
        if not has_no_values(grad) and not torch.allclose(grad, values[0], *gradient_tolerance(values[0]), equal_nan=True):
            raise LayoutError(gradient_difference_text(grad.shape))


def gradient_difference_text(shape: Sequence[int]) -> str:
    """Return the error text for gradients that differ between ranks, with respect to a tensor of this shape."""
    return (
        f"the gradient of a tensor of shape {tuple(shape)} that all ranks have differs between ranks, which used it with values "
        "of their own. If the gradient is the sum of the ranks', write to_local(grad_placements=[Partial()]), "
        "full_tensor(grad_placements=[Partial()]) or local_map(..., in_grad_placements=...). If the tensor is a plain one, "
        "distribute it (distribute_tensor, distribute_module, parallel.replicate), or give each rank its own with per_rank([...])"
    )


def gradient_tolerance(x: Tensor) -> tuple[float, float]:
    """Return the relative and absolute tolerance of gradients that are equal up to the order of additions."""
    relative, finite = torch.finfo(x.dtype).eps ** 0.5, x[x.isfinite()]
    return relative, relative * (finite.abs().max().item() if finite.numel() else 0.0)
