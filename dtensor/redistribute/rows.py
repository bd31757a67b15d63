"""``Rows``: where the blocks of many tensors stand in what one collective carries; integer maths, done once, and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.regions import Box
from ..comm.rows import flat_bytes
from ..layout.layout import Layout
from .executor import inside


@dataclass(frozen=True, slots=True)
class Rows:
    """What one member of a group sends and gets when blocks of many tensors become whole, or whole ones are reduced to blocks:
    for each group position a row, in which its blocks stand one behind the other.

    Attributes:
        cut: of which tensors positions have different blocks; the others are whole everywhere.
        dtypes: when gathered.
        shapes: of what positions have together, as this member holds it.
        sizes, numels: by position, by tensor, of its block.
        narrowed: where that lies in what they have together: tensor dims that it is a part of, with start and length.
        sections: by position, bytes of its blocks of what is cut.
        mine: this member's position.
        nbytes: of this member's row.
    """

    cut: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    numels: tuple[tuple[int, ...], ...]
    narrowed: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    sections: tuple[tuple[int, ...], ...]
    mine: int
    nbytes: int

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
        shapes = tuple(whole.local_shape(whole.mesh.coordinates[member]) for _, whole in pairs)
        boxes = [[inside(whole, member, part, other) for part, whole in pairs] for other in group]
        sizes = tuple(tuple(box.size for box in each) for each in boxes)
        numels = tuple(tuple(box.numel for box in each) for each in boxes)
        narrowed = tuple(tuple(map(_narrowed, each, shapes)) for each in boxes)
        sections = tuple(
            tuple(n * dtype.itemsize for n, dtype, is_cut in zip(each, dtypes, cut, strict=True) if is_cut) for each in numels
        )
        mine = list(group).index(member)
        nbytes = -(-sum(sections[mine]) // alignment) * alignment
        return Rows(tuple(cut), tuple(dtypes), shapes, sizes, numels, narrowed, sections, mine, nbytes)

    # --- blocks become whole -----------------------------------------------------------------------------------------
    def pack(
        self, locals_: Sequence[Tensor], device: str | torch.device, join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> Tensor:
        """This member's row of bytes. ``join`` puts blocks behind one another, in memory that nobody writes to later."""
        triples = zip(locals_, self.cut, self.dtypes, strict=True)
        parts = [flat_bytes(local.detach().to(dtype)) for local, cut, dtype in triples if cut]
        filled = sum(part.numel() for part in parts)
        if filled < self.nbytes:
            parts.append(torch.zeros(self.nbytes - filled, dtype=torch.uint8, device=locals_[0].device))
        return join(parts).to(device, non_blocking=True) if parts else torch.zeros(0, dtype=torch.uint8, device=device)

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
        regions = [_part(x, where) for each in self.narrowed for x, where, cut in zip(full, each, self.cut, strict=True) if cut]
        return regions + [x for x, cut in zip(full, self.cut, strict=True) if not cut]

    def unpack(self, rows: Sequence[Tensor], locals_: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy rows, by position, to the regions; what is not cut from ``locals_``."""
        sources: list[Tensor] = []
        mixed = len(set(self.dtypes)) > 1  # blocks of other dtypes may stand where this one's elements cannot be read
        for row, sizes, sections in zip(rows, self.sizes, self.sections, strict=False):  # no rows where nothing is cut
            kinds = [(size, dtype) for size, dtype, cut in zip(sizes, self.dtypes, self.cut, strict=True) if cut]
            for piece, (size, dtype) in zip(row.split([*sections, row.numel() - sum(sections)]), kinds, strict=False):
                sources.append((aligned(piece, dtype.itemsize) if mixed else piece).view(dtype).view(size))
        sources += [local.detach() for local, cut in zip(locals_, self.cut, strict=bool(locals_)) if not cut]
        torch._foreach_copy_(list(targets), sources)

    # --- the mirror: whole ones are reduced to blocks ----------------------------------------------------------------
    def chunks(
        self,
        chosen: Sequence[int],
        wholes: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        behind: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """By position what it shall reduce: its block of each of the chosen tensors (None: zeros), and then what stands behind.

        What is not cut stands in every chunk, so every rank gets its reduction.
        """
        result = []
        for numels, narrowed in zip(self.numels, self.narrowed, strict=True):
            parts = [
                torch.zeros(numels[i], dtype=dtype, device=device)
                if whole is None
                else _part(whole, narrowed[i]).to(dtype).reshape(-1)
                for i, whole in zip(chosen, wholes, strict=True)
            ]
            result.append(torch.cat([*parts, *behind]))
        return result

    def bucket(self, chosen: Sequence[int], dtype: torch.dtype, device: torch.device, behind: int) -> list[Tensor]:
        """Memory for this member's chunk, and its parts: a view for each tensor, one for the ``behind`` elements after."""
        flat = torch.empty(sum(self.numels[self.mine][i] for i in chosen) + behind, dtype=dtype, device=device)
        return [flat, *self.split(chosen, flat)]

    def split(self, chosen: Sequence[int], flat: Tensor) -> list[Tensor]:
        """This member's reduced chunk as blocks, and what stands behind them."""
        sizes, filled = self.sizes[self.mine], [self.numels[self.mine][i] for i in chosen]
        pieces = flat.split([*filled, flat.numel() - sum(filled)])
        return [*(piece.view(sizes[i]) for piece, i in zip(pieces, chosen, strict=False)), pieces[-1]]


def _narrowed(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """The tensor dims along which a block is a part; an empty one has no place, its offset may lie past the end."""
    dims = enumerate(zip(*box, shape, strict=True))
    return tuple((dim, min(start, whole), size) for dim, (start, size, whole) in dims if size != whole)


def _part(x: Tensor, narrowed: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, start, size in narrowed:
        x = x.narrow(dim, start, size)
    return x


def aligned(row: Tensor, itemsize: int) -> Tensor:
    """Bytes of other dtypes may stand before these."""
    return row.clone() if row.storage_offset() % itemsize else row
