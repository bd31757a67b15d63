"""``Communicator``: the collectives, as everything above sees them.

Those of separate tensors stand here: they bind a collective of :mod:`.backend_base` and run it at once, the tensors in rows
(:mod:`.flat_rows`). What every collective gives is :class:`Pending`.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from ..base.recorder_hooks import aside, site
from ..errors import LayoutError, MeshError
from ..mesh.process_groups import handle_of
from ..placement import Monoid
from . import events
from .backend_base import Binding, Dims, Local, Run
from .flat_rows import Shape, announced, apart, broadcast, exchanged, gathered, joined, runs
from .local_reduce import Op, check_reduction, dense, fold
from .pack import Route, Scatter, Traffic, Transfer
from .pending import Pending

Lengths = Callable[[int], Sequence[int]]  # of rows, for a member


class Communicator(Binding):
    """The collectives over the dims of one mesh.

    ``mesh_dims`` are one or several dims of ``mesh``, first one major; a member's group is
    ``mesh.members_of(mesh_dims, member)``, in that order, and a *group position* is an index in it. All members of a group
    make the same calls in the same order. Results are fresh row-major tensors without autograd history. A process outside the
    mesh gets its input back.
    """

    @site
    def all_reduce(self, x: Local, mesh_dims: Sequence[int], op: Op = "sum") -> Pending[Local]:
        """The reduction of the group's ``x`` on every rank of it."""
        return self.bind_all_reduce(mesh_dims, op, x.dtype).run(x)

    @site
    def all_gather(self, x: Local, mesh_dims: Sequence[int], shape_of: Callable[[int], Shape]) -> Pending[list[Local]]:
        """The list of the group's ``x``, by group position. ``shape_of(member)`` is the shape of that member's ``x``."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.held or size == 1:
            return Pending.of([self._own(x)] * size)
        shapes = {member: tuple(shape_of(member)) for group in self._groups(dims) for member in group}
        row = self.map(lambda member, piece: joined([announced(piece, shapes[member], member)]), x)
        bound = self._known(
            ("all_gather", dims, *shapes.items(), row.dtype),
            lambda: self.bind_gather(dims, lambda at: [math.prod(shapes[k]) for k in self.mesh.members_of(dims, at)], row.dtype),
        )
        return cast(Run, bound)(row).then(
            lambda whole: self.map(lambda at, own: apart(own, [shapes[k] for k in self.mesh.members_of(dims, at)]), whole)
        )

    def bind_gather(self, mesh_dims: Sequence[int], lengths_of: Lengths, dtype: torch.dtype, whose: str = "") -> Run:
        """The rows of a group, one behind the other, as one; ``lengths_of(member)`` those of its group, by position. ``whose``
        they are, besides, all ranks say."""
        dims = tuple(mesh_dims)
        if self.group_size(dims) == 1:
            return lambda row: Pending.of(self._own(row))
        lengths = self._by_group(dims, lengths_of)

        @functools.cache
        def route_of(member: int) -> Route:
            group = self.mesh.members_of(dims, member)
            return gathered([(length,) for length in lengths[group]], group.index(member))

        def new_of(member: int) -> tuple[int, ...]:
            return (sum(lengths[self.mesh.members_of(dims, member)]),)

        said, brings = _said((lengths[group] for group in lengths), whose), max(sum(own) - min(own) for own in lengths.values())
        return self.bind_transfer(dims, Transfer(route_of, dtype, "all_gather", said=said, new_of=new_of, brings=brings))

    @site
    def reduce_scatter(self, chunks: Sequence[Local], mesh_dims: Sequence[int], op: Op = "sum") -> Pending[Local]:
        """The reduction of the group's ``chunks[k]``, k being one's own group position.

        Chunks may differ in shape from one position to another, not from one rank to another.
        """
        dims, chunks = self._counted(chunks, mesh_dims, "reduce_scatter")
        if not self.held:
            return Pending.of(chunks[0])
        check_reduction(op, chunks[0].dtype)
        if len(chunks) == 1:
            return Pending.of(self.map(lambda _, term: fold([term], op), chunks[0]))
        shapes = self._each(lambda _, *own: tuple(tuple(chunk.shape) for chunk in own), *chunks)
        for group in self._groups(dims):
            same_in_group({member: shapes[member] for member in group if member in shapes})

        def shape_of(source: int, target: int) -> Shape:
            return shapes[source if source in shapes else target][self.mesh.members_of(dims, source).index(target)]

        if isinstance(op, Monoid):  # it need not work element by element: its terms stay whole
            arrived = self._exchange(chunks, dims, shape_of, "reduce_scatter")
            return arrived.then(lambda terms: self.map(lambda _, *own: fold(own, op), *terms))
        row = self.map(lambda _, *own: joined(own), *chunks)
        bound = self._known(
            ("reduce_scatter", dims, *shapes.items(), op, row.dtype),
            lambda: self.bind_scatter(dims, lambda member: [math.prod(shape) for shape in shapes[member]], op, row.dtype),
        )
        return cast(Run, bound)(row).then(
            lambda reduced: self.map(lambda member, own: own.view(shape_of(member, member)), reduced)
        )

    def bind_scatter(self, mesh_dims: Sequence[int], lengths_of: Lengths, op: str, dtype: torch.dtype, whose: str = "") -> Run:
        """Part k of a group's rows, reduced, for position k; ``lengths_of(member)`` are the parts' in its group."""
        dims = tuple(mesh_dims)
        if self.group_size(dims) == 1:
            return lambda row: Pending.of(self.map(lambda _, term: fold([term], op), row) if self.held else row)
        parts = {group: tuple(runs([(n,) for n in each])) for group, each in self._by_group(dims, lengths_of).items()}
        wholes = {group: (sum(box.numel for box in boxes),) for group, boxes in parts.items()}
        members_of = self.mesh.members_of
        said = _said(([box.numel for box in boxes] for boxes in parts.values()), whose)

        def new(at: int) -> tuple[int, ...]:
            group = members_of(dims, at)
            return parts[group][group.index(at)].size

        scatter = Scatter(lambda at: parts[members_of(dims, at)], op, lambda at: wholes[members_of(dims, at)], new, dtype, said)
        return self.bind_reduce_scatter(dims, scatter)

    def bind_exchange(self, mesh_dims: Sequence[int], leaving: Lengths, arriving: Lengths, dtype: torch.dtype) -> Run:
        """What comes, one part behind the other by position, of rows whose part k goes to position k; lengths by position."""
        dims = tuple(mesh_dims)

        @functools.cache
        def route_of(member: int) -> Route:
            sends, receives = ([(length,) for length in lengths_of(member)] for lengths_of in (leaving, arriving))
            return exchanged(sends, receives, self.mesh.members_of(dims, member).index(member))

        return self.bind_transfer(dims, self._between_all(dims, route_of, dtype, "all_to_all"))

    def _between_all(self, dims: Dims, route_of: Callable[[int], Route], dtype: torch.dtype, kind: str) -> Transfer:
        """Where all are taken to meet all: a rank need not know what others have for each other."""
        everybody = Traffic(0, self.group_size(dims), False)
        return Transfer(route_of, dtype, kind, lambda _: everybody)

    def _by_group(self, dims: Dims, of: Lengths) -> dict[Dims, Sequence[int]]:
        return {group: of(next(at for at in group if at in self.held)) for group in self._groups(dims)}

    @site
    def all_to_all(
        self, chunks: Sequence[Local], mesh_dims: Sequence[int], shape_of: Callable[[int, int], Shape]
    ) -> Pending[list[Local]]:
        """What each rank of the group had for this one, by group position; ``chunks[k]`` goes to position k.

        ``shape_of(source_member, target_member)`` is the shape of what goes from one to the other.
        """
        dims, chunks = self._counted(chunks, mesh_dims, "all_to_all")
        if not self.held or len(chunks) == 1:
            return Pending.of([self._own(chunk) for chunk in chunks])
        return self._exchange(chunks, dims, shape_of, "all_to_all")

    def _exchange(
        self, chunks: list[Local], dims: Dims, shape_of: Callable[[int, int], Shape], kind: str
    ) -> Pending[list[Local]]:
        members_of = self.mesh.members_of

        @functools.cache
        def arriving(member: int) -> list[Shape]:
            return [shape_of(source, member) for source in members_of(dims, member)]

        @functools.cache
        def route_of(member: int) -> Route:
            group = members_of(dims, member)
            return exchanged([shape_of(member, to) for to in group], arriving(member), group.index(member))

        def row_of(member: int, *own: torch.Tensor) -> torch.Tensor:
            pairs = zip(own, members_of(dims, member), strict=True)
            return joined([announced(piece, shape_of(member, to), member) for piece, to in pairs])

        row = self.map(row_of, *chunks)
        bound = self.bind_transfer(dims, self._between_all(dims, route_of, row.dtype, kind))
        return bound(row).then(lambda whole: self.map(lambda member, own: apart(own, arriving(member)), whole))

    @site
    def broadcast(self, x: Local, mesh_dims: Sequence[int], source: int = 0) -> Pending[Local]:
        """``x`` of group position ``source``; the others' ``x`` tells only shape and dtype."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not 0 <= source < size:
            raise MeshError(f"broadcast from group rank {source} in a group of {size} ranks; use 0 to {size - 1}")
        if not self.held or size == 1:
            return Pending.of(self._own(x))
        shapes = self._each(lambda _, piece: tuple(piece.shape), x)

        def route_of(member: int) -> Route:
            group = self.mesh.members_of(dims, member)
            shape = next(shapes[one] for one in (group[source], member, *shapes) if one in shapes)
            return broadcast(shape, size, source, group.index(member))

        said = f"from {source}, {next(iter(shapes.values()))}"
        return self.bind_transfer(dims, Transfer(route_of, x.dtype, "broadcast", said=said))(x)

    @aside
    def all_gather_object(self, value: Any, mesh_dims: Sequence[int]) -> list[Any]:
        """The group's small Python values, by group position (for validation: it pickles)."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.held or size == 1:
            return [value] * size
        self.reported("all_gather_object", dims)
        return self._all_gather_object(value, dims)

    def all_gather_numbers(self, row: Sequence[int], mesh_dims: Sequence[int]) -> list[list[int]]:
        """The group's rows of whole numbers, of one length, by group position: in less time than :meth:`all_gather_object`."""
        told: list[list[int]] = self.all_gather_rows(bytearray(array("q", row)), mesh_dims).tolist()
        return told

    def all_gather_rows(self, numbers: bytearray, mesh_dims: Sequence[int]) -> torch.Tensor:
        """The same, of rows that lie in memory, as a tensor: (group size, length)."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        row = torch.frombuffer(numbers, dtype=torch.int64)
        if not self.talks or size == 1:
            return row.expand(size, -1)
        self.reported("all_gather_object", dims)
        length = len(row)
        run = self._known(("numbers", dims, length), lambda: self._bind_rows(dims, length))
        rows: torch.Tensor = run(row.to(self.mesh.device_type)).wait().view(size, -1)
        return rows

    def _bind_rows(self, dims: Dims, length: int) -> Run:
        group = self.mesh.members_of(dims, self.held[0])
        lengths, said = [(length,)] * len(group), f"of {length} whole numbers"
        route_of = lambda member: gathered(lengths, group.index(member))  # noqa: E731
        return self._transfer(dims, Transfer(route_of, torch.int64, "all_gather", said=said, blocking=True))

    def reported(self, kind: str, mesh_dims: Sequence[int], nbytes: Callable[[], int] = lambda: 0) -> None:
        """Tells those who listen of what is no collective of its own."""
        if events.listeners:
            events.report(self._event(kind, tuple(mesh_dims), nbytes()))

    def process_group(self, mesh_dims: Sequence[int]) -> Any:
        """The ``torch.distributed`` group over ``mesh_dims``. MeshError: the ranks are no processes."""
        return handle_of(self.mesh, mesh_dims)

    # --- what they share -------------------------------------------------------------------------------------------
    def _own(self, x: Local) -> Local:
        """What comes of ``x`` where nobody else takes part: a copy; outside the mesh itself."""
        return self.map(lambda _, piece: dense(piece), x) if self.held else x

    def _each(self, fn: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """``fn(member, *args)`` of each member held here."""
        found: dict[int, Any] = {}

        def one(member: int, *own: Any) -> None:
            found[member] = fn(member, *own)

        self.map(one, *args)
        return found

    def _counted(self, chunks: Sequence[Local], mesh_dims: Sequence[int], kind: str) -> tuple[Dims, list[Local]]:
        if len(chunks) != (size := self.group_size(mesh_dims)):
            raise LayoutError(f"{kind} in a group of {size} ranks takes {size} chunks, got {len(chunks)}")
        return tuple(mesh_dims), list(chunks)


def _said(lengths: Iterable[Sequence[int]], whose: str) -> str:
    """The lengths of this rank's group's rows."""
    return f"of {whose and f'{whose}, '}rows [{', '.join(map(str, next(iter(lengths))))}]"


def same_in_group(shapes: dict[int, Any]) -> None:
    """Refuses terms of a reduction that differ in shape, by member."""
    if len(set(shapes.values())) > 1:
        raise LayoutError(f"all ranks must pass tensors of the same shape to a reduction, got {shapes}")
