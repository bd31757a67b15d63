"""The communicator of a mesh whose ranks all live in this process: collectives are functions on the list of shards.

Deterministic: reductions fold in group order. Every rank gets tensors of its own, as it would from another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..errors import LayoutError
from ..mesh.current_rank import RUNNING, running_as
from ..mesh.device_mesh import DeviceMesh
from ..ranks.joint_function import watch_functions
from ..ranks.per_rank import PerRank, count_ranks, merge, parts
from ..ranks.rank_values import RankValues
from .communicator import Communicator, Local, Pending, Shape
from .fold import Op, dense, fold
from .regions import Box, Route, region


class InProcess(Communicator):
    """All members here. On a submesh every copy of it communicates, each among its own ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        watch_functions()

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        members = self.mesh.members
        count = count_ranks((args, kwargs), len(members))
        root, results = self.mesh._root, []
        before = RUNNING.at
        try:
            for member, (own, named) in zip(members, parts(args, kwargs, count), strict=True):
                RUNNING.at = root, member  # as running_as does, without a context manager for each member and op
                results.append(fn(member, *own, **named))
        finally:
            RUNNING.at = before
        return merge(results, RankValues)

    def _bind_transfer(
        self, mesh_dims: tuple[int, ...], route_of: Callable[[int], Route], dtype: Any, kind: str, traffic_of: Any = None
    ) -> Callable[[Local, bool], Pending[Local]]:
        groups = {member: group for group in self._groups(mesh_dims) for member in group}
        position = {member: group.index(member) for member, group in groups.items()}
        moves = [_copies(member, groups[member], position, route_of) for member in self.mesh.members]
        shapes = [route_of(member).new for member in self.mesh.members]

        def run(x: Local, async_op: bool) -> Pending[Local]:
            shards = self._shards(x)
            results = [shards[0].new_empty(shape) for shape in shapes]
            for result, copies in zip(results, moves, strict=True):
                for source, old, new in copies:
                    region(result, new).copy_(region(shards[source].detach(), old))
            return Pending.of(PerRank(results))

        return run

    def _bind_reduce_scatter(
        self,
        mesh_dims: tuple[int, ...],
        chunks_of: Callable[[int], tuple[Box, ...]],
        op: Op,
        old: Callable[[int], Shape],
        dtype: Any,
    ) -> Callable[[Local, bool], Pending[Local]]:
        def run(x: Local, async_op: bool) -> Pending[Local]:
            shards, results = self._shards(x), {}
            for group in self._groups(mesh_dims):
                for k, member in enumerate(group):
                    results[member] = fold([region(shards[source], chunks_of(source)[k]) for source in group], op)
            return Pending.of(self._per_rank(results))

        return run

    def _all_reduce(self, x: Local, mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]:
        shards, results = self._shards(x), {}
        for group in self._groups(mesh_dims):
            with self._at(group):
                total = fold(_same_shape([shards[member] for member in group], group), op)
            results.update({member: dense(total) for member in group[1:]} | {group[0]: total})
        return Pending.of(self._per_rank(results))

    def _all_gather(
        self, x: Local, mesh_dims: tuple[int, ...], shape_of: Callable[[int], Shape], async_op: bool
    ) -> Pending[list[Local]]:
        shards, groups = self._shards(x), self._groups(mesh_dims)

        def from_position(j: int) -> PerRank:
            sources = ((group[j], member) for group in groups for member in group)
            return self._per_rank({member: _copy(shards[source], shape_of(source)) for source, member in sources})

        return Pending.of([from_position(j) for j in range(len(groups[0]))])

    def _reduce_scatter(self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]:
        parts, results = [self._shards(chunk) for chunk in chunks], {}
        for group in self._groups(mesh_dims):
            with self._at(group):
                for k, member in enumerate(group):
                    results[member] = fold(_same_shape([parts[k][source] for source in group], group), op)
        return Pending.of(self._per_rank(results))

    def _all_to_all(
        self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], shape_of: Callable[[int, int], Shape], async_op: bool
    ) -> Pending[list[Local]]:
        parts, groups = [self._shards(chunk) for chunk in chunks], self._groups(mesh_dims)

        def from_position(j: int) -> PerRank:
            routes = ((group[j], k, member) for group in groups for k, member in enumerate(group))
            return self._per_rank({member: _copy(parts[k][source], shape_of(source, member)) for source, k, member in routes})

        return Pending.of([from_position(j) for j in range(len(groups[0]))])

    def _broadcast(self, x: Local, mesh_dims: tuple[int, ...], source: int, async_op: bool) -> Pending[Local]:
        shards = self._shards(x)
        return Pending.of(
            self._per_rank({member: dense(shards[group[source]]) for group in self._groups(mesh_dims) for member in group})
        )

    def _all_gather_object(self, value: Any, mesh_dims: tuple[int, ...]) -> list[Any]:
        if not isinstance(value, RankValues):
            return [value] * self.group_size(mesh_dims)
        groups = [self.mesh.members_of(mesh_dims, member) for member in self.mesh.members]
        return [RankValues(value[group[k]] for group in groups) for k in range(len(groups[0]))]

    def _groups(self, mesh_dims: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        cache: dict[tuple[int, ...], list[tuple[int, ...]]] = self.__dict__.setdefault("_groups_of", {})
        found = cache.get(mesh_dims)
        if found is None:
            found = cache[mesh_dims] = list(
                dict.fromkeys(self.mesh.members_of(mesh_dims, member) for member in self.mesh.members)
            )
        return found

    def _at(self, group: tuple[int, ...]) -> AbstractContextManager[None]:
        """A user's monoid may ask the mesh where it runs."""
        return running_as(self.mesh._root, group[0])

    def _shards(self, x: Local) -> tuple[Tensor, ...]:
        """One tensor per member; a plain tensor is every member's."""
        if not isinstance(x, PerRank):
            return (x,) * len(self.mesh.members)
        count_ranks(x, len(self.mesh.members))
        return x.shards

    def _per_rank(self, results: dict[int, Tensor]) -> PerRank:
        return PerRank(results[member] for member in self.mesh.members)


def _copies(
    member: int, group: tuple[int, ...], position: dict[int, int], route_of: Callable[[int], Route]
) -> list[tuple[int, Box, Box]]:
    """From whom which region of the old block comes to which region of the new one."""
    route, mine = route_of(member), position[member]
    copies = [] if route.kept is None else [(member, *route.kept)]
    for source, new in zip(group, route.receives, strict=True):
        if new is not None and source != member:
            old = route_of(source).sends[mine]
            assert old is not None, "what one receives another sends"
            copies.append((source, old, new))
    return copies


def _copy(piece: Tensor, shape: Shape) -> Tensor:
    return dense(piece).view(tuple(shape))  # an empty piece takes the announced shape, as it does when sent


def _same_shape(terms: list[Tensor], group: tuple[int, ...]) -> list[Tensor]:
    if any(term.shape != terms[0].shape for term in terms):
        shapes = {member: tuple(term.shape) for member, term in zip(group, terms, strict=True)}
        raise LayoutError(f"the terms of a reduction must have one shape on all ranks, members hold {shapes}")
    return terms
