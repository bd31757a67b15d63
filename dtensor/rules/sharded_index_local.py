"""Elements that operands name by index, in dims that are sharded: each rank reads and writes those that its own block holds.

Read: zeros stand for what others hold, so that the ranks' results are terms of a sum. Written: what belongs to others goes to a
scratch row. No block moves. How an operator names elements is an :class:`Address`; it is declared by ``reads`` and ``writes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ..comm.local_reduce import nothing
from ..layout.layout import Layout
from .call import Call
from .kernel_context import At, KernelContext, check_range, functional_of


# --- how elements are named -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Address:
    """Which elements of operand 0 an index means.

    Attributes:
        argument: the position of the argument.
        dims: the dims that are indexed; None where a mask picks, so that the data decide.
        form: ``"table"``: the dims of the index stand in place of the dim; ``"rows"``: the same, one dim always; ``"elements"``:
            an index for each element, the other dims go together; ``"places"``: a list, an index for each dim; ``"flat"``: one
            for all dims, as if they were one.
        negative: whether negative indices count from the end.
        error: what the operator raises for an index that is out of range.
        operand: the name of operand 0.
    """

    argument: int
    dims: Callable[[Call], tuple[int, ...] | None]
    form: str
    negative: bool = False
    error: type[Exception] = IndexError
    operand: str = "self"


def _of_argument(call: Call) -> tuple[int, ...]:
    return call.dims("dim", len(call.shape(0)))


def masked(call: Call) -> bool:
    """Whether some index is a mask: then the data decide how many elements are meant."""
    return any(isinstance(item, Layout) and item.dtype in (torch.bool, torch.uint8) for item in call["indices"])


def _of_list(call: Call) -> tuple[int, ...] | None:
    return None if masked(call) else tuple(d for d, item in enumerate(call["indices"]) if isinstance(item, Layout)) or None


TABLE = Address(1, lambda call: (0,), "table", operand="weight")
ROWS = Address(2, _of_argument, "rows")
ELEMENTS = Address(2, _of_argument, "elements", error=RuntimeError)
PLACES = Address(1, _of_list, "places", negative=True)
FLAT = Address(1, lambda call: tuple(range(len(call.shape(0)))), "flat", negative=True)


Runs = tuple[Any, tuple[int, ...], int]  # what runs on a block, the dims that are indexed, where the dims of indices begin


# --- kernels ----------------------------------------------------------------------------------------------------------
def read_owned(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """The elements that the block holds, what changes no sum in place of the others."""
    runs = bound(address, op, at)
    _, dims, lead = runs

    def own(here: At, block: Tensor, *rest: Any) -> Tensor:
        inside, positions = _located(at, here.member, address, rest[address.argument - 1], dims, block.device)
        found = on_block(runs, address, block, positions, rest, named)
        if (beside := found.ndim - lead - inside.ndim) > 0:
            inside = inside.reshape((*inside.shape, *(1,) * beside))
        return torch.where(inside, found, found.new_full((), nothing(found.dtype)), out=found)  # of every dtype

    return at.map(own, *args)


def write_owned(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """What belongs to the block is written there, what belongs to others to a row that is dropped."""
    runs = bound(address, op, at)
    _, dims, _ = runs

    def own(here: At, block: Tensor, *rest: Any) -> Tensor:
        inside, positions = _located(at, here.member, address, rest[address.argument - 1], dims, block.device)
        positions[0] = torch.where(inside, positions[0], block.shape[dims[0]])
        return on_block(runs, address, block, positions, rest, named, dropped=1)

    return at.map(own, *args)


def of_own(address: Address, op: Any, dropped: int | None, at: KernelContext, *args: Any, **named: Any) -> Any:
    """The elements that a rank's part of the names means, all of which its block has, read or (``dropped``: 0) written there."""
    runs = bound(address, op, at)

    def own(here: At, block: Tensor, *rest: Any) -> Tensor:
        _, positions = _located(at, here.member, address, rest[address.argument - 1], runs[1], block.device)
        return on_block(runs, address, block, positions, rest, named, dropped)

    return at.map(own, *args)


def on_block(
    runs: Runs,
    address: Address,
    block: Tensor,
    positions: list[Tensor],
    rest: Sequence[Any],
    named: Any,
    dropped: int | None = None,
) -> Tensor:
    """What the operator gives of a block where these are positions in it; ``dropped``: of one that writes, how many rows behind
    the block take what is not for it."""
    call, dims, _ = runs
    made: Tensor = call(with_room(block, dims, dropped or 0), *with_index(address, rest, positions, dims, block.ndim), **named)
    return made if dropped is None else without_room(made, block, dims)


def bound(address: Address, op: Any, at: KernelContext) -> Runs:
    """What runs on a block, the dims that are indexed, and where the dims of indices begin in what is read; found once."""
    found: Runs | None = at.known.get("bound")
    if found is None:
        dims = address.dims(at.call) or ()
        found = at.known["bound"] = op or functional_of(at.call.func._schema.name), dims, lead_of(dims)
    return found


def lead_of(dims: Sequence[int]) -> int:
    """Where the dims of the indices stand in what is picked: in place of adjacent dims, else in front."""
    return dims[0] if dims and dims[-1] - dims[0] == len(dims) - 1 else 0


def _located(
    at: KernelContext, member: int, address: Address, given: Any, dims: tuple[int, ...], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Whether the member's block, on this device, holds each element, and its positions there; where it does not, valid ones.

    Raises:
        address.error: an index is out of range, as on plain tensors (on an accelerator a device-side assertion).
    """
    layout = at.operands[0]
    extents = at.known.get(member) or at.known.setdefault(member, _extents(layout, member, dims))
    if address.form not in ("places", "flat"):
        ((offset, size, total),) = extents
        inside, position = _in_block(_checked(address, given, total), offset, size)
        return inside, [position]
    if address.form == "flat":
        indices = _unravelled(_checked(address, given, layout.numel), tuple(layout.shape))
    else:
        indices = _listed(address, given, [total for *_, total in extents], device)
    pairs = zip(torch.broadcast_tensors(*indices) if indices[1:] else indices, extents, strict=True)
    found = [_in_block(index, offset, size) for index, (offset, size, _) in pairs]
    return reduce(and_, [inside for inside, _ in found]), [position for _, position in found]


def _listed(address: Address, given: Sequence[Tensor | None], totals: Sequence[int], device: torch.device) -> list[Tensor]:
    """The indices of a list, on this device: torch takes such from the CPU too."""
    indices = [index.to(device) for index in given if index is not None]
    return [_checked(address, index, total) for index, total in zip(indices, totals, strict=True)]


def positions_of(address: Address, given: Any, totals: Sequence[int], device: torch.device) -> list[Tensor]:
    """By dim that is indexed, whose sizes these are, a position for each element that indices mean, counted from the front."""
    each = _listed(address, given if address.form == "places" else [given], totals, device)
    return list(torch.broadcast_tensors(*each)) if each[1:] else each


def _in_block(index: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    """Which of these positions along a dim a block has, and where in it; valid places for the others."""
    position = index - offset if offset else index
    return (position >= 0) & (position < size), position.clamp(0, max(0, size - 1))


def _extents(layout: Layout, member: int, dims: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Of each dim where the member's block begins, its size, and that of the whole."""
    coordinate = layout.mesh.coordinates[member]
    offset, size = layout.local_offset(coordinate), layout.local_shape(coordinate)
    return tuple([(offset[d], size[d], layout.shape[d]) for d in dims])


def _checked(address: Address, index: Tensor, total: int) -> Tensor:
    """The index, counted from the front."""
    index = index.long()
    least = -total if address.negative else 0
    check_range(index, range(least, total), None, partial(_outside, address.error, least, total))
    return torch.where(index < 0, index + total, index) if least else index


def _outside(error: Callable[[str], Exception], least: int, total: int, index: int) -> Exception:
    return error(f"index out of range: found {index} outside [{least}, {total - 1}]")


def _unravelled(index: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """An index for each dim, of elements in row-major order."""
    found = []
    for size in reversed(shape):
        found.append(index.remainder(max(1, size)))
        index = index.div(max(1, size), rounding_mode="floor")
    return found[::-1]


def with_index(address: Address, rest: Sequence[Any], positions: list[Tensor], dims: Sequence[int], ndim: int) -> list[Any]:
    """The arguments behind operand 0, positions in the block in place of the index."""
    given: Any = positions[0]
    if address.form in ("places", "flat"):
        by_dim = dict(zip(dims, positions, strict=True))
        given = [by_dim.get(d) for d in range(ndim)]
    return [*rest[: address.argument - 1], given, *rest[address.argument :]]


def with_room(block: Tensor, dims: Sequence[int], more: int = 0) -> Tensor:
    """``block``, or a copy with ``more`` along the first of ``dims`` and at least one element along each: zeros."""
    shape = list(block.shape)
    if not more and (0 not in shape or all(shape[d] for d in dims)):
        return block
    shape[dims[0]] += more
    for d in dims:
        shape[d] = max(1, shape[d])
    made = within = block.new_empty(shape)
    for d in dims:
        made.narrow(d, block.shape[d], shape[d] - block.shape[d]).zero_()
        within = within.narrow(d, 0, block.shape[d])
    within.copy_(block)
    return made


def without_room(made: Tensor, block: Tensor, dims: Sequence[int]) -> Tensor:
    """What was made of ``block``, of its size again."""
    for d in dims:
        made = made.narrow(d, 0, block.shape[d])
    return made
