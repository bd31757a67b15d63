"""Sharded indexing, local: each rank reads and writes the indexed elements of its own block.

A read gives zeros for elements of other blocks, so that the results of the ranks are a partial sum. A write sends elements of
other blocks to a scratch row that is dropped. No block moves. An :class:`Address` states how an operator indexes.
``index_read`` and ``index_write`` declare it. ``sharded_index_exchange.py`` is the way with communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ...comm.local_reduce import sum_identity
from ...layout.layout import Layout
from ..call import Call
from ..kernel_context import At, KernelContext, check_range, functional_operator


# --- addresses of elements --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Address:
    """The way in which an index selects elements of operand 0.

    Attributes:
        argument: the position of the index argument.
        dims: a function of the call that returns the indexed dims. None if a mask selects, so that data decide.
        form: ``"table"``: the dims of the index replace the dim. ``"rows"``: the same, with one index dim. ``"elements"``: an
            index for each element, the other dims correspond. ``"places"``: a list with an index for each dim. ``"flat"``: one
            index for all dims flattened.
        negative: negative indices count from the end.
        error: the error of the operator for an index that is out of range.
        operand: the name of operand 0.
    """

    argument: int
    dims: Callable[[Call], tuple[int, ...] | None]
    form: str
    negative: bool = False
    error: type[Exception] = IndexError
    operand: str = "self"


def _dim_argument(call: Call) -> tuple[int, ...]:
    return call.dims("dim", len(call.shape(0)))


def has_mask(call: Call) -> bool:
    """Return True if some index of argument ``indices`` is a mask, so that data decide how many elements are selected."""
    return any(isinstance(item, Layout) and item.dtype in (torch.bool, torch.uint8) for item in call["indices"])


def _indexed_dims_of_list(call: Call) -> tuple[int, ...] | None:
    return None if has_mask(call) else tuple(d for d, item in enumerate(call["indices"]) if isinstance(item, Layout)) or None


TABLE = Address(1, lambda call: (0,), "table", operand="weight")
ROWS = Address(2, _dim_argument, "rows")
ELEMENTS = Address(2, _dim_argument, "elements", error=RuntimeError)
PLACES = Address(1, _indexed_dims_of_list, "places", negative=True)
FLAT = Address(1, lambda call: tuple(range(len(call.shape(0)))), "flat", negative=True)


BoundIndexing = tuple[Any, tuple[int, ...], int]  # (operator on a block, indexed dims, position of the index dims)


# --- kernels ----------------------------------------------------------------------------------------------------------
def read_local_masked(address: Address, op: Any, at: KernelContext, *args: Any, **keywords: Any) -> Any:
    """Read the indexed elements that are in each rank's block. The others are zero, so the results of ranks are a partial sum."""
    bound = bind_indexing(address, op, at)
    _, dims, lead = bound

    def read_block(here: At, block: Tensor, *rest: Any) -> Tensor:
        """Read the indexed elements that are in one rank's block; all others are the identity of sums."""
        inside, positions = _locate_in_block(at, here.member, address, rest[address.argument - 1], dims, block.device)
        elements = run_on_block(bound, address, block, positions, rest, keywords)
        if (trailing_dims := elements.ndim - lead - inside.ndim) > 0:
            inside = inside.reshape((*inside.shape, *(1,) * trailing_dims))
        return torch.where(
            inside, elements, elements.new_full((), sum_identity(elements.dtype)), out=elements
        )  # works for every dtype

    return at.map(read_block, *args)


def write_local_masked(address: Address, op: Any, at: KernelContext, *args: Any, **keywords: Any) -> Any:
    """Write the elements with positions in each rank's block. Those of other blocks go to a scratch row that is dropped."""
    bound = bind_indexing(address, op, at)
    _, dims, _ = bound

    def write_block(here: At, block: Tensor, *rest: Any) -> Tensor:
        """Write the elements with positions in the block; all others go to a scratch row."""
        inside, positions = _locate_in_block(at, here.member, address, rest[address.argument - 1], dims, block.device)
        positions[0] = torch.where(inside, positions[0], block.shape[dims[0]])
        return run_on_block(bound, address, block, positions, rest, keywords, scratch_rows=1)

    return at.map(write_block, *args)


def run_local(address: Address, op: Any, scratch_rows: int | None, at: KernelContext, *args: Any, **keywords: Any) -> Any:
    """Read or write at each rank's part of sharded indices, all of which are in the rank's own block."""
    bound = bind_indexing(address, op, at)

    def run_block(here: At, block: Tensor, *rest: Any) -> Tensor:
        _, positions = _locate_in_block(at, here.member, address, rest[address.argument - 1], bound[1], block.device)
        return run_on_block(bound, address, block, positions, rest, keywords, scratch_rows)

    return at.map(run_block, *args)


def run_on_block(
    bound: BoundIndexing,
    address: Address,
    block: Tensor,
    positions: list[Tensor],
    arguments: Sequence[Any],
    keywords: Any,
    scratch_rows: int | None = None,
) -> Tensor:
    """Run the operator on one rank's block, with these positions in the block as its index.

    ``scratch_rows``: for a write, the number of rows behind the block that receive the elements of other blocks. None for a read.
    """
    call, dims, _ = bound
    result: Tensor = call(
        pad_block(block, dims, scratch_rows or 0), *replace_index(address, arguments, positions, dims, block.ndim), **keywords
    )
    return result if scratch_rows is None else crop_block(result, block, dims)


def bind_indexing(address: Address, op: Any, at: KernelContext) -> BoundIndexing:
    """Return the operator for a block, the indexed dims, and the position of the index dims in the result (computed once)."""
    bound: BoundIndexing | None = at.cache.get("bound")
    if bound is None:
        dims = address.dims(at.call) or ()
        bound = at.cache["bound"] = op or functional_operator(at.call.func._schema.name), dims, index_dims_position(dims)
    return bound


def index_dims_position(dims: Sequence[int]) -> int:
    """Return the position of the index dims in the result: in place of adjacent indexed dims, else in front."""
    return dims[0] if dims and dims[-1] - dims[0] == len(dims) - 1 else 0


def _locate_in_block(
    at: KernelContext, member: int, address: Address, index: Any, dims: tuple[int, ...], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return a mask of the indexed elements that are in a rank's block, and positions in the block (valid ones for all).

    Raises:
        address.error: an index is out of range, as on plain tensors (on an accelerator a device-side assertion).
    """
    layout = at.operands[0]
    extents = at.cache.get(member) or at.cache.setdefault(member, _block_extents(layout, member, dims))
    if address.form not in ("places", "flat"):
        ((offset, size, total),) = extents
        inside, position = _to_block_positions(_check_index(address, index, total), offset, size)
        return inside, [position]
    if address.form == "flat":
        indices = _unravel_index(_check_index(address, index, layout.numel), tuple(layout.shape))
    else:
        indices = _check_indices(address, index, [total for *_, total in extents], device)
    pairs = zip(torch.broadcast_tensors(*indices) if indices[1:] else indices, extents, strict=True)
    located = [_to_block_positions(index, offset, size) for index, (offset, size, _) in pairs]
    return reduce(and_, [inside for inside, _ in located]), [position for _, position in located]


def _check_indices(
    address: Address, indices_given: Sequence[Tensor | None], totals: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Move the indices of a list to the block's device (torch also accepts those on the CPU), and check their range."""
    indices = [index.to(device) for index in indices_given if index is not None]
    return [_check_index(address, index, total) for index, total in zip(indices, totals, strict=True)]


def find_positions(address: Address, index: Any, totals: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return for each indexed dim (of sizes ``totals``) the non-negative global position of each indexed element."""
    each = _check_indices(address, index if address.form == "places" else [index], totals, device)
    return list(torch.broadcast_tensors(*each)) if each[1:] else each


def _to_block_positions(index: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the positions that are in a block, and the positions in the block, clamped for the others."""
    position = index - offset if offset else index
    return (position >= 0) & (position < size), position.clamp(0, max(0, size - 1))


def _block_extents(layout: Layout, member: int, dims: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return for each dim the offset and size of the rank's block, and the global size."""
    coordinate = layout.mesh.coordinates[member]
    offset, size = layout.local_offset(coordinate), layout.local_shape(coordinate)
    return tuple([(offset[d], size[d], layout.shape[d]) for d in dims])


def _check_index(address: Address, index: Tensor, total: int) -> Tensor:
    """Return the index with negative values counted from the front. Raise ``address.error`` if a value is out of range."""
    index = index.long()
    least = -total if address.negative else 0
    check_range(index, range(least, total), None, partial(_out_of_range_error, address.error, least, total))
    return torch.where(index < 0, index + total, index) if least else index


def _out_of_range_error(error: Callable[[str], Exception], least: int, total: int, index: int) -> Exception:
    return error(f"index out of range: found {index} outside [{least}, {total - 1}]")


def _unravel_index(index: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """Convert flat row-major indices into one index for each dim."""
    indices = []
    for size in reversed(shape):
        indices.append(index.remainder(max(1, size)))
        index = index.div(max(1, size), rounding_mode="floor")
    return indices[::-1]


def replace_index(
    address: Address, arguments: Sequence[Any], positions: list[Tensor], dims: Sequence[int], ndim: int
) -> list[Any]:
    """Return the operator's arguments after operand 0, with positions in the block in place of the index argument."""
    index: Any = positions[0]
    if address.form in ("places", "flat"):
        by_dim = dict(zip(dims, positions, strict=True))
        index = [by_dim.get(d) for d in range(ndim)]
    return [*arguments[: address.argument - 1], index, *arguments[address.argument :]]


def pad_block(block: Tensor, dims: Sequence[int], extra: int = 0) -> Tensor:
    """Pad ``block`` with ``extra`` rows of zeros along the first of ``dims``, and empty dims to one element.

    Nothing is copied without need.
    """
    shape = list(block.shape)
    if not extra and (0 not in shape or all(shape[d] for d in dims)):
        return block
    shape[dims[0]] += extra
    for d in dims:
        shape[d] = max(1, shape[d])
    padded = within = block.new_empty(shape)
    for d in dims:
        padded.narrow(d, block.shape[d], shape[d] - block.shape[d]).zero_()
        within = within.narrow(d, 0, block.shape[d])
    within.copy_(block)
    return padded


def crop_block(result: Tensor, block: Tensor, dims: Sequence[int]) -> Tensor:
    """Remove the padding of :func:`pad_block`: crop ``result`` to the size of ``block`` along ``dims``."""
    for d in dims:
        result = result.narrow(d, 0, block.shape[d])
    return result
