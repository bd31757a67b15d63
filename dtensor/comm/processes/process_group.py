"""Process-group backend: the communicator of a mesh with ranks that are processes of ``torch.distributed``.

The algorithm depends only on backend, dtype, shapes and group size, so all ranks choose the same.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...mesh.device_mesh import DeviceMesh
from ...mesh.process_groups import Group, backend_name, get_group, get_torch_group, library_subgroup, torch_rank_order
from ..communicator import BoundCollective, BoundReduction, Communicator, Dims, containing_mesh
from ..flat_rows import row_gather_route
from ..local_reduce import Op
from ..pack import Scatter, Transfer
from ..pending import Pending
from . import traced_collectives
from .checked_collectives import send_recv_lengths, wrap_checked
from .reductions import bind_group_all_reduce, bind_group_reduce_scatter
from .traced_collectives import select_when_traced
from .transfer import bind_direct_messages, bind_group_transfer


class ProcessGroups(Communicator):
    """The communicator of a mesh of processes. This process holds one member; outside the mesh it gets its inputs back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._member = mesh.current_member()
        self.held = () if self._member is None else (self._member,)
        self.has_other_processes = self._member is not None and dist.get_backend() != "fake"
        self._by_dims: dict[Dims, Group] = {}

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn(member, *args)`` for the rank of this process; outside of the mesh return the first argument."""
        if self._member is None:
            return args[0] if args else None
        return fn(self._member, *args, **kwargs)

    def _group(self, dims: Dims) -> Group:
        """Return the group of this rank along mesh dims ``dims``; made once."""
        group = self._by_dims.get(dims)
        if group is None:
            group = self._by_dims[dims] = get_group(self.mesh, dims)
        return group

    def _make_transfer(self, dims: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer within the groups over mesh dims: each call is compared with other ranks, and can be traced."""
        group = self._group(dims)
        lengths = None if transfer.description else send_recv_lengths(transfer.route_of(group.members[group.position]))
        description = f"{transfer.kind} {transfer.description}".rstrip()
        run = wrap_checked(group, description, self._name_dims(dims), bind_group_transfer(group, transfer), lengths=lengths)
        return select_when_traced(run, lambda: traced_collectives.bind_traced_transfer(group, transfer))

    def _make_transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer between the ranks of two meshes, over a group that contains both."""
        rank = dist.get_rank()
        if rank not in ranks:
            return Pending.of
        mesh = containing_mesh(self.mesh, target)
        handle: Any = dist.group.WORLD
        if mesh is not None and len(ranks) < dist.get_world_size():
            root = mesh._get_root_mesh()
            handle = get_torch_group(root, range(root.ndim))
        whole_name, all_take_part = handle.group_name, dist.get_world_size(handle) == len(ranks)
        handle = library_subgroup(handle, ranks, target.device_type)
        name = whole_name if all_take_part else handle.group_name
        order, backend = torch_rank_order(handle, ranks), backend_name(handle, target.device_type)
        group = Group(handle, tuple(range(len(ranks))), ranks.index(rank), order, backend, name)
        description, mesh_dims = f"transfer to another mesh {transfer.description}", f"ranks {', '.join(map(str, ranks))}"
        route = transfer.route_of(group.position)
        if dist.get_world_size(handle) == len(ranks):
            run = wrap_checked(
                group, description, mesh_dims, bind_group_transfer(group, transfer), lengths=send_recv_lengths(route)
            )
            return select_when_traced(run, lambda: traced_collectives.bind_traced_transfer(group, transfer))
        return select_when_traced(
            wrap_checked(group, description, mesh_dims, bind_direct_messages(group, route), lengths=send_recv_lengths(route)),
            traced_collectives.raise_without_group,
        )

    def _make_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> BoundReduction:
        """Return the all-reduce of these groups: each call is compared with other ranks, and can be traced."""
        group, bound = self._group(dims), bind_group_all_reduce(self._group(dims), op, dtype)
        description, mesh_dims = f"all_reduce({op})", self._name_dims(dims)
        wrap = functools.partial(wrap_checked, group, description, mesh_dims, compare_shape=True)
        run_donated = None if bound.run_donated is None else wrap(bound.run_donated)
        return traced_collectives.add_traced_reduction(
            BoundReduction(wrap(bound.run), run_donated, bound.at_once), group, op, dtype
        )

    def _make_reduce_scatter(self, dims: Dims, scatter: Scatter) -> BoundCollective:
        """Return the reduce-scatter of these groups: each call is compared with other ranks, and can be traced."""
        group, description = self._group(dims), f"reduce_scatter({scatter.op}) {scatter.description}"
        run = wrap_checked(group, description, self._name_dims(dims), bind_group_reduce_scatter(group, scatter))
        return select_when_traced(run, lambda: traced_collectives.bind_traced_scatter(group, scatter))

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        """Pickle ``value``, and return the values of all ranks: one transfer gathers the lengths, one the bytes."""
        encoded = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        position = self._group(dims).position
        lengths = self._gather_row(
            dims, torch.tensor([len(encoded)], device="cpu"), [1] * self.group_size(dims), position
        ).tolist()
        rows = self._gather_row(dims, encoded, lengths, position).split(lengths)
        return [pickle.loads(row.numpy().tobytes()) for row in rows]

    def _gather_row(self, dims: Dims, row: torch.Tensor, lengths: list[int], position: int) -> torch.Tensor:
        """Gather rows of these lengths from all ranks of the group into one row on the CPU."""
        route = row_gather_route([(length,) for length in lengths], position)
        group, transfer = self._group(dims), Transfer(lambda _: route, row.dtype, "all_gather", blocking=True)
        run = wrap_checked(
            group, f"all_gather of pickled objects, {lengths}", self._name_dims(dims), bind_group_transfer(group, transfer)
        )
        rows: torch.Tensor = run(row.to(self.mesh.device_type)).wait()
        return rows.cpu()

    def _name_dims(self, dims: Dims) -> str:
        return repr(self.mesh.named(dims))
