"""Batch norm: channels are a factor; in training the statistics run over the samples and positions of all ranks.

Running statistics are updated with the global mean and variance, on every rank alike: they stay equal wherever they are
replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import MixedTensorError
from ..blockwise import asked_for, on_each_rank, plain_op
from ..call import Call, Meta
from ..kernels import KernelContext
from ..registry import register
from ..rule import Dims, Factors, Kernel, Rule
from .moments import (
    block_moments,
    centred_gradient,
    combined,
    dims_of,
    moments,
    scale_and_shift,
    statistics_bytes,
    statistics_dtype,
    wide,
)

NONE: Dims = ((),)
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


def table_of(call: Call) -> tuple[dict[str, Dims], dict[str, int], tuple[str, ...]]:
    """Factors by argument, sizes, and the factors over which statistics run."""
    shape = call.shape(call.names.index("input"))
    spatial = tuple(f"s{d}" for d in range(2, len(shape)))
    own = (("n",), ("c",), *((name,) for name in spatial))
    per_channel: Dims = (("c",),)
    channels = ("weight", "bias", *RUNNING, "save_mean", "save_invstd", "save_var")
    table = dict.fromkeys(channels, per_channel) | {"input": own, "grad_out": own, "grad_output": own, "reserveSpace": NONE}
    sizes = {"n": shape[0], "c": shape[1]} | dict(zip(spatial, shape[2:], strict=True))
    return table, sizes, ("n", *spatial)


def around_channels(ndim: int) -> tuple[int, ...]:
    return tuple(d for d in range(ndim) if d != 1)


def per_channel(x: Tensor | None, ndim: int) -> Tensor | None:
    """(c,) so that it broadcasts against a block."""
    return None if x is None else wide(x).reshape(1, -1, *(1,) * (ndim - 2))


# --- forward --------------------------------------------------------------------------------------------------------
def training_result(
    bound: dict[str, Any], mean: Tensor, variance: Tensor, count: int, dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, ...]:
    """The normalized block and the saved statistics; updates the running ones."""
    x, ndim = bound["input"], bound["input"].ndim
    eps: float = bound["eps"] if "eps" in bound else bound["epsilon"]
    momentum: float = bound["momentum"] if "momentum" in bound else bound["exponential_average_factor"]
    rstd = (variance + eps).rsqrt()
    weight, bias = (per_channel(bound[name], ndim) for name in ("weight", "bias"))
    out = scale_and_shift((wide(x) - mean) * rstd, weight, bias).to(x.dtype)
    if bound.get("running_mean") is not None:
        bound["running_mean"].mul_(1 - momentum).add_(mean.reshape(-1), alpha=momentum)
    if bound.get("running_var") is not None:
        unbiased = variance.reshape(-1) * (count / max(1, count - 1))
        bound["running_var"].mul_(1 - momentum).add_(unbiased, alpha=momentum)
    saved = (mean.reshape(-1).to(dtypes[1]), rstd.reshape(-1).to(dtypes[2]))
    reserve = tuple(x.new_empty(0, dtype=dtype) for dtype in dtypes[3:])
    return (out, *saved, *reserve)


def numbers_of_channels(call: Call) -> int:
    """Bytes of two numbers for each channel."""
    return statistics_bytes(call, 2 * call.shape(0)[1])


def batch_norm_of_blocks(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in at.call.func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    dims = around_channels(len(at.call.shape(0)))
    count = math.prod(at.call.shape(0)[d] for d in dims)
    dtypes = [layout.dtype for layout in at.results if layout is not None]
    mean, variance = moments(at, bound["input"], 0, dims)
    return at.map(lambda _, own, mean, variance: training_result(own, mean, variance, count, dtypes), bound, mean, variance)


def forward_factors(call: Call) -> Factors:
    table, sizes, reduced = table_of(call)
    own, training = table["input"], is_training(call)
    written(call)
    call.results = corrected(call, training)
    saved = [table["weight"] if meta is not None and meta.shape == (sizes["c"],) else NONE for meta in call.results[1:3]]
    reserve = (NONE,) * (len(call.results) - 3)
    if training:
        kernel = Kernel(batch_norm_of_blocks, collectives=1, nbytes=numbers_of_channels, joint=True)
        kernels = dict.fromkeys(reduced, kernel)
    else:  # the empty statistics lack every factor
        kernels = dict.fromkeys(sizes, Kernel(plain_op, joint=True))
    return Factors(dims_of(call, table, sizes), (own, *saved, *reserve), sizes, kernels=kernels)


def corrected(call: Call, training: bool) -> tuple[Meta | None, ...]:
    """What CPU kernels save, which torch's meta kernels do not tell: nothing in evaluation, and the input's dtype."""
    dtype = statistics_dtype(call)
    if dtype is None:
        return call.results
    first, *rest = call.results
    fixed = [None if m is None else replace(m, dtype=dtype, shape=m.shape if training else (0,), stride=(1,)) for m in rest[:2]]
    return (first, *fixed, *rest[2:])


def on_blocks(op: Any) -> Any:
    """``op`` on one block with all its samples; without elements the operator refuses to train."""

    def run(x: Tensor, *args: Any) -> Any:
        if x.numel():
            return op(x, *args)
        return x.clone(), x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])

    return on_each_rank(run)


# --- backward -------------------------------------------------------------------------------------------------------
def batch_norm_gradients_of_blocks(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in at.call.func._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    reduced = at.all_reduce(at.map(lambda _, own: gradient_sums(own), bound), "sum")
    return at.map(lambda _, own, sums: training_gradients(own, sums, at.call), bound, reduced)


def parts(bound: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Upstream gradient, normalized input, and the reciprocal deviation."""
    x, grad = bound["input"], bound["grad_out"] if "grad_out" in bound else bound["grad_output"]
    mean = per_channel(bound["save_mean"], x.ndim)
    rstd = per_channel(bound["save_invstd"] if "save_invstd" in bound else bound["save_var"], x.ndim)
    assert mean is not None
    assert rstd is not None
    return wide(grad), (wide(x) - mean) * rstd, rstd


def gradient_sums(bound: dict[str, Any]) -> Tensor:
    grad, normalized, _ = parts(bound)
    dims = around_channels(grad.ndim)
    return torch.stack((grad.sum(dims, keepdim=True), (grad * normalized).sum(dims, keepdim=True)))


def training_gradients(bound: dict[str, Any], sums: Tensor, call: Call) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias; the last two are the sums that the first needs."""
    x, weight = bound["input"], bound["weight"]
    grad, normalized, rstd = parts(bound)
    shape = call.shape(call.names.index("input"))
    scale = scale_and_shift(rstd, per_channel(weight, x.ndim), None)
    of_input = centred_gradient(grad, normalized, sums, math.prod(shape) // shape[1], scale).to(x.dtype)
    mask, dtype = bound.get("output_mask", (True,) * 3), (x if weight is None else weight).dtype
    given = (of_input, sums[1].reshape(-1).to(dtype), sums[0].reshape(-1).to(dtype))
    return tuple(value if wanted else None for value, wanted in zip(given, mask, strict=True))


def backward_factors(call: Call) -> Factors:
    table, sizes, reduced = table_of(call)
    results = (table["input"], table["weight"], table["bias"])
    kept = asked_for(call, results) if "output_mask" in call.arguments else results
    operands = dims_of(call, table, sizes)
    if not is_training(call):
        return Factors(operands, kept, sizes, reduced=dict.fromkeys(reduced, "sum"))
    kernel = Kernel(batch_norm_gradients_of_blocks, collectives=1, nbytes=numbers_of_channels, joint=True)
    return Factors(operands, kept, sizes, kernels=dict.fromkeys(reduced, kernel))


@on_each_rank
def batch_norm_backward_block(
    grad: Tensor, x: Tensor, weight: Any, mean: Any, var: Any, saved: Any, rstd: Any, train: bool, eps: float, mask: Any
) -> Any:
    """``native_batch_norm_backward`` of one block with all its samples; without elements the operator divides by zero."""
    if x.numel():
        return torch.ops.aten.native_batch_norm_backward(grad, x, weight, mean, var, saved, rstd, train, eps, mask)
    zeros = x.new_zeros(x.shape[1], dtype=(x if weight is None else weight).dtype)
    return tuple(
        value if wanted else None for value, wanted in zip((torch.zeros_like(x), zeros, zeros.clone()), mask, strict=True)
    )


SOURCE = "[n] c [s], c, c, c, c -> [n] c [s], c, c"
for name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"):
    overload = getattr(torch.ops.aten, name) if "." not in name else torch.ops.aten._native_batch_norm_legit.no_stats
    register(name, Rule(forward_factors, local=on_blocks(overload), writes=written, kind="kernel", source=SOURCE))
register("_native_batch_norm_legit_no_training", Rule(forward_factors, kind="kernel", source=SOURCE))
register(
    "native_batch_norm_backward",
    Rule(backward_factors, local=batch_norm_backward_block, kind="kernel", source="as native_batch_norm"),
)


# --- cuDNN: what it keeps for its backward pass cannot be cut, so blocks are computed as above ----------------------
@on_each_rank
def cudnn_block(*args: Any) -> Any:
    if not args[5]:
        return torch.ops.aten.cudnn_batch_norm(*args)
    names = ("input", "weight", "bias", *RUNNING, "training", "momentum", "eps")
    x, dims = args[0], around_channels(args[0].ndim)
    count = x.numel() // max(1, x.shape[1])
    mean, variance = combined([count], [torch.stack(block_moments(wide(x), dims))])
    kept = args[1].dtype
    return training_result(dict(zip(names, args, strict=True)), mean, variance, count, (x.dtype, kept, kept, torch.uint8))


@on_each_rank
def cudnn_backward_block(
    x: Tensor, grad: Tensor, weight: Tensor, mean: Any, var: Any, saved: Tensor, rstd: Tensor, eps: float, reserve: Any
) -> Any:
    bound = {"input": x, "grad_out": grad, "weight": weight, "save_mean": saved, "save_invstd": rstd}
    sums, ndim = gradient_sums(bound), x.ndim
    upstream, normalized, scale = parts(bound)
    scaled = scale * per_channel(weight, ndim)  # type: ignore[operator]  # the weight is there
    of_input = centred_gradient(upstream, normalized, sums, x.numel() // max(1, x.shape[1]), scaled).to(x.dtype)
    return of_input, sums[1].reshape(-1).to(weight.dtype), sums[0].reshape(-1).to(weight.dtype)


register("cudnn_batch_norm", Rule(forward_factors, local=cudnn_block, writes=written, kind="kernel", source=SOURCE))
register(
    "cudnn_batch_norm_backward",
    Rule(backward_factors, local=cudnn_backward_block, kind="kernel", source="as cudnn_batch_norm"),
)
