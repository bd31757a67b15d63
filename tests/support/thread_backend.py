"""Thread backend: a minimal communication backend of six methods and a row of ``BACKENDS``, with ranks that are threads of a
process.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor.comm import Communicator, Pending, fold
from dtensor.comm.communicator import BoundCollective, BoundReduction, Dims
from dtensor.comm.map_ranks import BACKENDS
from dtensor.comm.pack import Box, Scatter, SendRecvPlan, Transfer, view_region
from dtensor.mesh.current_rank import run_as_member
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.mesh.root import Root


class Mailboxes:
    """Messages between threads by (ranks and number of the exchange, sender, receiver). Numbers allow exchanges to end in any
    order.
    """

    def __init__(self) -> None:
        self._boxes: defaultdict[Any, Queue[Any]] = defaultdict(Queue)
        self._counts: Counter[Any] = Counter()
        self._lock = threading.Lock()

    def exchange(self, group: Dims, me: int, letters: Sequence[Any]) -> Callable[[], list[Any]]:
        """Send ``letters[k]`` to member ``group[k]``; return a function that waits for all letters, by position."""
        with self._lock:
            self._counts[group, me] += 1
            which = group, self._counts[group, me]
            for other, letter in zip(group, letters, strict=True):
                self._boxes[which, me, other].put(letter)
            theirs = [self._boxes[which, other, me] for other in group]
        return lambda: [box.get(timeout=30) for box in theirs]


class ThreadCommunicator(Communicator):
    """The communicator of one rank, which is the thread that made it."""

    post = Mailboxes()

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.me: int = mesh.current_member()
        self.held = (self.me,)

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(self.me, *args, **kwargs)

    def _make_transfer(self, dims: Dims, transfer: Transfer) -> BoundCollective:
        return self._send_blocks(self.mesh.members_of(dims, self.me), self.me, transfer.route_of(self.me))

    def _make_transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> BoundCollective:
        position = ranks.index(self.mesh.ranks[self.me])
        return self._send_blocks(tuple(range(len(ranks))), position, transfer.route_of(position))

    def _make_all_reduce(self, dims: Dims, op: Any, dtype: torch.dtype) -> BoundReduction:
        def run(x: Tensor) -> Pending[Tensor]:
            receive = self._send_to_group(dims, [x.detach().clone()] * self.group_size(dims))
            return Pending(lambda: fold(receive(), op))

        return BoundReduction(run)

    def _make_reduce_scatter(self, dims: Dims, scatter: Scatter) -> BoundCollective:
        def run(x: Tensor) -> Pending[Tensor]:
            receive = self._send_to_group(dims, _copy_regions(x, scatter.chunks_of(self.me)))
            return Pending(lambda: fold(receive(), scatter.op))

        return run

    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        return self._send_to_group(dims, [value] * self.group_size(dims))()

    def _send_to_group(self, dims: Dims, letters: Sequence[Any]) -> Callable[[], list[Any]]:
        return self.post.exchange(self.mesh.members_of(dims, self.me), self.me, letters)

    def _send_blocks(self, group: Dims, me: int, route: SendRecvPlan) -> BoundCollective:
        """Return a collective that sends blocks of its input to the group and assembles the rank's new tensor from the received
        blocks.
        """

        def run(x: Tensor) -> Pending[Tensor]:
            result = x.new_empty(route.new)
            receive = self.post.exchange(group, me, _copy_regions(x, route.sends))
            if route.kept is not None:
                view_region(result, route.kept[1]).copy_(view_region(x.detach(), route.kept[0]))

            def finish() -> Tensor:
                for box, letter in zip(route.receives, receive(), strict=True):
                    if box is not None:
                        view_region(result, box).copy_(letter)
                return result

            return Pending(finish)

        return run


def _copy_regions(x: Tensor, boxes: Sequence[Box | None]) -> list[Tensor | None]:
    return [None if box is None else view_region(x.detach(), box).clone() for box in boxes]


def run_on_threads(monkeypatch: pytest.MonkeyPatch, ranks: int, program: Callable[[Callable[..., DeviceMesh]], Any]) -> list[Any]:
    """Run ``program(mesh_of)`` on one thread for each rank and return the results by rank. ``mesh_of(*shape)`` makes a mesh of
    the ranks.
    """
    monkeypatch.setitem(BACKENDS, "threads", ThreadCommunicator)

    def mesh_of(*shape: int) -> DeviceMesh:
        root = Root("cpu", tuple(range(ranks)), shape, None, "threads")
        return DeviceMesh("cpu", None, _root=root, _dims=tuple((dim,) for dim in range(len(shape))))

    def run_rank(rank: int) -> Any:
        with run_as_member(mesh_of(ranks)._root, rank):
            return program(mesh_of)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run_rank, range(ranks)))
