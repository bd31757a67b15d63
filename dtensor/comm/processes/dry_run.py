"""Dry run: the communicator of a mesh on ``"meta"``, with one representative rank (member 0), shapes and events, and no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...mesh.device_mesh import DeviceMesh
from ...mesh.process_groups import Group
from ..communicator import BoundCollective, BoundReduction, Communicator, Dims, Local
from ..local_reduce import Op
from ..pack import Packing, Scatter, Transfer
from ..pending import Pending
from .transfer import is_packed, make_packings


class DryRun(Communicator):
    """The communicator of a dry run. It returns meta tensors; a reduce-scatter keeps its addends until ``wait()``."""

    held, has_other_processes = (0,), False

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(0, *args, **kwargs)

    def _make_transfer(self, dims: Dims, transfer: Transfer) -> BoundCollective:
        """Return a transfer that sends nothing, and allocates the memory that the backend would."""
        like = self.mesh._root.simulated_mesh
        if like is None or like.device_type != "cpu":  # a cluster with a backend that copies nothing into rows
            return _make_empty(transfer.route_of(0).new if transfer.new_of is None else transfer.new_of(0))
        route, members = transfer.route_of(0), self.mesh.members_of(dims, 0)
        group = Group(None, members, members.index(0), None, "gloo")
        return _pack_and_exchange(*make_packings(group, route)) if is_packed(group, transfer) else _make_empty(route.new)

    def _max_received(self, dims: Dims, transfer: Transfer) -> int:
        return super()._max_received(dims, transfer) if transfer.max_received is None else transfer.max_received

    def _make_transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> BoundCollective:
        return _make_empty(transfer.route_of(ranks.index(target.ranks[0])).new)

    def _make_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> BoundReduction:
        """Return an all-reduce that sends nothing and allocates its result."""
        return BoundReduction(lambda x: Pending.of(x.new_empty(x.shape)))

    def _make_reduce_scatter(self, dims: Dims, scatter: Scatter) -> BoundCollective:
        """Return a reduce-scatter that sends nothing, and allocates the received addends and the result."""
        own = scatter.new(0)

        def run_scatter(x: Local) -> Pending[Local]:
            addends = x.new_empty((self.group_size(dims), *own))  # those received from all ranks, or its own packed for all ranks
            return Pending(lambda: addends.new_empty(own))

        return run_scatter

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        return [value] * self.group_size(dims)


def _pack_and_exchange(send_packing: Packing, recv_packing: Packing) -> BoundCollective:
    """Return a collective with the memory of a packed exchange: a row until ``wait()``, a buffer until it is unpacked."""

    def run_exchange(x: Local) -> Pending[Local]:
        """Allocate the row to send and the receive buffer; ``wait()`` allocates the result. No data is sent."""
        row = x if send_packing.is_block else x.new_empty(send_packing.total)
        buffer = x.new_empty(recv_packing.shape if recv_packing.is_block else recv_packing.total)
        return Pending(lambda: (buffer if recv_packing.is_block else buffer.new_empty(recv_packing.shape), row)[0])

    return run_exchange


def _make_empty(shape: tuple[int, ...]) -> BoundCollective:
    """Return a collective that sends nothing and returns an empty tensor of ``shape``."""
    return lambda x: Pending.of(x.new_empty(shape))
