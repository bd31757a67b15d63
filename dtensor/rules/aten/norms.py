"""Layer, RMS, group and weight norm: global programs on blocks, whose one collective is the statistics of the whole.

Each is written once, below, as the mathematics of one rank: moments and sums are of the whole, and a mean is a sum
over the global count. It runs where a dim that statistics run over (an *inner* one) is sharded; elsewhere the operator does.

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
from ..kernel_context import KernelContext, asked_for, densely, on_each_rank, plain_op, statistics_bytes, wide
from ..registry import register
from ..rule import Dims, Factors, Kernel, LocalView, R, Rule, Shapes, Spec

aten = torch.ops.aten


# --- what all of them are made of: what one rank computes before and after the collective ---------------------------
def moments(at: KernelContext, x: Any, dims: tuple[int, ...], count: int) -> tuple[list[Any], list[int]]:
    """Over ``dims`` (kept) of the whole, ``count`` values each, that ``x`` is a block of, as :func:`combined` takes them."""
    return at.all_gather(block_moments(x, dims)), at.counts(count)


@on_each_rank
def block_moments(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean and sum of squared deviations; nothing has no mean, which nobody reads."""
    x = wide(x)
    mean = x.mean(dims, keepdim=True)
    return torch.stack((mean, (x - mean).square().sum(dims, keepdim=True)))


def combined(blocks: list[Tensor], counts: list[int]) -> tuple[Any, Any]:
    """Mean and biased variance of the union of blocks."""
    held = [(size, block[0], block[1]) for size, block in zip(counts, blocks, strict=True) if size]
    if not held:
        return torch.zeros_like(blocks[0][0]), torch.zeros_like(blocks[0][0])
    total = sum(counts)
    mean = reduce(add, [own * (size / total) for size, own, _ in held])
    return mean, reduce(add, [squares + (own - mean).square() * size for size, own, squares in held]) / total


def centred(x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Any, bias: Any, kept: torch.dtype) -> Any:
    """What was centred and scaled, its mean, and the reciprocal deviation."""
    rstd = (variance + eps).rsqrt()
    return affine((wide(x) - mean) * rstd, weight, bias).to(x.dtype), mean.to(kept), rstd.to(kept)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """``x * weight + bias``, either of which may be missing."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@on_each_rank
def gradient_terms(grad: Tensor, x: Tensor, mean: Any, rstd: Tensor, weight: Any, dims: tuple[int, ...]) -> Any:
    """The gradient, the values normalized, the gradient that reaches them (g), and the terms of what it depends on: the sums
    over ``dims`` (if any) of g and of g times the values."""
    grad, x = wide(grad), wide(x)
    normalized, upstream = (x if mean is None else x - mean) * rstd, affine(grad, weight)
    products = (upstream * normalized,) if mean is None else (upstream, upstream * normalized)
    terms = torch.stack([product.sum(dims, keepdim=True) for product in products]) if dims else None
    return grad, normalized, upstream, terms


def centred_gradient(upstream: Tensor, normalized: Tensor, sums: Tensor, count: int, rstd: Tensor) -> Tensor:
    """Gradient of ``count`` values that were centred (if there are two sums) and scaled, from the sums of the whole."""
    centre = sums[0] / count if len(sums) > 1 else 0
    return (upstream - centre - normalized * (sums[-1] / count)) * rstd


def asked_dtypes(call: Call, mask: list[bool]) -> tuple[Any, ...]:
    """Of the gradients of input, weight and bias (the weight's where the operator is not told); None of those not asked for."""
    x, weight = call["input"], call["weight"]
    weight = x if weight is None else weight
    bias = call.get("bias", weight)
    return tuple(
        like.dtype if asked else None for like, asked in zip((x, weight, x if bias is None else bias), mask, strict=False)
    )


@on_each_rank
def gradients(parts: Any, sums: Any, count: int, rstd: Tensor, rows: tuple[int, ...], dtypes: tuple[Any, ...]) -> Any:
    """Of the input, the weight and the bias, each if it has a dtype; ``parts`` are of :func:`gradient_terms`."""
    grad, normalized, upstream = parts
    first, *rest = dtypes
    of_input = None if first is None else centred_gradient(upstream, normalized, sums, count, rstd).to(first)
    terms = (None if dtype is None else grad * normalized if i == 0 else grad for i, dtype in enumerate(rest))
    summed = (term if term is None or not rows else term.sum(rows) for term in terms)
    return of_input, *(None if x is None else x.to(dtype) for x, dtype in zip(summed, rest, strict=True))


def normalized_backward(
    at: KernelContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, mask: Any, dims: Any, count: int, rows: Any
) -> Any:
    """The gradients asked for of what was normalized over ``dims``, ``count`` values each; weights' are sums over ``rows``."""
    *parts, terms = gradient_terms(grad, x, mean, rstd, weight, dims if mask[0] else ())
    sums = at.all_reduce(terms, "sum") if mask[0] else None
    return gradients(parts, sums, count, rstd, rows, asked_dtypes(at.call, mask))


# --- which dims are what --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Seen:
    """A norm's call: the factors of its arguments and results by name; those that statistics run over, and those whose sums
    are gradients of the weights."""

    dims: dict[str, Dims]
    sizes: dict[str, int]
    inner: tuple[str, ...]
    outer: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()

    def count(self, name: str) -> int:
        """How many elements an argument has."""
        return math.prod(self.sizes[factor] for dim in self.dims[name] for factor in dim)

    def operands(self, call: Call) -> tuple[Dims, ...]:
        """By argument name; an empty marker in the place of statistics that were left out has no factors."""
        return tuple(
            ((),) if tuple(layout.shape) == (0,) and self.count(name) else self.dims[name]
            for name, layout in zip(call.names, call.operands, strict=True)
        )


def input_shape(call: Call) -> tuple[int, ...]:
    return call.shape(call.names.index("input"))


def factors_of(call: Call, seen: Seen, program: Any, results: Any, numbers: int, lacking: Spec = R) -> Factors:
    """Where an inner dim is sharded ``program`` runs; it reduces ``numbers`` values for each mean, in one collective."""
    nbytes = statistics_bytes(call, numbers * seen.count("rstd"))
    kernel = Kernel(program, lacking, int(numbers > 0), lambda call: nbytes, joint=True)
    reduced = {} if lacking is R else dict.fromkeys(seen.outer, "sum")
    return Factors(seen.operands(call), results, seen.sizes, seen.whole, reduced, kernels=dict.fromkeys(seen.inner, kernel))


def norm(name: str, see: Callable[[Call], Seen], program: Any, results: str, *, numbers: int = 2, **options: Any) -> None:
    """Declare a norm. Of a backward pass only the gradient of the input needs statistics; those of the weights are terms.

    torch's meta kernels do not know in which dtype statistics are kept, nor that the gradient of the input has the input's.
    """

    def factors(call: Call) -> Factors:
        seen, mask, kept = see(call), call.get("output_mask"), on_cpu(call) if "mean" in results else None
        made = tuple(seen.dims[name] for name in results.split())
        dtypes = (None, kept, kept) if mask is None else (call["input"].dtype, None, None)
        call.results = tuple(m and replace(m, dtype=d or m.dtype) for m, d in zip(call.results, dtypes, strict=False))
        if mask is None:
            return factors_of(call, seen, program, made, numbers)
        return factors_of(call, seen, program, asked_for(call, made), mask[0] * numbers, Partial("sum"))

    register(name, Rule(factors, kind="kernel", **options))


def unless_empty(op: Any, instead: Callable[..., Any], block: int = 0) -> Any:
    """``op``, which refuses blocks without elements (of argument ``block``); for those what ``instead`` gives."""
    return on_each_rank(lambda *args: op(*args) if args[block].numel() else instead(*args))


def on_cpu(call: Call) -> torch.dtype | None:
    """The dtype in which CPU kernels keep statistics, which torch's meta kernels do not tell; None elsewhere.

    In float16 and bfloat16 they are kept as the input's, unless weights of float32 make the computation mixed.
    """
    if call.mesh.device_type != "cpu":
        return None
    parameters = {layout.dtype for name, layout in zip(call.names, call.operands, strict=True) if name in ("weight", "bias")}
    return torch.float32 if torch.float32 in parameters else call.operands[0].dtype


# --- layer norm, RMS norm: over the last dims -----------------------------------------------------------------------
def over_last(call: Call) -> Seen:
    shape = input_shape(call)
    count = len(shape) - len(call["normalized_shape"])
    sizes = {f"{'b' if d < count else 'n'}{d}": size for d, size in enumerate(shape)}
    own: Dims = tuple((name,) for name in sizes)
    ones, normalized = (*own[:count], *((),) * (len(shape) - count)), own[count:]
    dims = {"input": own, "grad_out": own, "mean": ones, "rstd": ones, "weight": normalized, "bias": normalized}
    return Seen(dims, sizes, inner=tuple(sizes)[count:], outer=tuple(sizes)[:count])


def last(normalized_shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def layer_norm(at: KernelContext, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    parts = moments(at, x, last(normalized_shape), math.prod(normalized_shape))
    return layer_normalized(x, *parts, eps, weight, bias, at.dtype(1))


layer_normalized = on_each_rank(lambda x, blocks, counts, *rest: centred(x, *combined(blocks, counts), *rest))


def layer_norm_backward(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: list[bool]
) -> Any:
    rows = tuple(range(len(at.call["input"].shape) - len(normalized_shape)))
    return normalized_backward(at, grad, x, mean, rstd, weight, mask, last(normalized_shape), math.prod(normalized_shape), rows)


@on_each_rank
def squares(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return wide(x).square().sum(dims, keepdim=True)


@on_each_rank
def scaled(x: Tensor, squares: Tensor, count: int, weight: Any, eps: float | None, kept: torch.dtype) -> Any:
    rstd = (squares / count + (torch.finfo(squares.dtype).eps if eps is None else eps)).rsqrt()
    return affine(wide(x) * rstd, weight).to(x.dtype), rstd.to(kept)


def rms_norm(at: KernelContext, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    total = at.all_reduce(squares(x, last(normalized_shape)), "sum")
    return scaled(x, total, math.prod(normalized_shape), weight, eps, at.dtype(1))


def rms_norm_backward(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, mask: list[bool]
) -> Any:
    """Layer norm's, of values that were not centred."""
    mask = [mask[0], mask[1] and weight is not None]
    return layer_norm_backward(at, grad, x, normalized_shape, None, rstd, weight, None, mask)


def rms_norm_backward_of_rows(at: KernelContext, grad: Any, *args: Any) -> Any:
    """The operator, which has no CPU kernel."""
    return (rms_norm_backward if at.call.mesh.device_type == "cpu" else plain_op)(at, grad, *args)


def layer_norm_shapes(call: Call) -> Shapes | None:
    shape, normalized = call.shape(0), tuple(call["normalized_shape"])
    rows = len(shape) - len(normalized)
    if rows < 0 or shape[rows:] != normalized or any(layout.shape != normalized for layout in call.operands[1:]):
        return None
    ones = (*shape[:rows], *(1,) * len(normalized))
    return shape, ones, ones


norm("native_layer_norm", over_last, layer_norm, "input mean rstd", shapes=layer_norm_shapes)
norm(
    "native_layer_norm_backward",
    over_last,
    layer_norm_backward,
    "input weight bias",
    local=densely(aten.native_layer_norm_backward),  # it reads the statistics as contiguous: blocks cut out of whole ones are not
)
norm("_fused_rms_norm", over_last, rms_norm, "input rstd", numbers=1)
norm("_fused_rms_norm_backward", over_last, rms_norm_backward, "input weight", numbers=1, run=rms_norm_backward_of_rows)


# --- group norm: over the channels of a group and positions; of several groups ranks take whole ones ----------------
INNER = (2, 3)  # where they lie once the channels are split into groups


def over_groups(call: Call) -> Seen:
    """Channels of a single group, and positions, are inner; without channels nothing is worth cutting."""
    shape, groups = input_shape(call), call["group"]
    spatial = tuple(f"s{d}" for d in range(2, len(shape)))
    own: Dims = (("n",), ("g", "c"), *((name,) for name in spatial))
    dims = {"input": own, "grad_out": own} | dict.fromkeys(("weight", "bias"), own[1:2])
    dims |= dict.fromkeys(("mean", "rstd"), (("n",), ("g",)))
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups} | dict(zip(spatial, shape[2:], strict=True))
    whole = frozenset("g" if groups == 1 or not call["C"] else "c")
    return Seen(dims, sizes, ("c", *spatial) if call["C"] else (), ("n",), whole)


@on_each_rank
def by_groups(x: Any, channels: int, groups: int) -> Any:
    """(n, channels, ...) or (channels,) as (n, groups, channels of a group, positions), of which a block has some."""
    if x is None:
        return None
    n, own, *spatial = x.shape if x.ndim > 1 else (1, *x.shape)
    split = (1, own) if groups == 1 else (own // (channels // groups), channels // groups)
    return x.reshape(n, *split, math.prod(spatial))


@on_each_rank
def like(x: Tensor, made: Tensor) -> Tensor:
    return made.reshape(x.shape).to(x.dtype)


def group_norm(at: KernelContext, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
    _, channels, positions, groups, eps = sizes
    parts = moments(at, by_groups(x, channels, groups), INNER, channels // groups * positions)
    return groups_normalized(x, *parts, weight, bias, [channels, groups], eps, at.dtype(1))


@on_each_rank
def groups_normalized(x: Tensor, blocks: Any, counts: Any, weight: Any, bias: Any, of: list[int], eps: float, kept: Any) -> Any:
    block, weight, bias = (by_groups(value, *of) for value in (x, weight, bias))
    out, mean, rstd = centred(block, *combined(blocks, counts), eps, weight, bias, kept)
    return out.reshape(x.shape).to(x.dtype), mean[:, :, 0, 0], rstd[:, :, 0, 0]


def group_norm_backward(at: KernelContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *sizes: Any) -> Any:
    _, channels, positions, groups, mask = sizes
    grad, block, own = (by_groups(value, channels, groups) for value in (grad, x, weight))
    mean, rstd = mean[:, :, None, None], rstd[:, :, None, None]
    count = channels // groups * positions
    of_input, *rest = normalized_backward(at, grad, block, mean, rstd, own, mask, INNER, count, (0, 3))
    return of_input if of_input is None else like(x, of_input), *(x if x is None else x.reshape(-1) for x in rest)


def local_sizes(call: Call, view: LocalView) -> dict[str, Any]:
    """The sizes of the block, which the operator takes apart from it."""
    n, channels, *spatial = view.operands[call.names.index("input")]
    per_group = call["C"] // call["group"]
    return {"N": n, "C": channels, "HxW": math.prod(spatial), "group": channels // per_group if per_group else call["group"]}


@on_each_rank
def group_norm_of_groups(x: Tensor, weight: Any, bias: Any, n: int, c: int, positions: int, groups: int, eps: float) -> Any:
    """The operator, which refuses to have no groups, and blocks that are not contiguous."""
    if groups:
        return aten.native_group_norm(x.contiguous(), weight, bias, n, c, positions, groups, eps)
    return x.clone(), x.new_empty(n, 0), x.new_empty(n, 0)


norm("native_group_norm", over_groups, group_norm, "input mean rstd", local_args=local_sizes, local=group_norm_of_groups)
norm(
    "native_group_norm_backward",
    over_groups,
    group_norm_backward,
    "input weight bias",
    local_args=local_sizes,
    local=densely(aten.native_group_norm_backward),
)


# --- weight norm: one norm for each index of dim ``dim``; norms have size one in the others --------------------------
_others_whole = "each: [a*] @dim [b*] -> each: [a*] @dim [b*]"
_local = unless_empty(densely(aten._weight_norm_interface), lambda v, g, *_: (v.clone(), g.clone()))
blockwise("_weight_norm_interface", _others_whole, local=_local)
_local = unless_empty(densely(aten._weight_norm_interface_backward), lambda grad, v, g, *_: (v.clone(), g.clone()), block=1)
blockwise("_weight_norm_interface_backward", _others_whole, local=_local)
