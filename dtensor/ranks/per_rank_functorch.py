"""Functorch: ``PerRank`` tensors under transforms of ``torch.func``, which wrap all ranks' tensors as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.torch_internals import functorch_active, functorch_unwrapped, is_functorch_wrapped


class SplitRanks(torch.autograd.Function):
    """Autograd function from a ``PerRank`` that transforms have wrapped to a tensor for each rank, each under the transforms."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args) if functorch_active() else args[0].shards

    @staticmethod
    def forward(*given: Tensor) -> Any:
        """Raise AssertionError: this is reached only without ``torch.func`` transforms, where the function must not run."""
        raise AssertionError(
            "SplitRanks and JoinRanks run only under torch.func transforms; below them the ranks' tensors have their own graphs"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = type(unwrap_functorch(inputs[0]))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return SplitRanks.apply(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        shards = SplitRanks.apply(x)
        return shards, (in_dims[0],) * len(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return JoinRanks.apply(ctx.kind, *grads)


class JoinRanks(torch.autograd.Function):
    """Autograd function from ranks' tensors under transforms to one wrapped ``PerRank``: inverse of :class:`SplitRanks`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args) if functorch_active() else args[0](args[1:])

    forward = SplitRanks.forward

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kind = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor) -> Any:
        return JoinRanks.apply(ctx.kind, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, kind: Any, *shards: Tensor) -> Any:
        """Join batched tensors of ranks: move each batch dim to the front and join the results."""
        pairs = list(zip(shards, in_dims[1:], strict=True))
        size = [*next(shard.movedim(dim, 0) for shard, dim in pairs if dim is not None).shape]
        return JoinRanks.apply(kind, *(x.expand(size) if dim is None else x.movedim(dim, 0) for x, dim in pairs)), 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *SplitRanks.apply(grad)


def unwrap_functorch(x: Any) -> Any:
    """Return ``x`` without the wrappers of ``torch.func`` transforms."""
    while is_functorch_wrapped(x):
        x = functorch_unwrapped(x)
    return x


def split_ranks(x: Any) -> Any:
    """Return ``x``; if it is the ``torch.func`` wrapper of a ``PerRank``, a ``PerRank`` of wrapped tensors."""
    if not is_functorch_wrapped(x):
        return x
    inner = unwrap_functorch(x)
    return type(inner)(SplitRanks.apply(x)) if hasattr(inner, "shards") else x


def join_ranks(shards: Sequence[Tensor], kind: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Return ranks' tensors as one tensor of ``kind``; under ``torch.func`` transforms as the wrapper of one tensor of ``kind``.

    Transforms search results for wrapped tensors. Ragged tensors cannot be wrapped, so they are returned as ``kind`` of wrapped
    tensors.
    """
    if functorch_active() and any(map(is_functorch_wrapped, shards)) and len({shard.shape for shard in shards}) == 1:
        wrapped: Tensor = JoinRanks.apply(kind, *shards)
        return wrapped
    return kind(shards)
