"""What a backend of communication implements, and the one form of its collectives: bound, then run any number of times.

A backend is a class with six methods, ``map`` and the five with an underscore, each for groups of two ranks or more. What all
share stands here, once: groups of one rank, ranks outside the mesh, events, recording.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..base.caches import Shared
from ..base.recorder_hooks import ACTIVE, current, site
from ..base.torch_internals import count_dispatch_modes, profiler_enabled
from ..base.tracing import shows_ranges
from ..mesh.device_mesh import DeviceMesh
from ..ranks.per_rank import shards_of
from . import events
from .local_reduce import Op, check_reduction, fold
from .pack import Scatter, Transfer
from .pending import Pending

# A torch.Tensor with process groups, a PerRank of them in one process, a meta tensor in a dry run.
Local: TypeAlias = Any
Run: TypeAlias = Callable[[Local], Pending[Local]]
Dims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A bound all-reduce.

    Attributes:
        run: of a local of the dtype it was bound for.
        taking: the same of a row-major one that nobody needs any more: its memory may be that of the result.
        at_once: nobody waits for this rank's ``wait()``, so that it may come at any time.
    """

    run: Run
    taking: Run | None = None
    at_once: bool = False


class Binding(ABC):
    """The bound collectives over the dims of one mesh; see :class:`.communicator.Communicator`.

    Attributes:
        held: the members whose locals are here: all in one process, this process's own, none outside the mesh.
        holds_all: whether that are all, and locals those of all ranks as one (:class:`..ranks.per_rank.PerRank`).
        talks: whether there may be others to ask.
    """

    held: Sequence[int]
    holds_all: bool = False
    talks: bool = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._kept: Shared[Any, Any] = Shared(128, 128)
        self._bound = self._kept.part()

    # --- a backend's part ----------------------------------------------------------------------------------------------
    @abstractmethod
    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(member, *args, **kwargs)`` once per member held here, each with its own part of every ``PerRank``."""

    @abstractmethod
    def _transfer(self, dims: Dims, transfer: Transfer) -> Run:
        """Binds a transfer within the groups over mesh dims."""

    @abstractmethod
    def _transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> Run:
        """Binds one from this mesh to another; its "members" are positions in ``ranks``, those of both meshes."""

    @abstractmethod
    def _all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> Reduction: ...

    @abstractmethod
    def _reduce_scatter(self, dims: Dims, scatter: Scatter) -> Run: ...

    @abstractmethod
    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]: ...

    # --- bound collectives: what follows from groups and regions is worked out once ------------------------------------------
    def bind_transfer(self, mesh_dims: Sequence[int], transfer: Transfer) -> Run:
        """Every member's new block, of the regions that others send and that it keeps."""
        dims = tuple(mesh_dims)
        if not self.held:
            return Pending.of
        nbytes = functools.cache(lambda: self._brought(dims, transfer) * transfer.dtype.itemsize)
        return self._issuing(transfer.kind, dims, self._transfer(dims, transfer), lambda _: nbytes())

    def _brought(self, dims: Dims, transfer: Transfer) -> int:
        """Elements that it brings to a rank, the most over ranks."""
        return events.routed(self._groups(dims), transfer.route_of)

    def bind_transfer_to(self, target: DeviceMesh, ranks: Sequence[int], transfer: Transfer) -> Run:
        """The local on ``target`` of what is given as the local on this mesh.

        ``ranks`` are those of both meshes, and ``transfer.route_of(position)`` is the part of the rank at that position. Ranks of
        neither mesh do nothing. It counts as one all-to-all where one of the meshes has all the ranks, else as one
        ``"send_recv"``.
        """
        run, everywhere = self._transfer_to(target, tuple(ranks), transfer), [range(len(ranks))]
        kind = "send_recv" if spanning(self.mesh, target) is None else "all_to_all"

        @site
        def issue(x: Local) -> Pending[Local]:
            if events.listeners and (nbytes := events.routed(everywhere, transfer.route_of) * transfer.dtype.itemsize):
                event = events.Event(kind, (), len(ranks), nbytes, groups=(tuple(ranks),))
                return events.reporting(event, lambda: run(x), x)
            return run(x)

        return issue

    def bind_reduce_scatter(self, mesh_dims: Sequence[int], scatter: Scatter) -> Run:
        """Region k of the group's blocks, reduced, for position k."""
        dims = tuple(mesh_dims)
        check_reduction(scatter.op, scatter.dtype)
        if not self.held:
            return Pending.of

        def received(_: Local) -> int:
            most = max(box.numel for group in self._groups(dims) for box in scatter.chunks_of(group[0]))
            return (self.group_size(dims) - 1) * most * scatter.dtype.itemsize

        return self._issuing("reduce_scatter", dims, self._reduce_scatter(dims, scatter), received)

    def bind_all_reduce(self, mesh_dims: Sequence[int], op: Op, dtype: torch.dtype) -> Reduction:
        """The reduction of the group's locals of one dtype on every rank of it."""
        return self._known(("all_reduce", *mesh_dims, op, dtype), lambda: self._bind_all_reduce(tuple(mesh_dims), op, dtype))

    def _bind_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> Reduction:
        if not self.held:
            return Reduction(Pending.of)
        check_reduction(op, dtype)
        size = self.group_size(dims)
        if size == 1:
            return Reduction(lambda x: Pending.of(self.map(lambda _, term: fold([term], op), x)))

        def told(run: Run) -> Run:
            return self._issuing("all_reduce", dims, run, lambda x: events.reduced(_nbytes(x), size, op), made.at_once)

        made = self._all_reduce(dims, op, dtype)
        return Reduction(told(made.run), None if made.taking is None else told(made.taking), made.at_once)

    def _issuing(self, kind: str, dims: Dims, run: Run, nbytes: Callable[[Local], int], at_once: bool = True) -> Run:
        """``run``, recorded and reported; ``at_once``: as of :class:`Reduction`, with others to wait for."""

        def issue(x: Local) -> Pending[Local]:
            if ACTIVE and (recorder := current()) is not None:
                return recorder.site(issue, (x,), {})
            if events.listeners or profiler_enabled() or (count_dispatch_modes() and shows_ranges()):
                return events.reporting(self._event(kind, dims, nbytes(x)), lambda: run(x), x)
            return run(x)

        issue.__name__ = kind
        setattr(issue, "at_once", at_once and self.talks)  # noqa: B010  no attribute of functions that types know
        return issue

    def local(self, pieces: Sequence[torch.Tensor]) -> Local:
        """The local whose pieces these are, one per member held here."""
        return pieces[0]

    def pieces(self, local: Local) -> dict[int, torch.Tensor]:
        """What a local is made of, by member held here."""
        return dict(zip(self.held, shards_of(local), strict=False))  # a rank outside the mesh has none

    def map_outside_too(self, fn: Callable[..., Any], *args: Any) -> Any:
        """As ``map``; on ranks outside the mesh ``fn(None, *args)``."""
        return self.map(fn, *args) if self.held else fn(None, *args)

    # --- what they share -------------------------------------------------------------------------------------------
    def group_size(self, mesh_dims: Sequence[int]) -> int:
        """Number of ranks in a group over ``mesh_dims``."""
        return self.mesh.size_of(mesh_dims)

    def _groups(self, dims: Dims) -> Sequence[Dims]:
        """The groups of the members held here."""
        return self._known(
            ("groups", dims), lambda: list(dict.fromkeys(self.mesh.members_of(dims, member) for member in self.held))
        )

    def _known(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._bound.get(key)
        return self._kept.keep(self._bound, key, make()) if found is None else found

    def _event(self, kind: str, dims: Dims, nbytes: int) -> events.Event:
        ranks = self.mesh.ranks
        groups = self._known(
            ("ranks", dims), lambda: tuple(tuple(ranks[member] for member in group) for group in self._groups(dims))
        )
        return events.Event(kind, dims, self.group_size(dims), nbytes, self.mesh, groups=groups)


def spanning(one: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """The mesh that has all the ranks of both."""
    a, b = set(one.ranks), set(other.ranks)
    return one if a >= b else other if b >= a else None


def _nbytes(x: Local) -> int:
    """Bytes of a local, the largest over the members held here."""
    return max(shard.numel() * shard.dtype.itemsize for shard in shards_of(x))
