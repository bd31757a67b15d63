"""Disjoint partial values: partial sums of which each row is non-zero on one rank, and other operand facts.

If matrices of groups are sharded (the experts of a mixture), a rank computes the rows of its groups and zeros elsewhere. Data
decide which rows these are. The rows are a partial sum as any other: their sum is the value. That each row has one owner is a
fact beside the layout. With it, an operation on single rows may run on the owners, though it is not linear. Dropping the fact is
always safe: the tensor is then handled as an ordinary ``Partial("sum")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..layout.layout import Layout
from ..layout.splits import Split


@dataclass(frozen=True, slots=True)
class DisjointSplit:
    """The disjoint rows of one partial operand.

    Attributes:
        dim: the tensor dim of the rows.
        owner_number: equal numbers within a call mean the same rows on the same ranks.
        split: the split of the groups. Rows are disjoint over its mesh dims together.
        source: the argument that states the group of each row, if it is one of the call.
    """

    dim: int
    owner_number: int
    split: Split
    source: str | None = None


@dataclass(frozen=True, slots=True)
class OperandFacts:
    """The facts of one operand beside its layout.

    Attributes:
        disjoint_rows: its disjoint rows.
        cached_reductions: (mesh dim, tensor dim) of reductions over a mesh dim that are cached. The tensor dim is sharded, None:
            replicated.
        deferred_dims: mesh dims over which an earlier operator deferred the reduction.
        local_indices: of a sharded vector of positions, the split of the dim that they index. Each rank's positions are in its
            own block.
        preferred_layout: the preferred layout: an operator redistributed the operand to it.
    """

    disjoint_rows: DisjointSplit | None = None
    cached_reductions: frozenset[tuple[int, int | None]] = frozenset()
    deferred_dims: frozenset[int] = frozenset()
    local_indices: Split | None = None
    preferred_layout: Layout | None = None


NO_FACTS: Mapping[Any, OperandFacts] = MappingProxyType({})  # by argument and position in its list


@dataclass(frozen=True, slots=True)
class DisjointResult:
    """A result with disjoint rows.

    Attributes:
        result: its position among the tensor results. ``dim``: the tensor dim of the rows.
        operand: an operand with the same rows. None if ``source`` states the owner of each row, for groups split by ``split``.
        masked: the rows of other ranks must be set to zero.
    """

    result: int
    dim: int
    operand: int | None = None
    source: str = ""
    split: Split | None = None
    masked: bool = False
