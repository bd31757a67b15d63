"""Group norm: samples and whole groups are factors; channels of a single group, and spatial dims, have kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..blockwise import asked_for, on_each_rank
from ..call import Call
from ..kernels import KernelContext
from ..registry import register
from ..rule import Dims, Factors, Kernel, LocalView, Rule
from .moments import block_moments, centred_gradient, combined, counts, dims_of, scale_and_shift, statistics_bytes, wide

INNER = (2, 3)  # where the elements of one group lie once the channels are split into groups


def factors_of_groups(call: Call) -> tuple[dict[str, Dims], dict[str, int], list[str]]:
    """Factors by argument, sizes, and the factors over which statistics run."""
    shape, groups = call.shape(call.names.index("input")), call["group"]
    spatial = [f"s{d}" for d in range(2, len(shape))]
    own: Dims = (("n",), ("g", "c"), *((name,) for name in spatial))
    channels, statistics = (("g", "c"),), (("n",), ("g",))
    table = {"input": own, "grad_out": own, "weight": channels, "bias": channels, "mean": statistics, "rstd": statistics}
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups} | dict(zip(spatial, shape[2:], strict=True))
    return table, sizes, ["c", *spatial]


def single(call: Call) -> frozenset[str]:
    """A single group is whole, its channels have a kernel, and without channels nothing is worth cutting. Of several groups
    channels are whole, also where each rank has one.
    """
    return frozenset("g" if call["group"] == 1 or not call["C"] else "c")


def local_sizes(call: Call, view: LocalView) -> dict[str, Any]:
    """The sizes of the block, which the operator takes apart from it."""
    n, channels, *spatial = view.operands[call.names.index("input")]
    per_group = call["C"] // call["group"]
    return {"N": n, "C": channels, "HxW": math.prod(spatial), "group": channels // per_group if per_group else call["group"]}


def grouped(x: Tensor, groups: int) -> Tensor:
    """(n, channels, ...) as (n, groups, channels of a group, positions)."""
    return wide(x).reshape(x.shape[0], groups, x.shape[1] // max(1, groups), math.prod(x.shape[2:]))


def by_group(parameter: Tensor | None, groups: int) -> Tensor | None:
    """(channels,) so that it multiplies what :func:`grouped` gives."""
    return None if parameter is None else parameter.reshape(1, groups, parameter.shape[0] // max(1, groups), 1)


def groups_of(at: KernelContext, x: Tensor) -> int:
    """Groups in a block: a kernel splits channels only where there is one group."""
    return 1 if at.call["group"] == 1 else x.shape[1] // (at.call["C"] // at.call["group"])


def numbers_of_groups(call: Call) -> int:
    """Bytes of two numbers for each group of each sample."""
    return statistics_bytes(call, 2 * call["N"] * call["group"])


def group_norm_of_blocks(at: KernelContext, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    eps, reduced = args[-1], [d for d in range(len(at.call.shape(0))) if d > 1 or (d == 1 and at.call["group"] == 1)]
    per_group = 1 if 1 in reduced else at.call["C"] // at.call["group"]

    def own(_: Any, x: Tensor) -> Tensor:
        return torch.stack(block_moments(grouped(x, groups_of(at, x)), INNER))

    def shape_of(member: int) -> tuple[int, ...]:
        n, channels, *_ = at.operands[0].local_shape(at.call.mesh.coordinates[member])
        return (2, n, 1 if at.call["group"] == 1 else channels // per_group, 1, 1)

    gathered = at.all_gather(at.map(own, x), shape_of)

    def finish(here: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *blocks: Tensor) -> tuple[Tensor, ...]:
        groups = groups_of(at, x)
        mean, variance = combined([per_group * count for count in counts(at, 0, reduced, here.member)], blocks)
        return normalized_groups(x, weight, bias, mean, variance, groups, eps)

    return at.map(finish, x, weight, bias, *gathered)


def normalized_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, groups: int, eps: float
) -> tuple[Tensor, ...]:
    rstd = (variance + eps).rsqrt()
    out = scale_and_shift((grouped(x, groups) - mean) * rstd, by_group(weight, groups), by_group(bias, groups))
    return out.reshape(x.shape).to(x.dtype), mean.reshape(mean.shape[:2]).to(x.dtype), rstd.reshape(rstd.shape[:2]).to(x.dtype)


@on_each_rank
def group_norm(x: Tensor, weight: Any, bias: Any, n: int, channels: int, positions: int, groups: int, eps: float) -> Any:
    """The operator, which refuses to have no groups, and blocks that are not contiguous."""
    if groups:
        return torch.ops.aten.native_group_norm(x.contiguous(), weight, bias, n, channels, positions, groups, eps)
    return x.clone(), x.new_empty(n, 0), x.new_empty(n, 0)


def group_norm_factors(call: Call) -> Factors:
    table, sizes, inner = factors_of_groups(call)
    kernel = Kernel(group_norm_of_blocks, collectives=1, nbytes=numbers_of_groups, joint=True)
    results = (table["input"], table["mean"], table["rstd"])
    return Factors(
        dims_of(call, table, sizes), results, sizes, single(call), kernels=dict.fromkeys(inner if call["C"] else [], kernel)
    )


def group_norm_gradients_of_blocks(at: KernelContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *args: Any) -> Any:
    groups, mask = at.call["group"], args[-1]
    total = at.call["C"] // groups * at.call["HxW"]

    def parts(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = groups_of(at, x)
        scale = rstd[:, :, None, None]
        return grouped(grad, own), (grouped(x, own) - mean[:, :, None, None]) * scale, scale

    def sums(_: Any, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        upstream, normalized, _scale = parts(x, grad, mean, rstd)
        upstream = scale_and_shift(upstream, by_group(weight, groups_of(at, x)), None)
        return torch.stack((upstream.sum(INNER, keepdim=True), (upstream * normalized).sum(INNER, keepdim=True)))

    reduced = at.all_reduce(at.map(sums, x, grad, mean, rstd, weight), "sum") if mask[0] else None

    def finish(_: Any, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, reduced: Tensor) -> Any:
        upstream, normalized, scale = parts(x, grad, mean, rstd)
        scaled = scale_and_shift(upstream, by_group(weight, groups_of(at, x)), None)
        of_input = centred_gradient(scaled, normalized, reduced, total, scale).reshape(x.shape).to(x.dtype) if mask[0] else None
        dtype = (x if weight is None else weight).dtype
        of_weight = (upstream * normalized).sum((0, 3)).reshape(-1).to(dtype) if mask[1] else None
        return of_input, of_weight, upstream.sum((0, 3)).reshape(-1).to(dtype) if mask[2] else None

    return at.map(finish, x, grad, mean, rstd, weight, reduced)


@on_each_rank
def group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *args: Any) -> Any:
    """The operator, which takes its operands for contiguous."""
    return torch.ops.aten.native_group_norm_backward(
        grad.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), *args
    )


def group_norm_backward_factors(call: Call) -> Factors:
    table, sizes, inner = factors_of_groups(call)
    wanted = int(call["output_mask"][0])  # the other gradients are terms
    nbytes: Callable[[Call], int] = lambda call: wanted * numbers_of_groups(call)  # noqa: E731
    kernel = Kernel(group_norm_gradients_of_blocks, Partial("sum"), wanted, nbytes, joint=True)
    results = asked_for(call, (table["input"], table["weight"], table["bias"]))
    kernels = dict.fromkeys(inner if call["C"] else [], kernel)
    return Factors(dims_of(call, table, sizes), results, sizes, single(call), {"n": "sum"}, kernels=kernels)


register(
    "native_group_norm",
    Rule(
        group_norm_factors,
        local_args=local_sizes,
        local=group_norm,
        kind="kernel",
        source="n (g [c]) [s], (g c), (g c) -> n (g c) s, n g, n g",
    ),
)
register(
    "native_group_norm_backward",
    Rule(
        group_norm_backward_factors,
        local_args=local_sizes,
        local=group_norm_backward,
        kind="kernel",
        source="as native_group_norm",
    ),
)
