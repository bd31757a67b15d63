"""``Rows``: where the blocks of many tensors stand in what one collective carries; integer maths, done once, and copies."""

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
from ..comm.flat_rows import flat
from ..comm.pack import Box
from ..layout.layout import Layout
from .executor import inside

Join = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one member of a group sends and gets when blocks of many tensors become whole, or whole ones are reduced to blocks:
    for each group position a row, in which its blocks stand one behind the other.

    Attributes:
        cut: of which tensors positions have different blocks; the others are whole everywhere.
        uncut: the numbers of those others.
        dtypes: when gathered.
        shapes: of what positions have together, as this member holds it.
        sizes, numels: by position, by tensor, of its block.
        narrowed: where that lies in what they have together: tensor dims that it is a part of, with start and length.
        mine: this member's position.
        strides: of its blocks, row-major.
        seen: the dtype of rows: the one of all that is cut, else bytes.
        lengths: of rows, by position.
        pieces: of all rows one behind the other: the length of each block that is cut, and of what pads a row after its blocks.
        blocks: which of the pieces are blocks, with their size and dtype.
        padding: of this member's row.
        even: where all positions have equal parts of each cut tensor, in their order: the dim that is cut, None where none is.
            Then a copy serves all positions. None: parts are unlike, and copied one by one.
    """

    cut: tuple[bool, ...]
    uncut: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    numels: tuple[tuple[int, ...], ...]
    narrowed: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    mine: int
    strides: tuple[tuple[int, ...], ...]
    seen: torch.dtype
    lengths: tuple[int, ...]
    pieces: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    padding: int
    even: tuple[int | None, ...] | None

    @staticmethod
    def of(
        pairs: Sequence[tuple[Layout, Layout]],
        dtypes: Sequence[torch.dtype],
        cut: Sequence[bool],
        member: int,
        group: Sequence[int],
        alignment: int = 1,
    ) -> Rows:
        """Of tensors by their layouts, cut and whole over ``group``; rows are padded to ``alignment`` bytes."""
        shapes = tuple(whole.shape_of(member) for _, whole in pairs)
        boxes = [[inside(whole, member, part, other) for part, whole in pairs] for other in group]
        return Rows.of_blocks(shapes, boxes, dtypes, cut, list(group).index(member), alignment)

    @staticmethod
    def of_blocks(
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[Sequence[Box]],
        dtypes: Sequence[torch.dtype],
        cut: Sequence[bool],
        mine: int,
        alignment: int = 1,
    ) -> Rows:
        """Of tensors by the shapes of what positions have together, and by position by tensor the place of its block in that."""
        shapes = tuple(shapes)
        sizes = tuple(tuple(box.size for box in each) for each in boxes)
        numels = tuple(tuple(box.numel for box in each) for each in boxes)
        narrowed = tuple(tuple(map(_narrowed, each, shapes)) for each in boxes)
        kinds = {dtype for dtype, is_cut in zip(dtypes, cut, strict=True) if is_cut}
        seen = kinds.pop() if len(kinds) == 1 else torch.uint8
        lengths: list[int] = []
        pieces: list[int] = []
        blocks: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        for each in sizes:
            start = len(pieces)
            for size, dtype, is_cut in zip(each, dtypes, cut, strict=True):
                if is_cut:
                    blocks.append((len(pieces), size, dtype))
                    pieces.append(math.prod(size) * dtype.itemsize // seen.itemsize)
            unit, filled = max(1, alignment // seen.itemsize), sum(pieces[start:])
            lengths.append(-(-filled // unit) * unit)
            pieces.append(lengths[-1] - filled)
        padding = pieces[(mine + 1) * (sum(cut) + 1) - 1]
        even = _even(narrowed, cut) if len(kinds) == 0 and len(boxes) > 1 else None
        found = (tuple(lengths), tuple(pieces), tuple(blocks), padding, even)
        uncut = tuple(i for i, is_cut in enumerate(cut) if not is_cut)
        strides = tuple(map(contiguous_stride, sizes[mine]))
        return Rows(tuple(cut), uncut, tuple(dtypes), shapes, sizes, numels, narrowed, mine, strides, seen, *found)

    # --- blocks become whole -----------------------------------------------------------------------------------------
    def pack(self, locals_: Sequence[Tensor], join: Join = torch.cat) -> Tensor:
        """This member's row of its locals."""
        return self.row(self.parts_of(locals_), locals_[0].device, join)

    def parts_of(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """What stands in this member's row: of what is cut each block, flat; in its own memory where it lies so."""
        with _unrecorded():
            pairs = [(x, dtype) for x, cut, dtype in zip(locals_, self.cut, self.dtypes, strict=True) if cut]
            blocks = [x if x.dtype is dtype else x.to(dtype) for x, dtype in pairs]
            return [x.reshape(-1) if x.dtype is self.seen else flat(x).view(self.seen) for x in blocks]

    def row(self, parts: Sequence[Tensor], device: str | torch.device, join: Join = torch.cat) -> Tensor:
        """Parts one behind the other. ``join`` puts them so, in memory that nobody writes to later; without any it is there."""
        if not parts:
            return torch.zeros(0, dtype=self.seen, device=device)
        with _unrecorded():
            padding = [torch.zeros(self.padding, dtype=self.seen, device=parts[0].device)] if self.padding else []
            return join([*parts, *padding])

    def buffer(self, device: str) -> list[Tensor]:
        """A buffer of bytes, then each whole tensor as a view of it."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        made = torch.empty(max(1, sum(sizes)), dtype=torch.uint8, device=device)
        views, start = [], 0
        for size, shape, dtype in zip(sizes, self.shapes, self.dtypes, strict=True):
            views.append(made[start : start + size].view(dtype).view(shape))
            start += size
        return [made, *views]

    def targets(self, full: Sequence[Tensor]) -> list[Tensor]:
        """The regions of whole tensors that rows are copied to: by position those of what is cut, then what is not."""
        if self.even is not None:
            count = len(self.lengths)
            return [x if dim is None else _in_parts(x, dim, count) for x, dim in self._uncut_last(full, self.even)]
        regions = [_part(x, where) for each in self.narrowed for x, where, cut in zip(full, each, self.cut, strict=True) if cut]
        return regions + [x for x, cut in zip(full, self.cut, strict=True) if not cut]

    def unpack(self, row: Tensor | None, locals_: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy all rows, one behind the other by position, to the regions; what is not cut from ``locals_``."""
        with _unrecorded():
            whole = [locals_[i].detach() for i in self.uncut] if locals_ else []
            if self.even is None or row is None:
                torch._foreach_copy_(list(targets), [*self._by_piece(row), *whole])
                return
            *own, padding = self.pieces[: len(self.pieces) // len(self.lengths)]
            each, into = row.view(len(self.lengths), -1), list(targets[: len(own)])
            if all(x.ndim == 2 for x in into):
                torch.split_with_sizes_copy(each[:, :-padding] if padding else each, own, 1, out=into)
            else:
                sources = each.split([*own, padding], 1)[: len(own)]
                whole = [*(part.view(x.shape) for part, x in zip(sources, into, strict=True)), *whole]
            if whole:
                torch._foreach_copy_(list(targets[-len(whole) :]), whole)

    def _uncut_last(self, full: Sequence[Tensor], dims: Sequence[int | None]) -> list[tuple[Tensor, int | None]]:
        return sorted(zip(full, dims, strict=True), key=lambda pair: pair[1] is None)

    def _by_piece(self, row: Tensor | None) -> list[Tensor]:
        sources: list[Tensor] = []
        pieces = () if row is None else row.split(self.pieces)
        for k, size, dtype in self.blocks:
            piece = pieces[k]
            sources.append((piece if dtype is self.seen else aligned(piece, dtype.itemsize).view(dtype)).view(size))
        return sources

    # --- the mirror: whole ones are reduced to blocks ----------------------------------------------------------------
    def terms(
        self,
        chosen: Sequence[int],
        wholes: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor] = (),
        memory_of: Callable[[int], Tensor | None] = lambda numel: None,
    ) -> Tensor:
        """What positions shall reduce: for each its block of every chosen tensor (None: zeros), then what stands ``behind``.

        ``memory_of(numel)`` gives memory for it, or None: new one. What is not cut stands in every part, so every rank gets its
        reduction.
        """
        with _unrecorded():
            if self.even is not None:
                return self._even_terms(self.even, chosen, wholes, dtype, device, behind, memory_of)
            parts: list[Tensor] = []
            for numels, narrowed in zip(self.numels, self.narrowed, strict=True):
                for i, whole in zip(chosen, wholes, strict=True):
                    if whole is None:
                        parts.append(torch.zeros(numels[i], dtype=dtype, device=device))
                    else:
                        part = _part(whole, narrowed[i]) if narrowed[i] else whole
                        parts.append((part if part.dtype is dtype else part.to(dtype)).reshape(-1))
                parts += behind
            memory = memory_of(sum(part.numel() for part in parts))
            return torch.cat(parts) if memory is None else torch.cat(parts, out=memory)

    def _even_terms(
        self,
        even: Sequence[int | None],
        chosen: Sequence[int],
        wholes: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor],
        memory_of: Callable[[int], Tensor | None],
    ) -> Tensor:
        count, numels, parts = len(self.lengths), self.numels[0], list[Tensor]()
        for i, whole in zip(chosen, wholes, strict=True):
            if whole is None:
                parts.append(torch.zeros((), dtype=dtype, device=device).expand(count, numels[i]))
            elif (dim := even[i]) is None:
                parts.append(whole.reshape(-1).expand(count, -1))
            else:
                part = _in_parts(whole, dim, count)
                parts.append(part if part.ndim == 2 else part.reshape(count, numels[i]))
        parts += [x.expand(count, -1) for x in behind]
        length = count * sum(part.shape[1] for part in parts)
        memory = memory_of(length)
        flat = torch.empty(length, dtype=dtype, device=device) if memory is None else memory
        torch.cat(parts, 1, out=flat.view(count, -1))
        return flat

    def parts(self, chosen: Sequence[int], behind: int) -> list[int]:
        """The lengths of the positions' parts of :meth:`terms`."""
        return [sum(numels[i] for i in chosen) + behind for numels in self.numels]

    def bucket(self, chosen: Sequence[int], dtype: torch.dtype, device: torch.device, behind: int) -> list[Tensor]:
        """Memory for this member's part, and its parts: a view for each tensor, one for the ``behind`` elements after."""
        flat = torch.empty(self.parts(chosen, behind)[self.mine], dtype=dtype, device=device)
        return [flat, *self.split(chosen, flat)]

    def split(self, chosen: Sequence[int], flat: Tensor) -> list[Tensor]:
        """This member's reduced part as blocks, and what stands behind them."""
        sizes, filled = self.sizes[self.mine], [self.numels[self.mine][i] for i in chosen]
        starts = [*itertools.accumulate(filled, initial=int(flat.storage_offset()))]
        left = flat.numel() - sum(filled)
        with _unrecorded():
            if is_traced(flat) or not flat.is_contiguous():
                *pieces, behind = flat.split([*filled, left])
                return [*(piece.view(sizes[i]) for piece, i in zip(pieces, chosen, strict=True)), behind]
            strides = self.strides  # one view for each: a piece of the row and then a view of that would be two
            blocks = [flat.as_strided(sizes[i], strides[i], start) for i, start in zip(chosen, starts, strict=False)]
            return [*blocks, flat.as_strided((left,), (1,), starts[-1])]


def _unrecorded() -> AbstractContextManager[Any]:
    """Copies are no part of a graph. Dispatch modes are to see what composites are made of, which autograd takes apart."""
    return torch.no_grad() if count_dispatch_modes() else BelowAutograd()


def _narrowed(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """The tensor dims along which a block is a part; an empty one has no place, its offset may lie past the end."""
    dims = enumerate(zip(*box, shape, strict=True))
    return tuple((dim, min(start, whole), size) for dim, (start, size, whole) in dims if size != whole)


def _even(narrowed: Sequence[Sequence[tuple[tuple[int, int, int], ...]]], cut: Sequence[bool]) -> tuple[int | None, ...] | None:
    """By tensor the dim that positions have equal parts of, one behind the other; None, once or for all: there is none."""
    dims: list[int | None] = []
    for i, is_cut in enumerate(cut):
        first, size = narrowed[0][i][0][::2] if narrowed[0][i] else (None, 0)
        if is_cut and any(each[i] != ((first, k * size, size),) for k, each in enumerate(narrowed)):
            return None
        dims.append(first if is_cut else None)
    return tuple(dims)


def _in_parts(x: Tensor, dim: int, count: int) -> Tensor:
    """``x`` as ``count`` equal parts of a dim, along a dim of their own, the first; as rows where they are."""
    return x.view(count, x.numel() // count) if dim == 0 and x.is_contiguous() else x.unflatten(dim, (count, -1)).movedim(dim, 0)


def _part(x: Tensor, narrowed: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, start, size in narrowed:
        x = x.narrow(dim, start, size)
    return x


def aligned(row: Tensor, itemsize: int) -> Tensor:
    """Bytes of other dtypes may stand before these."""
    return row.clone() if row.storage_offset() % itemsize else row
