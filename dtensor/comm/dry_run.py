"""The communicator of a mesh on ``"meta"``: one representative rank (member 0), shapes and events, no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .communicator import Communicator, Local, Pending, Shape
from .fold import Op
from .regions import Box, Route


class DryRun(Communicator):
    """Every collective returns meta tensors of the right shapes at once."""

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(0, *args, **kwargs)

    def _bind_transfer(
        self, mesh_dims: tuple[int, ...], route_of: Callable[[int], Route], dtype: Any, kind: str, traffic_of: Any = None
    ) -> Callable[[Local, bool], Pending[Local]]:
        shape = route_of(0).new
        return lambda x, async_op: Pending.of(x.new_empty(shape))

    def _bind_reduce_scatter(
        self,
        mesh_dims: tuple[int, ...],
        chunks_of: Callable[[int], tuple[Box, ...]],
        op: Op,
        old: Callable[[int], Shape],
        dtype: Any,
    ) -> Callable[[Local, bool], Pending[Local]]:
        shape = chunks_of(0)[self.mesh.members_of(mesh_dims, 0).index(0)].size
        return lambda x, async_op: Pending.of(x.new_empty(shape))

    def _all_reduce(self, x: Local, mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]:
        return Pending.of(x.new_empty(x.shape))

    def _all_gather(
        self, x: Local, mesh_dims: tuple[int, ...], shape_of: Callable[[int], Shape], async_op: bool
    ) -> Pending[list[Local]]:
        return Pending.of([x.new_empty(tuple(shape_of(member))) for member in self.mesh.members_of(mesh_dims, 0)])

    def _reduce_scatter(self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]:
        return Pending.of(chunks[0].new_empty(chunks[0].shape))

    def _all_to_all(
        self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], shape_of: Callable[[int, int], Shape], async_op: bool
    ) -> Pending[list[Local]]:
        return Pending.of([chunks[0].new_empty(tuple(shape_of(source, 0))) for source in self.mesh.members_of(mesh_dims, 0)])

    def _broadcast(self, x: Local, mesh_dims: tuple[int, ...], source: int, async_op: bool) -> Pending[Local]:
        return Pending.of(x.new_empty(x.shape))

    def _all_gather_object(self, value: Any, mesh_dims: tuple[int, ...]) -> list[Any]:
        return [value] * self.group_size(mesh_dims)

    def _groups(self, mesh_dims: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        return [self.mesh.members_of(mesh_dims, 0)]
