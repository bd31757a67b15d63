"""Megatron GPT: ``gpt_model`` with Megatron-LM's tensor parallelism written by hand: local tensors and explicit all-reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class _CopyToRanks(torch.autograd.Function):
    """Identity in the forward pass; the backward pass all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in the forward pass; the backward pass passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _part(p: Tensor, dim: int, group: Any) -> nn.Parameter:
    return nn.Parameter(p.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone())


def _reduce_input_gradient(module: nn.Module, group: Any) -> None:
    """Make ``module`` all-reduce the gradient of its first input."""
    module.register_forward_pre_hook(lambda _, args: (_CopyToRanks.apply(args[0], group), *args[1:]))


def _split_linear_layers(module: Any, columns: tuple[str, ...], rows: str, group: Any) -> None:
    """Keep this rank's shards of column-sharded layers and of the row-sharded last layer, and all-reduce output and input
    gradient.
    """
    for name in columns:
        linear = getattr(module, name)
        linear.weight = _part(linear.weight, 0, group)
    last = getattr(module, rows)
    last.weight = _part(last.weight, 1, group)
    last.register_forward_hook(lambda _, args, out: _SumOverRanks.apply(out, group))
    _reduce_input_gradient(module, group)


def split_part(model: Any, group: Any) -> nn.Module:
    """Shard the weights of ``model.part``, a feed-forward layer or a block, in place and return the model."""
    part = model.part
    if hasattr(part, "attention"):
        _split_linear_layers(part.attention, ("query", "key", "value"), "out", group)
    _split_linear_layers(getattr(part, "feed_forward", part), ("gate", "up"), "down", group)
    return model


def split_model(model: Any, group: Any) -> nn.Module:
    """Shard the weights of all layers, the embedding and the head of ``model`` in place and return it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for block in model.blocks:
        _split_linear_layers(block.attention, ("query", "key", "value"), "out", group)
        _split_linear_layers(block.feed_forward, ("gate", "up"), "down", group)
    rows = model.embedding.weight.shape[0] // ranks
    model.embedding.weight = _part(model.embedding.weight, 0, group)

    def embed(tokens: Tensor) -> Tensor:
        own = (tokens >= rank * rows) & (tokens < (rank + 1) * rows)
        found = F.embedding((tokens - rank * rows).where(own, 0), model.embedding.weight)
        return _SumOverRanks.apply(found * own[..., None], group)

    model.embedding.forward = embed
    model.head.weight = _part(model.head.weight, 0, group)
    _reduce_input_gradient(model.head, group)
    return model


def make_vocabulary_loss(group: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the mean cross-entropy of logits sharded over the vocabulary."""
    rank = dist.get_rank(group)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, 1), targets.flatten()
        first = rank * flat.shape[1]
        largest = flat.detach().amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = flat - largest[:, None]
        own = (wanted >= first) & (wanted < first + flat.shape[1])
        picked = shifted.gather(1, (wanted - first).where(own, 0)[:, None])[:, 0] * own
        total = _SumOverRanks.apply(torch.stack([shifted.exp().sum(1), picked]), group)
        return (total[0].log() - total[1]).mean()

    return loss
