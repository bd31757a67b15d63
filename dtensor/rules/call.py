"""One operation about to run, seen globally: the op, its arguments by name, its tensor operands as layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch

from ..errors import RuleError
from ..layout.layout import Layout
from ..layout.splits import Split
from ..mesh.device_mesh import DeviceMesh
from .disjoint_partial import Known, Parted


@dataclass(frozen=True, slots=True)
class Meta:
    """Global shape, strides and dtype of a result; of a view the bytes from where the first operand begins to where it does."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int = field(default=0, compare=False)


class Kind(IntEnum):
    """What is known of a number while planning, beside its type: plans depend on no more of it."""

    ZERO = 0
    HALF = 1  # neither zero nor infinite in any floating dtype
    WIDE = 2  # nor in single precision
    ANY = 3


def kind_of(number: complex) -> Kind:
    """The kind of a number: of a complex one that of the part which is known less.

    >>> kind_of(0.5), kind_of(1e30), kind_of(float("nan"))
    (<Kind.HALF: 1>, <Kind.WIDE: 2>, <Kind.ANY: 3>)
    """
    if isinstance(number, complex):
        return max(kind_of(number.real), kind_of(number.imag))
    size = abs(number)
    if size == 0:
        return Kind.ZERO
    if 1e-4 <= size <= 6e4:
        return Kind.HALF
    return Kind.WIDE if 1e-37 <= size <= 1e38 else Kind.ANY


@dataclass(slots=True)
class Call:
    """What rules look at. Nothing in it depends on the rank.

    Attributes:
        func: the overload.
        arguments: value by schema name (defaults filled in); a tensor stands as its ``Layout``, a list of tensors as a list of
            layouts, an optional tensor as None.
        operands: the layouts of all tensor arguments, flattened in schema order.
        names: for each operand the name of the argument that it belongs to.
        results: metadata of each result tensor, flattened; None for a result that is not a tensor.
        plain: positions of operands that are plain tensors or numbers rather than DTensors.
        scalars: names of the arguments that are numbers and no operands (a step size).
        stale: names of the numbers that may be another call's, as this one's plan serves all of them.
        known: for each operand what is known of it beside its layout, () where that is nothing for all.
    """

    func: Any
    mesh: DeviceMesh
    arguments: dict[str, Any]
    operands: tuple[Layout, ...]
    names: tuple[str, ...]
    results: tuple[Meta | None, ...] = ()
    plain: frozenset[int] = field(default_factory=frozenset)
    scalars: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    known: tuple[Known | None, ...] = ()

    @property
    def parted(self) -> tuple[Parted | None, ...]:
        """For each operand what is known of its rows, () where nothing is known of any."""
        found = tuple([None if each is None else each.parted for each in self.known])
        return found if any(found) else ()

    def sums(self, operand: int, mesh_dim: int) -> tuple[int | None, ...]:
        """How the terms of an operand over a mesh dim lie that have been added up before: cut along a dim, or whole (None)."""
        own = self.known[operand] if self.known else None
        return () if own is None else tuple([at for over, at in own.sums if over == mesh_dim])

    def passed(self, operand: int, mesh_dim: int) -> bool:
        """Whether another operation has left terms of an operand's terms over a mesh dim."""
        own = self.known[operand] if self.known else None
        return own is not None and mesh_dim in own.passed

    def named_by(self, operand: int) -> Split | None:
        """How a dim is cut of which an operand, positions, names what each rank has itself."""
        own = self.known[operand] if self.known else None
        return None if own is None else own.names

    def as_wanted(self) -> Call:
        """The call with the operands for which that is known where operators wanted them."""
        wanted = [None if own is None else own.wanted for own in self.known]
        if not any(wanted):
            return self
        return replace(self, operands=tuple([at or x for at, x in zip(wanted, self.operands, strict=True)]))

    def wanted(self, operand: int) -> bool:
        """Whether an operator had an operand moved, so that others will."""
        own = self.known[operand] if self.known else None
        return own is not None and own.wanted is not None

    @property
    def fixed(self) -> frozenset[int]:
        """Positions of operands that stay as they are: numbers and 0-d plain tensors. Plain tensors with dims can be cut."""
        return frozenset(i for i in self.plain if not self.operands[i].shape) if self.plain else self.plain

    @property
    def kinds(self) -> tuple[tuple[int | str, Kind], ...]:
        """The kind of each number, by its position among the operands or its name."""
        found: list[tuple[int | str, Kind]] = []
        for i in sorted(self.plain):
            if isinstance(number := self.arguments[self.names[i]], (int, float, complex)):
                found.append((i, kind_of(number)))
        for name in sorted(self.scalars):
            if isinstance(number := self.arguments.get(name), (int, float, complex)):
                found.append((name, kind_of(number)))
        return tuple(found)

    def __getitem__(self, name: str) -> Any:
        if name in self.stale:
            raise RuleError(
                f"{self.func}: the value of {name!r} may change between calls that share this plan; read it from "
                "the arguments of the kernel"
            )
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.arguments else default

    def for_all_numbers(self) -> Call:
        """The call as kernels see it, which run for others that differ from it in numbers.

        Asked for such a number, it raises ``RuleError``.
        """
        names = self.scalars.union([self.names[i] for i in self.plain]) if self.plain else self.scalars
        stale = [name for name in names if isinstance(self.arguments.get(name), (int, float, complex))]
        return replace(self, stale=frozenset(stale)) if stale else self

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.operands[operand].shape)

    def result_bytes(self) -> list[int]:
        """Of each result that is a tensor."""
        return [math.prod(meta.shape) * meta.dtype.itemsize for meta in self.results if meta is not None]

    def operands_of(self, name: str) -> list[int]:
        """Positions of the operands that belong to one argument."""
        return [position for position, owner in enumerate(self.names) if owner == name]

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """The dims that argument ``name`` (an int, a list, or None for all) picks, non-negative."""
        return normalize_dims(self.arguments.get(name), ndim)


def normalize_dims(value: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dims as non-negative ints; None or an empty list means all.

    >>> normalize_dims(-1, 3), normalize_dims(None, 2)
    ((2,), (0, 1))
    """
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(ndim))
    values = (value,) if isinstance(value, int) else value
    return tuple(v + ndim if v < 0 else v for v in values) if ndim else ()
