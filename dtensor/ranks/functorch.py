"""All ranks' tensors behind transforms of ``torch.func``, which see one tensor and know of no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.torch_internals import functorch_active, functorch_unwrapped, is_functorch_wrapped


class EachRank(torch.autograd.Function):
    """All ranks' tensors, which a transform hides as one -> one per rank, each under the transform."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args) if functorch_active() else args[0].shards

    @staticmethod
    def forward(*given: Tensor) -> Any:
        raise AssertionError("below all transforms nothing is recorded here: the ranks' tensors have graphs of their own")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = type(seen(inputs[0]))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return EachRank.apply(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        found = EachRank.apply(x)
        return found, (in_dims[0],) * len(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return AsOne.apply(ctx.kind, *grads)


class AsOne(torch.autograd.Function):
    """One tensor per rank, each under a transform -> one that hides them all: the inverse of :class:`EachRank`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args) if functorch_active() else args[0](args[1:])

    forward = EachRank.forward

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor) -> Any:
        return AsOne.apply(ctx.kind, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, kind: Any, *shards: Tensor) -> Any:
        pairs = list(zip(shards, in_dims[1:], strict=True))
        size = [*next(shard.movedim(dim, 0) for shard, dim in pairs if dim is not None).shape]
        return AsOne.apply(kind, *(x.expand(size) if dim is None else x.movedim(dim, 0) for x, dim in pairs)), 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *EachRank.apply(grad)


def seen(x: Any) -> Any:
    """What ``x`` is below all transforms of ``torch.func``."""
    while is_functorch_wrapped(x):
        x = functorch_unwrapped(x)
    return x


def each_rank(x: Any) -> Any:
    """``x``; as a ``PerRank`` where transforms hide that it is one."""
    if not is_functorch_wrapped(x):
        return x
    found = seen(x)
    return type(found)(EachRank.apply(x)) if hasattr(found, "shards") else x


def as_one(shards: Sequence[Tensor], kind: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """The ranks' tensors as one of ``kind``; where transforms stand above them, it stands below: they look for one in a result.
    Ragged ones cannot be hidden."""
    if functorch_active() and any(map(is_functorch_wrapped, shards)) and len({shard.shape for shard in shards}) == 1:
        hidden: Tensor = AsOne.apply(kind, *shards)
        return hidden
    return kind(shards)
