"""Products of groups of rows, each with its own matrix: the experts of a mixture.

``offs`` says where each group ends along the dim that is cut into groups (the ragged one): rows of the first operand, columns of
the second, or, for the gradient of the matrices, the dim that is summed. A rank that holds a block of the ragged dim has a part
of every group, one that holds some of the matrices has the rows of theirs and zeros elsewhere.
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
from ..declare import by_pattern
from ..kernel_context import At, KernelContext
from ..registry import register
from ..rule import Along, Factors, R, Row, Word

# by the number of dims of both operands: what their dims are, and the result's ("r" is ragged, "g" counts groups)
_KINDS: dict[tuple[int, int], tuple[str, str, str]] = {
    (2, 3): ("rk", "gkn", "rn"),
    (3, 2): ("gmk", "kr", "mr"),
    (2, 2): ("mr", "rn", "gmn"),
    (3, 3): ("gmk", "gkn", "gmn"),
}


def _kind(call: Call) -> tuple[str, str, str]:
    for name, operand in zip("ab", (0, 1), strict=True):
        if len(call.shape(operand)) not in (2, 3):
            raise RuntimeError(f"mat_{name} has to be 2 or 3d")
    return _KINDS[len(call.shape(0)), len(call.shape(1))]


def _groups(call: Call) -> int:
    return 1 if call.get("offs") is None else int(call["offs"].shape[0])


def _sizes(call: Call) -> dict[str, int]:
    """Of the dims of both operands."""
    left, right, _ = _kind(call)
    return dict(zip(left + right, call.shape(0) + call.shape(1), strict=True))


def grouped_metas(call: Call) -> tuple[Meta, ...]:
    """What the operator gives: rows that begin at multiples of 16 bytes, which it asks of its operands too."""
    left, right, result = _kind(call)
    _check(call, left + right)
    sizes = _sizes(call) | {"g": _groups(call)}
    if "g" in left + right:
        sizes["g"] = (call.shape(0) if left[0] == "g" else call.shape(1))[0]
    dtype = call.operands[0].dtype
    if any(min(layout.stride[-2:]) != 1 or _odd(layout.stride[-2:], dtype.itemsize) for layout in call.operands[:2]):
        raise RuntimeError("strides should be multiple of 16 bytes")
    shape = tuple(sizes[name] for name in result)
    step = 16 // dtype.itemsize
    row = math.ceil(shape[-1] / step) * step
    stride = (shape[-2] * row, row, 1)[-len(shape) :]
    return (Meta(shape, stride, call["out_dtype"] or dtype),)


def _check(call: Call, dims: str) -> None:
    """What torch asks of groups, in its words; a rank's own part need not show it."""
    offs = call.get("offs")
    if (offs is not None) != ("r" in dims):
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    if offs is not None and offs.dtype is not torch.int32:
        raise RuntimeError("Offsets have to be int32")
    counts = [call.shape(k)[0] for k in range(2) if len(call.shape(k)) == 3] + ([] if offs is None else [_groups(call)])
    if len(set(counts)) > 1:
        raise RuntimeError("matrix batch sizes have to match")


def _odd(stride: tuple[int, ...], itemsize: int) -> bool:
    return max(stride) * itemsize % 16 != 0


def grouped(at: KernelContext, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None) -> Any:
    left, right, result = _kind(at.call)
    made = at.results[0]
    assert made is not None
    total, whole = at.once(_sizes).get("r", 0), _by_operator(at, made)

    def product(here: At, a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
        if offs is None:
            return torch.bmm(a, b)
        if whole and not a.is_meta:  # torch's inference knows one dtype
            return torch.ops.aten._grouped_mm(_aligned(a), _aligned(b), offs, None, out_dtype)
        coordinate = at.call.mesh.coordinates[here.member]
        offsets = {
            name: offset
            for i, names in enumerate((left, right))
            for name, offset in zip(names, at.operands[i].local_offset(coordinate), strict=True)
        }
        sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
        ends = [min(max(end - offsets["r"], 0), sizes["r"]) for end in (0, *_ends(offs, total))]
        out = a.new_zeros(made.local_shape(coordinate))
        first, groups = offsets.get("g", 0), sizes.get("g", 0)
        if result == "gmn":
            first, groups = made.local_offset(coordinate)[0], out.shape[0]
        for group in range(groups):
            rows = slice(ends[first + group], ends[first + group + 1])
            if result == "rn":
                out[rows] = a[rows] @ b[group]
            elif result == "mr":
                out[:, rows] = a[group] @ b[:, rows]
            else:
                out[group] = a[:, rows] @ b[rows]
        return out

    return at.map(product, a, b, offs)


def _by_operator(at: KernelContext, result: Layout) -> bool:
    """Whether the operator takes the blocks: they have all groups and all of their positions, and rows of 16 bytes."""
    if "by operator" not in at.known:
        step, cut, rows = 16 // at.operands[0].dtype.itemsize, set(), set()
        for layout, names in zip((*at.operands[:2], result), _kind(at.call), strict=True):
            cut |= {name for name, split in zip(names, layout.splits, strict=True) if split}
            rows |= {*layout.splits[-1].sizes} if layout.splits[-1] else {layout.shape[-1]}
        at.known["by operator"] = cut.isdisjoint("rg") and all(size and size % step == 0 for size in rows)
    return bool(at.known["by operator"])


def _aligned(x: Tensor) -> Tensor:
    steps = x.stride()[-2:]
    return x if min(steps) == 1 and not _odd(steps, x.itemsize) else x.contiguous()


def _ends(offs: Tensor, total: int) -> list[int]:
    """Where each group ends; without data, in even parts."""
    count = offs.shape[0]
    return [total * (i + 1) // count for i in range(count)] if offs.is_meta else offs.tolist()


def products(call: Call) -> float:
    """FLOPs of a call: each position of the ragged dim is in one group."""
    sizes = _sizes(call)
    return 2.0 * math.prod(size for name, size in sizes.items() if name != "g" or "r" not in sizes)


@dataclass(frozen=True, slots=True)
class Ragged(Word):
    """The factors of a notation; which group a position of the ragged dim belongs to is in ``offs``. The groups of the result can
    be cut though no operand has them."""

    notation: Callable[[Call], Factors | None]

    def __call__(self, call: Call) -> Factors | None:
        found = self.notation(call)
        if found is None or call.get("offs") is None:
            return found
        found = replace(found, orderless=frozenset("kmn"))
        left, _, result = _kind(call)
        if result != "gmn" or "r" not in left:
            return replace(found, groups={"r": ("g", "offs")})
        by_group = Row((R,) * len(found.operands), (Along("g"),), "g")
        results = ((("g",), *found.results[0][1:]),)
        sizes = {**found.sizes, "g": _groups(call)}
        return replace(found, results=results, sizes=sizes, rows=(by_group,), groups={"r": ("g", "offs")})

    def __str__(self) -> str:
        return str(self.notation)


PRODUCTS = "r k, g k n, [], [] -> r n | g m k, k r, [], [] -> m r | m r, r n, [], [] -> [] m n | g m k, g k n, [], [] -> g m n"
ragged = by_pattern(PRODUCTS, sums="*", run=grouped, metas=grouped_metas, flops=products)
register("_grouped_mm", replace(ragged, factors=Ragged(ragged.factors)))
