"""The communicator of a mesh whose ranks are processes of ``torch.distributed``.

Which algorithm runs depends on the backend, dtype, shapes and group size only, so all ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..mesh.device_mesh import DeviceMesh
from ..mesh.groups import Group, backend_of, group_of
from . import functional
from .backends import all_gather_object
from .binding import Dims, Reduction, Run, spanning
from .communicator import Communicator
from .fold import Op
from .functional import either
from .pending import Pending
from .reductions import bind_all_reduce, bind_scatter
from .regions import Scatter, Transfer
from .transfer import bind_direct, bind_transfer


class ProcessGroups(Communicator):
    """One member here; a process outside the mesh gets its inputs back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._member = mesh.current_member()
        self.held = () if self._member is None else (self._member,)
        self.talks = self._member is not None and dist.get_backend() != "fake"
        self._by_dims: dict[Dims, Group] = {}

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._member is None:
            return args[0] if args else None
        return fn(self._member, *args, **kwargs)

    def _group(self, dims: Dims) -> Group:
        found = self._by_dims.get(dims)
        if found is None:
            found = self._by_dims[dims] = group_of(self.mesh, dims)
        return found

    def _transfer(self, dims: Dims, transfer: Transfer) -> Run:
        group = self._group(dims)
        return either(bind_transfer(group, transfer), lambda: functional.bind_transfer(group, transfer))

    def _transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> Run:
        rank = dist.get_rank()
        if rank not in ranks:
            return Pending.of
        mesh = spanning(self.mesh, target)
        handle = dist.group.WORLD
        if mesh is not None and len(ranks) < dist.get_world_size():
            root = mesh._root
            whole = mesh._derive(tuple((dim,) for dim in range(len(root.shape))), root.names)
            handle = group_of(whole, range(whole.ndim)).handle
        in_torch = dist.get_process_group_ranks(handle)
        order = tuple(in_torch.index(rank) for rank in ranks)
        natural = order == tuple(range(len(in_torch)))
        backend = backend_of(handle, target.device_type)
        group = Group(handle, tuple(range(len(ranks))), ranks.index(rank), None if natural else order, backend)
        if len(in_torch) == len(ranks):
            return either(bind_transfer(group, transfer), lambda: functional.bind_transfer(group, transfer))
        return either(bind_direct(group, transfer.route_of(group.position)), functional.refusing_part)

    def _all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> Reduction:
        group = self._group(dims)
        return functional.beside(bind_all_reduce(group, op, dtype), group, op, dtype)

    def _reduce_scatter(self, dims: Dims, scatter: Scatter) -> Run:
        group = self._group(dims)
        return either(bind_scatter(group, scatter), lambda: functional.bind_scatter(group, scatter))

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        group = self._group(dims)
        values: list[Any] = [None] * group.size
        all_gather_object(values, value, group=group.handle)
        return group.to_mesh(values)
