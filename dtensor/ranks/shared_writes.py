"""A plain tensor that the ranks of one process write to together (``plain += per_rank``, ``out=plain``).

With processes each rank has its own and writes it once. Here each writes a copy; what they agree on is the plain tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.tensor_tree import listed
from ..errors import LayoutError, MixedTensorError
from .write_result import assign

_WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__"))
_WRITING |= frozenset(("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__ipow__"))


class AgreedByRanks(torch.autograd.Function):
    """Every rank's tensor, all of one value, as one plain tensor; each gets its gradient, as it would from a copy of its own."""

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
        return AgreedByRanks.apply(*shards), in_dims[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad,) * ctx.count


def written_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the plain tensors that a call writes to."""
    return [x for x in _written(func, args, kwargs) if is_plain(x)]


def refuse_writes_to_dtensors(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise MixedTensorError if a call with per-rank tensors writes to a DTensor."""
    if any(hasattr(x, "_layout") for x in _written(func, args, kwargs)):
        raise MixedTensorError(
            f"{_name_of(func)} would write a per-rank tensor into a DTensor, which is one global value: make a DTensor first "
            "with DTensor.from_local(x, mesh, placements), or, of a value that all ranks share, with "
            "distribute_tensor(t, mesh, placements)"
        )


def _name_of(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", "")).partition(".")[0]


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    name = _name_of(func)
    writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    values = (*(args[:1] if writes else ()), kwargs.get("out"), *statistics_written(func, args, kwargs))
    return [x for value in values for x in listed(value)]


_BY_NAME = (F.batch_norm, F.instance_norm)  # (input, running_mean, running_var, weight, bias, flag, ...)
_BY_OPERATOR = (
    torch.batch_norm,
    torch.instance_norm,
    torch.native_batch_norm,
)  # (input, weight, bias, running_mean, ..., flag, ...)
_BY_OPERATOR += tuple(
    getattr(torch.ops.aten, name).default
    for name in ("batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit")
)


def statistics_written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the running statistics that a normalization writes to, which neither its name nor its schema tells."""
    if func not in _BY_NAME and func not in _BY_OPERATOR:
        return ()
    flag = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
    first = 1 if func in _BY_NAME else 3
    named = [kwargs[name] for name in ("running_mean", "running_var") if name in kwargs]
    return [*args[first : first + 2], *named] if flag else ()


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a tensor of torch's own classes."""
    return type(value) is Tensor or type(value) is nn.Parameter


def write_back(target: Tensor, shards: Sequence[Tensor]) -> None:
    """Give ``target`` the value that all ranks have written.

    Raises:
        LayoutError: they have written different ones.
    """
    first = shards[0]
    for shard in shards[1:]:
        same = shard.shape == first.shape and bool(((shard == first) | ((shard != shard) & (first != first))).all())
        if not same:
            raise LayoutError(
                f"the ranks write different values into one plain tensor of shape {tuple(target.shape)}; on "
                "processes each rank would have its own tensor. Make it per_rank([...]), or write x = x + y "
                "instead of x += y"
            )
    if target.shape != first.shape:
        target.resize_(first.shape)
    recorded = torch.is_grad_enabled() and any(shard.requires_grad for shard in shards)
    assign(target, AgreedByRanks.apply(*shards) if recorded else first)
