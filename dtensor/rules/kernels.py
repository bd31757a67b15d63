"""What a kernel sees while it runs: its locals' place in the whole, and collectives over the mesh dims that split a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comm import communicator_of
from ..layout.layout import Layout, Split, offsets_of
from ..placement import Monoid
from .call import Call


@dataclass(frozen=True, slots=True)
class At:
    """One member's place: its index in the group, and its block of the sharded factor."""

    member: int
    index: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Collectives over ``mesh_dims`` (those that split the kernel's factor, outermost first) and block positions.

    Attributes:
        call: the global call.
        operands, results: layouts of the locals that the kernel gets and gives.
        mesh_dims: the mesh dims that split the factor (all factors, where a joint kernel has several); () when it is not split.
        sizes: the factor's block sizes along the group.
        splits: how each factor of the kernel that is sharded is cut.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: Mapping[str, Split] = field(default_factory=dict)
    places: dict[int, At] = field(default_factory=dict, compare=False)  # of members, once asked for

    @property
    def comm(self) -> Any:
        return communicator_of(self.call.mesh)

    @property
    def total(self) -> int:
        """Global size of the factor."""
        return sum(self.sizes)

    def all_reduce(self, x: Any, op: str | Monoid) -> Any:
        """The reduction of ``x`` over the group, on every rank."""
        return self.comm.all_reduce(x, self.mesh_dims, op)

    def all_gather(self, x: Any, shape_of: Callable[[int], tuple[int, ...]] | None = None) -> list[Any]:
        """Every group position's ``x``; ``shape_of(member)`` tells their shapes, ``None`` if all have the shape of ``x``."""
        if shape_of is None:
            shape = tuple(x.shape)
            shape_of = lambda member: shape  # noqa: E731  a constant function
        return list(self.comm.all_gather(x, self.mesh_dims, shape_of))

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(at, *args)`` once per rank held in this process, with that rank's locals."""
        places = self.places

        def one(member: int, *locals_: Any) -> Any:
            return fn(places[member] if member in places else self.at(member), *locals_)

        return self.comm.map(one, *args)

    def at(self, member: int) -> At:
        """One member's place in the group (of no use to a joint kernel, whose group splits several factors)."""
        found = self.places.get(member)
        if found is None:
            found = self.places[member] = self._place(member)
        return found

    def _place(self, member: int) -> At:
        if not self.sizes:
            return At(member, 0, 0, 0)
        coordinate = self.call.mesh.coordinates[member]
        index = 0
        for mesh_dim in self.mesh_dims:
            index = index * self.call.mesh.shape[mesh_dim] + coordinate[mesh_dim]
        return At(member, index, offsets_of(self.sizes)[index], self.sizes[index])
