"""Batch norm: channels are a factor; in training the statistics run over the samples and positions of all ranks.

Running statistics are updated with the global mean and variance on every rank, so replicas stay equal.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import MixedTensorError
from ..call import Call, Meta
from ..kernel_context import At, KernelContext, drop_unrequested_results, functional_overload, on_each_rank, to_sum_dtype
from ..registry import register
from ..rule import Dims, Factors, Kernel, Rule
from .norms import (
    NormCall,
    combine_moments,
    cpu_statistics_dtype,
    gather_moments,
    gradient_terms,
    handle_empty_blocks,
    input_gradient,
    input_shape,
    make_norm_factors,
    normalize_by_moments,
    requested_dtypes,
    scale_and_shift,
)

aten = torch.ops.aten
RUNNING_STATISTICS = ("running_mean", "running_var")


def is_training(call: Call) -> bool:
    """Return True if a batch-norm call computes statistics of its batch. Overloads name the argument differently."""
    return bool(call.get("training", call.get("train", not call.func._schema.name.endswith("no_training"))))


def written_statistics(call: Call) -> tuple[str, ...]:
    """Return the names of the running statistics if the call updates them (in training), else ().

    Raises:
        MixedTensorError: they are plain tensors, which the ranks of one process would all update.
    """
    if not is_training(call):
        return ()
    if any(call.names[i] in RUNNING_STATISTICS for i in call.plain):
        raise MixedTensorError(
            f"{call.func._schema.name} would update plain running statistics with those of a DTensor; make them distributed "
            "first: distribute_module(m, mesh), or distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim)"
        )
    return RUNNING_STATISTICS


def describe_batch_norm(call: Call) -> NormCall:
    """Return the factors of all arguments of a batch norm. It normalizes over all of them but the channels ``c``."""
    shape = input_shape(call)
    sizes = {"n": shape[0], "c": shape[1]} | {f"s{d}": size for d, size in enumerate(shape) if d > 1}
    input_dims: Dims = tuple((name,) for name in sizes)
    channels = ("weight", "bias", *RUNNING_STATISTICS, "save_mean", "save_invstd", "save_var", "rstd")
    dims = (
        dict.fromkeys(channels, input_dims[1:2])
        | dict.fromkeys(("input", "grad_out", "grad_output"), input_dims)
        | {"reserveSpace": ((),)}
    )
    return NormCall(dims, sizes, tuple(name for name in sizes if name != "c"))


def dims_except_channels(call: Call) -> tuple[int, ...]:
    return tuple(d for d in range(len(input_shape(call))) if d != 1)


def broadcast_per_channel(parameter: Any, dims: tuple[int, ...]) -> Any:
    """Reshape a parameter of shape (c,) so that it broadcasts against a block that is reduced over ``dims``."""
    return None if parameter is None else to_sum_dtype(parameter).reshape(1, -1, *(1,) * (len(dims) - 1))


def count_per_channel(call: Call) -> int:
    """Return how many global values each channel has."""
    shape = input_shape(call)
    return math.prod(shape) // shape[1]


def batch_norm(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Normalize each rank's block with the mean and variance of all ranks, and update the running statistics (a kernel)."""
    own, count, dims = (
        at.arguments_by_name(args, kwargs),
        at.compute_once(count_per_channel),
        at.compute_once(dims_except_channels),
    )
    blocks, counts = gather_moments(at, own["input"], dims, count)
    eps, step = own.get("eps", own.get("epsilon")), own.get("momentum", own.get("exponential_average_factor"))
    parameters = [own.get(name) for name in ("weight", "bias", *RUNNING_STATISTICS)]
    saved_dtypes = [at.dtype(i) for i in range(1, len(at.results))]
    return normalize_and_save(own["input"], blocks, counts, parameters, eps, step, dims, count, saved_dtypes)


@on_each_rank
def normalize_and_save(
    x: Tensor,
    blocks: list[Tensor],
    counts: list[int],
    parameters: list[Any],
    eps: float,
    step: float,
    dims: tuple[int, ...],
    count: int,
    saved_dtypes: list[torch.dtype],
) -> Any:
    """Normalize one rank's block, update the running statistics in place, and return output and saved values."""
    mean, variance = combine_moments(blocks, counts)
    weight, bias = (broadcast_per_channel(value, dims) for value in parameters[:2])
    out, mean, rstd = normalize_by_moments(x, mean, variance, eps, weight, bias, mean.dtype)
    for running, value in zip(parameters[2:], (mean, variance * (count / max(1, count - 1))), strict=True):
        if running is not None:
            running.mul_(1 - step).add_(value.reshape(-1), alpha=step)
    saved = (value.reshape(-1).to(dtype) for value, dtype in zip((mean, rstd), saved_dtypes, strict=False))
    return out, *saved, *(x.new_empty(0, dtype=dtype) for dtype in saved_dtypes[2:])


def batch_norm_backward(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Compute the gradients of a batch norm: an all-reduce of two sums per channel gives all of them (a kernel)."""
    own, dims = at.arguments_by_name(args, kwargs), at.compute_once(dims_except_channels)
    mean, rstd = (
        broadcast_per_channel(own["save_mean"], dims),
        broadcast_per_channel(own.get("save_invstd", own.get("save_var")), dims),
    )
    grad = own.get("grad_out", own.get("grad_output"))
    _, normalized, upstream, terms = gradient_terms(grad, own["input"], mean, rstd, None, dims)
    scale = scale_and_shift(rstd, broadcast_per_channel(own["weight"], dims))
    dtypes = requested_dtypes(at.call, own.get("output_mask", [True] * 3))
    return channel_gradients(upstream, normalized, at.all_reduce(terms, "sum"), at.compute_once(count_per_channel), scale, dtypes)


@on_each_rank
def channel_gradients(upstream: Tensor, normalized: Tensor, sums: Tensor, count: int, scale: Tensor, dtypes: Any) -> Any:
    """Return the requested gradients of input, weight and bias from the reduced sums of each channel."""
    gradients = (input_gradient(upstream, normalized, sums, count, scale), sums[1].reshape(-1), sums[0].reshape(-1))
    return tuple(None if dtype is None else x.to(dtype) for x, dtype in zip(gradients, dtypes, strict=True))


def batch_norm_factors(call: Call) -> Factors:
    """Return the factors and kernels of a forward pass of batch norm, in training or in evaluation."""
    norm_call, training = describe_batch_norm(call), is_training(call)
    written_statistics(call)
    call.results = fix_saved_metas(call, training)
    of_channels, (_, *rest) = (norm_call.sizes["c"],), call.results
    saved = [norm_call.dims["rstd"] if i < 2 and meta and meta.shape == of_channels else ((),) for i, meta in enumerate(rest)]
    factors = make_norm_factors(call, norm_call, batch_norm, (norm_call.dims["input"], *saved), 2)
    return (
        factors
        if training
        else replace(factors, kernels=dict.fromkeys(norm_call.sizes, Kernel(batch_norm_in_evaluation, joint=True)))
    )


def batch_norm_in_evaluation(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Run batch norm in evaluation on each rank's block, also on empty ones, which accelerators refuse (a kernel)."""
    op, results = at.compute_once(functional_overload), at.results

    def normalize_block(here: At, x: Tensor, *rest: Any, **named: Any) -> Any:
        """Run the operator on one rank's block. An empty block gets the saved values of a block of zeros."""
        if x.numel():
            return op(x, *rest, **named)
        if not x.shape[1]:
            return tuple(like and like.new_local_like(x, here.member) for like in results)
        _, *saved = op(x.new_zeros([size or 1 for size in x.shape]), *rest, **named)
        return x.clone(), *saved

    return at.map(normalize_block, *args, **kwargs)


def fix_saved_metas(call: Call, training: bool) -> tuple[Meta | None, ...]:
    """Correct the metas of saved values to those of CPU kernels: empty in evaluation, and in the dtype of the input."""
    dtype = cpu_statistics_dtype(call)
    if dtype is None:
        return call.results
    first, *rest = call.results
    fixed = [None if m is None else replace(m, dtype=dtype, shape=m.shape if training else (0,), stride=(1,)) for m in rest[:2]]
    return (first, *fixed, *rest[2:])


def batch_norm_backward_factors(call: Call) -> Factors:
    """Return the factors of the backward of batch norm. In evaluation, gradients of weight and bias are partial sums."""
    norm_call = describe_batch_norm(call)
    result_dims = tuple(norm_call.dims[name] for name in ("input", "weight", "bias"))
    result_dims = drop_unrequested_results(call, result_dims) if "output_mask" in call.arguments else result_dims
    factors = make_norm_factors(call, norm_call, batch_norm_backward, result_dims, 2)
    return factors if is_training(call) else replace(factors, kernels={}, reduced=dict.fromkeys(norm_call.inner, "sum"))


def empty_batch_norm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the results of batch norm for an empty block."""
    return x.clone(), x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])


def empty_gradients(grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    """Return zeros as the requested gradients of an empty block."""
    zeros = x.new_zeros(x.shape[1], dtype=(x if weight is None else weight).dtype)
    return tuple(
        value if is_requested else None
        for value, is_requested in zip((torch.zeros_like(x), zeros, zeros.clone()), args[-1], strict=True)
    )


for _name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"):
    _packet, _, _overload = _name.partition(".")
    _local = handle_empty_blocks(getattr(getattr(aten, _packet), _overload or "default"), empty_batch_norm)
    register(_name, Rule(batch_norm_factors, local=_local, writes=written_statistics, kind="kernel"))
register("_native_batch_norm_legit_no_training", Rule(batch_norm_factors, kind="kernel"))
_local = handle_empty_blocks(aten.native_batch_norm_backward, empty_gradients, block=1)
register("native_batch_norm_backward", Rule(batch_norm_backward_factors, local=_local, kind="kernel"))


def batch_norm_in_training(at: KernelContext, *args: Any) -> Any:
    """Run this module's kernels in place of cuDNN's operator, because what cuDNN saves for backward cannot be sharded."""
    return (batch_norm if is_training(at.call) else batch_norm_in_evaluation)(at, *args)


register("cudnn_batch_norm", Rule(batch_norm_factors, run=batch_norm_in_training, writes=written_statistics, kind="kernel"))
register("cudnn_batch_norm_backward", Rule(batch_norm_backward_factors, run=batch_norm_backward, kind="kernel"))
