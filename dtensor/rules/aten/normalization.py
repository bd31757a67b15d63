"""Layer norm, RMS norm and weight norm. Dims before the normalized ones are factors; normalized dims have kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..blockwise import asked_for, on_each_rank
from ..call import Call
from ..kernels import KernelContext
from ..registry import register
from ..rule import Dims, Factors, Kernel, Rule, Shapes
from .moments import centred_gradient, dims_of, moments, scale_and_shift, statistics_bytes, statistics_dtype, wide


def rows_and_normalized(call: Call, operand: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors of the leading dims, of the normalized dims, and all sizes."""
    shape = call.shape(operand)
    count = len(shape) - len(call["normalized_shape"])
    rows = tuple((f"b{d}",) for d in range(count))
    normalized = tuple((f"n{d}",) for d in range(count, len(shape)))
    return rows, normalized, {name: size for (name,), size in zip((*rows, *normalized), shape, strict=True)}


def last(at: KernelContext, operand: int, normalized_shape: Any) -> tuple[int, ...]:
    """The normalized dims."""
    ndim = len(at.call.shape(operand))
    return tuple(range(ndim - len(normalized_shape), ndim))


def numbers_of_rows(count: int) -> Callable[[Call], int]:
    """Bytes of ``count`` numbers for each row."""

    def nbytes(call: Call) -> int:
        shape = call.operands[call.names.index("input")].shape
        return statistics_bytes(call, count * math.prod(shape[: len(shape) - len(call["normalized_shape"])]))

    return nbytes


# --- layer norm -----------------------------------------------------------------------------------------------------
def layer_norm_of_blocks(at: KernelContext, x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = last(at, 0, normalized_shape)
    kept = at.results[1].dtype  # type: ignore[union-attr]  # the mean is a tensor
    mean, variance = moments(at, x, 0, dims)

    def finish(
        _: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        rstd = (variance + eps).rsqrt()
        return scale_and_shift((wide(x) - mean) * rstd, weight, bias).to(x.dtype), mean.to(kept), rstd.to(kept)

    return at.map(finish, x, mean, variance, weight, bias)


def layer_norm_factors(call: Call) -> Factors:
    rows, normalized, sizes = rows_and_normalized(call, 0)
    kept = statistics_dtype(call)
    if kept is not None:
        call.results = tuple(meta if i == 0 or meta is None else replace(meta, dtype=kept) for i, meta in enumerate(call.results))
    own, ones = (*rows, *normalized), (*rows, *((),) * len(normalized))
    kernel = Kernel(layer_norm_of_blocks, collectives=1, nbytes=numbers_of_rows(2), joint=True)
    operands = dims_of(call, {"input": own, "weight": normalized, "bias": normalized}, sizes)
    return Factors(operands, (own, ones, ones), sizes, kernels={name: kernel for (name,) in normalized})


def layer_norm_shapes(call: Call) -> Shapes | None:
    shape, normalized = call.shape(0), tuple(call["normalized_shape"])
    rows = len(shape) - len(normalized)
    if rows < 0 or shape[rows:] != normalized or any(layout.shape != normalized for layout in call.operands[1:]):
        return None
    ones = (*shape[:rows], *(1,) * len(normalized))
    return shape, ones, ones


def layer_norm_gradients_of_blocks(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: list[bool]
) -> Any:
    dims = last(at, 1, normalized_shape)
    rows = tuple(range(dims[0]))
    total = math.prod(normalized_shape)

    def sums(_: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        normalized = (wide(x) - mean) * rstd
        upstream = scale_and_shift(wide(grad), weight, None)
        return torch.stack((upstream.sum(dims, keepdim=True), (upstream * normalized).sum(dims, keepdim=True)))

    reduced = at.all_reduce(at.map(sums, grad, x, mean, rstd, weight), "sum") if mask[0] else None

    def finish(
        _: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, reduced: Tensor
    ) -> Any:
        normalized = (wide(x) - mean) * rstd
        upstream = scale_and_shift(wide(grad), weight, None)
        of_input = centred_gradient(upstream, normalized, reduced, total, rstd).to(x.dtype) if mask[0] else None
        of_weight = summed(wide(grad) * normalized, rows).to((weight if weight is not None else x).dtype) if mask[1] else None
        of_bias = summed(wide(grad), rows).to((bias if bias is not None else x).dtype) if mask[2] else None
        return of_input, of_weight, of_bias

    return at.map(finish, grad, x, mean, rstd, weight, bias, reduced)


def summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The sum over ``dims``, of which there may be none."""
    return x.sum(dims) if dims else x


def layer_norm_backward_factors(call: Call) -> Factors:
    rows, normalized, sizes = rows_and_normalized(call, 1)
    own, ones = (*rows, *normalized), (*rows, *((),) * len(normalized))
    wanted = int(call["output_mask"][0])  # the other gradients are terms
    kernel = Kernel(layer_norm_gradients_of_blocks, collectives=wanted, nbytes=numbers_of_rows(2 * wanted), joint=True)
    table = {"grad_out": own, "input": own, "mean": ones, "rstd": ones, "weight": normalized, "bias": normalized}
    results = asked_for(call, (own, normalized, normalized))
    kernels = {name: kernel for (name,) in normalized}
    return Factors(dims_of(call, table, sizes), results, sizes, reduced={name: "sum" for (name,) in rows}, kernels=kernels)


@on_each_rank
def layer_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: Any, mean: Tensor, rstd: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """The operator, which reads the statistics as contiguous without a look; blocks cut out of whole ones are not."""
    return torch.ops.aten.native_layer_norm_backward(grad, x, normalized_shape, mean.contiguous(), rstd.contiguous(), *rest)


register(
    "native_layer_norm",
    Rule(layer_norm_factors, shapes=layer_norm_shapes, kind="kernel", source="... [n], [n], [n] -> ... [n], ..., ..."),
)
register(
    "native_layer_norm_backward",
    Rule(layer_norm_backward_factors, local=layer_norm_backward, kind="kernel", source="as native_layer_norm"),
)


# --- RMS norm: as layer norm, without centring ----------------------------------------------------------------------
def rms_norm_of_blocks(at: KernelContext, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    total, dims = math.prod(normalized_shape), last(at, 0, normalized_shape)
    kept = at.results[1].dtype  # type: ignore[union-attr]  # rstd is a tensor
    squares = at.all_reduce(at.map(lambda _, x: wide(x).square().sum(dims, keepdim=True), x), "sum")

    def finish(_: Any, x: Tensor, squares: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        rstd = (squares / total + (torch.finfo(wide(x).dtype).eps if eps is None else eps)).rsqrt()
        return scale_and_shift(wide(x) * rstd, weight, None).to(x.dtype), rstd.to(kept)

    return at.map(finish, x, squares, weight)


def rms_norm_factors(call: Call) -> Factors:
    rows, normalized, sizes = rows_and_normalized(call, 0)
    own, ones = (*rows, *normalized), (*rows, *((),) * len(normalized))
    kernel = Kernel(rms_norm_of_blocks, collectives=1, nbytes=numbers_of_rows(1), joint=True)
    return Factors(
        dims_of(call, {"input": own, "weight": normalized}, sizes),
        (own, ones),
        sizes,
        kernels={name: kernel for (name,) in normalized},
    )


def rms_norm_gradients_of_blocks(
    at: KernelContext, grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, mask: list[bool]
) -> Any:
    total, dims, reduced = math.prod(normalized_shape), last(at, 1, normalized_shape), None
    if mask[0]:
        own = at.map(lambda _, grad, x, rstd, weight: rms_sums(grad, x, rstd, weight, dims), grad, x, rstd, weight)
        reduced = at.all_reduce(own, "sum")

    def finish(_: Any, *block: Any) -> Any:
        return rms_gradients(block[0], block[1], block[2], block[3], block[4], total, mask, dims[0])

    return at.map(finish, grad, x, rstd, weight, reduced)


def rms_sums(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    return (scale_and_shift(wide(grad), weight, None) * (wide(x) * rstd)).sum(dims, keepdim=True)


def rms_gradients(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, reduced: Tensor | None, total: int, mask: list[bool], rows: int
) -> tuple[Tensor | None, Tensor | None]:
    normalized = wide(x) * rstd
    of_input = None
    if reduced is not None:
        of_input = ((scale_and_shift(wide(grad), weight, None) - normalized * (reduced / total)) * rstd).to(x.dtype)
    of_weight = summed(wide(grad) * normalized, tuple(range(rows))).to(weight.dtype) if mask[1] and weight is not None else None
    return of_input, of_weight


@on_each_rank
def rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: Any, rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The operator, which has no CPU kernel."""
    if x.device.type != "cpu":
        return torch.ops.aten._fused_rms_norm_backward(grad, x, normalized_shape, rstd, weight, mask)
    rows = x.ndim - len(normalized_shape)
    sums = rms_sums(grad, x, rstd, weight, tuple(range(rows, x.ndim))) if mask[0] else None
    return rms_gradients(grad, x, rstd, weight, sums, math.prod(normalized_shape), mask, rows)


def rms_norm_backward_factors(call: Call) -> Factors:
    rows, normalized, sizes = rows_and_normalized(call, 1)
    own, ones = (*rows, *normalized), (*rows, *((),) * len(normalized))
    wanted = int(call["output_mask"][0])
    kernel = Kernel(rms_norm_gradients_of_blocks, collectives=wanted, nbytes=numbers_of_rows(wanted), joint=True)
    table = {"grad_out": own, "input": own, "rstd": ones, "weight": normalized}
    results = asked_for(call, (own, normalized))
    kernels = {name: kernel for (name,) in normalized}
    return Factors(dims_of(call, table, sizes), results, sizes, reduced={name: "sum" for (name,) in rows}, kernels=kernels)


register("_fused_rms_norm", Rule(rms_norm_factors, kind="kernel", source="... [n], [n] -> ... [n], ..."))
register(
    "_fused_rms_norm_backward",
    Rule(rms_norm_backward_factors, local=rms_norm_backward, kind="kernel", source="as _fused_rms_norm"),
)


# --- weight norm: one norm for each index of dim ``dim`` ------------------------------------------------------------
def weight_norm_factors(call: Call) -> Factors:
    """All operands are like ``v`` or like the norms, which have size one in all dims but one."""
    shape = call.shape(0)
    kept = call.dims("dim", len(shape))[0]
    sizes = {f"d{d}": size for d, size in enumerate(shape)}
    whole = frozenset(name for d, name in enumerate(sizes) if d != kept)

    def dims(own: tuple[int, ...]) -> Dims:
        return tuple((f"d{d}",) if own[d] == shape[d] else () for d in range(len(own)))

    results = tuple(dims(meta.shape) for meta in call.results if meta is not None)
    return Factors(tuple(dims(call.shape(i)) for i in range(len(call.operands))), results, sizes, whole)


@on_each_rank
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """The operator, which divides by zero where a block is empty."""
    return torch.ops.aten._weight_norm_interface(v.contiguous(), g.contiguous(), dim) if v.numel() else (v.clone(), g.clone())


@on_each_rank
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The operator, which asks for contiguous blocks that are not empty."""
    if not v.numel():
        return v.clone(), g.clone()
    own = (tensor.contiguous() for tensor in (grad, v, g, norms))
    return torch.ops.aten._weight_norm_interface_backward(*own, dim)


register(
    "_weight_norm_interface", Rule(weight_norm_factors, local=weight_norm, kind="along", source="v [..] o, 1 o -> v [..] o, 1 o")
)
register(
    "_weight_norm_interface_backward",
    Rule(weight_norm_factors, local=weight_norm_backward, kind="along", source="as _weight_norm_interface"),
)
