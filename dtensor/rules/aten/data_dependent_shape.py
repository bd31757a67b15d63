"""Results whose size the data decide: where elements are, and which values occur.

Each rank lists the places or the values of its own block. Where blocks follow each other in row-major order, so do their lists,
which are the blocks of the places: ranks tell each other their lengths. Else the lists are gathered, and the results are whole on
every rank. Where each element's place among the values is asked for, it is looked up block by block and stays sharded as the
elements are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.recorder_hooks import ACTIVE
from ...base.tracing import under_way
from ...layout.layout import Layout
from ...layout.splits import Split
from ...placement import Replicate
from ...ranks.per_rank import shards_of
from ..call import Call
from ..declare import blockwise, kernel_rule
from ..kernel_context import At, KernelContext, Measured, integers_on
from ..notation_rules import by
from ..rule import Dims, Factors, Kernel, uncut

aten = torch.ops.aten


def gathered_rows(at: KernelContext, rows: Any) -> list[Any]:
    """Every group position's rows, each rank having its own number of them."""
    lengths = _by_member(at, _counted(at, rows))
    shape = tuple(rows.shape[1:]) if not hasattr(rows, "shards") else tuple(rows.shards[0].shape[1:])
    return at.all_gather(rows, lambda member: (lengths[member], *shape))


def _counted(at: KernelContext, rows: Any) -> list[Any]:
    """How many rows each group position has."""
    return at.all_gather(at.map(lambda _, own: integers_on(own.device, [own.shape[0]]), rows))


def _lengths(at: KernelContext, rows: Any) -> tuple[int, ...]:
    """The same as numbers, for a mesh whose copies agree."""
    return tuple([int(shards_of(count)[0].item()) for count in _counted(at, rows)])


def _by_member(at: KernelContext, counts: list[Any]) -> dict[int, int]:
    """How many rows each member of the mesh has, those held here and their groups."""
    found: dict[int, int] = {}

    def note(here: At, own: list[Tensor]) -> Tensor:
        group = at.call.mesh.members_of(at.mesh_dims, here.member)
        found.update(zip(group, (int(count.item()) for count in own), strict=True))
        return own[0]

    at.map(note, counts)
    return found


def in_order(layout: Layout) -> tuple[int, ...]:
    """The mesh dims, outermost first, by which the elements of a tensor are cut into blocks that follow each other in row-major
    order: those of the first dim that is cut, and of later ones where blocks have one position of all dims before."""
    found: tuple[int, ...] = ()
    for size, split in zip(layout.shape, layout.splits, strict=True):
        found += () if split is None else split.mesh_dims
        if (size if split is None else max(split.sizes)) > 1:
            break
    return found


def nonzero_of_blocks(at: KernelContext, x: Any) -> Any:
    """Positions in the whole, in row-major order."""
    layout = at.operands[0]
    shape, coordinates = tuple(layout.shape), at.call.mesh.coordinates

    def own(here: At, block: Tensor) -> Tensor:
        offset = integers_on(block.device, layout.local_offset(coordinates[here.member]))
        return torch.nonzero(block).add_(offset)

    def ordered(_: Any, parts: list[Tensor]) -> Tensor:
        rows = torch.cat(parts)
        flat = torch.zeros_like(rows[:, 0])
        for d, size in enumerate(shape):
            flat = flat * size + rows[:, d]
        return torch.empty_like(rows.t().contiguous()).t().copy_(rows[flat.argsort()])  # the strides that torch gives

    rows = at.map(own, x)
    kept = () if ACTIVE or under_way() else in_order(layout)
    if others := tuple([mesh_dim for mesh_dim in at.mesh_dims if mesh_dim not in kept]):
        within = replace(at, mesh_dims=others)
        rows = at.map(ordered, gathered_rows(within, rows))
    if not kept:
        return rows
    lengths = _lengths(replace(at, mesh_dims=kept), rows)
    names = tuple([split if split is not None and set(kept).issuperset(split.mesh_dims) else None for split in layout.splits])
    return Measured(rows, Split(kept, lengths), (1, sum(lengths)), names)


blockwise("nonzero", "[s*] ->", kernel=Kernel(nonzero_of_blocks, collectives=1, joint=True), measured=True)
kernel_rule("repeat_interleave.Tensor", uncut, measured=True)  # the places of counts follow from those before them


def is_cut(call: Call) -> bool:
    return any(split is not None for split in call.operands[0].splits)


# --- of all elements ---
def unique_of_blocks(at: KernelContext, x: Any, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Values and, where asked for, how often each occurs."""

    def own(_: Any, block: Tensor) -> list[Tensor]:
        values, _, counted = aten._unique2(block, True, False, counts)
        return [values, counted]

    def merged(_: Any, parts: list[Tensor], counted: list[Tensor] | None) -> list[Tensor]:
        values, places, _ = aten._unique2(torch.cat(parts), True, counts, False)
        return [values, places.new_empty(0), _added(values.shape[0], places, counted)]

    rows, counted = at.map(own, x)
    return at.map(merged, gathered_rows(at, rows), gathered_rows(at, counted) if counts else None)


def _added(length: int, places: Tensor, counted: list[Tensor] | None) -> Tensor:
    """The counts of the parts by their places in the whole."""
    if counted is None:
        return places.new_empty(0)
    return places.new_zeros(length).index_add_(0, places, torch.cat(counted))


def unique_only(at: KernelContext, x: Any, sorted: bool = True, inverse: bool = False) -> Any:
    return unique_of_blocks(at, x, sorted)[:2]


def everywhere(x: Any) -> Tensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


_SEARCHED = {torch.bool: torch.uint8, torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what has an order to search


def unique_with_places(x: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Each NaN is a value of its own. Which is whose is as torch's sort leaves them: several are looked at where they are all."""
    values, _, counted = aten._unique2(x, True, False, counts)
    if x.dtype.is_floating_point and values.isnan().sum().item() > 1:  # the same on all ranks: the values are whole
        return aten._unique2(everywhere(x), True, True, counts)
    wide = _SEARCHED.get(x.dtype, x.dtype)
    places = torch.searchsorted(values.to(wide), x.to(wide).contiguous())
    if x.dtype.is_floating_point:
        unordered = x.isnan()
        places = torch.where(unordered, values.shape[0] - 1, places)
    return values, places.contiguous(), counted


def with_places(call: Call) -> bool:
    return bool(call["return_inverse"]) and is_cut(call)


def unique_with_only_places(*args: Any, **kwargs: Any) -> Any:
    return unique_with_places(*args, **kwargs)[:2]


for _name, _kernel, _decomposed in (
    ("_unique2", unique_of_blocks, unique_with_places),
    ("_unique", unique_only, unique_with_only_places),
):
    _listed = by("return_inverse", {False: Kernel(_kernel, collectives=2, joint=True)})
    blockwise(_name, "[s*] ->", kernel=_listed, measured=True, decompose=_decomposed, decomposes=with_places)


# --- along a dim ---
def unique_slices(at: KernelContext, x: Any, dim: int, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Slices of each block that differ, as rows; then those of all of them. A place is one in the block's, then in the whole.

    Places and counts are given, asked for or not, as torch does.
    """
    dim %= len(at.call.shape(0))

    def own(_: Any, block: Tensor) -> list[Tensor]:
        nothing = block.new_empty(0, dtype=torch.int64)
        if not block.shape[dim]:
            return [block.movedim(dim, 0).contiguous(), nothing, nothing]
        values, places, counted = aten.unique_dim(block, dim, True, True, True)
        return [values.movedim(dim, 0).contiguous(), counted, places]

    def merged(here: At, parts: list[Tensor], counted: list[Tensor], places: Tensor) -> list[Tensor]:
        values, of_parts, _ = aten.unique_dim(torch.cat(parts).movedim(0, dim), dim, True, True, False)
        before = sum(part.shape[0] for part in parts[: here.index])
        return [values, _added(values.shape[dim], of_parts, counted), of_parts[before:][places]]

    rows, counted, places = at.map(own, x)
    values, counted, places = at.map(merged, gathered_rows(at, rows), gathered_rows(at, counted), places)
    return values, at.map(lambda _, parts: torch.cat(parts), gathered_rows(at, places)), counted


def slices(call: Call) -> Factors | None:
    shape = call.shape(0)
    if not shape or 0 in shape:
        return None  # torch has rules of its own for nothing
    dims: Dims = tuple(("n",) if d == call["dim"] % len(shape) else () for d in range(len(shape)))
    return Factors((dims,), (), {"n": shape[call["dim"]]}, kernels={"n": Kernel(unique_slices, collectives=2)})


kernel_rule("unique_dim", slices, measured=True)


# --- of neighbours ---
def neighbours(x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    """What differs from the one before it begins a run."""
    along = 0 if dim is None else dim % x.ndim
    inverse, counts = inverse or dim is not None, counts or dim is not None  # along a dim torch gives all three, asked or not
    rows = x.reshape(-1) if dim is None else x.movedim(along, 0)
    total = rows.shape[0]
    differs = rows.narrow(0, 1, total - 1) != rows.narrow(0, 0, total - 1)
    if differs.ndim > 1:
        differs = differs.flatten(1).any(1)
    begins = torch.cat([differs.new_ones(1), differs])
    places = begins.nonzero().select(1, 0)
    values = rows.contiguous().index_select(0, places).movedim(0, along)
    runs = begins.cumsum(0) - 1
    nothing = places.new_empty(0)
    lengths = torch.cat([places[1:], places.new_full((1,), total)]) - places if counts else nothing
    return values, (runs.view(x.shape) if dim is None else runs) if inverse else nothing, lengths


def consecutive(x: Tensor, dim: int, inverse: bool = False, counts: bool = False) -> Any:
    return neighbours(x, inverse, counts, dim)


def several(call: Call) -> bool:
    return is_cut(call) and call.operands[0].numel > 0


kernel_rule("unique_consecutive", uncut, measured=True, decompose=neighbours, decomposes=several)
kernel_rule("unique_dim_consecutive", uncut, measured=True, decompose=consecutive, decomposes=several)
