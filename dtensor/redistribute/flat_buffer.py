"""Flat buffer: positions of the blocks of many tensors in the buffer of one collective, computed once, and the copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.memory_order import contiguous_stride
from ..base.torch_internals import BelowAutograd, count_dispatch_modes
from ..base.tracing import is_traced
from ..comm.flat_rows import flatten_to_row
from ..comm.pack import Box
from ..layout.layout import Layout
from .executor import box_inside

Join = Callable[[list[Tensor]], Tensor]
Ranges = tuple[tuple[int, int, int], ...]  # (tensor dim, start, length) of each dim of which a block is a part


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Flat rows that one member of a group sends and receives when many tensors are gathered or reduce-scattered together.

    There is a row for each group position, with the blocks of that position one after the other.

    Attributes:
        sharded: for each tensor, True if it is sharded over the group; others are replicated.
        replicated: indices of the replicated tensors.
        dtypes: dtypes of the gathered tensors.
        shapes: shape of each tensor after the gather, on this member.
        sizes, numels: by position and tensor, the size of its block.
        ranges: by position and tensor, the range of its block in the gathered tensor: (tensor dim, start, length) for each
            dim of which it is a part.
        position: group position of this member.
        strides: row-major strides of this member's blocks.
        row_dtype: dtype of the rows: the dtype of all sharded tensors if it is one, else bytes.
        lengths: length of each row, by position.
        part_lengths: lengths of all parts of all rows in order: each sharded block, and the padding after the blocks of a row.
        blocks: the parts that are blocks: index, size and dtype.
        padding: length of the padding of this member's row.
        even_dims: if all positions have equal parts of each sharded tensor, in order: the sharded dim of each tensor, or None for
            a replicated one. One copy then serves all positions. None: parts differ and are copied one by one.
    """

    sharded: tuple[bool, ...]
    replicated: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    numels: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[Ranges, ...], ...]
    position: int
    strides: tuple[tuple[int, ...], ...]
    row_dtype: torch.dtype
    lengths: tuple[int, ...]
    part_lengths: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    padding: int
    even_dims: tuple[int | None, ...] | None

    @staticmethod
    def from_layouts(
        pairs: Sequence[tuple[Layout, Layout]],
        dtypes: Sequence[torch.dtype],
        sharded: Sequence[bool],
        member: int,
        group: Sequence[int],
        alignment: int = 1,
    ) -> FlatBuffer:
        """Return the flat buffer of tensors from their (sharded, gathered) layouts; rows are padded to ``alignment`` bytes."""
        shapes = tuple(full.shape_of(member) for _, full in pairs)
        boxes = [[box_inside(full, member, part, other) for part, full in pairs] for other in group]
        return FlatBuffer.from_blocks(shapes, boxes, dtypes, sharded, list(group).index(member), alignment)

    @staticmethod
    def from_blocks(
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[Sequence[Box]],
        dtypes: Sequence[torch.dtype],
        sharded: Sequence[bool],
        position: int,
        alignment: int = 1,
    ) -> FlatBuffer:
        """Return the flat buffer of tensors from gathered shapes and, by position and tensor, the box of each block."""
        shapes = tuple(shapes)
        sizes = tuple(tuple(box.size for box in each) for each in boxes)
        numels = tuple(tuple(box.numel for box in each) for each in boxes)
        ranges = tuple(tuple(map(_narrow_ranges, each, shapes)) for each in boxes)
        kinds = {dtype for dtype, is_sharded in zip(dtypes, sharded, strict=True) if is_sharded}
        row_dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        lengths: list[int] = []
        part_lengths: list[int] = []
        blocks: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        for each in sizes:
            start = len(part_lengths)
            for size, dtype, is_sharded in zip(each, dtypes, sharded, strict=True):
                if is_sharded:
                    blocks.append((len(part_lengths), size, dtype))
                    part_lengths.append(math.prod(size) * dtype.itemsize // row_dtype.itemsize)
            unit, used = max(1, alignment // row_dtype.itemsize), sum(part_lengths[start:])
            lengths.append(-(-used // unit) * unit)
            part_lengths.append(lengths[-1] - used)
        padding = part_lengths[(position + 1) * (sum(sharded) + 1) - 1]
        even_dims = _find_even_dims(ranges, sharded) if len(kinds) == 0 and len(boxes) > 1 else None
        computed = (tuple(lengths), tuple(part_lengths), tuple(blocks), padding, even_dims)
        replicated = tuple(i for i, is_sharded in enumerate(sharded) if not is_sharded)
        strides = tuple(map(contiguous_stride, sizes[position]))
        return FlatBuffer(
            tuple(sharded), replicated, tuple(dtypes), shapes, sizes, numels, ranges, position, strides, row_dtype, *computed
        )

    # --- gather ------------------------------------------------------------------------------------------------------
    def pack_row(self, locals_: Sequence[Tensor], join: Join = torch.cat) -> Tensor:
        """Return the row that this member sends in an all-gather, packed from its local tensors."""
        return self.concat_row(self.flat_blocks_of(locals_), locals_[0].device, join)

    def flat_blocks_of(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat blocks of this member's row, one for each sharded tensor; views if dtype and strides allow it."""
        with _below_autograd():
            pairs = [(x, dtype) for x, is_sharded, dtype in zip(locals_, self.sharded, self.dtypes, strict=True) if is_sharded]
            blocks = [x if x.dtype is dtype else x.to(dtype) for x, dtype in pairs]
            return [x.reshape(-1) if x.dtype is self.row_dtype else flatten_to_row(x).view(self.row_dtype) for x in blocks]

    def concat_row(self, parts: Sequence[Tensor], device: str | torch.device, join: Join = torch.cat) -> Tensor:
        """Concatenate flat blocks, and the padding, into a row. ``join`` returns memory that is not written to later."""
        if not parts:
            return torch.zeros(0, dtype=self.row_dtype, device=device)
        with _below_autograd():
            padding = [torch.zeros(self.padding, dtype=self.row_dtype, device=parts[0].device)] if self.padding else []
            return join([*parts, *padding])

    def allocate_gathered(self, device: str) -> list[Tensor]:
        """Allocate memory for all gathered tensors. Return it as bytes, followed by each tensor as a view of it."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        memory = torch.empty(max(1, sum(sizes)), dtype=torch.uint8, device=device)
        views, start = [], 0
        for size, shape, dtype in zip(sizes, self.shapes, self.dtypes, strict=True):
            views.append(memory[start : start + size].view(dtype).view(shape))
            start += size
        return [memory, *views]

    def gathered_regions(self, full: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the gathered tensors that rows are copied to, in the order of the blocks, replicated tensors last."""
        if self.even_dims is not None:
            count = len(self.lengths)
            return [x if dim is None else _split_even(x, dim, count) for x, dim in self._replicated_last(full, self.even_dims)]
        regions = [
            _narrow(x, where)
            for each in self.ranges
            for x, where, is_sharded in zip(full, each, self.sharded, strict=True)
            if is_sharded
        ]
        return regions + [x for x, is_sharded in zip(full, self.sharded, strict=True) if not is_sharded]

    def copy_gathered(self, row: Tensor | None, locals_: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy gathered rows, concatenated by position, to ``targets``, and replicated tensors from ``locals_``."""
        with _below_autograd():
            replicated = [locals_[i].detach() for i in self.replicated] if locals_ else []
            if self.even_dims is None or row is None:
                torch._foreach_copy_(list(targets), [*self._block_sources(row), *replicated])
                return
            *blocks, padding = self.part_lengths[: len(self.part_lengths) // len(self.lengths)]
            rows, destinations = row.view(len(self.lengths), -1), list(targets[: len(blocks)])
            if all(x.ndim == 2 for x in destinations):
                torch.split_with_sizes_copy(rows[:, :-padding] if padding else rows, blocks, 1, out=destinations)
            else:
                sources = rows.split([*blocks, padding], 1)[: len(blocks)]
                replicated = [*(part.view(x.shape) for part, x in zip(sources, destinations, strict=True)), *replicated]
            if replicated:
                torch._foreach_copy_(list(targets[-len(replicated) :]), replicated)

    def _replicated_last(self, full: Sequence[Tensor], dims: Sequence[int | None]) -> list[tuple[Tensor, int | None]]:
        return sorted(zip(full, dims, strict=True), key=lambda pair: pair[1] is None)

    def _block_sources(self, row: Tensor | None) -> list[Tensor]:
        """Return the blocks of gathered rows as views with their shapes and dtypes."""
        sources: list[Tensor] = []
        parts = () if row is None else row.split(self.part_lengths)
        for k, size, dtype in self.blocks:
            part = parts[k]
            sources.append((part if dtype is self.row_dtype else align_bytes(part, dtype.itemsize).view(dtype)).view(size))
        return sources

    # --- reduce-scatter ----------------------------------------------------------------------------------------------
    def pack_addends(
        self,
        chosen: Sequence[int],
        full_tensors: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor] = (),
        memory_of: Callable[[int], Tensor | None] = lambda numel: None,
    ) -> Tensor:
        """Return the input of a reduce-scatter: by position the blocks of chosen tensors (None: zeros), then ``behind``.

        Replicated tensors are packed for every position, so every rank gets their reduction.

        Args:
            memory_of: returns memory for a number of elements, or None for new memory.
        """
        with _below_autograd():
            if self.even_dims is not None:
                return self._pack_even_addends(self.even_dims, chosen, full_tensors, dtype, device, behind, memory_of)
            parts: list[Tensor] = []
            for numels, ranges in zip(self.numels, self.ranges, strict=True):
                for i, full in zip(chosen, full_tensors, strict=True):
                    if full is None:
                        parts.append(torch.zeros(numels[i], dtype=dtype, device=device))
                    else:
                        part = _narrow(full, ranges[i]) if ranges[i] else full
                        parts.append((part if part.dtype is dtype else part.to(dtype)).reshape(-1))
                parts += behind
            memory = memory_of(sum(part.numel() for part in parts))
            return torch.cat(parts) if memory is None else torch.cat(parts, out=memory)

    def _pack_even_addends(
        self,
        even_dims: Sequence[int | None],
        chosen: Sequence[int],
        full_tensors: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor],
        memory_of: Callable[[int], Tensor | None],
    ) -> Tensor:
        """Return the input of a reduce-scatter of evenly sharded tensors, packed with one concatenation."""
        count, numels, parts = len(self.lengths), self.numels[0], list[Tensor]()
        for i, full in zip(chosen, full_tensors, strict=True):
            if full is None:
                parts.append(torch.zeros((), dtype=dtype, device=device).expand(count, numels[i]))
            elif (dim := even_dims[i]) is None:
                parts.append(full.reshape(-1).expand(count, -1))
            else:
                part = _split_even(full, dim, count)
                parts.append(part if part.ndim == 2 else part.reshape(count, numels[i]))
        parts += [x.expand(count, -1) for x in behind]
        length = count * sum(part.shape[1] for part in parts)
        memory = memory_of(length)
        flat = torch.empty(length, dtype=dtype, device=device) if memory is None else memory
        torch.cat(parts, 1, out=flat.view(count, -1))
        return flat

    def addend_counts(self, chosen: Sequence[int], behind: int) -> list[int]:
        """Return by position the number of elements that :meth:`pack_addends` packs for it."""
        return [sum(numels[i] for i in chosen) + behind for numels in self.numels]

    def allocate_bucket(self, chosen: Sequence[int], dtype: torch.dtype, device: torch.device, behind: int) -> list[Tensor]:
        """Allocate this member's output of a reduce-scatter. Return it, a view for each tensor, and the ``behind`` elements."""
        flat = torch.empty(self.addend_counts(chosen, behind)[self.position], dtype=dtype, device=device)
        return [flat, *self.split_reduced(chosen, flat)]

    def split_reduced(self, chosen: Sequence[int], flat: Tensor) -> list[Tensor]:
        """Return this member's output of a reduce-scatter as one block for each chosen tensor, and the elements behind them."""
        sizes, numels = self.sizes[self.position], [self.numels[self.position][i] for i in chosen]
        starts = [*itertools.accumulate(numels, initial=int(flat.storage_offset()))]
        behind_numel = flat.numel() - sum(numels)
        with _below_autograd():
            if is_traced(flat) or not flat.is_contiguous():
                *parts, behind = flat.split([*numels, behind_numel])
                return [*(part.view(sizes[i]) for part, i in zip(parts, chosen, strict=True)), behind]
            strides = self.strides  # as_strided makes one view for each block; split and view would make two
            blocks = [flat.as_strided(sizes[i], strides[i], start) for i, start in zip(chosen, starts, strict=False)]
            return [*blocks, flat.as_strided((behind_numel,), (1,), starts[-1])]


def _below_autograd() -> AbstractContextManager[Any]:
    """Return a context without autograd: ``no_grad`` under dispatch modes, which need composite operators decomposed."""
    return torch.no_grad() if count_dispatch_modes() else BelowAutograd()


def _narrow_ranges(box: Box, shape: Sequence[int]) -> Ranges:
    """Return (tensor dim, start, length) for each dim of which ``box`` is a part; the start of an empty box is clamped."""
    dims = enumerate(zip(*box, shape, strict=True))
    return tuple((dim, min(start, full), size) for dim, (start, size, full) in dims if size != full)


def _find_even_dims(
    ranges: Sequence[Sequence[tuple[tuple[int, int, int], ...]]], sharded: Sequence[bool]
) -> tuple[int | None, ...] | None:
    """Return for each tensor the dim of which all positions have equal parts in order (None: replicated); else None."""
    dims: list[int | None] = []
    for i, is_sharded in enumerate(sharded):
        first, size = ranges[0][i][0][::2] if ranges[0][i] else (None, 0)
        if is_sharded and any(each[i] != ((first, k * size, size),) for k, each in enumerate(ranges)):
            return None
        dims.append(first if is_sharded else None)
    return tuple(dims)


def _split_even(x: Tensor, dim: int, count: int) -> Tensor:
    """Return ``x`` in ``count`` equal parts of ``dim``, along a new first dim (as rows if ``dim`` is 0 and it is contiguous)."""
    return x.view(count, x.numel() // count) if dim == 0 and x.is_contiguous() else x.unflatten(dim, (count, -1)).movedim(dim, 0)


def _narrow(x: Tensor, narrowed: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the view of ``x`` narrowed by each ``(dim, start, size)``."""
    for dim, start, size in narrowed:
        x = x.narrow(dim, start, size)
    return x


def align_bytes(row: Tensor, itemsize: int) -> Tensor:
    """Return ``row``, a view of bytes, copied if its address is no multiple of ``itemsize``, to be viewed as another dtype."""
    return row.clone() if row.storage_offset() % itemsize else row
