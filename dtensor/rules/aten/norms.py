"""Norms: layer, RMS, group and weight norm as programs on blocks, with one collective for global statistics.

Each is the program of one rank. Moments and sums are global, and a mean is a sum over the global count. The program runs if a dim
of the statistics (an *inner* dim) is sharded; otherwise the operator does.

Moments of blocks are combined as (count, mean, sum of squared deviations): two numbers in one collective, and no difference of
large sums (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import blockwise
from ..kernel_context import (
    KernelContext,
    drop_unrequested_results,
    on_contiguous,
    on_each_rank,
    run_operator,
    statistics_bytes,
    to_sum_dtype,
)
from ..registry import register
from ..rule import Dims, Factors, Kernel, LocalView, R, Rule, Shapes, Spec

aten = torch.ops.aten


# --- shared parts: computation of one rank before and after the collective ------------------------------------------
def gather_moments(at: KernelContext, x: Any, dims: tuple[int, ...], count: int) -> tuple[list[Any], list[int]]:
    """All-gather mean and squared deviations of all ranks' blocks over ``dims``, and return them with element counts."""
    return at.all_gather(stack_block_moments(x, dims)), at.block_counts(count)


@on_each_rank
def stack_block_moments(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return mean and sum of squared deviations of one rank's block, stacked. Those of an empty block are not read."""
    x = to_sum_dtype(x)
    mean = x.mean(dims, keepdim=True)
    return torch.stack((mean, (x - mean).square().sum(dims, keepdim=True)))


def combine_moments(blocks: list[Tensor], counts: list[int]) -> tuple[Any, Any]:
    """Combine the moments of several blocks into mean and biased variance of all their values."""
    nonempty = [(size, block[0], block[1]) for size, block in zip(counts, blocks, strict=True) if size]
    if not nonempty:
        return torch.zeros_like(blocks[0][0]), torch.zeros_like(blocks[0][0])
    total = sum(counts)
    mean = reduce(add, [own * (size / total) for size, own, _ in nonempty])
    return mean, reduce(add, [squares + (own - mean).square() * size for size, own, squares in nonempty]) / total


def normalize_by_moments(
    x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Any, bias: Any, statistics_dtype: torch.dtype
) -> Any:
    """Normalize values by mean and variance, scale and shift them; return them with the mean and the reciprocal deviation."""
    rstd = (variance + eps).rsqrt()
    return (
        scale_and_shift((to_sum_dtype(x) - mean) * rstd, weight, bias).to(x.dtype),
        mean.to(statistics_dtype),
        rstd.to(statistics_dtype),
    )


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return ``x * weight + bias``. Either may be None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@on_each_rank
def gradient_terms(grad: Tensor, x: Tensor, mean: Any, rstd: Tensor, weight: Any, dims: tuple[int, ...]) -> Any:
    """Compute for a norm's backward: the gradient, normalized values, the gradient with respect to these, and local sums.

    The sums over ``dims`` (if any) are those of g (unless ``mean`` is None) and of g times the values.
    """
    grad, x = to_sum_dtype(grad), to_sum_dtype(x)
    normalized, upstream = (x if mean is None else x - mean) * rstd, scale_and_shift(grad, weight)
    products = (upstream * normalized,) if mean is None else (upstream, upstream * normalized)
    terms = torch.stack([product.sum(dims, keepdim=True) for product in products]) if dims else None
    return grad, normalized, upstream, terms


def input_gradient(upstream: Tensor, normalized: Tensor, sums: Tensor, count: int, rstd: Tensor) -> Tensor:
    """Return the gradient of a norm's input, from the gradient of the normalized values and its global sums."""
    centre = sums[0] / count if len(sums) > 1 else 0
    return (upstream - centre - normalized * (sums[-1] / count)) * rstd


def requested_dtypes(call: Call, mask: list[bool]) -> tuple[Any, ...]:
    """Return the dtypes of the gradients of input, weight and bias; None for each that ``mask`` does not request."""
    x, weight = call["input"], call["weight"]
    weight = x if weight is None else weight
    bias = call.get("bias", weight)
    return tuple(
        like.dtype if is_requested else None
        for like, is_requested in zip((x, weight, x if bias is None else bias), mask, strict=False)
    )


@on_each_rank
def finish_norm_gradients(parts: Any, sums: Any, count: int, rstd: Tensor, rows: tuple[int, ...], dtypes: tuple[Any, ...]) -> Any:
    """Compute the requested gradients of a norm's input, weight and bias, from :func:`gradient_terms` and the reduced sums."""
    grad, normalized, upstream = parts
    first, *rest = dtypes
    of_input = None if first is None else input_gradient(upstream, normalized, sums, count, rstd).to(first)
    terms = (None if dtype is None else grad * normalized if i == 0 else grad for i, dtype in enumerate(rest))
    summed = (term if term is None or not rows else term.sum(rows) for term in terms)
    return of_input, *(None if x is None else x.to(dtype) for x, dtype in zip(summed, rest, strict=True))


def normalized_backward(
    at: KernelContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, mask: Any, dims: Any, count: int, rows: Any
) -> Any:
    """Compute the requested gradients of a norm over ``dims``: one all-reduce. Gradients of weights are summed over ``rows``."""
    *parts, terms = gradient_terms(grad, x, mean, rstd, weight, dims if mask[0] else ())
    sums = at.all_reduce(terms, "sum") if mask[0] else None
    return finish_norm_gradients(parts, sums, count, rstd, rows, requested_dtypes(at.call, mask))


# --- factors of a norm's call ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class NormCall:
    """The factors of a norm's arguments and results by name.

    ``inner``: factors of the statistics. ``outer``: factors over which gradients of the weights are summed.
    """

    dims: dict[str, Dims]
    sizes: dict[str, int]
    inner: tuple[str, ...]
    outer: tuple[str, ...] = ()
    unsharded: frozenset[str] = frozenset()

    def count(self, name: str) -> int:
        """Return how many global elements an argument has."""
        return math.prod(self.sizes[factor] for dim in self.dims[name] for factor in dim)

    def operands(self, call: Call) -> tuple[Dims, ...]:
        """Return the factors of all operands of a norm. An empty tensor in place of absent statistics has none."""
        return tuple(
            ((),) if tuple(layout.shape) == (0,) and self.count(name) else self.dims[name]
            for name, layout in zip(call.names, call.operands, strict=True)
        )


def input_shape(call: Call) -> tuple[int, ...]:
    return call.shape(call.names.index("input"))


def make_norm_factors(call: Call, norm_call: NormCall, program: Any, results: Any, numbers: int, lacking: Spec = R) -> Factors:
    """Return the factors of a norm, with ``program`` as the kernel if inner dims are sharded.

    The kernel all-reduces ``numbers`` values per mean.
    """
    nbytes = statistics_bytes(call, numbers * norm_call.count("rstd"))
    kernel = Kernel(program, lacking, int(numbers > 0), lambda call: nbytes, joint=True)
    reduced = {} if lacking is R else dict.fromkeys(norm_call.outer, "sum")
    return Factors(
        norm_call.operands(call),
        results,
        norm_call.sizes,
        norm_call.unsharded,
        reduced,
        kernels=dict.fromkeys(norm_call.inner, kernel),
    )


def declare_norm(
    name: str, describe: Callable[[Call], NormCall], program: Any, results: str, *, numbers: int = 2, **options: Any
) -> None:
    """Declare a norm operator, with ``program`` as the kernel for sharded inner dims.

    Torch's meta kernels do not know the dtype of saved statistics, nor that the gradient of the input has the input's dtype.
    """

    def norm_factors(call: Call) -> Factors:
        """Return the factors of a norm's call, after its results got the dtypes of the CPU kernels."""
        norm_call, mask, statistics_dtype = (
            describe(call),
            call.get("output_mask"),
            cpu_statistics_dtype(call) if "mean" in results else None,
        )
        result_dims = tuple(norm_call.dims[name] for name in results.split())
        dtypes = (None, statistics_dtype, statistics_dtype) if mask is None else (call["input"].dtype, None, None)
        call.results = tuple(m and replace(m, dtype=d or m.dtype) for m, d in zip(call.results, dtypes, strict=False))
        if mask is None:
            return make_norm_factors(call, norm_call, program, result_dims, numbers)
        return make_norm_factors(
            call, norm_call, program, drop_unrequested_results(call, result_dims), mask[0] * numbers, Partial("sum")
        )

    register(name, Rule(norm_factors, kind="kernel", **options))


def handle_empty_blocks(op: Any, instead: Callable[..., Any], block: int = 0) -> Any:
    """Wrap an operator that refuses empty blocks: ``instead`` is called if argument ``block`` is empty."""
    return on_each_rank(lambda *args: op(*args) if args[block].numel() else instead(*args))


def cpu_statistics_dtype(call: Call) -> torch.dtype | None:
    """Return the dtype in which CPU kernels save a norm's statistics, which meta kernels do not know. None on other devices.

    It is the input's, also in float16 and bfloat16, unless weights of float32 make the computation mixed.
    """
    if call.mesh.device_type != "cpu":
        return None
    parameters = {layout.dtype for name, layout in zip(call.names, call.operands, strict=True) if name in ("weight", "bias")}
    return torch.float32 if torch.float32 in parameters else call.operands[0].dtype


# --- layer norm, RMS norm: over the last dims -----------------------------------------------------------------------
def describe_layer_norm(call: Call) -> NormCall:
    """Return the factors of all arguments of a layer norm or RMS norm: batch dims, and the dims that it normalizes over."""
    shape = input_shape(call)
    count = len(shape) - len(call["normalized_shape"])
    sizes = {f"{'b' if d < count else 'n'}{d}": size for d, size in enumerate(shape)}
    input_dims: Dims = tuple((name,) for name in sizes)
    ones, normalized = (*input_dims[:count], *((),) * (len(shape) - count)), input_dims[count:]
    dims = {"input": input_dims, "grad_out": input_dims, "mean": ones, "rstd": ones, "weight": normalized, "bias": normalized}
    return NormCall(dims, sizes, inner=tuple(sizes)[count:], outer=tuple(sizes)[:count])


def normalized_dims(normalized_shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def layer_norm(at: KernelContext, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Layer-normalize each rank's block by the moments of all ranks' blocks (a kernel)."""
    parts = gather_moments(at, x, normalized_dims(normalized_shape), math.prod(normalized_shape))
    return normalize_layer(x, *parts, eps, weight, bias, at.dtype(1))


normalize_layer = on_each_rank(lambda x, blocks, counts, *rest: normalize_by_moments(x, *combine_moments(blocks, counts), *rest))


def layer_norm_backward(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: list[bool]
) -> Any:
    """Compute the requested gradients of layer norm on each rank's block: one all-reduce (a kernel)."""
    rows = tuple(range(len(at.call["input"].shape) - len(normalized_shape)))
    return normalized_backward(
        at, grad, x, mean, rstd, weight, mask, normalized_dims(normalized_shape), math.prod(normalized_shape), rows
    )


@on_each_rank
def sum_squares(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return to_sum_dtype(x).square().sum(dims, keepdim=True)


@on_each_rank
def scale_by_rms(x: Tensor, squares: Tensor, count: int, weight: Any, eps: float | None, statistics_dtype: torch.dtype) -> Any:
    rstd = (squares / count + (torch.finfo(squares.dtype).eps if eps is None else eps)).rsqrt()
    return scale_and_shift(to_sum_dtype(x) * rstd, weight).to(x.dtype), rstd.to(statistics_dtype)


def rms_norm(at: KernelContext, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """RMS-normalize each rank's block by the all-reduced sum of squares (a kernel)."""
    total = at.all_reduce(sum_squares(x, normalized_dims(normalized_shape)), "sum")
    return scale_by_rms(x, total, math.prod(normalized_shape), weight, eps, at.dtype(1))


def rms_norm_backward(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, mask: list[bool]
) -> Any:
    """Compute the requested gradients of RMS norm: those of layer norm for values that were not centered (a kernel)."""
    mask = [mask[0], mask[1] and weight is not None]
    return layer_norm_backward(at, grad, x, normalized_shape, None, rstd, weight, None, mask)


def rms_norm_backward_of_rows(at: KernelContext, grad: Any, *args: Any) -> Any:
    """Run the backward of RMS norm if inner dims are unsharded: the operator, or this module's program on CPU.

    The operator has no CPU kernel.
    """
    return (rms_norm_backward if at.call.mesh.device_type == "cpu" else run_operator)(at, grad, *args)


def layer_norm_shapes(call: Call) -> Shapes | None:
    """Return the result shapes of a layer norm, or None if its arguments do not fit."""
    shape, normalized = call.shape(0), tuple(call["normalized_shape"])
    rows = len(shape) - len(normalized)
    if rows < 0 or shape[rows:] != normalized or any(layout.shape != normalized for layout in call.operands[1:]):
        return None
    ones = (*shape[:rows], *(1,) * len(normalized))
    return shape, ones, ones


declare_norm("native_layer_norm", describe_layer_norm, layer_norm, "input mean rstd", shapes=layer_norm_shapes)
declare_norm(
    "native_layer_norm_backward",
    describe_layer_norm,
    layer_norm_backward,
    "input weight bias",
    local=on_contiguous(
        aten.native_layer_norm_backward
    ),  # it reads the statistics as contiguous, which slices of replicated ones are not
)
declare_norm("_fused_rms_norm", describe_layer_norm, rms_norm, "input rstd", numbers=1)
declare_norm(
    "_fused_rms_norm_backward", describe_layer_norm, rms_norm_backward, "input weight", numbers=1, run=rms_norm_backward_of_rows
)


# --- group norm: over the channels of a group and positions ---------------------------------------------------------
GROUP_DIMS = (2, 3)  # the dims of a group after the channels are split into groups


def describe_group_norm(call: Call) -> NormCall:
    """Return the factors of all arguments of a group norm. Positions, and the channels of a single group, are inner dims."""
    shape, groups = input_shape(call), call["group"]
    spatial = tuple(f"s{d}" for d in range(2, len(shape)))
    input_dims: Dims = (("n",), ("g", "c"), *((name,) for name in spatial))
    dims = {"input": input_dims, "grad_out": input_dims} | dict.fromkeys(("weight", "bias"), input_dims[1:2])
    dims |= dict.fromkeys(("mean", "rstd"), (("n",), ("g",)))
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups} | dict(zip(spatial, shape[2:], strict=True))
    unsharded = frozenset("g" if groups == 1 or not call["C"] else "c")
    return NormCall(dims, sizes, ("c", *spatial) if call["C"] else (), ("n",), unsharded)


@on_each_rank
def split_into_groups(x: Any, channels: int, groups: int) -> Any:
    """Reshape a block (n, channels, ...) or (channels,) to (n, groups, channels of a group, positions)."""
    if x is None:
        return None
    n, own, *spatial = x.shape if x.ndim > 1 else (1, *x.shape)
    split = (1, own) if groups == 1 else (own // (channels // groups), channels // groups)
    return x.reshape(n, *split, math.prod(spatial))


@on_each_rank
def reshape_like(x: Tensor, value: Tensor) -> Tensor:
    return value.reshape(x.shape).to(x.dtype)


def group_norm(at: KernelContext, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
    """Group-normalize each rank's block by the moments of all ranks' blocks (a kernel)."""
    _, channels, positions, groups, eps = sizes
    parts = gather_moments(at, split_into_groups(x, channels, groups), GROUP_DIMS, channels // groups * positions)
    return normalize_groups(x, *parts, weight, bias, [channels, groups], eps, at.dtype(1))


@on_each_rank
def normalize_groups(
    x: Tensor, blocks: Any, counts: Any, weight: Any, bias: Any, of: list[int], eps: float, statistics_dtype: Any
) -> Any:
    """Normalize one rank's block in groups of channels, by the moments of all ranks' blocks."""
    block, weight, bias = (split_into_groups(value, *of) for value in (x, weight, bias))
    out, mean, rstd = normalize_by_moments(block, *combine_moments(blocks, counts), eps, weight, bias, statistics_dtype)
    return out.reshape(x.shape).to(x.dtype), mean[:, :, 0, 0], rstd[:, :, 0, 0]


def group_norm_backward(at: KernelContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *sizes: Any) -> Any:
    """Compute the requested gradients of group norm on each rank's block: one all-reduce (a kernel)."""
    _, channels, positions, groups, mask = sizes
    grad, block, own = (split_into_groups(value, channels, groups) for value in (grad, x, weight))
    mean, rstd = mean[:, :, None, None], rstd[:, :, None, None]
    count = channels // groups * positions
    of_input, *rest = normalized_backward(at, grad, block, mean, rstd, own, mask, GROUP_DIMS, count, (0, 3))
    return of_input if of_input is None else reshape_like(x, of_input), *(x if x is None else x.reshape(-1) for x in rest)


def local_group_norm_args(call: Call, view: LocalView) -> dict[str, Any]:
    """Return the sizes of one rank's block, which the group norm operator takes as arguments."""
    n, channels, *spatial = view.operands[call.names.index("input")]
    per_group = call["C"] // call["group"]
    return {"N": n, "C": channels, "HxW": math.prod(spatial), "group": channels // per_group if per_group else call["group"]}


@on_each_rank
def group_norm_of_block(x: Tensor, weight: Any, bias: Any, n: int, c: int, positions: int, groups: int, eps: float) -> Any:
    """Run group norm on one rank's block, also without groups and not contiguous, which the operator refuses."""
    if groups:
        return aten.native_group_norm(x.contiguous(), weight, bias, n, c, positions, groups, eps)
    return x.clone(), x.new_empty(n, 0), x.new_empty(n, 0)


declare_norm(
    "native_group_norm",
    describe_group_norm,
    group_norm,
    "input mean rstd",
    local_args=local_group_norm_args,
    local=group_norm_of_block,
)
declare_norm(
    "native_group_norm_backward",
    describe_group_norm,
    group_norm_backward,
    "input weight bias",
    local_args=local_group_norm_args,
    local=on_contiguous(aten.native_group_norm_backward),
)


# --- weight norm: one norm for each index of dim ``dim``; norms have size one in the others --------------------------
_OTHERS_UNSHARDED = "each: [a*] @dim [b*] -> each: [a*] @dim [b*]"
_local = handle_empty_blocks(on_contiguous(aten._weight_norm_interface), lambda v, g, *_: (v.clone(), g.clone()))
blockwise("_weight_norm_interface", _OTHERS_UNSHARDED, local=_local)
_local = handle_empty_blocks(
    on_contiguous(aten._weight_norm_interface_backward), lambda grad, v, g, *_: (v.clone(), g.clone()), block=1
)
blockwise("_weight_norm_interface_backward", _OTHERS_UNSHARDED, local=_local)
