"""Base of the communication backends: the collectives over the dims of one mesh, which are bound once and run any number of
times.

To *bind* a collective is to return a function that runs it, with all work done once that depends only on shapes, dtype and group.
A backend is a subclass of ``Communicator`` with six methods, ``map`` and the five abstract ones with an underscore, for groups
of two ranks or more. This module has what all backends share: groups of one rank, ranks outside the mesh, events, recording,
and collectives of separate tensors. Each collective returns :class:`Pending`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from ..base.caches import PooledDicts
from ..base.recorder_hooks import ACTIVE_RECORDERS, current_recorder, recorded_op, untracked
from ..base.torch_internals import count_dispatch_modes, profiler_enabled
from ..base.tracing import has_range_observer
from ..errors import LayoutError, MeshError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import get_torch_group
from ..placement import Monoid
from ..ranks.per_rank import shards_of
from . import events
from .flat_rows import (
    Shape,
    broadcast_route,
    check_announced_shape,
    concat_to_row,
    row_boxes,
    row_exchange_route,
    row_gather_route,
    split_row,
)
from .local_reduce import Op, check_reduction, fold, row_major_copy
from .pack import Scatter, SendRecvPlan, Traffic, Transfer
from .pending import Pending

# A local value: a torch.Tensor with process groups, a PerRank of them in one process, a meta tensor in a dry run.
Local: TypeAlias = Any
BoundCollective: TypeAlias = Callable[[Local], Pending[Local]]
Dims: TypeAlias = tuple[int, ...]
Lengths: TypeAlias = Callable[[int], Sequence[int]]  # by member: elements of each row of its group


@dataclass(frozen=True, slots=True, eq=False)
class BoundReduction:
    """A bound all-reduce.

    Attributes:
        run: reduces a local value of the dtype for which it was bound.
        run_donated: the same for a row-major value that the caller needs no more, so that its memory may hold the result.
        at_once: whether the transfer completes without this rank's ``wait()``, so that ``wait()`` may come at any time.
    """

    run: BoundCollective
    run_donated: BoundCollective | None = None
    at_once: bool = False


class Communicator(ABC):
    """The collectives over the dims of one mesh.

    ``mesh_dims`` are one or several dims of ``mesh``, the first one major. The group of a member is
    ``mesh.members_of(mesh_dims, member)``, in that order, and a *group position* is an index in it. All members of a group make
    the same calls in the same order. Results are fresh row-major tensors without autograd history. A process outside the mesh
    gets its input back.

    Attributes:
        held: the members with local values in this process: all if all ranks are here, one with process groups, none outside
            the mesh.
        holds_all: whether all ranks are in this process, so that local values are :class:`..ranks.per_rank.PerRank`.
        has_other_processes: whether there may be other processes.
    """

    held: Sequence[int]
    holds_all: bool = False
    has_other_processes: bool = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._kept: PooledDicts[Any, Any] = PooledDicts(128, 128)
        self._bound = self._kept.make_part()

    # --- abstract methods --------------------------------------------------------------------------------------------------
    @abstractmethod
    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn(member, *args, **kwargs)`` for each member held here, each with its own part of every ``PerRank``."""

    @abstractmethod
    def _make_transfer(self, dims: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer within the groups over mesh dims. No data is sent before it is called."""

    @abstractmethod
    def _make_transfer_to(self, target: DeviceMesh, ranks: Dims, transfer: Transfer) -> BoundCollective:
        """Return the transfer from local values on this mesh to local values on ``target``. No data is sent before it is called.

        The "members" of the transfer are positions in ``ranks``, the ranks of both meshes.
        """

    @abstractmethod
    def _make_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> BoundReduction:
        """Return the all-reduce within the groups over mesh dims. No data is sent before it is called."""

    @abstractmethod
    def _make_reduce_scatter(self, dims: Dims, scatter: Scatter) -> BoundCollective:
        """Return the reduce-scatter within the groups over mesh dims. No data is sent before it is called."""

    @abstractmethod
    def _all_gather_object(self, value: Any, dims: Dims) -> list[Any]:
        """Return the Python values that the ranks of the group pass, by group position."""

    # --- bound collectives -----------------------------------------------------------------------------------------------
    def bind_transfer(self, mesh_dims: Sequence[int], transfer: Transfer) -> BoundCollective:
        """Bind a transfer: each member gets a new block, of regions that other members send and regions that it keeps."""
        dims = tuple(mesh_dims)
        if not self.held:
            return Pending.of
        nbytes = functools.cache(lambda: self._max_received(dims, transfer) * transfer.dtype.itemsize)
        return self._wrap_collective(transfer.kind, dims, self._make_transfer(dims, transfer), lambda _: nbytes())

    def _max_received(self, dims: Dims, transfer: Transfer) -> int:
        """Return the number of elements that a rank receives in a transfer, the maximum over ranks."""
        return events.max_received(self._groups(dims), transfer.route_of)

    def bind_transfer_to(self, target: DeviceMesh, ranks: Sequence[int], transfer: Transfer) -> BoundCollective:
        """Bind a transfer from local values on this mesh to local values on ``target``.

        ``ranks`` are those of both meshes, and ``transfer.route_of(position)`` is the part of the rank at that position. Ranks
        of neither mesh do nothing. It is reported as an all-to-all if one of the meshes has all the ranks, else as
        ``"send_recv"``.
        """
        run, groups = self._make_transfer_to(target, tuple(ranks), transfer), [range(len(ranks))]
        kind = "send_recv" if containing_mesh(self.mesh, target) is None else "all_to_all"

        @recorded_op
        def issue_transfer_to(x: Local) -> Pending[Local]:
            """Run the transfer, reported to listeners if it sends anything."""
            if events.listeners and (nbytes := events.max_received(groups, transfer.route_of) * transfer.dtype.itemsize):
                event = events.Event(kind, (), len(ranks), nbytes, groups=(tuple(ranks),))
                return events.issue_reported(event, lambda: run(x), x)
            return run(x)

        return issue_transfer_to

    def bind_reduce_scatter(self, mesh_dims: Sequence[int], scatter: Scatter) -> BoundCollective:
        """Bind a reduce-scatter: position k gets region k of the group's blocks, reduced."""
        dims = tuple(mesh_dims)
        check_reduction(scatter.op, scatter.dtype)
        if not self.held:
            return Pending.of

        def num_received(_: Local) -> int:
            max_numel = max(box.numel for group in self._groups(dims) for box in scatter.chunks_of(group[0]))
            return (self.group_size(dims) - 1) * max_numel * scatter.dtype.itemsize

        return self._wrap_collective("reduce_scatter", dims, self._make_reduce_scatter(dims, scatter), num_received)

    def bind_all_reduce(self, mesh_dims: Sequence[int], op: Op, dtype: torch.dtype) -> BoundReduction:
        """Bind an all-reduce: each rank of a group gets the reduction of the group's local values of one dtype."""
        return self._get_or_bind(
            ("all_reduce", *mesh_dims, op, dtype), lambda: self._bind_all_reduce(tuple(mesh_dims), op, dtype)
        )

    def _bind_all_reduce(self, dims: Dims, op: Op, dtype: torch.dtype) -> BoundReduction:
        """Return an all-reduce that is reported and recorded; with one rank or none it does not communicate."""
        if not self.held:
            return BoundReduction(Pending.of)
        check_reduction(op, dtype)
        size = self.group_size(dims)
        if size == 1:
            return BoundReduction(lambda x: Pending.of(self.map(lambda _, term: fold([term], op), x)))

        def num_received(x: Local) -> int:
            nbytes = max(shard.numel() * shard.dtype.itemsize for shard in shards_of(x))
            return events.all_reduce_bytes(nbytes, size, op)

        def wrap_reduction(run: BoundCollective) -> BoundCollective:
            return self._wrap_collective("all_reduce", dims, run, num_received, bound.at_once)

        bound = self._make_all_reduce(dims, op, dtype)
        return BoundReduction(
            wrap_reduction(bound.run), None if bound.run_donated is None else wrap_reduction(bound.run_donated), bound.at_once
        )

    def _wrap_collective(
        self, kind: str, dims: Dims, run: BoundCollective, nbytes: Callable[[Local], int], at_once: bool = True
    ) -> BoundCollective:
        """Wrap ``run``, a bound collective: an active recorder records each call; listeners and the profiler get an event for it.

        ``nbytes(x)``: bytes that a rank receives. ``at_once``: see :class:`BoundReduction`.
        """

        def run_or_record(x: Local) -> Pending[Local]:
            """Run the collective: through an active recorder, or reported to listeners or the profiler, or directly."""
            if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:
                return recorder.record_op(run_or_record, (x,), {})
            if events.listeners or profiler_enabled() or (count_dispatch_modes() and has_range_observer()):
                return events.issue_reported(self._event(kind, dims, nbytes(x)), lambda: run(x), x)
            return run(x)

        run_or_record.__name__ = kind
        setattr(run_or_record, "at_once", at_once and self.has_other_processes)  # noqa: B010  mypy knows no such attribute of functions
        return run_or_record

    def local(self, shards: Sequence[torch.Tensor]) -> Local:
        """Return the local value with these shards, one for each member held here."""
        return shards[0]

    def shards_by_member(self, local: Local) -> dict[int, torch.Tensor]:
        """Return the shards of a local value, by member held here."""
        return dict(zip(self.held, shards_of(local), strict=False))  # a rank outside the mesh has none

    def map_outside_too(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call :meth:`map`; on ranks outside the mesh call ``fn(None, *args)``."""
        return self.map(fn, *args) if self.held else fn(None, *args)

    def group_size(self, mesh_dims: Sequence[int]) -> int:
        """Return the number of ranks in a group over ``mesh_dims``."""
        return self.mesh.size_of(mesh_dims)

    def _groups(self, dims: Dims) -> Sequence[Dims]:
        """Return the groups of the members held here."""
        return self._get_or_bind(
            ("groups", dims), lambda: list(dict.fromkeys(self.mesh.members_of(dims, member) for member in self.held))
        )

    def _get_or_bind(self, key: Any, make: Callable[[], Any]) -> Any:
        bound = self._bound.get(key)
        return self._kept.keep(self._bound, key, make()) if bound is None else bound

    def _event(self, kind: str, dims: Dims, nbytes: int) -> events.Event:
        """Make the event that describes a collective to listeners."""
        ranks = self.mesh.ranks
        groups = self._get_or_bind(
            ("ranks", dims), lambda: tuple(tuple(ranks[member] for member in group) for group in self._groups(dims))
        )
        return events.Event(kind, dims, self.group_size(dims), nbytes, self.mesh, groups=groups)

    # --- collectives of separate tensors ---------------------------------------------------------------------------------
    @recorded_op
    def all_reduce(self, x: Local, mesh_dims: Sequence[int], op: Op = "sum") -> Pending[Local]:
        """Return the reduction of the group's ``x`` on each rank of the group."""
        return self.bind_all_reduce(mesh_dims, op, x.dtype).run(x)

    @recorded_op
    def all_gather(self, x: Local, mesh_dims: Sequence[int], shape_of: Callable[[int], Shape]) -> Pending[list[Local]]:
        """Return the list of the group's ``x``, by group position. ``shape_of(member)`` is the shape of that member's ``x``."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.held or size == 1:
            return Pending.of([self._copy_own(x)] * size)
        shapes = {member: tuple(shape_of(member)) for group in self._groups(dims) for member in group}
        row = self.map(lambda member, shard: concat_to_row([check_announced_shape(shard, shapes[member], member)]), x)
        bound = self._get_or_bind(
            ("all_gather", dims, *shapes.items(), row.dtype),
            lambda: self.bind_row_all_gather(
                dims, lambda at: [math.prod(shapes[k]) for k in self.mesh.members_of(dims, at)], row.dtype
            ),
        )
        return cast(BoundCollective, bound)(row).then(
            lambda row: self.map(lambda at, own: split_row(own, [shapes[k] for k in self.mesh.members_of(dims, at)]), row)
        )

    def bind_row_all_gather(
        self, mesh_dims: Sequence[int], lengths_of: Lengths, dtype: torch.dtype, owner: str = ""
    ) -> BoundCollective:
        """Bind an all-gather of rows: each rank gets the rows of its group, concatenated.

        Args:
            lengths_of: gives the lengths of the rows of a member's group, by position.
            owner: description of the rows, which ranks compare.
        """
        dims = tuple(mesh_dims)
        if self.group_size(dims) == 1:
            return lambda row: Pending.of(self._copy_own(row))
        lengths = self._lengths_by_group(dims, lengths_of)

        @functools.cache
        def route_of(member: int) -> SendRecvPlan:
            group = self.mesh.members_of(dims, member)
            return row_gather_route([(length,) for length in lengths[group]], group.index(member))

        def new_of(member: int) -> tuple[int, ...]:
            return (sum(lengths[self.mesh.members_of(dims, member)]),)

        description = _describe_lengths((lengths[group] for group in lengths), owner)
        max_received = max(sum(group_lengths) - min(group_lengths) for group_lengths in lengths.values())
        return self.bind_transfer(
            dims, Transfer(route_of, dtype, "all_gather", description=description, new_of=new_of, max_received=max_received)
        )

    @recorded_op
    def reduce_scatter(self, chunks: Sequence[Local], mesh_dims: Sequence[int], op: Op = "sum") -> Pending[Local]:
        """Return the reduction of the group's ``chunks[k]``, where k is the own group position.

        Chunks may differ in shape between positions, not between ranks.
        """
        dims, chunks = self._check_chunks(chunks, mesh_dims, "reduce_scatter")
        if not self.held:
            return Pending.of(chunks[0])
        check_reduction(op, chunks[0].dtype)
        if len(chunks) == 1:
            return Pending.of(self.map(lambda _, addend: fold([addend], op), chunks[0]))
        shapes = self._map_members(lambda _, *shards: tuple(tuple(chunk.shape) for chunk in shards), *chunks)
        for group in self._groups(dims):
            check_same_shapes({member: shapes[member] for member in group if member in shapes})

        def shape_of(source: int, target: int) -> Shape:
            return shapes[source if source in shapes else target][self.mesh.members_of(dims, source).index(target)]

        if isinstance(op, Monoid):  # it may combine elements of different positions, so its addends are not flattened
            arrived = self._exchange(chunks, dims, shape_of, "reduce_scatter")
            return arrived.then(lambda addends: self.map(lambda _, *shards: fold(shards, op), *addends))
        row = self.map(lambda _, *shards: concat_to_row(shards), *chunks)
        bound = self._get_or_bind(
            ("reduce_scatter", dims, *shapes.items(), op, row.dtype),
            lambda: self.bind_row_reduce_scatter(
                dims, lambda member: [math.prod(shape) for shape in shapes[member]], op, row.dtype
            ),
        )
        return cast(BoundCollective, bound)(row).then(
            lambda reduced: self.map(lambda member, shards: shards.view(shape_of(member, member)), reduced)
        )

    def bind_row_reduce_scatter(
        self, mesh_dims: Sequence[int], lengths_of: Lengths, op: str, dtype: torch.dtype, owner: str = ""
    ) -> BoundCollective:
        """Bind a reduce-scatter of rows: position k gets part k of the group's rows, reduced.

        ``lengths_of(member)`` are the lengths of the parts in a member's group. ``owner``: a description of the rows, which
        ranks compare.
        """
        dims = tuple(mesh_dims)
        if self.group_size(dims) == 1:
            return lambda row: Pending.of(self.map(lambda _, addend: fold([addend], op), row) if self.held else row)
        parts = {
            group: tuple(row_boxes([(n,) for n in each])) for group, each in self._lengths_by_group(dims, lengths_of).items()
        }
        row_shapes = {group: (sum(box.numel for box in boxes),) for group, boxes in parts.items()}
        members_of = self.mesh.members_of
        description = _describe_lengths(([box.numel for box in boxes] for boxes in parts.values()), owner)

        def new_shape_of(at: int) -> tuple[int, ...]:
            group = members_of(dims, at)
            return parts[group][group.index(at)].size

        scatter = Scatter(
            lambda at: parts[members_of(dims, at)],
            op,
            lambda at: row_shapes[members_of(dims, at)],
            new_shape_of,
            dtype,
            description,
        )
        return self.bind_reduce_scatter(dims, scatter)

    def bind_row_exchange(
        self, mesh_dims: Sequence[int], send_lengths_of: Lengths, recv_lengths_of: Lengths, dtype: torch.dtype
    ) -> BoundCollective:
        """Bind an all-to-all of rows: part k of a row goes to position k; received parts are concatenated by position.

        ``send_lengths_of`` and ``recv_lengths_of`` give the lengths of the parts that a member sends and receives, by position.
        """
        dims = tuple(mesh_dims)

        @functools.cache
        def route_of(member: int) -> SendRecvPlan:
            sends, receives = ([(length,) for length in lengths_of(member)] for lengths_of in (send_lengths_of, recv_lengths_of))
            return row_exchange_route(sends, receives, self.mesh.members_of(dims, member).index(member))

        return self.bind_transfer(dims, self._make_dense_transfer(dims, route_of, dtype, "all_to_all"))

    def _make_dense_transfer(
        self, dims: Dims, route_of: Callable[[int], SendRecvPlan], dtype: torch.dtype, kind: str
    ) -> Transfer:
        """Make a transfer that counts as messages from each rank to all others, since no rank knows the routes of others."""
        traffic = Traffic(0, self.group_size(dims), False)
        return Transfer(route_of, dtype, kind, lambda _: traffic)

    def _lengths_by_group(self, dims: Dims, lengths_of: Lengths) -> dict[Dims, Sequence[int]]:
        """Return the lengths for each group of the members held here."""
        return {group: lengths_of(next(at for at in group if at in self.held)) for group in self._groups(dims)}

    @recorded_op
    def all_to_all(
        self, chunks: Sequence[Local], mesh_dims: Sequence[int], shape_of: Callable[[int, int], Shape]
    ) -> Pending[list[Local]]:
        """Return what each rank of the group sent to this one, by group position; ``chunks[k]`` goes to position k.

        ``shape_of(source_member, target_member)`` is the shape of what one sends to the other.
        """
        dims, chunks = self._check_chunks(chunks, mesh_dims, "all_to_all")
        if not self.held or len(chunks) == 1:
            return Pending.of([self._copy_own(chunk) for chunk in chunks])
        return self._exchange(chunks, dims, shape_of, "all_to_all")

    def _exchange(
        self, chunks: list[Local], dims: Dims, shape_of: Callable[[int, int], Shape], kind: str
    ) -> Pending[list[Local]]:
        """Send a chunk from each member to each member of its group, and return the received chunks by position."""
        members_of = self.mesh.members_of

        @functools.cache
        def recv_shapes(member: int) -> list[Shape]:
            return [shape_of(source, member) for source in members_of(dims, member)]

        @functools.cache
        def route_of(member: int) -> SendRecvPlan:
            group = members_of(dims, member)
            return row_exchange_route([shape_of(member, to) for to in group], recv_shapes(member), group.index(member))

        def row_of(member: int, *shards: torch.Tensor) -> torch.Tensor:
            pairs = zip(shards, members_of(dims, member), strict=True)
            return concat_to_row([check_announced_shape(shard, shape_of(member, to), member) for shard, to in pairs])

        row = self.map(row_of, *chunks)
        bound = self.bind_transfer(dims, self._make_dense_transfer(dims, route_of, row.dtype, kind))
        return bound(row).then(lambda row: self.map(lambda member, shards: split_row(shards, recv_shapes(member)), row))

    @recorded_op
    def broadcast(self, x: Local, mesh_dims: Sequence[int], source: int = 0) -> Pending[Local]:
        """Return ``x`` of group position ``source``; the ``x`` of other positions gives only shape and dtype."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not 0 <= source < size:
            raise MeshError(f"broadcast from group rank {source} in a group of {size} ranks; use 0 to {size - 1}")
        if not self.held or size == 1:
            return Pending.of(self._copy_own(x))
        shapes = self._map_members(lambda _, shard: tuple(shard.shape), x)

        def route_of(member: int) -> SendRecvPlan:
            """Return the member's send/receive plan for the broadcast."""
            group = self.mesh.members_of(dims, member)
            shape = next(shapes[one] for one in (group[source], member, *shapes) if one in shapes)
            return broadcast_route(shape, size, source, group.index(member))

        description = f"from {source}, {next(iter(shapes.values()))}"
        return self.bind_transfer(dims, Transfer(route_of, x.dtype, "broadcast", description=description))(x)

    @untracked
    def all_gather_object(self, value: Any, mesh_dims: Sequence[int]) -> list[Any]:
        """Return the small Python values of the group, by group position. It pickles them, and is meant for validation."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.held or size == 1:
            return [value] * size
        self.report("all_gather_object", dims)
        return self._all_gather_object(value, dims)

    def all_gather_numbers(self, row: Sequence[int], mesh_dims: Sequence[int]) -> list[list[int]]:
        """Return the rows of integers of the group, all of one length, by group position.

        It takes less time than :meth:`all_gather_object`.
        """
        rows: list[list[int]] = self.all_gather_rows(bytearray(array("q", row)), mesh_dims).tolist()
        return rows

    def all_gather_rows(self, numbers: bytearray, mesh_dims: Sequence[int]) -> torch.Tensor:
        """All-gather the bytes of ``numbers``, read as int64; return a tensor of shape (group size, length)."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        row = torch.frombuffer(numbers, dtype=torch.int64)
        if not self.has_other_processes or size == 1:
            return row.expand(size, -1)
        self.report("all_gather_object", dims)
        length = len(row)
        run = self._get_or_bind(("numbers", dims, length), lambda: self._bind_number_rows(dims, length))
        rows: torch.Tensor = run(row.to(self.mesh.device_type)).wait().view(size, -1)
        return rows

    def _bind_number_rows(self, dims: Dims, length: int) -> BoundCollective:
        """Bind the all-gather of ``length`` int64 numbers from each rank of a group along ``dims``; it is not reported."""
        group = self.mesh.members_of(dims, self.held[0])
        lengths, description = [(length,)] * len(group), f"of {length} whole numbers"
        route_of = lambda member: row_gather_route(lengths, group.index(member))  # noqa: E731
        return self._make_transfer(dims, Transfer(route_of, torch.int64, "all_gather", description=description, blocking=True))

    def report(self, kind: str, mesh_dims: Sequence[int], nbytes: Callable[[], int] = lambda: 0) -> None:
        """Send listeners the event of a communication that the caller runs by itself, not through a bound collective."""
        if events.listeners:
            events.report_event(self._event(kind, tuple(mesh_dims), nbytes()))

    def process_group(self, mesh_dims: Sequence[int]) -> Any:
        """Return the ``torch.distributed`` group over ``mesh_dims``. Raise MeshError if the ranks are not processes."""
        return get_torch_group(self.mesh, mesh_dims)

    # --- shared helpers ------------------------------------------------------------------------------------------------
    def _copy_own(self, x: Local) -> Local:
        """Return a copy of ``x``, the result of a collective in a group of one rank; outside the mesh ``x`` itself."""
        return self.map(lambda _, shard: row_major_copy(shard), x) if self.held else x

    def _map_members(self, fn: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """Return ``fn(member, *args)`` of each member held here, by member."""
        results: dict[int, Any] = {}

        def run_member(member: int, *shards: Any) -> None:
            results[member] = fn(member, *shards)

        self.map(run_member, *args)
        return results

    def _check_chunks(self, chunks: Sequence[Local], mesh_dims: Sequence[int], kind: str) -> tuple[Dims, list[Local]]:
        """Return the mesh dims as a tuple and the chunks as a list; raise unless there is one chunk for each rank."""
        if len(chunks) != (size := self.group_size(mesh_dims)):
            raise LayoutError(f"{kind} in a group of {size} ranks takes {size} chunks, got {len(chunks)}")
        return tuple(mesh_dims), list(chunks)


def _describe_lengths(lengths: Iterable[Sequence[int]], owner: str) -> str:
    """Return a description of the lengths of the rows of this rank's group, which ranks compare."""
    return f"of {owner and f'{owner}, '}rows [{', '.join(map(str, next(iter(lengths))))}]"


def check_same_shapes(shapes: dict[int, Any]) -> None:
    """Raise LayoutError if ``shapes`` (by member) of the addends of a reduction differ."""
    if len(set(shapes.values())) > 1:
        raise LayoutError(f"all ranks must pass tensors of the same shape to a reduction, got {shapes}")


def containing_mesh(one: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh that has all the ranks of both meshes, None if neither has."""
    a, b = set(one.ranks), set(other.ranks)
    return one if a >= b else other if b >= a else None
