"""Grouped products (``_grouped_mm``) of rows in groups, each with its own matrix: the experts of a mixture.

``offs`` states where each group ends along the dim that consists of groups (the ragged one): rows of the first operand, columns
of the second, or, for the gradient of the matrices, the dim that is summed. A rank with a block of the ragged dim has a part of
every group. A rank with some of the matrices computes the rows of their groups and zeros elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...layout.layout import Layout
from ..call import Call, Meta
from ..declare import make_blockwise_rule
from ..kernel_context import At, KernelContext
from ..registry import register
from ..rule import Along, Declaration, Factors, R, Strategy

# numbers of dims of the operands -> names of all dims ("r" is ragged, "g" counts groups)
_DIM_NAMES: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("rk", "gkn", "rn"),
    (3, 2): ("gmk", "kr", "mr"),
    (2, 2): ("mr", "rn", "gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}


def _dim_names(call: Call) -> tuple[str, str, str]:
    """Return a letter for each dim of both operands and of the result (``r`` ragged, ``g`` groups)."""
    for name, operand in zip("ab", (0, 1), strict=True):
        if len(call.shape(operand)) not in (2, 3):
            raise RuntimeError(f"mat_{name} has to be 2 or 3d")
    return _DIM_NAMES[len(call.shape(0)), len(call.shape(1))]


def _group_count(call: Call) -> int:
    return 1 if call.get("offs") is None else int(call["offs"].shape[0])


def _operand_sizes(call: Call) -> dict[str, int]:
    """Return the size of each lettered dim of both operands."""
    left, right, _ = _dim_names(call)
    return dict(zip(left + right, call.shape(0) + call.shape(1), strict=True))


def grouped_metas(call: Call) -> tuple[Meta, ...]:
    """Return the metas of ``_grouped_mm``, after its checks of groups and strides. Result rows begin at multiples of 16 bytes."""
    left, right, result = _dim_names(call)
    _check_groups(call, left + right)
    sizes = _operand_sizes(call) | {"g": _group_count(call)}
    if "g" in left + right:
        sizes["g"] = (call.shape(0) if left[0] == "g" else call.shape(1))[0]
    dtype = call.operands[0].dtype
    if any(min(layout.stride[-2:]) != 1 or _is_misaligned(layout.stride[-2:], dtype.itemsize) for layout in call.operands[:2]):
        raise RuntimeError("strides should be multiple of 16 bytes")
    shape = tuple(sizes[name] for name in result)
    step = 16 // dtype.itemsize
    row = math.ceil(shape[-1] / step) * step
    stride = (shape[-2] * row, row, 1)[-len(shape) :]
    return (Meta(shape, stride, call["out_dtype"] or dtype),)


def _check_groups(call: Call, dims: str) -> None:
    """Raise torch's errors for wrong groups, because one rank's blocks need not show them."""
    offs = call.get("offs")
    if (offs is not None) != ("r" in dims):
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    if offs is not None and offs.dtype is not torch.int32:
        raise RuntimeError("Offsets have to be int32")
    counts = [call.shape(k)[0] for k in range(2) if len(call.shape(k)) == 3] + ([] if offs is None else [_group_count(call)])
    if len(set(counts)) > 1:
        raise RuntimeError("matrix batch sizes have to match")


def _is_misaligned(stride: tuple[int, ...], itemsize: int) -> bool:
    return max(stride) * itemsize % 16 != 0


def grouped_mm_of_blocks(
    at: KernelContext, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """Compute grouped products on each rank's blocks, by torch's operator or group by group (runs for all strategies)."""
    left, right, result = _dim_names(at.call)
    result_layout = at.results[0]
    assert result_layout is not None
    total, runs_operator = at.compute_once(_operand_sizes).get("r", 0), _can_run_operator(at, result_layout)

    def multiply_block(here: At, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
        """Compute the grouped products of one rank's blocks: the part of every group that they have, zeros elsewhere."""
        if offs is None:
            return torch.bmm(a, b)
        if runs_operator and not a.is_meta:  # torch's meta kernel accepts one dtype only
            return torch.ops.aten._grouped_mm(_align_rows(a), _align_rows(b), offs, None, out_dtype)
        coordinate = at.call.mesh.coordinates[here.member]
        offsets = {
            name: offset
            for i, names in enumerate((left, right))
            for name, offset in zip(names, at.operands[i].local_offset(coordinate), strict=True)
        }
        sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
        ends = [min(max(end - offsets["r"], 0), sizes["r"]) for end in (0, *_group_ends(offs, total))]
        out = a.new_zeros(result_layout.local_shape(coordinate))
        first, groups = offsets.get("g", 0), sizes.get("g", 0)
        if result == "gmn":
            first, groups = result_layout.local_offset(coordinate)[0], out.shape[0]
        for group in range(groups):
            rows = slice(ends[first + group], ends[first + group + 1])
            if result == "rn":
                out[rows] = a[rows] @ b[group]
            elif result == "mr":
                out[:, rows] = a[group] @ b[:, rows]
            else:
                out[group] = a[:, rows] @ b[rows]
        return out

    return at.map(multiply_block, a, b, offs)


def _can_run_operator(at: KernelContext, result: Layout) -> bool:
    """Return True if torch's operator accepts all blocks: ragged and group dims unsharded, rows of multiples of 16 bytes."""
    if "by operator" not in at.cache:
        step, sharded, rows = 16 // at.operands[0].dtype.itemsize, set(), set()
        for layout, names in zip((*at.operands[:2], result), _dim_names(at.call), strict=True):
            sharded |= {name for name, split in zip(names, layout.splits, strict=True) if split}
            rows |= {*layout.splits[-1].sizes} if layout.splits[-1] else {layout.shape[-1]}
        at.cache["by operator"] = sharded.isdisjoint("rg") and all(size and size % step == 0 for size in rows)
    return bool(at.cache["by operator"])


def _align_rows(x: Tensor) -> Tensor:
    """Copy a block if its rows do not begin at multiples of 16 bytes, which torch's operator requires.

    ``contiguous`` would return a block with no elements or with one row as it is, with any stride.
    """
    steps = x.stride()[-2:]
    is_aligned = min(steps) == 1 and not _is_misaligned(steps, x.itemsize)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _group_ends(offs: Tensor, total: int) -> list[int]:
    """Return where each group ends along the ragged dim. On meta tensors groups are even."""
    count = offs.shape[0]
    return [total * (i + 1) // count for i in range(count)] if offs.is_meta else offs.tolist()


def grouped_mm_flops(call: Call) -> float:
    """Return the FLOPs of a grouped product. Each position of the ragged dim is in one group only."""
    sizes = _operand_sizes(call)
    return 2.0 * math.prod(size for name, size in sizes.items() if name != "g" or "r" not in sizes)


@dataclass(frozen=True, slots=True)
class RaggedFactors(Declaration):
    """The factors of a notation; ``offs`` states the group of each position of the ragged dim.

    The groups of the result can be sharded though no operand has them.
    """

    notation: Callable[[Call], Factors | None]

    def __call__(self, call: Call) -> Factors | None:
        """Return the factors of a grouped product, with the ragged dim marked as consisting of groups."""
        factors = self.notation(call)
        if factors is None or call.get("offs") is None:
            return factors
        factors = replace(factors, order_invariant=frozenset("kmn"))
        left, _, result = _dim_names(call)
        if result != "gmn" or "r" not in left:
            return replace(factors, groups={"r": ("g", "offs")})
        by_group = Strategy((R,) * len(factors.operands), (Along("g"),), "g")
        results = ((("g",), *factors.results[0][1:]),)
        sizes = {**factors.sizes, "g": _group_count(call)}
        return replace(factors, results=results, sizes=sizes, listed_strategies=(by_group,), groups={"r": ("g", "offs")})

    def __str__(self) -> str:
        return str(self.notation)


PRODUCTS = "r k, g k n, [], [] -> r n | g m k, k r, [], [] -> m r | m r, r n, [], [] -> [] m n | g m k, g k n, [], [] -> g m n"
GROUPED_MM_RULE = make_blockwise_rule(PRODUCTS, sums="*", run=grouped_mm_of_blocks, metas=grouped_metas, flops=grouped_mm_flops)
register("_grouped_mm", replace(GROUPED_MM_RULE, factors=RaggedFactors(GROUPED_MM_RULE.factors)))
