"""Local reduction: reduce the addends of a group in group order, alike in one process and on gloo. NCCL has its own kernels.

[Note: Semantics of reductions]
The dtype never changes. Integers wrap around. On bools, ``sum`` and ``max`` are *or*, ``product`` and ``min`` are *and*, as in
``torch.add`` and ``torch.mul``. Floats narrower than 32 bits are accumulated in float32 and rounded once, at the end, if this
module reduces them: in one process, and on gloo. NCCL reduces them in its own way. ``max`` and ``min`` propagate NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..placement import REDUCE_OPS, Monoid

Op = str | Monoid

# The dtype in which a reduction is computed, if not its own: narrow floats for exact sums, the others lack torch kernels.
_ACCUMULATION_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


DTYPES_WITHOUT_SUM = frozenset({torch.float8_e8m0fnu})  # powers of two without a zero, which torch cannot add

_REDUCE_STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "max": lambda total, addend: torch.maximum(total, addend, out=total),
    "min": lambda total, addend: torch.minimum(total, addend, out=total),
}
_BOOL_REDUCE_STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.logical_or_,
    "max": Tensor.logical_or_,
    "product": Tensor.logical_and_,
    "min": Tensor.logical_and_,
}


def check_reduction(op: Op, dtype: torch.dtype) -> None:
    """Raise unless a reduction by ``op`` of values of ``dtype`` has a result of that dtype. Ranks call it before they send.

    Raises:
        UnsupportedOperationError: unknown reduction, average of integers or bools, maximum or minimum of complex numbers.
    """
    if isinstance(op, Monoid):
        return
    if op not in REDUCE_OPS:
        raise UnsupportedOperationError(f"{op!r} is not a reduction; use one of {REDUCE_OPS} or a Monoid")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedOperationError(
            f"the average of {dtype} values is not defined as {dtype}; reduce with 'sum', or convert: x.to(torch.float32)"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise UnsupportedOperationError(
            f"{op} is not defined for {dtype}: complex numbers are not ordered; reduce x.abs() instead"
        )


def row_major_copy(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a row-major copy without autograd history, with lazy conjugation and negation applied."""
    x = x.detach()
    if dtype is None or dtype is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format).copy_(x)


def fold(addends: Sequence[Tensor], op: Op, out: Tensor | None = None) -> Tensor:
    """Return the reduction of ``addends``, in their order, as a new row-major tensor of the same dtype.

    With ``out``, which is row-major and not one of the addends, the result is written there.
    """
    if isinstance(op, Monoid):
        return _reduce_monoid(addends, op)
    dtype = addends[0].dtype
    if dtype.is_complex and op in ("sum", "avg"):
        # torch computes a + 1 * b, in which infinity becomes NaN; backends add real and imaginary parts
        parts = fold([torch.view_as_real(addend.detach().resolve_conj()) for addend in addends], op)
        return torch.view_as_complex(parts) if out is None else out.copy_(torch.view_as_complex(parts))
    if dtype in FUSED_SUM_DTYPES and op in ("sum", "avg") and len(addends) > 1:
        if out is None:
            out = torch.empty(addends[0].shape, dtype=dtype, device=addends[0].device)
        return _sum_in_blocks(addends, op, out)
    folded = _reduce_uint64(addends, op) if dtype is torch.uint64 else _reduce_by_steps(addends, op)
    return folded if out is None else out.copy_(folded)


def _reduce_by_steps(addends: Sequence[Tensor], op: str) -> Tensor:
    """Reduce addends one after another, in the accumulation dtype."""
    dtype = addends[0].dtype
    compute_dtype = _ACCUMULATION_DTYPES.get(dtype, dtype)
    total = row_major_copy(addends[0], compute_dtype)
    if op == "avg":
        return _write_mean(total, total, (addend.detach().to(compute_dtype) for addend in addends[1:]), len(addends)).to(dtype)
    step = (_BOOL_REDUCE_STEPS if dtype is torch.bool else _REDUCE_STEPS)[op]
    for addend in addends[1:]:
        step(total, addend.detach().to(compute_dtype))
    return total.to(dtype)


def _write_mean(total: Tensor, first: Tensor, rest: Iterable[Tensor], count: int) -> Tensor:
    """Write the mean of ``count`` addends to ``total``, which may be the first one, and return it.

    The mean of finite numbers is finite, while their sum may overflow (masks hold the smallest number). So each addend is
    multiplied by a power of two, at most 1 / ``count``, before the addition. The result is rounded as that of the sum; only
    subnormal digits are lost.
    """
    scale = 2.0 ** -(count - 1).bit_length()
    torch.mul(first, scale, out=total)
    for addend in rest:
        total.add_(addend, alpha=scale)
    return total if count * scale == 1 else total.div_(count * scale)


def divide_in_place(total: Tensor, count: int) -> Tensor:
    """Divide ``total`` by ``count`` in place, and return it.

    Real and imaginary parts are divided separately, since infinity divided by a complex number is NaN.
    """
    (torch.view_as_real(total) if total.is_complex() else total).div_(count)
    return total


FUSED_SUM_DTYPES = frozenset({torch.float32, torch.float64, torch.int64, torch.int32})
_BLOCK_ELEMENTS = 1 << 16  # elements of each addend that are summed at a time, so that they stay in the cache


def _sum_in_blocks(addends: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """Write the sum or mean of the addends to ``out``; those of large addends block by block."""
    addends = [addend.detach() for addend in addends]
    if out.numel() > 2 * _BLOCK_ELEMENTS and len(addends) > 2 and all(addend.is_contiguous() for addend in addends):
        blocks = list(zip(*(addend.view(-1).split(_BLOCK_ELEMENTS) for addend in (out, *addends)), strict=True))
    else:
        blocks = [(out, *addends)]
    for total, first, second, *rest in blocks:
        if op == "avg":
            _write_mean(total, first, (second, *rest), len(addends))
            continue
        torch.add(first, second, out=total)
        for addend in rest:
            total.add_(addend)
    return out


def _reduce_monoid(addends: Sequence[Tensor], op: Monoid) -> Tensor:
    """Reduce addends by a monoid, and apply its ``finalize``; the result is contiguous and shares no memory with them."""
    if len(addends) > 1 and (op.combine_all is not None or (op.elementwise and len(addends) > 2)):
        return reduce_stack(torch.stack([addend.detach() for addend in addends]), op)
    total = functools.reduce(op.combine, addends)
    if op.finalize is not None:
        total = op.finalize(total)
    # combine and finalize may return an addend, or a view of one
    is_shared = any(_shares_storage(total, addend) for addend in addends)
    return row_major_copy(total) if is_shared or not total.is_contiguous() else total.detach()


def reduce_stack(stack: Tensor, op: Monoid) -> Tensor:
    """Return the reduction by ``op`` of addends stacked along dim 0: by its ``combine_all`` if it has one, else pairwise."""
    total = reduce_pairwise(op.combine, stack) if op.combine_all is None else op.combine_all(stack)
    return (total if op.finalize is None else op.finalize(total)).contiguous().detach()


def reduce_pairwise(combine: Callable[[Tensor, Tensor], Tensor], states: Tensor, dim: int = 0) -> Tensor:
    """Reduce ``states`` along a dim by ``combine``, all pairs of neighbors at once.

    ``combine`` must be associative and work for each index of that dim separately.
    """
    while (count := states.shape[dim]) > 1:
        even = count // 2 * 2
        combined = combine(*states.narrow(dim, 0, even).unflatten(dim, (-1, 2)).unbind(dim + 1))
        states = combined if even == count else torch.cat([combined, states.narrow(dim, even, 1)], dim)
    return states.select(dim, 0)


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    # data_ptr is not available for fake tensors
    return a is b or (a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata)


_SIGN_BIT = -(2**63)


def _reduce_uint64(addends: Sequence[Tensor], op: str) -> Tensor:
    """Reduce uint64 addends as int64.

    Modular sums and products have equal bits in both dtypes. For max and min the top bit is flipped, which keeps the order.
    """
    flip = op in ("max", "min")
    signed = [addend.view(torch.int64) for addend in addends]
    total = fold([addend ^ _SIGN_BIT for addend in signed] if flip else signed, op)
    return (total ^ _SIGN_BIT if flip else total).view(torch.uint64)


def reduction_identity(op: Op, like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor, like ``like`` in shape, dtype and strides, that does not change the result of ``op`` as an addend."""
    match op:
        case Monoid():
            return op.identity(like)
        case "product":
            return torch.ones_like(like)
        case "max" | "min":
            return torch.full_like(like, max_min_identities(like.dtype)[op == "min"])
        case _:
            return torch.full_like(like, sum_identity(like.dtype))


def sum_identity(dtype: torch.dtype) -> complex:
    """Return the identity of a sum: 0, or -0.0 for floats, which keeps the sign of a zero (``-0.0 + -0.0`` is ``-0.0``)."""
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0 if dtype.is_floating_point else 0


def max_min_identities(dtype: torch.dtype) -> tuple[float, float]:
    """Return the identities of max and of min for ``dtype``: its smallest and its largest value."""
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point and (dtype.itemsize > 1 or dtype is torch.float8_e5m2):  # the other 8-bit ones have no inf
        return -torch.inf, torch.inf
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max
