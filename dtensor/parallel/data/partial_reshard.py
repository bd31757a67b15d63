"""Between forward and backward: gathered parameters cut over a few neighbouring ranks (``reshard_after_forward=8``).

Backward then gathers from those neighbours only, say from the ranks of one machine, for 1/8 of the whole parameters' memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm import communicator_of, reordered
from ...comm.backend_base import Run
from ...errors import UnsupportedOperationError
from .dp_modes import Axes


class Neighbours:
    """Groups of ``size`` consecutive ranks along the mesh dim that cuts parameters.

    Raises:
        ValueError: ``size`` does not divide the ranks of that dim.
        UnsupportedOperationError: several dims cut parameters.
    """

    def __init__(self, axes: Axes, size: int) -> None:
        if len(axes.shard) != 1:
            raise UnsupportedOperationError(
                "reshard_after_forward= as a number needs one sharded mesh dim; flatten the sharded mesh dims to one"
            )
        ranks = axes.mesh.shape[axes.shard[0]]
        if not 1 <= size <= ranks or ranks % size:
            raise ValueError(
                f"reshard_after_forward= as a number must divide the {ranks} ranks over which parameters are sharded, got {size}"
            )
        self.axes, self.size, self._dim = axes, size, axes.shard[0] + 1
        unnamed = axes.mesh._derive(axes.mesh._dims, None)
        self._mesh = unnamed.unflatten(axes.shard[0], (ranks // size, size))
        self._order = [axes.mesh.ranks.index(rank) for rank in self._mesh.ranks]  # members there, as members of the axes' mesh

    def keep(self, buffer: Any) -> Any:
        """This rank's part of a buffer of bytes that all of its neighbours hold whole."""

        def part(member: int, whole: Tensor) -> Tensor:
            start, length = self._bounds(member, whole.numel())
            return whole[start : start + length].clone()

        with torch.no_grad():
            return communicator_of(self.axes.mesh).map(part, buffer)

    def gathering(self, numel_of: Callable[[int], int]) -> Run:
        """What makes kept parts whole buffers; ``numel_of(member)``: of those."""

        def lengths_of(k: int) -> list[int]:
            group = [self._order[other] for other in self._mesh.members_of((self._dim,), k)]
            return [self._bounds(member, numel_of(member))[1] for member in group]

        bound = communicator_of(self._mesh).bind_gather((self._dim,), lengths_of, torch.uint8)
        back = [self._order.index(k) for k in range(len(self._order))]
        return lambda kept: bound(reordered(kept, self._order)).then(lambda local: reordered(local, back))

    def fill(self, row: Any, buffer: Any) -> None:
        """The buffer whole again; through ``.data``, which leaves the version counters alone that autograd checks."""
        communicator_of(self.axes.mesh).map(lambda member, own, whole: whole.data.copy_(own), row, buffer)

    def _bounds(self, member: int, numel: int) -> tuple[int, int]:
        position = self.axes.mesh.coordinates[member][self.axes.shard[0]] % self.size
        each = -(-numel // self.size)
        start = min(position * each, numel)
        return start, min(each, numel - start)
