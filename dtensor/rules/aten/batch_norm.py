"""Batch norm: channels are a factor; in training the statistics run over the samples and positions of all ranks.

Running statistics are updated with the global mean and variance, on every rank alike: they stay equal wherever they are
replicated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import MixedTensorError
from ..call import Call, Meta
from ..kernel_context import At, KernelContext, asked_for, on_each_rank, wide, without_out
from ..registry import register
from ..rule import Dims, Factors, Kernel, Rule
from .norms import (
    Seen,
    affine,
    asked_dtypes,
    centred,
    centred_gradient,
    combined,
    factors_of,
    gradient_terms,
    input_shape,
    moments,
    on_cpu,
    unless_empty,
)

aten = torch.ops.aten
RUNNING = ("running_mean", "running_var")


def is_training(call: Call) -> bool:
    """Under whichever name the overload has it; ``cudnn_batch_norm_backward`` exists for training only."""
    return bool(call.get("training", call.get("train", not call.func._schema.name.endswith("no_training"))))


def written(call: Call) -> tuple[str, ...]:
    """The running statistics, in training.

    Raises:
        MixedTensorError: they are plain tensors, which the ranks of one process would all update.
    """
    if not is_training(call):
        return ()
    if any(call.names[i] in RUNNING for i in call.plain):
        raise MixedTensorError(
            f"{call.func._schema.name} would update plain running statistics with those of a DTensor; make them distributed "
            "first: distribute_module(m, mesh), or distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim)"
        )
    return RUNNING


def over_samples(call: Call) -> Seen:
    shape = input_shape(call)
    sizes = {"n": shape[0], "c": shape[1]} | {f"s{d}": size for d, size in enumerate(shape) if d > 1}
    own: Dims = tuple((name,) for name in sizes)
    channels = ("weight", "bias", *RUNNING, "save_mean", "save_invstd", "save_var", "rstd")
    dims = dict.fromkeys(channels, own[1:2]) | dict.fromkeys(("input", "grad_out", "grad_output"), own) | {"reserveSpace": ((),)}
    return Seen(dims, sizes, tuple(name for name in sizes if name != "c"))


def around_channels(call: Call) -> tuple[int, ...]:
    return tuple(d for d in range(len(input_shape(call))) if d != 1)


def per_channel(parameter: Any, dims: tuple[int, ...]) -> Any:
    """(c,) so that it broadcasts against a block, whose other dims are ``dims``."""
    return None if parameter is None else wide(parameter).reshape(1, -1, *(1,) * (len(dims) - 1))


def samples(call: Call) -> int:
    """How many values each channel has."""
    shape = input_shape(call)
    return math.prod(shape) // shape[1]


def batch_norm(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    own, count, dims = at.named(args, kwargs), at.once(samples), at.once(around_channels)
    blocks, counts = moments(at, own["input"], dims, count)
    eps, step = own.get("eps", own.get("epsilon")), own.get("momentum", own.get("exponential_average_factor"))
    given = [own.get(name) for name in ("weight", "bias", *RUNNING)]
    kept = [at.dtype(i) for i in range(1, len(at.results))]
    return normalized_and_kept(own["input"], blocks, counts, given, eps, step, dims, count, kept)


@on_each_rank
def normalized_and_kept(
    x: Tensor,
    blocks: list[Tensor],
    counts: list[int],
    given: list[Any],
    eps: float,
    step: float,
    dims: tuple[int, ...],
    count: int,
    kept: list[torch.dtype],
) -> Any:
    """The normalized block and what is saved; updates the running statistics (``given``, behind weight and bias)."""
    mean, variance = combined(blocks, counts)
    weight, bias = (per_channel(value, dims) for value in given[:2])
    out, mean, rstd = centred(x, mean, variance, eps, weight, bias, mean.dtype)
    for running, value in zip(given[2:], (mean, variance * (count / max(1, count - 1))), strict=True):
        if running is not None:
            running.mul_(1 - step).add_(value.reshape(-1), alpha=step)
    saved = (value.reshape(-1).to(dtype) for value, dtype in zip((mean, rstd), kept, strict=False))
    return out, *saved, *(x.new_empty(0, dtype=dtype) for dtype in kept[2:])


def batch_norm_backward(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Gradients of input, weight and bias; the last two are the sums that the first needs."""
    own, dims = at.named(args, kwargs), at.once(around_channels)
    mean, rstd = per_channel(own["save_mean"], dims), per_channel(own.get("save_invstd", own.get("save_var")), dims)
    grad = own.get("grad_out", own.get("grad_output"))
    _, normalized, upstream, terms = gradient_terms(grad, own["input"], mean, rstd, None, dims)
    scale = affine(rstd, per_channel(own["weight"], dims))
    asked = asked_dtypes(at.call, own.get("output_mask", [True] * 3))
    return channel_gradients(upstream, normalized, at.all_reduce(terms, "sum"), at.once(samples), scale, asked)


@on_each_rank
def channel_gradients(upstream: Tensor, normalized: Tensor, sums: Tensor, count: int, scale: Tensor, dtypes: Any) -> Any:
    given = (centred_gradient(upstream, normalized, sums, count, scale), sums[1].reshape(-1), sums[0].reshape(-1))
    return tuple(None if dtype is None else x.to(dtype) for x, dtype in zip(given, dtypes, strict=True))


def batch_norm_factors(call: Call) -> Factors:
    """In evaluation the empty statistics lack every factor."""
    seen, training = over_samples(call), is_training(call)
    written(call)
    call.results = saved_on_cpu(call, training)
    of_channels, (_, *rest) = (seen.sizes["c"],), call.results
    saved = [seen.dims["rstd"] if i < 2 and meta and meta.shape == of_channels else ((),) for i, meta in enumerate(rest)]
    factors = factors_of(call, seen, batch_norm, (seen.dims["input"], *saved), 2)
    return factors if training else replace(factors, kernels=dict.fromkeys(seen.sizes, Kernel(in_evaluation, joint=True)))


def in_evaluation(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """The operator, which on accelerators does not start for no samples: what it saves is then that of any."""
    op, results = at.once(without_out), at.results

    def one(here: At, x: Tensor, *rest: Any, **named: Any) -> Any:
        if x.numel():
            return op(x, *rest, **named)
        if not x.shape[1]:
            return tuple(like and like.block_beside(x, here.member) for like in results)
        _, *saved = op(x.new_zeros([size or 1 for size in x.shape]), *rest, **named)
        return x.clone(), *saved

    return at.map(one, *args, **kwargs)


def saved_on_cpu(call: Call, training: bool) -> tuple[Meta | None, ...]:
    """What CPU kernels save, which torch's meta kernels do not tell: nothing in evaluation, and the input's dtype."""
    dtype = on_cpu(call)
    if dtype is None:
        return call.results
    first, *rest = call.results
    fixed = [None if m is None else replace(m, dtype=dtype, shape=m.shape if training else (0,), stride=(1,)) for m in rest[:2]]
    return (first, *fixed, *rest[2:])


def batch_norm_backward_factors(call: Call) -> Factors:
    seen = over_samples(call)
    made = tuple(seen.dims[name] for name in ("input", "weight", "bias"))
    made = asked_for(call, made) if "output_mask" in call.arguments else made
    factors = factors_of(call, seen, batch_norm_backward, made, 2)
    return factors if is_training(call) else replace(factors, kernels={}, reduced=dict.fromkeys(seen.inner, "sum"))


def nothing_normalized(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return x.clone(), x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])


def no_gradients(grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    zeros = x.new_zeros(x.shape[1], dtype=(x if weight is None else weight).dtype)
    return tuple(
        value if asked else None for value, asked in zip((torch.zeros_like(x), zeros, zeros.clone()), args[-1], strict=True)
    )


for _name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"):
    _packet, _, _overload = _name.partition(".")
    _local = unless_empty(getattr(getattr(aten, _packet), _overload or "default"), nothing_normalized)
    register(_name, Rule(batch_norm_factors, local=_local, writes=written, kind="kernel"))
register("_native_batch_norm_legit_no_training", Rule(batch_norm_factors, kind="kernel"))
_local = unless_empty(aten.native_batch_norm_backward, no_gradients, block=1)
register("native_batch_norm_backward", Rule(batch_norm_backward_factors, local=_local, kind="kernel"))


def batch_norm_in_training(at: KernelContext, *args: Any) -> Any:
    """What cuDNN keeps for its backward pass cannot be cut, so blocks are computed as above."""
    return (batch_norm if is_training(at.call) else in_evaluation)(at, *args)


register("cudnn_batch_norm", Rule(batch_norm_factors, run=batch_norm_in_training, writes=written, kind="kernel"))
register("cudnn_batch_norm_backward", Rule(batch_norm_backward_factors, run=batch_norm_backward, kind="kernel"))
