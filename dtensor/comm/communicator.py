"""``Communicator``: the collectives, as everything above sees them.

Those of separate tensors stand here: they bind a collective of :mod:`.binding` and run it at once, the tensors in rows
(:mod:`.rows`). What every collective gives is :class:`Pending`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.recording import exchange, site
from ..errors import LayoutError, MeshError
from ..mesh.groups import handle_of
from ..placement import Monoid
from . import events
from .binding import Binding, Dims, Local, Run
from .fold import Op, check_reduction, dense, fold
from .pending import Pending
from .regions import Route, Scatter, Traffic, Transfer
from .rows import Shape, announced, apart, broadcast, exchanged, gathered, joined, runs

Shapes = dict[int, tuple[tuple[int, ...], ...]]  # by member


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
        return self._gather_of(dims, shapes, row.dtype)(row).then(
            lambda whole: self.map(lambda at, own: apart(own, [shapes[k] for k in self.mesh.members_of(dims, at)]), whole)
        )

    def _gather_of(self, dims: Dims, shapes: dict[int, tuple[int, ...]], dtype: torch.dtype) -> Run:
        @functools.cache
        def route_of(member: int) -> Route:
            group = self.mesh.members_of(dims, member)
            return gathered([shapes[other] for other in group], group.index(member))

        return self._known(
            ("all_gather", dims, *shapes.items(), dtype),
            lambda: self.bind_transfer(dims, Transfer(route_of, dtype, "all_gather")),
        )

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
        return self._scatter_of(dims, shapes, op, row.dtype)(row).then(
            lambda reduced: self.map(lambda member, own: own.view(shape_of(member, member)), reduced)
        )

    def _scatter_of(self, dims: Dims, shapes: Shapes, op: str, dtype: torch.dtype) -> Run:
        boxes = {member: tuple(runs(own)) for member, own in shapes.items()}
        own = next(iter(boxes.values()))  # alike in a group, of which others need not be here

        def length_of(member: int) -> tuple[int, ...]:
            return (sum(box.numel for box in boxes.get(member, own)),)

        scatter = Scatter(lambda member: boxes.get(member, own), op, length_of, dtype)
        return self._known(("reduce_scatter", dims, *shapes.items(), op, dtype), lambda: self.bind_reduce_scatter(dims, scatter))

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
        everybody = Traffic(0, len(chunks), False)  # taken to be so: a rank need not know what others have for each other
        bound = self.bind_transfer(dims, Transfer(route_of, row.dtype, kind, lambda _: everybody))
        return bound(row).then(lambda whole: self.map(lambda member, own: apart(own, arriving(member)), whole))

    @site
    def broadcast(self, x: Local, mesh_dims: Sequence[int], source: int = 0) -> Pending[Local]:
        """``x`` of group position ``source``; the others' ``x`` tells only shape and dtype."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not 0 <= source < size:
            raise MeshError(f"broadcast from group position {source} of a group of {size}; use 0 .. {size - 1}")
        if not self.held or size == 1:
            return Pending.of(self._own(x))
        shapes = self._each(lambda _, piece: tuple(piece.shape), x)

        def route_of(member: int) -> Route:
            group = self.mesh.members_of(dims, member)
            shape = next(shapes[one] for one in (group[source], member, *shapes) if one in shapes)
            return broadcast(shape, size, source, group.index(member))

        return self.bind_transfer(dims, Transfer(route_of, x.dtype, "broadcast"))(x)

    @exchange
    def all_gather_object(self, value: Any, mesh_dims: Sequence[int]) -> list[Any]:
        """The group's small Python values, by group position (for validation: it pickles)."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.held or size == 1:
            return [value] * size
        if events.listeners:
            self._report("all_gather_object", dims, 0)
        return self._all_gather_object(value, dims)

    def all_gather_numbers(self, row: Sequence[int], mesh_dims: Sequence[int]) -> list[list[int]]:
        """The group's rows of whole numbers, of one length, by group position: in less time than :meth:`all_gather_object`."""
        dims, size = tuple(mesh_dims), self.group_size(mesh_dims)
        if not self.talks or size == 1:
            return [list(row)] * size
        if events.listeners:
            self._report("all_gather_object", dims, 0)
        group = self.mesh.members_of(dims, self.held[0])
        transfer = Transfer(lambda member: gathered([(len(row),)] * size, group.index(member)), torch.int64, "all_gather")
        run = self._known(("numbers", dims, len(row)), lambda: self._transfer(dims, transfer))
        told: list[list[int]] = run(torch.tensor(row, device=self.mesh.device_type)).wait().view(size, -1).tolist()
        return told

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


def same_in_group(shapes: dict[int, Any]) -> None:
    """Refuses terms of a reduction that differ in shape, by member."""
    if len(set(shapes.values())) > 1:
        raise LayoutError(f"the terms of a reduction must have one shape on all ranks, members hold {shapes}")
