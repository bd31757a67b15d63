"""Sequence order of context parallelism: the positions that each rank holds."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.map_ranks import communicator_of
from ...layout.splits import chunk_sizes, offsets_of
from ...mesh.device_mesh import DeviceMesh
from ...rules.aten.attention.ring import Ring, SequencePieces


class SequenceOrder(NamedTuple):
    """Assignment of the positions of a sequence to ranks.

    Attributes:
        length: number of positions.
        ranks: number of ranks.
        balanced: a rank holds an early and a late block instead of one contiguous block.

    >>> balanced = SequenceOrder(8, 2, True)
    >>> balanced.position_ranges(0), balanced.position_ranges(1), SequenceOrder(7, 2, False).position_ranges(1)
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)), (range(4, 7),))
    """

    length: int
    ranks: int
    balanced: bool

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Return the number of sequence positions of each rank, which are the sizes of a ``Shard``."""
        return chunk_sizes(self.length, (self.ranks,))

    def position_ranges(self, index: int) -> SequencePieces:
        """Return the ranges of positions that the rank at ``index`` holds."""
        early = [size - size // 2 if self.balanced else size for size in self.shard_sizes]
        late = [size // 2 for size in reversed(self.shard_sizes)] if self.balanced else []
        starts = offsets_of((*early, *late))
        held = [(starts[index], early[index])] + ([(starts[-1 - index], late[-1 - index])] if late else [])
        return tuple(range(start, start + size) for start, size in held)

    @property
    def inverse_permutation(self) -> Tensor:
        """Return the permutation that restores the sequence order of the shards concatenated by rank."""
        return torch.tensor(
            list(chain.from_iterable(chain(*map(self.position_ranges, range(self.ranks))))), device="cpu"
        ).argsort()

    def shard_of(self, mesh: DeviceMesh, full: Tensor, dim: int) -> Any:
        """Return each rank's shard of the full tensor ``full``: its sequence positions along ``dim``."""

        def select_positions(member: int, full: Tensor) -> Tensor:
            ranges = self.position_ranges(mesh.coordinates[member][0])
            return torch.cat([full.narrow(dim, r.start, len(r)) for r in ranges], dim)

        return communicator_of(mesh).map(select_positions, full)

    def make_ring(self, mesh: DeviceMesh, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Ring:
        """Return the ring attention schedule, in which ranks pass on shards of ``key`` and ``value``."""
        around = [(x.size(0), x.size(1), x.size(3)) for x in (key, value)]

        def own_positions(member: int) -> SequencePieces:
            return self.position_ranges(mesh.coordinates[member][0])

        def local_shapes(member: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """Return the shapes of the key and the value shard of a member."""
            held = self.shard_sizes[mesh.coordinates[member][0]]
            of_key, of_value = ((batch, heads, held, width) for batch, heads, width in around)
            return of_key, of_value

        return Ring(mesh, (0,), own_positions, own_positions, local_shapes, causal, scale)
