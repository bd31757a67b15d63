"""Means and variances of values that lie in blocks over several ranks, and what normalizations share.

Blocks are combined as (count, mean, sum of squared deviations): one collective of two numbers per row, and no difference of
large sums (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..kernels import KernelContext
from ..rule import Dims

Sums = tuple[Tensor, Tensor]


def statistics_bytes(call: Call, count: int) -> int:
    """Bytes of that many numbers about the first operand, which are not kept in half precision."""
    return count * torch.promote_types(call.operands[0].dtype, torch.float32).itemsize


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that normalizations compute in: at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def dims_of(call: Call, table: dict[str, Dims], sizes: Mapping[str, int]) -> tuple[Dims, ...]:
    """The factors of all operands by argument name; an empty marker in the place of statistics that were left out has none."""
    return tuple(
        ((),) if tuple(layout.shape) == (0,) and _size(table[name], sizes) else table[name]
        for name, layout in zip(call.names, call.operands, strict=True)
    )


def _size(dims: Dims, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[factor] for dim in dims for factor in dim)


def shape_of_statistics(at: KernelContext, operand: int, dims: Sequence[int], member: int) -> tuple[int, ...]:
    """Shape of one member's block of an operand, the reduced dims of size one."""
    shape = at.operands[operand].local_shape(at.call.mesh.coordinates[member])
    return tuple(1 if d in dims else size for d, size in enumerate(shape))


def counts(at: KernelContext, operand: int, dims: Sequence[int], member: int) -> list[int]:
    """How many values each rank of the member's group has to reduce over ``dims``."""
    layout, mesh = at.operands[operand], at.call.mesh
    blocks = [layout.local_shape(mesh.coordinates[other]) for other in mesh.members_of(at.mesh_dims, member)]
    return [math.prod(block[d] for d in dims) for block in blocks]


def moments(at: KernelContext, x: Any, operand: int, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Mean and biased variance over ``dims`` (kept) of the whole that ``x`` is a block of, on every rank of the group."""

    def own(_: Any, block: Tensor) -> Tensor:
        mean, squares = block_moments(wide(block), dims)
        return torch.stack((mean, squares))

    gathered = at.all_gather(at.map(own, x), lambda member: (2, *shape_of_statistics(at, operand, dims, member)))
    return at.map(lambda here, *blocks: combined(counts(at, operand, dims, here.member), blocks), *gathered)


def block_moments(x: Tensor, dims: tuple[int, ...]) -> Sums:
    """Mean and sum of squared deviations over ``dims`` (kept); zeros where there is nothing to reduce."""
    mean = x.sum(dims, keepdim=True) / max(1, math.prod(x.shape[d] for d in dims))
    return mean, (x - mean).square().sum(dims, keepdim=True)


def combined(sizes: Sequence[int], blocks: Sequence[Tensor]) -> Sums:
    """Mean and biased variance of the union of blocks of ``sizes`` values each."""
    total = max(1, sum(sizes))
    mean = sum((block[0] * (size / total) for size, block in zip(sizes, blocks, strict=True)), torch.zeros_like(blocks[0][0]))
    squares = sum(
        (block[1] + (block[0] - mean).square() * size for size, block in zip(sizes, blocks, strict=True)), torch.zeros_like(mean)
    )
    return mean, squares / total


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x * weight + bias``, either of which may be missing."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def centred_gradient(upstream: Tensor, normalized: Tensor, sums: Tensor, count: int, rstd: Tensor) -> Tensor:
    """Gradient of ``count`` values that were centred and scaled, from the sums of ``upstream`` and ``upstream * normalized``."""
    return (upstream - sums[0] / count - normalized * (sums[1] / count)) * rstd


def statistics_dtype(call: Call) -> torch.dtype | None:
    """The dtype in which CPU kernels keep statistics, which torch's meta kernels do not tell; None elsewhere.

    In float16 and bfloat16 they are kept as the input's, unless weights of float32 make the computation mixed.
    """
    if call.mesh.device_type != "cpu":
        return None
    parameters = {layout.dtype for name, layout in zip(call.names, call.operands, strict=True) if name in ("weight", "bias")}
    return torch.float32 if torch.float32 in parameters else call.operands[0].dtype
