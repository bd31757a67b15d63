"""Terms whose rows are *parted*: along one dim each row is one rank's, and zeros on the others, as data decide.

Where matrices of groups are cut over ranks (the experts of a mixture), a rank has the rows of its groups. They are terms like any
others: their sum is the value. That every row has one owner is a fact beside their layout: with it, an operation that treats each
row by itself can be done by the owners, though it is not linear. Who forgets the fact has terms, and is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..layout.layout import Layout
from ..layout.splits import Split


@dataclass(frozen=True, slots=True)
class Parted:
    """What is known of one operand in terms.

    Attributes:
        dim: its rows are parted along this one.
        by: equal numbers, within a call, are the same rows on the same ranks.
        split: how the groups are cut that decide; rows are parted over its mesh dims together.
        source: the argument that says which group a row belongs to, if it is one of the call.
    """

    dim: int
    by: int
    split: Split
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one operand beside its layout.

    Attributes:
        parted: how its rows are parted.
        sums: mesh dims over which it is in terms that have been added up before, for another operation, and along which dim
            these sums are cut, None if they are whole.
        passed: mesh dims over which it is in terms that another operation has passed on.
        names: of a vector of positions that is cut, how some dim is cut of which each rank's are in its own block.
        wanted: what an operator had it moved to.
    """

    parted: Parted | None = None
    sums: frozenset[tuple[int, int | None]] = frozenset()
    passed: frozenset[int] = frozenset()
    names: Split | None = None
    wanted: Layout | None = None


NOTHING: Mapping[Any, Known] = MappingProxyType({})  # by argument and position in a list


@dataclass(frozen=True, slots=True)
class Left:
    """A result whose rows are parted.

    Attributes:
        result: its position among those that are tensors; ``dim``: along which.
        operand: one that is parted alike; None where ``source`` says whose each row is, as ``split`` cuts the groups.
        masked: other ranks' rows are to be made zeros.
    """

    result: int
    dim: int
    operand: int | None = None
    source: str = ""
    split: Split | None = None
    masked: bool = False
