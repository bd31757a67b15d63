"""Data-dependent shapes: ``nonzero``, ``unique`` and other results with a size that data decide.

Each rank lists the positions or the values of its own block. If blocks follow each other in row-major order, so do their lists,
which are then the blocks of the result, and ranks exchange only their lengths. Otherwise the lists are gathered, and the results
are replicated. If the place of each element among the values is requested, it is looked up block by block and is sharded as the
elements are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.recorder_hooks import ACTIVE_RECORDERS
from ...base.tracing import is_tracing
from ...layout.layout import Layout
from ...layout.splits import Split
from ...placement import Replicate
from ...ranks.per_rank import shards_of
from ..call import Call
from ..declare import blockwise, kernel_rule
from ..declared_factors import by
from ..kernel_context import At, DataDependentResult, KernelContext, make_index_tensor
from ..rule import Dims, Factors, Kernel, make_unsharded_factors

aten = torch.ops.aten


def all_gather_rows(at: KernelContext, rows: Any) -> list[Any]:
    """All-gather rows of which each rank has its own number, and return them by group position."""
    lengths = _counts_by_member(at, _all_gather_counts(at, rows))
    shape = tuple(rows.shape[1:]) if not hasattr(rows, "shards") else tuple(rows.shards[0].shape[1:])
    return at.all_gather(rows, lambda member: (lengths[member], *shape))


def _all_gather_counts(at: KernelContext, rows: Any) -> list[Any]:
    """All-gather the number of rows of each group position, as tensors."""
    return at.all_gather(at.map(lambda _, own: make_index_tensor(own.device, [own.shape[0]]), rows))


def _count_rows(at: KernelContext, rows: Any) -> tuple[int, ...]:
    """Return the number of rows of each group position as Python numbers; valid if all groups have equal copies."""
    return tuple([int(shards_of(count)[0].item()) for count in _all_gather_counts(at, rows)])


def _counts_by_member(at: KernelContext, counts: list[Any]) -> dict[int, int]:
    """Return a dict from rank to its number of rows, for the ranks of this process and of their groups."""
    counts_of: dict[int, int] = {}

    def record_counts(here: At, own: list[Tensor]) -> Tensor:
        """Write the row counts of one rank's group into the dict."""
        group = at.call.mesh.members_of(at.mesh_dims, here.member)
        counts_of.update(zip(group, (int(count.item()) for count in own), strict=True))
        return own[0]

    at.map(record_counts, counts)
    return counts_of


def row_major_mesh_dims(layout: Layout) -> tuple[int, ...]:
    """Return the mesh dims, outermost first, that shard elements into blocks that follow each other in row-major order.

    They are those of the first sharded dim, and those of later dims if blocks have one position of all dims before.
    """
    mesh_dims: tuple[int, ...] = ()
    for size, split in zip(layout.shape, layout.splits, strict=True):
        mesh_dims += () if split is None else split.mesh_dims
        if (size if split is None else max(split.sizes)) > 1:
            break
    return mesh_dims


def nonzero_of_blocks(at: KernelContext, x: Any) -> Any:
    """List the positions of non-zero elements in each rank's block; sharded if blocks are in row-major order (a kernel).

    Over other mesh dims the lists are all-gathered.
    """
    layout = at.operands[0]
    shape, coordinates = tuple(layout.shape), at.call.mesh.coordinates

    def nonzero_of_block(here: At, block: Tensor) -> Tensor:
        offset = make_index_tensor(block.device, layout.local_offset(coordinates[here.member]))
        return torch.nonzero(block).add_(offset)

    def join_positions(_: Any, parts: list[Tensor]) -> Tensor:
        """Concatenate the positions of all ranks, and sort them into row-major order."""
        rows = torch.cat(parts)
        flat = torch.zeros_like(rows[:, 0])
        for d, size in enumerate(shape):
            flat = flat * size + rows[:, d]
        return torch.empty_like(rows.t().contiguous()).t().copy_(rows[flat.argsort()])  # the strides of torch's result

    rows = at.map(nonzero_of_block, x)
    kept_mesh_dims = () if ACTIVE_RECORDERS or is_tracing() else row_major_mesh_dims(layout)
    if gathered_mesh_dims := tuple([mesh_dim for mesh_dim in at.mesh_dims if mesh_dim not in kept_mesh_dims]):
        gather_context = replace(at, mesh_dims=gathered_mesh_dims)
        rows = at.map(join_positions, all_gather_rows(gather_context, rows))
    if not kept_mesh_dims:
        return rows
    lengths = _count_rows(replace(at, mesh_dims=kept_mesh_dims), rows)
    index_splits = tuple(
        [split if split is not None and set(kept_mesh_dims).issuperset(split.mesh_dims) else None for split in layout.splits]
    )
    return DataDependentResult(rows, Split(kept_mesh_dims, lengths), (1, sum(lengths)), index_splits)


blockwise("nonzero", "[s*] ->", kernel=Kernel(nonzero_of_blocks, collectives=1, joint=True), measured=True)
kernel_rule("repeat_interleave.Tensor", make_unsharded_factors, measured=True)  # a position depends on all counts before it


def is_sharded(call: Call) -> bool:
    return any(split is not None for split in call.operands[0].splits)


# --- unique elements ---
def unique_of_blocks(at: KernelContext, x: Any, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Find the distinct values of all ranks (replicated) and, if requested, how often each occurs (a kernel)."""

    def unique_of_block(_: Any, block: Tensor) -> list[Tensor]:
        values, _, counted = aten._unique2(block, True, False, counts)
        return [values, counted]

    def merge_values(_: Any, parts: list[Tensor], counted: list[Tensor] | None) -> list[Tensor]:
        values, places, _ = aten._unique2(torch.cat(parts), True, counts, False)
        return [values, places.new_empty(0), _add_counts(values.shape[0], places, counted)]

    rows, counted = at.map(unique_of_block, x)
    return at.map(merge_values, all_gather_rows(at, rows), all_gather_rows(at, counted) if counts else None)


def _add_counts(length: int, places: Tensor, counted: list[Tensor] | None) -> Tensor:
    """Add the counts of all ranks' values at the places of these values among all distinct ones. Empty if there are no counts."""
    if counted is None:
        return places.new_empty(0)
    return places.new_zeros(length).index_add_(0, places, torch.cat(counted))


def unique_without_counts(at: KernelContext, x: Any, sorted: bool = True, inverse: bool = False) -> Any:
    return unique_of_blocks(at, x, sorted)[:2]


def replicate_tensor(x: Any) -> Tensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


_SEARCH_DTYPES = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}  # dtypes that searchsorted accepts


def unique_with_inverse(x: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Find the distinct values of a DTensor, and look up the position of each element among them, sharded as the elements.

    Each NaN is a value of its own, in the order of torch's sort.

    With several NaN the tensor is replicated first.
    """
    values, _, counted = aten._unique2(x, True, False, counts)
    if x.dtype.is_floating_point and values.isnan().sum().item() > 1:  # equal on all ranks: the values are replicated
        return aten._unique2(replicate_tensor(x), True, True, counts)
    search_dtype = _SEARCH_DTYPES.get(x.dtype, x.dtype)
    places = torch.searchsorted(values.to(search_dtype), x.to(search_dtype).contiguous())
    if x.dtype.is_floating_point:
        is_nan = x.isnan()
        places = torch.where(is_nan, values.shape[0] - 1, places)
    return values, places.contiguous(), counted


def needs_sharded_inverse(call: Call) -> bool:
    return bool(call["return_inverse"]) and is_sharded(call)


def unique_with_inverse_only(*args: Any, **kwargs: Any) -> Any:
    return unique_with_inverse(*args, **kwargs)[:2]


for _name, _kernel, _decomposed in (
    ("_unique2", unique_of_blocks, unique_with_inverse),
    ("_unique", unique_without_counts, unique_with_inverse_only),
):
    _listed = by("return_inverse", {False: Kernel(_kernel, collectives=2, joint=True)})
    blockwise(_name, "[s*] ->", kernel=_listed, measured=True, decompose=_decomposed, decomposes=needs_sharded_inverse)


# --- unique slices along a dim ---
def unique_slices(at: KernelContext, x: Any, dim: int, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Find the distinct slices along ``dim`` of all ranks, with the place of each slice among them and counts (a kernel).

    Places and counts are always returned, as torch does.
    """
    dim %= len(at.call.shape(0))

    def unique_of_block(_: Any, block: Tensor) -> list[Tensor]:
        """Return the distinct slices of one rank's block as rows, their counts, and the place of each slice among them."""
        empty = block.new_empty(0, dtype=torch.int64)
        if not block.shape[dim]:
            return [block.movedim(dim, 0).contiguous(), empty, empty]
        values, places, counted = aten.unique_dim(block, dim, True, True, True)
        return [values.movedim(dim, 0).contiguous(), counted, places]

    def merge_slices(here: At, parts: list[Tensor], counted: list[Tensor], places: Tensor) -> list[Tensor]:
        """Return the distinct slices of all ranks, their counts, and the places of this rank's slices among them."""
        values, of_parts, _ = aten.unique_dim(torch.cat(parts).movedim(0, dim), dim, True, True, False)
        before = sum(part.shape[0] for part in parts[: here.index])
        return [values, _add_counts(values.shape[dim], of_parts, counted), of_parts[before:][places]]

    rows, counted, places = at.map(unique_of_block, x)
    values, counted, places = at.map(merge_slices, all_gather_rows(at, rows), all_gather_rows(at, counted), places)
    return values, at.map(lambda _, parts: torch.cat(parts), all_gather_rows(at, places)), counted


def unique_dim_factors(call: Call) -> Factors | None:
    """Return the factors of ``unique_dim``, which shard only its dim. None for empty tensors, which torch treats differently."""
    shape = call.shape(0)
    if not shape or 0 in shape:
        return None  # torch treats empty tensors differently
    dims: Dims = tuple(("n",) if d == call["dim"] % len(shape) else () for d in range(len(shape)))
    return Factors((dims,), (), {"n": shape[call["dim"]]}, kernels={"n": Kernel(unique_slices, collectives=2)})


kernel_rule("unique_dim", unique_dim_factors, measured=True)


# --- runs of equal neighbors ---
def unique_consecutive(x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    """Find the values of runs of equal neighbors by operators on DTensors; optionally each element's run, and lengths."""
    along = 0 if dim is None else dim % x.ndim
    inverse, counts = inverse or dim is not None, counts or dim is not None  # along a dim torch always returns all three
    rows = x.reshape(-1) if dim is None else x.movedim(along, 0)
    total = rows.shape[0]
    differs = rows.narrow(0, 1, total - 1) != rows.narrow(0, 0, total - 1)
    if differs.ndim > 1:
        differs = differs.flatten(1).any(1)
    begins = torch.cat([differs.new_ones(1), differs])
    places = begins.nonzero().select(1, 0)
    values = rows.contiguous().index_select(0, places).movedim(0, along)
    runs = begins.cumsum(0) - 1
    empty = places.new_empty(0)
    lengths = torch.cat([places[1:], places.new_full((1,), total)]) - places if counts else empty
    return values, (runs.view(x.shape) if dim is None else runs) if inverse else empty, lengths


def unique_dim_consecutive(x: Tensor, dim: int, inverse: bool = False, counts: bool = False) -> Any:
    return unique_consecutive(x, inverse, counts, dim)


def is_sharded_and_nonempty(call: Call) -> bool:
    return is_sharded(call) and call.operands[0].numel > 0


kernel_rule(
    "unique_consecutive", make_unsharded_factors, measured=True, decompose=unique_consecutive, decomposes=is_sharded_and_nonempty
)
kernel_rule(
    "unique_dim_consecutive",
    make_unsharded_factors,
    measured=True,
    decompose=unique_dim_consecutive,
    decomposes=is_sharded_and_nonempty,
)
