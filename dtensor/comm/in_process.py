"""In-process backend: the communicator of a mesh with all ranks in this process. Collectives are functions of the list of shards.

It is deterministic: reductions add in group order. Each rank gets tensors of its own, as it would from another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..mesh.current_rank import RUNNING_RANK, run_as_member
from ..mesh.device_mesh import DeviceMesh
from ..ranks.per_rank import PerRank, count_ranks, merge_results, split_arguments
from ..ranks.rank_values import RankValues
from .communicator import BoundCollective, BoundReduction, Communicator, Dims, Local, check_same_shapes
from .local_reduce import Op, fold, row_major_copy
from .pack import Box, Scatter, SendRecvPlan, Transfer, view_region
from .pending import Pending

RegionCopy = tuple[int, Box, Box]  # source shard, region of it, region of the new block


class InProcess(Communicator):
    """The communicator of a mesh with all ranks here. On a submesh each copy of it communicates among its own ranks."""

    holds_all, has_other_processes = True, False

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.held = mesh.members

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` for one member after another, and merge the results to ``PerRank`` tensors."""
        members = self.mesh.members
        count = count_ranks((args, kwargs), len(members))
        root, results = self.mesh._root, []
        before = RUNNING_RANK.at
        try:
            for member, (shards, named) in zip(members, split_arguments(args, kwargs, count), strict=True):
                RUNNING_RANK.at = root, member  # as running_as does, without a context manager for each member and op
                results.append(fn(member, *shards, **named))
        finally:
            RUNNING_RANK.at = before
        return merge_results(results, RankValues)

    def local(self, shards: Sequence[Tensor]) -> PerRank:
        return PerRank(shards)

    def _make_transfer(self, dims: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer that copies regions between the shards of each group."""
        routes, copies = [transfer.route_of(member) for member in self.held], []
        for member, route in enumerate(routes):
            group = self.mesh.members_of(dims, member)
            copies.append((route.new, list(_list_copies(route, [routes[other] for other in group], group, group.index(member)))))
        return lambda x: Pending.of(_run_copies(self._shards(x), copies))

    def _make_transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer that copies regions between the shards of two meshes."""
        routes, copies = [transfer.route_of(position) for position in range(len(ranks))], []
        holders = [self.mesh.ranks.index(rank) if rank in self.mesh.ranks else -1 for rank in ranks]
        for position in map(ranks.index, target.ranks):
            route = routes[position]
            copies.append((route.new, list(_list_copies(route, routes, holders, position))))
        return lambda x: Pending.of(_run_copies(self._shards(x), copies))

    def _make_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> BoundReduction:
        """Return the all-reduce that reduces the local tensors of each group and copies the result to its members."""

        def reduce_groups(x: Local) -> Pending[Local]:
            """Reduce the local tensors of each group; each member gets a copy of the result."""
            shards, results = self._shards(x), {}
            for group in self._groups(dims):
                check_same_shapes({member: tuple(shards[member].shape) for member in group})
                with run_as_member(self.mesh._root, group[0]):  # a user's Monoid may call mesh.get_rank()
                    total = fold([shards[member] for member in group], op)
                results.update({member: row_major_copy(total) for member in group[1:]} | {group[0]: total})
            return Pending.of(PerRank(results[member] for member in self.held))

        return BoundReduction(reduce_groups)

    def _make_reduce_scatter(self, dims: Dims, scatter: Scatter) -> BoundCollective:
        """Return the reduce-scatter that reduces, for each member, its region of the local tensors of its group."""
        sources_of = []
        for member in self.held:
            group = self.mesh.members_of(dims, member)
            sources_of.append([(source, scatter.chunks_of(source)[group.index(member)]) for source in group])

        def reduce_regions(x: Local) -> Pending[Local]:
            """Reduce for each rank the regions of the local tensors that form its block of the result."""
            shards = self._shards(x)
            reduced = (fold([view_region(shards[source], box) for source, box in sources], scatter.op) for sources in sources_of)
            return Pending.of(PerRank(reduced))

        return reduce_regions

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        """Return the objects of all members of a group, in group order; an object of each rank gives ``RankValues``."""
        if not isinstance(value, RankValues):
            return [value] * self.group_size(dims)
        groups = [self.mesh.members_of(dims, member) for member in self.held]
        return [RankValues(value[group[k]] for group in groups) for k in range(len(groups[0]))]

    def _shards(self, x: Local) -> tuple[Tensor, ...]:
        """Return one tensor for each member; a plain tensor is shared by all members."""
        if not isinstance(x, PerRank):
            return (x,) * len(self.held)
        count_ranks(x, len(self.held))
        return x.shards


def _list_copies(
    route: SendRecvPlan, others: Sequence[SendRecvPlan], holders: Sequence[int], position: int
) -> Iterator[RegionCopy]:
    """Yield the copies that make the new block of group position ``position``; ``holders[k]`` is the shard of position k."""
    if route.kept is not None:
        yield holders[position], *route.kept
    for k, new in enumerate(route.receives):
        if new is not None and k != position:
            old = others[k].sends[position]
            assert old is not None, "what one receives another sends"
            yield holders[k], old, new


def _run_copies(shards: Sequence[Tensor], copies: Sequence[tuple[tuple[int, ...], list[RegionCopy]]]) -> PerRank:
    """Return new blocks, filled with the regions that they get from shards."""
    results = [shards[0].new_empty(shape) for shape, _ in copies]
    for result, (_, block_copies) in zip(results, copies, strict=True):
        for source, old, new in block_copies:
            view_region(result, new).copy_(view_region(shards[source].detach(), old))
    return PerRank(results)
