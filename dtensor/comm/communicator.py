"""``Communicator``: the collectives, as everything above sees them.

A backend implements five of them (the methods with an underscore), each for groups of two ranks or more. What all
share stands here, once: argument checks, groups of one rank, ranks outside the mesh, events, ``async_op``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import torch

from ..base.recording import ACTIVE, current, exchange, site
from ..errors import LayoutError, MeshError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.groups import handle_of
from . import events
from .fold import Op, check_reduction, dense, fold
from .regions import Box, Route

# A torch.Tensor with process groups, a PerRank of them in one process, a meta tensor in a dry run.
Local: TypeAlias = Any
Shape: TypeAlias = Sequence[int]
T = TypeVar("T")


class BoundCollective(Protocol):
    """A collective whose regions and group are known: only the local is missing."""

    def __call__(self, x: Local, async_op: bool = False) -> Any: ...


class Pending(Generic[T]):
    """A collective under way. Its inputs must not be written to before ``wait()``."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Any = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        """One that has ended."""
        made = cls(lambda: value)
        made.wait()
        return made

    def wait(self) -> T:
        """The result; may be called again."""
        if ACTIVE and (recorder := current()) is not None and recorder.knows(self):
            return cast(T, recorder.site(Pending.wait, (self,), {}))
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # a T once _finish is gone


class Communicator(ABC):
    """The collectives over the dims of one mesh.

    ``mesh_dims`` are one or several dims of ``mesh``, first one major; a member's group is
    ``mesh.members_of(mesh_dims, member)``, in that order, and a *group position* is an index in it. All members of a group
    make the same calls in the same order. Results are fresh row-major tensors without autograd history. Every collective
    takes ``async_op=True`` and then returns a :class:`Pending`. A process outside the mesh gets its input back.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    # --- bound collectives: what follows from regions is worked out once ---------------------------------------------
    def bind_transfer(
        self,
        mesh_dims: Sequence[int],
        route_of: Callable[[int], Route],
        dtype: torch.dtype,
        kind: str = "all_to_all",
        traffic_of: Any = None,
    ) -> BoundCollective:
        """``bound(x, async_op=False)``: every member's new block, of the regions that others send and that it keeps.

        ``route_of(member)``: see :class:`Route`. ``kind`` ``"all_gather"``: every member gets the blocks of all.
        ``traffic_of(member)``: the :class:`.transfer.Traffic` of its group, where that is found sooner than by all its routes.
        """
        mesh_dims = tuple(mesh_dims)
        if self._absent:
            return _nothing
        run = self._bind_transfer(mesh_dims, route_of, dtype, kind, traffic_of)
        return self._bound(kind, mesh_dims, run, lambda: events.routed(self._groups(mesh_dims), route_of) * dtype.itemsize)

    def bind_reduce_scatter(
        self,
        mesh_dims: Sequence[int],
        chunks_of: Callable[[int], tuple[Box, ...]],
        op: Op,
        old: Callable[[int], Shape],
        dtype: torch.dtype,
    ) -> BoundCollective:
        """``bound(x, async_op=False)``: region ``chunks_of(member)[k]`` of the group's blocks, reduced, for position k.

        ``old(member)`` is the shape of its block; regions of one position are of one shape on all ranks.
        """
        mesh_dims = tuple(mesh_dims)
        check_reduction(op, dtype)
        if self._absent:
            return _nothing

        def received() -> int:
            most = max(box.numel for group in self._groups(mesh_dims) for box in chunks_of(group[0]))
            return (self.group_size(mesh_dims) - 1) * most * dtype.itemsize

        run = self._bind_reduce_scatter(mesh_dims, chunks_of, op, old, dtype)
        return self._bound("reduce_scatter", mesh_dims, run, received)

    def bind_all_reduce(
        self, mesh_dims: Sequence[int], op: Op, dtype: torch.dtype
    ) -> tuple[Callable[..., Local], Callable[..., Pending[Local]] | None]:
        """``bound(x, taken=False)``, which is :meth:`all_reduce` of an ``x`` of this dtype, and a form that only starts it; None
        where the other ranks would have to wait for its ``wait()``.

        ``taken``: of a row-major ``x`` that nobody needs any more; its memory may be that of the result.
        """
        mesh_dims = tuple(mesh_dims)

        def all_reduce(x: Local, taken: bool = False) -> Local:
            return self.all_reduce(x, mesh_dims, op)

        return all_reduce, None

    def _bound(
        self, kind: str, mesh_dims: tuple[int, ...], run: Callable[[Local, bool], Pending[Local]], nbytes: Callable[[], int]
    ) -> BoundCollective:
        known: list[int] = []  # counted when somebody listens first

        def issue(x: Local, async_op: bool = False) -> Any:
            if ACTIVE and (recorder := current()) is not None:
                return recorder.site(issue, (x, async_op), {})
            if events.listeners:
                known[:] = known or [nbytes()]
                self._report(kind, mesh_dims, known[0])
            return run(x, True) if async_op else run(x, False).wait()

        issue.__name__ = kind
        return issue

    @abstractmethod
    def _bind_transfer(
        self, mesh_dims: tuple[int, ...], route_of: Callable[[int], Route], dtype: torch.dtype, kind: str, traffic_of: Any = None
    ) -> Callable[[Local, bool], Pending[Local]]: ...

    @abstractmethod
    def _bind_reduce_scatter(
        self,
        mesh_dims: tuple[int, ...],
        chunks_of: Callable[[int], tuple[Box, ...]],
        op: Op,
        old: Callable[[int], Shape],
        dtype: torch.dtype,
    ) -> Callable[[Local, bool], Pending[Local]]: ...

    # --- local work --------------------------------------------------------------------------------------------
    @abstractmethod
    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(member, *args, **kwargs)`` once per member held here, each with its own part of every ``PerRank``."""

    # --- collectives ---------------------------------------------------------------------------------------------
    @site
    def all_reduce(self, x: Local, mesh_dims: Sequence[int], op: Op = "sum", *, async_op: bool = False) -> Any:
        """The reduction of the group's ``x`` on every rank of it."""
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if self._absent:
            return _ended(x, async_op)
        check_reduction(op, x.dtype)
        if size == 1:
            return _ended(self.map(lambda _, term: fold([term], op), x), async_op)
        if events.listeners:
            self._report("all_reduce", mesh_dims, events.reduced(_nbytes(x), size))
        return self._all_reduce(x, mesh_dims, op, async_op) if async_op else self._all_reduce(x, mesh_dims, op, False).wait()

    @site
    def all_gather(self, x: Local, mesh_dims: Sequence[int], shape_of: Callable[[int], Shape], *, async_op: bool = False) -> Any:
        """The list of the group's ``x``, by group position. ``shape_of(member)`` is the shape of that member's ``x``."""
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if self._absent:
            return _ended([x] * size, async_op)
        if size == 1:
            return _ended([self.map(lambda _, piece: dense(piece), x)], async_op)
        self.map(lambda member, piece: _expect(piece, shape_of(member), member), x)
        if events.listeners:
            self._report("all_gather", mesh_dims, events.gathered(self._groups(mesh_dims), shape_of, x.dtype.itemsize))
        pending = self._all_gather(x, mesh_dims, shape_of, async_op)
        return pending if async_op else pending.wait()

    @site
    def reduce_scatter(self, chunks: Sequence[Local], mesh_dims: Sequence[int], op: Op = "sum", *, async_op: bool = False) -> Any:
        """The reduction of the group's ``chunks[k]``, k being one's own group position.

        Chunks may differ in shape from one position to another, not from one rank to another.
        """
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        self._count(chunks, size, "reduce_scatter")
        if self._absent:
            return _ended(chunks[0], async_op)
        check_reduction(op, chunks[0].dtype)
        if size == 1:
            return _ended(self.map(lambda _, term: fold([term], op), chunks[0]), async_op)
        if events.listeners:
            self._report("reduce_scatter", mesh_dims, (size - 1) * max(_nbytes(chunk) for chunk in chunks))
        pending = self._reduce_scatter(chunks, mesh_dims, op, async_op)
        return pending if async_op else pending.wait()

    @site
    def all_to_all(
        self, chunks: Sequence[Local], mesh_dims: Sequence[int], shape_of: Callable[[int, int], Shape], *, async_op: bool = False
    ) -> Any:
        """What each rank of the group had for this one, by group position; ``chunks[k]`` goes to position k.

        ``shape_of(source_member, target_member)`` is the shape of what goes from one to the other.
        """
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        self._count(chunks, size, "all_to_all")
        if self._absent:
            return _ended(list(chunks), async_op)
        if size == 1:
            return _ended([self.map(lambda _, piece: dense(piece), chunks[0])], async_op)
        self.map(lambda member, mine: self._expect_all(mine, mesh_dims, shape_of, member), list(chunks))
        if events.listeners:
            self._report("all_to_all", mesh_dims, events.exchanged(self._groups(mesh_dims), shape_of, chunks[0].dtype.itemsize))
        pending = self._all_to_all(chunks, mesh_dims, shape_of, async_op)
        return pending if async_op else pending.wait()

    @site
    def broadcast(self, x: Local, mesh_dims: Sequence[int], source: int = 0, *, async_op: bool = False) -> Any:
        """``x`` of group position ``source``; the others' ``x`` tells only shape and dtype."""
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not 0 <= source < size:
            raise MeshError(f"broadcast from group position {source} of a group of {size}; use 0 .. {size - 1}")
        if self._absent:
            return _ended(x, async_op)
        if size == 1:
            return _ended(self.map(lambda _, value: dense(value), x), async_op)
        if events.listeners:
            self._report("broadcast", mesh_dims, _nbytes(x))
        pending = self._broadcast(x, mesh_dims, source, async_op)
        return pending if async_op else pending.wait()

    @exchange
    def all_gather_object(self, value: Any, mesh_dims: Sequence[int]) -> list[Any]:
        """The group's small Python values, by group position (for validation: it pickles)."""
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if self._absent or size == 1:
            return [value] * size
        if events.listeners:
            self._report("all_gather_object", mesh_dims, 0)
        return self._all_gather_object(value, mesh_dims)

    def all_gather_numbers(self, row: Sequence[int], mesh_dims: Sequence[int]) -> list[list[int]]:
        """The group's rows of whole numbers, of one length, by group position: in less time than :meth:`all_gather_object`."""
        mesh_dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if self._absent or size == 1:
            return [list(row)] * size
        if events.listeners:
            self._report("all_gather_object", mesh_dims, 0)
        return self._all_gather_numbers(row, mesh_dims)

    def process_group(self, mesh_dims: Sequence[int]) -> Any:
        """The ``torch.distributed`` group over ``mesh_dims``. MeshError: the ranks are no processes."""
        return handle_of(self.mesh, mesh_dims)

    # --- a backend's part: groups of two or more, members only -----------------------------------------------------
    @abstractmethod
    def _all_reduce(self, x: Local, mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]: ...

    @abstractmethod
    def _all_gather(
        self, x: Local, mesh_dims: tuple[int, ...], shape_of: Callable[[int], Shape], async_op: bool
    ) -> Pending[list[Local]]: ...

    @abstractmethod
    def _reduce_scatter(self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], op: Op, async_op: bool) -> Pending[Local]: ...

    @abstractmethod
    def _all_to_all(
        self, chunks: Sequence[Local], mesh_dims: tuple[int, ...], shape_of: Callable[[int, int], Shape], async_op: bool
    ) -> Pending[list[Local]]: ...

    @abstractmethod
    def _broadcast(self, x: Local, mesh_dims: tuple[int, ...], source: int, async_op: bool) -> Pending[Local]: ...

    @abstractmethod
    def _all_gather_object(self, value: Any, mesh_dims: tuple[int, ...]) -> list[Any]: ...

    def _all_gather_numbers(self, row: Sequence[int], mesh_dims: tuple[int, ...]) -> list[list[int]]:
        return [list(row)] * self.group_size(mesh_dims)

    @abstractmethod
    def _groups(self, mesh_dims: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """The groups of the members held here."""

    @property
    def _absent(self) -> bool:
        """Whether this process is outside the mesh."""
        return False

    # --- what they share -------------------------------------------------------------------------------------------
    def group_size(self, mesh_dims: Sequence[int]) -> int:
        """Number of ranks in a group over ``mesh_dims``."""
        return math.prod(self.mesh.shape[dim] for dim in mesh_dims)

    def _report(self, kind: str, mesh_dims: tuple[int, ...], nbytes: int) -> None:
        events.report(events.Event(kind, mesh_dims, self.group_size(mesh_dims), nbytes, self.mesh))

    def _expect_all(
        self, pieces: list[torch.Tensor], mesh_dims: tuple[int, ...], shape_of: Callable[[int, int], Shape], member: int
    ) -> None:
        for piece, to in zip(pieces, self.mesh.members_of(mesh_dims, member), strict=True):
            _expect(piece, shape_of(member, to), member)

    @staticmethod
    def _count(chunks: Sequence[Local], size: int, kind: str) -> None:
        if len(chunks) != size:
            raise LayoutError(f"{kind} in a group of {size} ranks takes {size} chunks, got {len(chunks)}")


def _nothing(x: Local, async_op: bool = False) -> Any:
    """What a bound collective does outside the mesh."""
    return _ended(x, async_op)


def _ended(value: Any, async_op: bool) -> Any:
    return Pending.of(value) if async_op else value


def _nbytes(x: Local) -> int:
    """Bytes of a local, the largest over the members held here."""
    shards: tuple[torch.Tensor, ...] = getattr(x, "shards", (x,))
    return max(shard.numel() * shard.dtype.itemsize for shard in shards)


def _expect(piece: torch.Tensor, shape: Shape, member: int) -> None:
    # A wrong shape sent would be read as another by the receiver. Two empty tensors carry the same nothing.
    if tuple(piece.shape) != tuple(shape) and (piece.numel() or math.prod(shape)):
        raise LayoutError(f"member {member} holds a piece of shape {tuple(piece.shape)} where {tuple(shape)} was announced")
