"""Calls: one operator call in global terms, with arguments by name and layouts in place of tensors."""

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
from .disjoint_partial import DisjointSplit, OperandFacts


@dataclass(frozen=True, slots=True)
class Meta:
    """Global shape, strides and dtype of a result. ``start``: of a view, the bytes from the beginning of the first operand to its
    own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int = field(default=0, compare=False)


class NumberKind(IntEnum):
    """The value class of a Python number, the only property of its value on which plans depend."""

    ZERO = 0
    HALF = 1  # neither zero nor infinite in any floating dtype
    WIDE = 2  # neither zero nor infinite in float32
    ANY = 3


def classify_number(number: complex) -> NumberKind:
    """Return the class of a number's magnitude, on which plans depend.

    A complex number has the less specific class of its two parts.

    >>> classify_number(0.5), classify_number(1e30), classify_number(float("nan"))
    (<NumberKind.HALF: 1>, <NumberKind.WIDE: 2>, <NumberKind.ANY: 3>)
    """
    if isinstance(number, complex):
        return max(classify_number(number.real), classify_number(number.imag))
    magnitude = abs(number)
    if magnitude == 0:
        return NumberKind.ZERO
    if 1e-4 <= magnitude <= 6e4:
        return NumberKind.HALF
    return NumberKind.WIDE if 1e-37 <= magnitude <= 1e38 else NumberKind.ANY


@dataclass(slots=True)
class Call:
    """The call that rules read. Nothing in it depends on the rank.

    Attributes:
        func: the overload.
        arguments: values by schema name, with defaults filled in. A tensor is a ``Layout``, a list of tensors a list of layouts,
            an absent tensor None.
        operands: the layouts of all tensor arguments, flattened in schema order.
        names: for each operand the name of its argument.
        results: metadata of each result, flattened. None for a result that is not a tensor.
        plain: positions of operands that are plain tensors or numbers.
        scalars: names of the arguments that are numbers and no operands (a step size).
        stale: names of the numbers that may differ in other calls with the same plan.
        operand_facts: for each operand its facts beside the layout, or () if there are none.
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
    operand_facts: tuple[OperandFacts | None, ...] = ()

    @property
    def disjoint_splits(self) -> tuple[DisjointSplit | None, ...]:
        """The disjoint rows (see :class:`DisjointSplit`) of each operand, or () if no operand has any."""
        disjoint = tuple([None if each is None else each.disjoint_rows for each in self.operand_facts])
        return disjoint if any(disjoint) else ()

    def cached_reduction_dims(self, operand: int, mesh_dim: int) -> tuple[int | None, ...]:
        """Return the sharded tensor dims of cached reductions of an operand over a mesh dim. None is a replicated one."""
        facts = self.operand_facts[operand] if self.operand_facts else None
        return () if facts is None else tuple([at for over, at in facts.cached_reductions if over == mesh_dim])

    def is_reduction_deferred(self, operand: int, mesh_dim: int) -> bool:
        """Return True if an earlier operator deferred the reduction of the operand over the mesh dim."""
        facts = self.operand_facts[operand] if self.operand_facts else None
        return facts is not None and mesh_dim in facts.deferred_dims

    def local_index_split(self, operand: int) -> Split | None:
        """Return the split of the dim that an index operand indexes, if each rank indexes its own block only; else None."""
        facts = self.operand_facts[operand] if self.operand_facts else None
        return None if facts is None else facts.local_indices

    def with_preferred_layouts(self) -> Call:
        """Return the call with each operand in its preferred layout (that of an earlier redistribution), if it has one."""
        preferred = [None if facts is None else facts.preferred_layout for facts in self.operand_facts]
        if not any(preferred):
            return self
        return replace(self, operands=tuple([at or x for at, x in zip(preferred, self.operands, strict=True)]))

    def has_preferred_layout(self, operand: int) -> bool:
        """Return True if an earlier operator redistributed the operand to a layout that later operators will use, too."""
        facts = self.operand_facts[operand] if self.operand_facts else None
        return facts is not None and facts.preferred_layout is not None

    @property
    def fixed_operands(self) -> frozenset[int]:
        """Positions of operands that no strategy shards: numbers and 0-d plain tensors."""
        return frozenset(i for i in self.plain if not self.operands[i].shape) if self.plain else self.plain

    @property
    def number_kinds(self) -> tuple[tuple[int | str, NumberKind], ...]:
        """The value class of each number in the call, by its position among the operands or by its name."""
        kinds: list[tuple[int | str, NumberKind]] = []
        for i in sorted(self.plain):
            if isinstance(number := self.arguments[self.names[i]], (int, float, complex)):
                kinds.append((i, classify_number(number)))
        for name in sorted(self.scalars):
            if isinstance(number := self.arguments.get(name), (int, float, complex)):
                kinds.append((name, classify_number(number)))
        return tuple(kinds)

    def __getitem__(self, name: str) -> Any:
        """Return an argument by name. Raise ``RuleError`` for a number that may differ in other calls with the same plan."""
        if name in self.stale:
            raise RuleError(
                f"{self.func}: the value of {name!r} may change between calls that share this plan; read it from "
                "the arguments of the kernel"
            )
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.arguments else default

    def forbid_number_reads(self) -> Call:
        """Return a copy of the call in which reading a number raises ``RuleError``, because other numbers may share the plan."""
        names = self.scalars.union([self.names[i] for i in self.plain]) if self.plain else self.scalars
        stale = [name for name in names if isinstance(self.arguments.get(name), (int, float, complex))]
        return replace(self, stale=frozenset(stale)) if stale else self

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.operands[operand].shape)

    def result_bytes(self) -> list[int]:
        """Return the global bytes of each result that is a tensor."""
        return [math.prod(meta.shape) * meta.dtype.itemsize for meta in self.results if meta is not None]

    def operands_of(self, name: str) -> list[int]:
        """Return the positions of the operands in argument ``name``, several if it is a list of tensors."""
        return [position for position, owner in enumerate(self.names) if owner == name]

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """Return the dims that argument ``name`` selects of a tensor with ``ndim`` dims, as non-negative numbers (None: all)."""
        return normalize_dims(self.arguments.get(name), ndim)


def normalize_dims(value: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims as non-negative numbers. None and an empty list mean all dims.

    >>> normalize_dims(-1, 3), normalize_dims(None, 2)
    ((2,), (0, 1))
    """
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(ndim))
    values = (value,) if isinstance(value, int) else value
    return tuple(v + ndim if v < 0 else v for v in values) if ndim else ()
