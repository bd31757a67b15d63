"""Rows that are parted, while a program is planned: a form of a value like others, which goes for terms wherever those do.

A plan does not tell owners apart whose groups are cut alike: a call that meets others when it runs chooses for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Partial, Placement, Shard
from ..propagation.select_strategy import declared
from ..propagation.strategy_table import Line
from ..rules.disjoint_partial import Known, Left, Parted
from .graph import Asked

NOT_CUT = Split((), ())


@dataclass(frozen=True, slots=True)
class ByOwner(Partial):
    """Terms whose rows along ``dim`` are parted as ``split`` cuts their groups."""

    dim: int = 0
    split: Split = NOT_CUT


def marks_of(layout: Layout) -> frozenset[tuple[int, ByOwner]]:
    """By mesh dim what is known of a layout's rows."""
    return frozenset((i, p) for i, p in enumerate(layout.placements) if type(p) is ByOwner)


def plain(placement: Placement) -> Placement:
    """A placement by itself: how it is cut is up to the layout."""
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def placed(layout: Layout, mesh_dim: int, placement: Placement) -> Layout:
    """``layout`` with another placement on one mesh dim."""
    placements = list(map(plain, layout.placements))
    placements[mesh_dim] = placement
    return layout.replace(placements=placements)


def unmarked(layout: Layout, mesh_dim: int | None = None) -> Layout:
    """The layout alone."""
    for i, _ in marks_of(layout):
        layout = placed(layout, i, Partial("sum")) if mesh_dim in (None, i) else layout
    return layout


def parted_as(layout: Layout, fact: Parted | None) -> Layout:
    """``layout`` marked with what is known, if it is in terms there."""
    if fact is None or len(fact.split.mesh_dims) > 1 or layout.partials[fact.split.mesh_dims[0]] != "sum":
        return layout
    return placed(layout, fact.split.mesh_dims[0], ByOwner(dim=fact.dim, split=fact.split))


def marked(results: Sequence[Layout | None], left: Sequence[Left], known: Sequence[Parted | None]) -> tuple[Layout | None, ...]:
    """The results with what is known of them."""
    found, places = list(results), [i for i, layout in enumerate(results) if layout is not None]
    for one in left:
        split = one.split if one.operand is None else cast(Parted, known[one.operand]).split
        at = places[one.result]
        if split is not None:
            found[at] = parted_as(cast(Layout, found[at]), Parted(one.dim, 0, split))
    return tuple(found)


def facts_of(asked: Asked, operands: Sequence[Layout | None]) -> tuple[Known | None, ...]:
    """What marks say of the operands of a call."""
    source = next((name for _, name in asked.factors.groups.values()), None)
    found: list[Known | None] = []
    numbers: dict[Split, int] = {}
    for layout in operands:
        mark = None if layout is None else next((p for p in layout.placements if type(p) is ByOwner), None)
        parted = None if mark is None else Parted(mark.dim, numbers.setdefault(mark.split, len(numbers)), mark.split, source)
        found.append(None if parted is None else Known(parted))
    return tuple(found) if numbers else ()


def lines_of(asked: Asked, operands: Sequence[Layout | None]) -> tuple[Line, ...]:
    """All rows that the rule has for operands of which this is known."""
    known = facts_of(asked, operands)
    key = "lines", known
    if key not in asked.answers:
        asked.answers[key] = declared(asked.rule, asked.factors, replace(asked.call, known=known)).lines
    return cast("tuple[Line, ...]", asked.answers[key])
