"""The communicator of a mesh whose ranks are processes of ``torch.distributed``.

Which algorithm runs depends on the backend, dtype, shapes and group size only, so all ranks choose the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.device_mesh import DeviceMesh
from ..mesh.groups import Group, group_of
from ..placement import Monoid
from . import events
from .backends import (
    all_gather_object,
    all_gather_single,
    all_reduction,
    broadcast,
    directly,
    exchange,
    exchange_directly,
    flat_bytes,
    from_bytes,
    native_reduction,
    reduce_scatter_single,
    started,
    traits_of,
)
from .communicator import Communicator, Pending, Shape
from .fold import Op, check_reduction, dense, fold
from .regions import Box, Route
from .transfer import all_reduce_in_place, bind_scatter, bind_transfer, reduced_by_all

Native = tuple[Callable[[Tensor, bool], "dist.Work | None"], torch.dtype]


class ProcessGroups(Communicator):
    """One member here; a process outside the mesh gets its inputs back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._member = mesh.current_member()
        self._by_dims: dict[tuple[int, ...], Group] = {}
        self._native: dict[tuple[tuple[int, ...], str, torch.dtype], Native | None] = {}

    @property
    def _absent(self) -> bool:
        return self._member is None

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._member is None:
            return args[0] if args else None
        return fn(self._member, *args, **kwargs)

    def _group(self, mesh_dims: tuple[int, ...]) -> Group:
        found = self._by_dims.get(mesh_dims)
        if found is None:
            found = self._by_dims[mesh_dims] = group_of(self.mesh, mesh_dims)
        return found

    def _groups(self, mesh_dims: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        return [self._group(mesh_dims).members]

    # --- bound ---------------------------------------------------------------------------------------------------
    def _bind_transfer(
        self, mesh_dims: tuple[int, ...], route_of: Callable[[int], Route], dtype: torch.dtype, kind: str, traffic_of: Any = None
    ) -> Callable[[Tensor, bool], Pending[Tensor]]:
        return bind_transfer(self._group(mesh_dims), route_of, dtype, kind == "all_gather", traffic_of)

    def _bind_reduce_scatter(
        self,
        mesh_dims: tuple[int, ...],
        chunks_of: Callable[[int], tuple[Box, ...]],
        op: Op,
        old: Callable[[int], Shape],
        dtype: torch.dtype,
    ) -> Callable[[Tensor, bool], Pending[Tensor]]:
        group = self._group(mesh_dims)
        member = group.members[group.position]
        return bind_scatter(group, tuple(old(member)), chunks_of(member), op, dtype)

    def bind_all_reduce(
        self, mesh_dims: Sequence[int], op: Op, dtype: torch.dtype
    ) -> tuple[Callable[..., Tensor], Callable[..., Pending[Tensor]] | None]:
        mesh_dims = tuple(mesh_dims)
        size = self.group_size(mesh_dims)
        native = None if self._absent or size == 1 else self._natively(mesh_dims, op, dtype)
        if native is None or native[1] is not dtype:
            return super().bind_all_reduce(mesh_dims, op, dtype)
        check_reduction(op, dtype)
        reduce, _ = native

        def shown(x: Tensor, taken: bool) -> Tensor:
            if events.listeners:
                self._report("all_reduce", mesh_dims, events.reduced(x.numel() * x.dtype.itemsize, size))
            return x if taken else dense(x)

        def all_reduce(x: Tensor, taken: bool = False) -> Tensor:
            result = shown(x, taken)
            reduce(result, False)
            return result

        def start_all_reduce(x: Tensor, taken: bool = False) -> Pending[Tensor]:
            result = shown(x, taken)
            return started(reduce(result, True), lambda: result)

        return all_reduce, start_all_reduce

    # --- reductions ----------------------------------------------------------------------------------------------
    def _all_reduce(self, x: Tensor, mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Tensor]:
        native = self._natively(mesh_dims, op, x.dtype)
        if native is not None:
            reduce, dtype = native
            seen = result = dense(x)
            if dtype is not x.dtype:
                seen = torch.view_as_real(result) if x.is_complex() else result.view(dtype)
            return started(reduce(seen, async_op), lambda: result)
        group = self._group(mesh_dims)
        total = x.numel() * x.dtype.itemsize * group.size
        # A monoid need not work element by element, so its terms stay whole.
        traits = traits_of(group)
        if isinstance(op, Monoid) or total <= traits.one_round_bytes:
            return reduced_by_all(group, x, op, async_op)
        if traits.direct_bytes < sys.maxsize:
            return all_reduce_in_place(group, x, op)
        return self._all_reduce_in_chunks(group, x, op, async_op)

    def _natively(self, mesh_dims: tuple[int, ...], op: Op, dtype: torch.dtype) -> Native | None:
        """The backend's own all-reduce, and the dtype to view the data as; None if the fold is ours."""
        if not isinstance(op, str):
            return None
        key = (mesh_dims, op, dtype)
        if key not in self._native:
            group = self._group(mesh_dims)
            found = native_reduction(group, op, dtype)
            self._native[key] = None if found is None else (all_reduction(group, found[0]), found[1])
        return self._native[key]

    def _all_reduce_in_chunks(self, group: Group, x: Tensor, op: Op, async_op: bool) -> Pending[Tensor]:
        """Reduce-scatter, then all-gather: the second round starts at ``wait()``, which all ranks reach in one order."""
        chunks = x.detach().reshape(-1).tensor_split(group.size)
        own = chunks[group.position]
        arrived = exchange(group, chunks, [own.shape] * group.size, async_op)

        def finish() -> Tensor:
            reduced = fold(arrived.wait(), op)
            return torch.cat(exchange(group, [reduced] * group.size, [chunk.shape for chunk in chunks], False).wait()).view(
                x.shape
            )

        return Pending(finish)

    def _reduce_scatter(self, chunks: Sequence[Tensor], mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Tensor]:
        group = self._group(mesh_dims)
        own = chunks[group.position]
        native = native_reduction(group, op, own.dtype)
        if native is not None and all(chunk.shape == own.shape for chunk in chunks):
            packed = torch.cat([flat_bytes(chunk) for chunk in group.to_torch(chunks)]).view(native[1])
            result = torch.empty(own.shape, dtype=own.dtype, device=own.device)
            flat = result.reshape(-1).view(native[1])
            work = reduce_scatter_single(flat, packed, native[0], group=group.handle, async_op=async_op)
            return started(work, lambda: result)
        if directly(group, [tuple(chunk.shape) for chunk in chunks], own.dtype):  # all members have chunks of these shapes
            arrived = exchange_directly(group, chunks, [tuple(own.shape)] * group.size)
        else:
            arrived = exchange(group, chunks, [own.shape] * group.size, async_op)
        return Pending(lambda: fold(arrived.wait(), op))

    # --- transfers -----------------------------------------------------------------------------------------------
    def _all_gather(
        self, x: Tensor, mesh_dims: tuple[int, ...], shape_of: Callable[[int], Shape], async_op: bool
    ) -> Pending[list[Tensor]]:
        group = self._group(mesh_dims)
        shapes = [tuple(shape_of(member)) for member in group.members]
        if directly(group, shapes, x.dtype):
            arrived, mine = exchange_directly(group, [x] * group.size, shapes), group.position
            return Pending(lambda: [dense(row) if k == mine else row for k, row in enumerate(arrived.wait())])
        if not traits_of(group).reduces or any(shape != shapes[0] for shape in shapes):
            return exchange(group, [x] * group.size, shapes, async_op)
        sent = flat_bytes(x)
        buffer = torch.empty(group.size * sent.numel(), dtype=torch.uint8, device=x.device)
        work = all_gather_single(buffer, sent, group=group.handle, async_op=async_op)
        rows = group.to_mesh(buffer.chunk(group.size) if sent.numel() else [buffer] * group.size)
        return started(work, lambda: [from_bytes(row, shapes[0], x.dtype) for row in rows])

    def _all_to_all(
        self, chunks: Sequence[Tensor], mesh_dims: tuple[int, ...], shape_of: Callable[[int, int], Shape], async_op: bool
    ) -> Pending[list[Tensor]]:
        group = self._group(mesh_dims)
        me = group.members[group.position]
        return exchange(group, chunks, [tuple(shape_of(source, me)) for source in group.members], async_op)

    def _broadcast(self, x: Tensor, mesh_dims: tuple[int, ...], source: int, async_op: bool) -> Pending[Tensor]:
        group = self._group(mesh_dims)
        result = dense(x) if group.position == source else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sender = self.mesh.ranks[group.members[source]]
        work = broadcast(flat_bytes(result), sender, group=group.handle, async_op=async_op)
        return started(work, lambda: result)

    def _all_gather_numbers(self, row: Sequence[int], mesh_dims: tuple[int, ...]) -> list[list[int]]:
        own = torch.tensor(row, device=self.mesh.device_type)
        rows: list[list[int]] = torch.stack(self._all_gather(own, mesh_dims, lambda _: own.shape, False).wait()).tolist()
        return rows

    def _all_gather_object(self, value: Any, mesh_dims: tuple[int, ...]) -> list[Any]:
        group = self._group(mesh_dims)
        values: list[Any] = [None] * group.size
        all_gather_object(values, value, group=group.handle)
        return group.to_mesh(values)
