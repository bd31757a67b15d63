"""Partial reshard: a few neighboring ranks share the unsharded values until backward (``reshard_after_forward=8``).

Backward then gathers from these ranks only, for example those of one host. It costs 1/8 of the memory of the unsharded values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .....comm import reordered
from .....comm.communicator import BoundCollective
from .....comm.map_ranks import communicator_of
from .....errors import UnsupportedOperationError
from ...settings.dp_modes import MeshAxes


class ReshardGroup:
    """Groups of ``size`` consecutive ranks along the mesh dim that shards parameters.

    Raises:
        ValueError: ``size`` does not divide the ranks of that dim.
        UnsupportedOperationError: several mesh dims shard parameters.
    """

    def __init__(self, axes: MeshAxes, size: int) -> None:
        if len(axes.shard) != 1:
            raise UnsupportedOperationError(
                "reshard_after_forward= as a number needs one sharded mesh dim; flatten the sharded mesh dims to one"
            )
        ranks = axes.mesh.shape[axes.shard[0]]
        if not 1 <= size <= ranks or ranks % size:
            raise ValueError(
                f"reshard_after_forward= as a number must divide the {ranks} ranks over which parameters are sharded, got {size}"
            )
        self.axes, self.size, self._group_dim = axes, size, axes.shard[0] + 1
        unnamed = axes.mesh._derive(axes.mesh._dims, None)
        self._mesh = unnamed.unflatten(axes.shard[0], (ranks // size, size))
        self._order = [axes.mesh.ranks.index(rank) for rank in self._mesh.ranks]  # its members, as members of the axes' mesh

    def shard_buffer(self, buffer: Any) -> Any:
        """Return the part that each member keeps of a byte buffer, which all ranks of its reshard group have in full."""

        def own_part(member: int, full: Tensor) -> Tensor:
            start, length = self._part_bounds(member, full.numel())
            return full[start : start + length].clone()

        with torch.no_grad():
            return communicator_of(self.axes.mesh).map(own_part, buffer)

    def bind_all_gather(self, numel_of: Callable[[int], int]) -> BoundCollective:
        """Return the bound collective that gathers the kept parts within a reshard group. ``numel_of(member)``: bytes in all."""

        def part_lengths(k: int) -> list[int]:
            group = [self._order[other] for other in self._mesh.members_of((self._group_dim,), k)]
            return [self._part_bounds(member, numel_of(member))[1] for member in group]

        bound = communicator_of(self._mesh).bind_row_all_gather((self._group_dim,), part_lengths, torch.uint8)
        inverse_order = [self._order.index(k) for k in range(len(self._order))]
        return lambda parts: bound(reordered(parts, self._order)).then(lambda local: reordered(local, inverse_order))

    def fill_buffer(self, gathered: Any, buffer: Any) -> None:
        """Copy gathered bytes into ``buffer``, through ``.data``: autograd's saved tensors must keep their version counters."""
        communicator_of(self.axes.mesh).map(lambda member, received, full: full.data.copy_(received), gathered, buffer)

    def _part_bounds(self, member: int, numel: int) -> tuple[int, int]:
        """Return the start and the length of a member's part of ``numel`` bytes."""
        position = self.axes.mesh.coordinates[member][self.axes.shard[0]] % self.size
        part_size = -(-numel // self.size)
        start = min(position * part_size, numel)
        return start, min(part_size, numel - start)
