"""Which positions of a sequence the ranks of context parallelism hold."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import communicator_of
from ...layout.splits import chunk_sizes, offsets_of
from ...mesh.device_mesh import DeviceMesh
from ...rules.aten.attention.ring import Pieces, Ring


class Order(NamedTuple):
    """Who has which positions of a sequence.

    >>> Order(8, 2, True).pieces(0), Order(8, 2, True).pieces(1), Order(7, 2, False).pieces(1)
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)), (range(4, 7),))
    """

    length: int
    ranks: int
    balanced: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many positions each rank holds: as a ``Shard`` gives them."""
        return chunk_sizes(self.length, (self.ranks,))

    def pieces(self, index: int) -> Pieces:
        """The positions that the rank at ``index`` holds."""
        early = [size - size // 2 if self.balanced else size for size in self.sizes]
        late = [size // 2 for size in reversed(self.sizes)] if self.balanced else []
        starts = offsets_of((*early, *late))
        held = [(starts[index], early[index])] + ([(starts[-1 - index], late[-1 - index])] if late else [])
        return tuple(range(start, start + size) for start, size in held)

    @property
    def back(self) -> Tensor:
        """Where each position is found in all ranks' parts, one behind the other."""
        return torch.tensor(list(chain.from_iterable(chain(*map(self.pieces, range(self.ranks))))), device="cpu").argsort()

    def part_of(self, mesh: DeviceMesh, whole: Tensor, dim: int) -> Any:
        """Each rank's part of a tensor."""

        def own(member: int, whole: Tensor) -> Tensor:
            pieces = self.pieces(mesh.coordinates[member][0])
            return torch.cat([whole.narrow(dim, piece.start, len(piece)) for piece in pieces], dim)

        return communicator_of(mesh).map(own, whole)

    def ring(self, mesh: DeviceMesh, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Ring:
        """Around which keys and values of this order travel."""
        around = [(x.size(0), x.size(1), x.size(3)) for x in (key, value)]

        def positions(member: int) -> Pieces:
            return self.pieces(mesh.coordinates[member][0])

        def shapes(member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            held = self.sizes[mesh.coordinates[member][0]]
            of_key, of_value = ((batch, heads, held, width) for batch, heads, width in around)
            return of_key, of_value

        return Ring(mesh, (0,), positions, positions, shapes, causal, scale)
