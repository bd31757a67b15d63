"""What a reduction means, once for every backend: the terms of a group folded in group order.

The laws: the dtype never changes; integers wrap around; on bools ``sum`` and ``max`` are *or*, ``product`` and ``min``
are *and* (as ``torch.add`` and ``torch.mul`` have it). Floats narrower than 32 bits are accumulated in float32 and
rounded once, at the end, wherever the fold is ours: in one process, and on gloo. NCCL reduces them its own way.
``max`` and ``min`` propagate NaN.
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

# Where a fold is computed when not in the dtype itself: narrow floats for their sums, the rest for want of torch kernels.
_CARRIER: dict[torch.dtype, torch.dtype] = {
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


NOT_ADDED = frozenset({torch.float8_e8m0fnu})  # powers of two: there is no zero, and torch adds none

_STEP: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "max": lambda total, term: torch.maximum(total, term, out=total),
    "min": lambda total, term: torch.minimum(total, term, out=total),
}
_BOOL_STEP: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.logical_or_,
    "max": Tensor.logical_or_,
    "product": Tensor.logical_and_,
    "min": Tensor.logical_and_,
}


def check_reduction(op: Op, dtype: torch.dtype) -> None:
    """Refuses what has no value of the same dtype; before anything is sent, so on all ranks alike.

    Raises:
        UnsupportedOperationError: an average of integers or bools, the largest of complex numbers.
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


def dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A fresh row-major copy (lazy conjugation and negation carried out), without autograd history."""
    x = x.detach()
    if dtype is None or dtype is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format).copy_(x)


def fold(terms: Sequence[Tensor], op: Op, out: Tensor | None = None) -> Tensor:
    """The reduction of ``terms`` in their order: a new row-major tensor of the same dtype (or ``out``, row-major and no term)."""
    if isinstance(op, Monoid):
        return _fold_monoid(terms, op)
    dtype = terms[0].dtype
    if dtype.is_complex and op in ("sum", "avg"):
        # torch's complex sum is a + 1 * b, which makes infinity NaN; backends add parts
        parts = fold([torch.view_as_real(term.detach().resolve_conj()) for term in terms], op)
        return torch.view_as_complex(parts) if out is None else out.copy_(torch.view_as_complex(parts))
    if dtype in SUMMED and op in ("sum", "avg") and len(terms) > 1:
        return _sum(terms, op, torch.empty(terms[0].shape, dtype=dtype, device=terms[0].device) if out is None else out)
    folded = _fold_uint64(terms, op) if dtype is torch.uint64 else _fold(terms, op)
    return folded if out is None else out.copy_(folded)


def _fold(terms: Sequence[Tensor], op: str) -> Tensor:
    dtype = terms[0].dtype
    carrier = _CARRIER.get(dtype, dtype)
    total = dense(terms[0], carrier)
    if op == "avg":
        return _mean(total, total, (term.detach().to(carrier) for term in terms[1:]), len(terms)).to(dtype)
    step = (_BOOL_STEP if dtype is torch.bool else _STEP)[op]
    for term in terms[1:]:
        step(total, term.detach().to(carrier))
    return total.to(dtype)


def _mean(total: Tensor, first: Tensor, rest: Iterable[Tensor], count: int) -> Tensor:
    """The mean of ``count`` terms, written to ``total``, which may be the first.

    The mean of finite numbers is finite, their sum may not be (masks hold the least number): each term is multiplied by a power
    of two, at most 1 / ``count``, before they are added. So they round as their sum would; only what is no normal number any
    more is lost.
    """
    share = 2.0 ** -(count - 1).bit_length()
    torch.mul(first, share, out=total)
    for term in rest:
        total.add_(term, alpha=share)
    return total if count * share == 1 else total.div_(count * share)


def divided(total: Tensor, count: int) -> Tensor:
    """``total``, divided in place; of complex numbers both parts, for infinity over a complex number is NaN."""
    (torch.view_as_real(total) if total.is_complex() else total).div_(count)
    return total


SUMMED = frozenset({torch.float32, torch.float64, torch.int64, torch.int32})
_BLOCK = 1 << 16  # elements that stay in cache while all terms are added


def _sum(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    terms = [term.detach() for term in terms]
    if out.numel() > 2 * _BLOCK and len(terms) > 2 and all(term.is_contiguous() for term in terms):
        rows = list(zip(*(term.view(-1).split(_BLOCK) for term in (out, *terms)), strict=True))
    else:
        rows = [(out, *terms)]
    for total, first, second, *rest in rows:
        if op == "avg":
            _mean(total, first, (second, *rest), len(terms))
            continue
        torch.add(first, second, out=total)
        for term in rest:
            total.add_(term)
    return out


def _fold_monoid(terms: Sequence[Tensor], op: Monoid) -> Tensor:
    if len(terms) > 1 and (op.combine_all is not None or (op.elementwise and len(terms) > 2)):
        return fold_stack(torch.stack([term.detach() for term in terms]), op)
    total = functools.reduce(op.combine, terms)
    if op.finalize is not None:
        total = op.finalize(total)
    # combine and finalize may hand back a term, or a view of one
    return dense(total) if any(_shares(total, term) for term in terms) or not total.is_contiguous() else total.detach()


def fold_stack(stack: Tensor, op: Monoid) -> Tensor:
    """The reduction of terms stacked along dim 0, at once or element by element."""
    total = in_pairs(op.combine, stack) if op.combine_all is None else op.combine_all(stack)
    return (total if op.finalize is None else op.finalize(total)).contiguous().detach()


def in_pairs(combine: Callable[[Tensor, Tensor], Tensor], states: Tensor, dim: int = 0) -> Tensor:
    """The states along a dim, combined: neighbours first, all pairs at once, as ``combine``, which is associative, does not see
    that dim."""
    while (count := states.shape[dim]) > 1:
        even = count // 2 * 2
        combined = combine(*states.narrow(dim, 0, even).unflatten(dim, (-1, 2)).unbind(dim + 1))
        states = combined if even == count else torch.cat([combined, states.narrow(dim, even, 1)], dim)
    return states.select(dim, 0)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.numel() > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata)  # fake tensors have no address


_SIGN = -(2**63)


def _fold_uint64(terms: Sequence[Tensor], op: str) -> Tensor:
    """Modular sums and products are those of the same bits as int64; flipping the top bit keeps the order."""
    flip = op in ("max", "min")
    signed = [term.view(torch.int64) for term in terms]
    total = fold([term ^ _SIGN for term in signed] if flip else signed, op)
    return (total ^ _SIGN if flip else total).view(torch.uint64)


def identity(op: Op, like: torch.Tensor) -> torch.Tensor:
    """A new tensor, in shape, dtype and memory order as ``like``, that changes nothing when it is a term of ``op``."""
    match op:
        case Monoid():
            return op.identity(like)
        case "product":
            return torch.ones_like(like)
        case "max" | "min":
            return torch.full_like(like, bounds(like.dtype)[op == "min"])
        case _:
            return torch.full_like(like, nothing(like.dtype))


def nothing(dtype: torch.dtype) -> complex:
    """What changes no sum, nor the sign of one that is zero: only ``-0.0 + -0.0`` is ``-0.0``."""
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0 if dtype.is_floating_point else 0


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The identities of max and of min."""
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point and (dtype.itemsize > 1 or dtype is torch.float8_e5m2):  # the other 8-bit ones have no inf
        return -torch.inf, torch.inf
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max
