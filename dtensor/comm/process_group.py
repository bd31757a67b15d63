"""The communicator of a mesh whose ranks are processes of ``torch.distributed``.

Which algorithm runs depends on the backend, dtype, shapes and group size only, so all ranks choose the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import Group, backend_of, beside_part, group_of, handle_of, order_in
from . import traced_collectives
from .backend_base import Dims, Reduction, Run, spanning
from .checked_collectives import lengths_of, watched
from .communicator import Communicator
from .flat_rows import gathered
from .local_reduce import Op
from .pack import Scatter, Transfer
from .pending import Pending
from .reductions import bind_all_reduce, bind_scatter
from .traced_collectives import either
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
        own = None if transfer.said else lengths_of(transfer.route_of(group.members[group.position]))
        said = f"{transfer.kind} {transfer.said}".rstrip()
        run = watched(group, said, self._over(dims), bind_transfer(group, transfer), lengths=own)
        return either(run, lambda: traced_collectives.bind_transfer(group, transfer))

    def _transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> Run:
        rank = dist.get_rank()
        if rank not in ranks:
            return Pending.of
        mesh = spanning(self.mesh, target)
        handle: Any = dist.group.WORLD
        if mesh is not None and len(ranks) < dist.get_world_size():
            whole = mesh._get_root_mesh()
            handle = handle_of(whole, range(whole.ndim))
        whole_name, all_take_part = handle.group_name, dist.get_world_size(handle) == len(ranks)
        handle = beside_part(handle, ranks, target.device_type)
        name = whole_name if all_take_part else handle.group_name
        order, backend = order_in(handle, ranks), backend_of(handle, target.device_type)
        group = Group(handle, tuple(range(len(ranks))), ranks.index(rank), order, backend, name)
        said, over = f"transfer to another mesh {transfer.said}", f"ranks {', '.join(map(str, ranks))}"
        own = transfer.route_of(group.position)
        if dist.get_world_size(handle) == len(ranks):
            run = watched(group, said, over, bind_transfer(group, transfer), lengths=lengths_of(own))
            return either(run, lambda: traced_collectives.bind_transfer(group, transfer))
        return either(
            watched(group, said, over, bind_direct(group, own), lengths=lengths_of(own)), traced_collectives.refusing_part
        )

    def _all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> Reduction:
        group, made = self._group(dims), bind_all_reduce(self._group(dims), op, dtype)
        said, over = f"all_reduce({op})", self._over(dims)
        run = watched(group, said, over, made.run, compare_shape=True)
        taking = None if made.taking is None else watched(group, said, over, made.taking, compare_shape=True)
        return traced_collectives.beside(Reduction(run, taking, made.at_once), group, op, dtype)

    def _reduce_scatter(self, dims: Dims, scatter: Scatter) -> Run:
        group, said = self._group(dims), f"reduce_scatter({scatter.op}) {scatter.said}"
        run = watched(group, said, self._over(dims), bind_scatter(group, scatter))
        return either(run, lambda: traced_collectives.bind_scatter(group, scatter))

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        """In two transfers: how long what each rank says is, then all of it."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        position = self._group(dims).position
        lengths = self._gathered(dims, torch.tensor([len(own)], device="cpu"), [1] * self.group_size(dims), position).tolist()
        rows = self._gathered(dims, own, lengths, position).split(lengths)
        return [pickle.loads(row.numpy().tobytes()) for row in rows]

    def _gathered(self, dims: Dims, row: torch.Tensor, lengths: list[int], position: int) -> torch.Tensor:
        route = gathered([(length,) for length in lengths], position)
        group, transfer = self._group(dims), Transfer(lambda _: route, row.dtype, "all_gather", blocking=True)
        run = watched(group, f"all_gather of what ranks say, {lengths}", self._over(dims), bind_transfer(group, transfer))
        whole: torch.Tensor = run(row.to(self.mesh.device_type)).wait()
        return whole.cpu()

    def _over(self, dims: Dims) -> str:
        return repr(self.mesh.named(dims))
