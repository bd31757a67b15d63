"""The communicator of a mesh on ``"meta"``: one representative rank (member 0), shapes and events, no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import Group
from .backend_base import Dims, Local, Reduction, Run
from .communicator import Communicator
from .local_reduce import Op
from .pack import Packing, Scatter, Transfer
from .pending import Pending
from .transfer import is_packed, packings


class DryRun(Communicator):
    """Every collective gives meta tensors of the right shapes; a reduce-scatter holds terms until it is waited for."""

    held, talks = (0,), False

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(0, *args, **kwargs)

    def _transfer(self, dims: Dims, transfer: Transfer) -> Run:
        like = self.mesh._root.stands_for
        if like is None or like.device_type != "cpu":  # a cluster, whose backend copies nothing into rows
            return _empty(transfer.route_of(0).new if transfer.new_of is None else transfer.new_of(0))
        route, members = transfer.route_of(0), self.mesh.members_of(dims, 0)
        group = Group(None, members, members.index(0), None, "gloo")
        return _in_rows(*packings(group, route)) if is_packed(group, transfer) else _empty(route.new)

    def _brought(self, dims: Dims, transfer: Transfer) -> int:
        return super()._brought(dims, transfer) if transfer.brings is None else transfer.brings

    def _transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> Run:
        return _empty(transfer.route_of(ranks.index(target.ranks[0])).new)

    def _all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> Reduction:
        return Reduction(lambda x: Pending.of(x.new_empty(x.shape)))

    def _reduce_scatter(self, dims: Dims, scatter: Scatter) -> Run:
        own = scatter.new(0)

        def run(x: Local) -> Pending[Local]:
            terms = x.new_empty((self.group_size(dims), *own))  # of all ranks, or this one's packed for all
            return Pending(lambda: terms.new_empty(own))

        return run

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        return [value] * self.group_size(dims)


def _in_rows(leaving: Packing, arriving: Packing) -> Run:
    """What leaves is there until it has arrived, and what arrives until it is in its place."""

    def run(x: Local) -> Pending[Local]:
        row = x if leaving.whole else x.new_empty(leaving.total)
        buffer = x.new_empty(arriving.shape if arriving.whole else arriving.total)
        return Pending(lambda: (buffer if arriving.whole else buffer.new_empty(arriving.shape), row)[0])

    return run


def _empty(shape: tuple[int, ...]) -> Run:
    return lambda x: Pending.of(x.new_empty(shape))
