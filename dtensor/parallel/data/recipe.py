"""Where each parameter's block stands in the rows that ranks exchange: one member's view, integer maths and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm.rows import flat_bytes
from ...layout.layout import Layout

_ALIGNMENT = 16  # bytes: rows stand behind each other in a receive buffer and are read in the parameters' own dtypes
Shape = tuple[int, ...]
Item = tuple[Layout, Layout, int | None, torch.dtype]  # sharded, whole, tensor dim that is cut, dtype when gathered


@dataclass(frozen=True, slots=True)
class Recipe:
    """One member's part of a group's rows.

    Attributes:
        cuts: per parameter the tensor dim that is cut, None if it is whole everywhere.
        dtypes: per parameter, when gathered.
        shapes: per parameter, whole.
        blocks: per group position, per parameter, the shape of that position's block.
        numels: elements of each block.
        nbytes: of this member's row.
    """

    cuts: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]
    blocks: tuple[tuple[Shape, ...], ...]
    numels: tuple[tuple[int, ...], ...]
    nbytes: int

    @staticmethod
    def of(items: Sequence[Item], member: int, group: Sequence[int]) -> Recipe:
        """The recipe of ``member``, whose group has these members."""
        coordinates = [layout.mesh.coordinates for layout, *_ in items]
        shapes = tuple(whole.local_shape(at[member]) for (_, whole, _, _), at in zip(items, coordinates, strict=True))
        blocks = tuple(
            tuple(layout.local_shape(at[other]) for (layout, *_), at in zip(items, coordinates, strict=True)) for other in group
        )
        cuts, dtypes = tuple(item[2] for item in items), tuple(item[3] for item in items)
        numels = tuple(tuple(map(math.prod, each)) for each in blocks)
        return Recipe(cuts, dtypes, shapes, blocks, numels, _padded(_sections(cuts, dtypes, blocks[list(group).index(member)])))

    # --- parameters ----------------------------------------------------------------------------------------------
    def pack(
        self,
        locals_: Sequence[Tensor],
        device: str | torch.device,
        join: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Tensor:
        """This member's row of bytes. ``join`` puts blocks behind one another, in memory that nobody writes to later."""
        parts = [
            flat_bytes(local.detach().to(dtype))
            for local, cut, dtype in zip(locals_, self.cuts, self.dtypes, strict=True)
            if cut is not None
        ]
        filled = sum(part.numel() for part in parts)
        if filled < self.nbytes:
            parts.append(torch.zeros(self.nbytes - filled, dtype=torch.uint8, device=locals_[0].device))
        return join(parts).to(device, non_blocking=True) if parts else torch.zeros(0, dtype=torch.uint8, device=device)

    def buffer(self, device: str) -> list[Tensor]:
        """A buffer of bytes, then each parameter as a view of it."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        made = torch.empty(max(1, sum(sizes)), dtype=torch.uint8, device=device)
        views, start = [], 0
        for size, shape, dtype in zip(sizes, self.shapes, self.dtypes, strict=True):
            views.append(made[start : start + size].view(dtype).view(shape))
            start += size
        return [made, *views]

    def targets(self, full: Sequence[Tensor]) -> list[Tensor]:
        """The regions of the whole parameters that rows are copied to: per group position those that are cut, then the others."""
        cut = [i for i, dim in enumerate(self.cuts) if dim is not None]
        regions = [self._region(full[i], i, position) for position in range(len(self.blocks)) for i in cut]
        return regions + [full[i] for i, dim in enumerate(self.cuts) if dim is None]

    def unpack(self, rows: Sequence[Tensor], locals_: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy rows, by group position, to the regions."""
        sources: list[Tensor] = []
        for row, blocks in zip(rows, self.blocks, strict=False):  # no rows where nothing is cut
            sections = _sections(self.cuts, self.dtypes, blocks)
            pieces = row.split([*sections, row.numel() - sum(sections)])
            shapes = [(shape, dtype) for shape, dtype, cut in zip(blocks, self.dtypes, self.cuts, strict=True) if cut is not None]
            sources += [piece.view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, shapes, strict=False)]
        sources += [local.detach() for local, cut in zip(locals_, self.cuts, strict=True) if cut is None]
        torch._foreach_copy_(list(targets), sources)

    # --- gradients -----------------------------------------------------------------------------------------------
    def chunks(
        self,
        chosen: Sequence[int],
        grads: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        """Per group position what it shall reduce: its block of each gradient, and then, for each, whether there was one here.

        What no rank cuts stands in every chunk, so every rank gets its reduction.
        """
        used = torch.ones(len(grads), dtype=dtype, device=device)
        for k, grad in enumerate(grads):
            if grad is None:
                used[k] = 0
        result = []
        for position, blocks in enumerate(self.blocks):
            parts = []
            for i, grad in zip(chosen, grads, strict=True):
                if grad is None:
                    parts.append(torch.zeros(math.prod(blocks[i]), dtype=dtype, device=device))
                else:
                    parts.append(self._region(grad, i, position).to(dtype).reshape(-1))
            result.append(torch.cat([*parts, used]))
        return result

    def bucket(self, chosen: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Memory for the only chunk, where nothing is cut, and its parts: a view for each gradient, and one for the flags."""
        flat = torch.empty(sum(self.numels[0][i] for i in chosen) + len(chosen), dtype=dtype, device=device)
        return [flat, *self.split(chosen, 0, flat)]

    def split(self, chosen: Sequence[int], position: int, flat: Tensor) -> list[Tensor]:
        """A reduced chunk as blocks, and behind them the flags."""
        shapes, numels = self.blocks[position], self.numels[position]
        pieces = flat.split([*(numels[i] for i in chosen), len(chosen)])
        return [*(piece.view(shapes[i]) for piece, i in zip(pieces, chosen, strict=False)), pieces[-1]]

    def _region(self, x: Tensor, i: int, position: int) -> Tensor:
        cut = self.cuts[i]
        if cut is None:
            return x
        start = sum(self.blocks[k][i][cut] for k in range(position))
        return x.narrow(cut, start, self.blocks[position][i][cut])


def _sections(cuts: Sequence[int | None], dtypes: Sequence[torch.dtype], blocks: Sequence[Shape]) -> list[int]:
    """Bytes of each block in a row."""
    triples = zip(blocks, dtypes, cuts, strict=True)
    return [math.prod(shape) * dtype.itemsize for shape, dtype, cut in triples if cut is not None]


def _padded(sections: Sequence[int]) -> int:
    return -(-sum(sections) // _ALIGNMENT) * _ALIGNMENT
