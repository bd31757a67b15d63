"""Largest and smallest elements: ``amax``, ``max``, ``max.dim``, ``argmax``, ``aminmax`` and their mirror images.

Values alone combine as ``Partial("max")``. With an index, each rank's best (value, index) pair goes through one small collective;
of equal values the first index wins, and NaN beats everything, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...base.caches import remembered
from ...placement import Monoid, Partial
from ..call import Call
from ..kernels import KernelContext
from ..rule import Along, Choice, Factors, Kernel, Row
from ..verbs import kernel_rule, reduction_factors
from .reduction import no_empty_shard

Extreme = str  # "max" or "min"


def worst(dtype: torch.dtype, op: Extreme) -> float | int | bool:
    """What no element is worse than."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -torch.inf if op == "max" else torch.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


# --- values alone -----------------------------------------------------------------------------------------------------
def extreme_factors(op: Extreme) -> Callable[[Call], Factors]:
    """Shards combine by ``op``; where some are empty a kernel stands in for the op, which refuses to reduce nothing."""
    kernel = Kernel(_extreme_of_blocks(op), lacking=Partial(op), joint=True)

    def factors(call: Call) -> Factors:
        dims = call.dims("dim", len(call.shape(0)))
        if any(call.shape(0)[d] == 0 for d in dims):
            return reduction_factors(call, dims, None)  # the best of nothing: the operator itself says that there is none
        if any(split is not None and 0 in split.sizes for split in call.operands[0].splits):
            return reduction_factors(call, dims, None, kernel)
        return reduction_factors(call, dims, op)

    return factors


def _extreme_of_blocks(op: Extreme) -> Callable[..., Any]:
    reduce = torch.amax if op == "max" else torch.amin

    def run(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
        result = at.results[0]
        assert result is not None
        dims = at.call.dims("dim", len(at.call.shape(0)))
        keepdim = bool(at.call.get("keepdim", False))

        def one(here: Any, block: torch.Tensor) -> torch.Tensor:
            if block.numel():
                return reduce(block, dims, keepdim)
            return block.new_full(result.local_shape(at.call.mesh.coordinates[here.member]), worst(block.dtype, op))

        return at.map(one, x)

    return run


kernel_rule("amax max", extreme_factors("max"), partials=("max -> max",), when=no_empty_shard)
kernel_rule("amin min", extreme_factors("min"), partials=("min -> min",), when=no_empty_shard)


# --- both at once -------------------------------------------------------------------------------------------------------
def both_factors(call: Call) -> Factors:
    return reduction_factors(call, call.dims("dim", len(call.shape(0))), None)


def both_rows(call: Call) -> tuple[Row, ...]:
    """Two results that combine by two reductions."""
    dims = call.dims("dim", len(call.shape(0)))
    return tuple(Row((Along(f"d{d}"),), (Partial("min"), Partial("max")), f"d{d}") for d in dims)


def no_empty_block(choice: Choice) -> bool:
    return all(min(split.sizes) > 0 for split in choice.splits.values())


kernel_rule("aminmax", both_factors, partials=both_rows, when=no_empty_block)


# --- value and index ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Better:
    """Of two (value, index) pairs the better value, of equal values the smaller index; NaN is best.

    Pairs are int64 of shape ``(2, ...)``: floats travel as the bits of a float64, which holds every narrower one exactly.
    """

    op: Extreme
    is_float: bool

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = (pair[0].contiguous().view(torch.float64) if self.is_float else pair[0] for pair in (a, b))
        wins = y > x if self.op == "max" else y < x
        ties = y == x
        if self.is_float:
            wins = (wins & ~x.isnan()) | (y.isnan() & ~x.isnan())
            ties = ties | (x.isnan() & y.isnan())
        return torch.where(wins | (ties & (b[1] < a[1])), b, a)


LAST = torch.iinfo(torch.int64).max  # an index that loses every tie


@dataclass(frozen=True, slots=True)
class _NoElement:
    op: Extreme
    is_float: bool

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        value = torch.full(like.shape[1:], worst(torch.float64 if self.is_float else torch.int64, self.op), device=like.device)
        return torch.stack([_bits(value.to(torch.float64 if self.is_float else torch.int64)), torch.full_like(like[1], LAST)])


@remembered(256)
def better(op: Extreme, is_float: bool) -> Monoid:
    """The reduction of (value, index) pairs."""
    return Monoid(f"arg{op}", _Better(op, is_float), _NoElement(op, is_float))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).contiguous().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def _values(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (bits.contiguous().view(torch.float64) if dtype.is_floating_point else bits).to(dtype)


def _best_pair(at: KernelContext, x: Any, op: Extreme, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The best (value, global index) over ``dims``, row-major over them, on every rank of the group."""
    layout = at.operands[0]
    result = at.results[0]
    assert result is not None
    sizes = [layout.shape[d] for d in dims]
    is_float = layout.dtype.is_floating_point

    def one(here: Any, block: torch.Tensor) -> torch.Tensor:
        coordinate = at.call.mesh.coordinates[here.member]
        shape = result.local_shape(coordinate)
        if not block.numel():
            value = torch.full(shape, worst(block.dtype, op), dtype=block.dtype, device=block.device)
            return torch.stack([_bits(value), torch.full(shape, LAST, device=block.device)])
        rest = [d for d in range(block.ndim) if d not in dims]
        flat = block.permute(*rest, *dims).flatten(len(rest)) if dims else block.unsqueeze(-1)
        value, local = flat.max(-1) if op == "max" else flat.min(-1)
        index = torch.zeros_like(local)
        offsets = layout.local_offset(coordinate)
        step, local_step = 1, 1
        for d, size in zip(reversed(dims), reversed(sizes), strict=True):
            index += (local // local_step % block.shape[d] + offsets[d]) * step
            step, local_step = step * size, local_step * block.shape[d]
        return torch.stack([_bits(value).reshape(shape), index.reshape(shape)])

    return at.all_reduce(at.map(one, x), better(op, is_float))


def _with_index(op: Extreme) -> Callable[..., Any]:
    def run(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
        dims = at.call.dims("dim", len(at.call.shape(0)))
        pair = _best_pair(at, x, op, dims, bool(at.call.get("keepdim", False)))
        return at.map(lambda _, block, best: (_values(best[0], block.dtype), best[1]), x, pair)

    return run


def _index_alone(op: Extreme) -> Callable[..., Any]:
    def run(at: KernelContext, x: Any, *args: Any, **kwargs: Any) -> Any:
        dims = at.call.dims("dim", len(at.call.shape(0)))
        pair = _best_pair(at, x, op, dims, bool(at.call.get("keepdim", False)))
        return at.map(lambda _, best: best[1], pair)

    return run


def pair_bytes(call: Call) -> int:
    result = call.results[0]
    assert result is not None
    return 16 * max(1, torch.Size(result.shape).numel())


def indexed_factors(kernel: Kernel, bools: bool = True) -> Callable[[Call], Factors]:
    """``bools``: the operator takes them; one that does not is to refuse them by itself."""

    def factors(call: Call) -> Factors:
        known = kernel if bools or call.operands[0].dtype is not torch.bool else None
        return reduction_factors(call, call.dims("dim", len(call.shape(0))), None, known)

    return factors


for _op in ("max", "min"):
    kernel_rule(f"{_op}.dim {_op}.dim_{_op}", indexed_factors(Kernel(_with_index(_op), collectives=1, nbytes=pair_bytes)))
    kernel_rule(
        f"arg{_op}", indexed_factors(Kernel(_index_alone(_op), collectives=1, nbytes=pair_bytes, joint=True), bools=False)
    )
