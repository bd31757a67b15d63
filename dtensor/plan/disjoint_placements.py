"""Disjoint partial values in a program plan: the fact is encoded as a placement, so layouts with and without it are options.

A plan does not distinguish owners with equally sharded groups. A call that meets other owners when it runs chooses for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..layout.layout import Layout
from ..layout.splits import Split, without_sizes
from ..placement import Partial, Placement
from ..propagation.select_strategy import bound_strategies_of
from ..propagation.strategy_table import BoundStrategy
from ..rules.disjoint_partial import DisjointResult, DisjointSplit, OperandFacts
from .graph import RuleQuery

UNSHARDED = Split((), ())


@dataclass(frozen=True, slots=True)
class DisjointPartial(Partial):
    """A ``Partial("sum")`` in which each row along ``dim`` is non-zero on one rank; ``split`` shards groups of rows."""

    dim: int = 0
    split: Split = UNSHARDED


def disjoint_placements(layout: Layout) -> frozenset[tuple[int, DisjointPartial]]:
    """Return the (mesh dim, placement) pairs of a layout's disjoint partial placements."""
    return frozenset((i, p) for i, p in enumerate(layout.placements) if type(p) is DisjointPartial)


def with_placement(layout: Layout, mesh_dim: int, placement: Placement) -> Layout:
    """Return ``layout`` with another placement on one mesh dim."""
    placements = list(map(without_sizes, layout.placements))
    placements[mesh_dim] = placement
    return layout.replace(placements=placements)


def without_disjoint(layout: Layout, mesh_dim: int | None = None) -> Layout:
    """Return ``layout`` with ``Partial("sum")`` for its disjoint partial placements, on one mesh dim or on all."""
    for i, _ in disjoint_placements(layout):
        layout = with_placement(layout, i, Partial("sum")) if mesh_dim in (None, i) else layout
    return layout


def mark_disjoint(layout: Layout, fact: DisjointSplit | None) -> Layout:
    """Return ``layout`` with the split of ``fact`` as a disjoint partial placement, if it is ``Partial("sum")`` there."""
    if fact is None or len(fact.split.mesh_dims) > 1 or layout.partials[fact.split.mesh_dims[0]] != "sum":
        return layout
    return with_placement(layout, fact.split.mesh_dims[0], DisjointPartial(dim=fact.dim, split=fact.split))


def mark_disjoint_results(
    results: Sequence[Layout | None], left: Sequence[DisjointResult], known: Sequence[DisjointSplit | None]
) -> tuple[Layout | None, ...]:
    """Return the layouts of a call's results, with the disjoint partial placements that the strategies predict.

    Args:
        results: the layouts.
        left: the predictions of the choice.
        known: the facts of the operands.
    """
    marked, places = list(results), [i for i, layout in enumerate(results) if layout is not None]
    for prediction in left:
        split = prediction.split if prediction.operand is None else cast(DisjointSplit, known[prediction.operand]).split
        place = places[prediction.result]
        if split is not None:
            marked[place] = mark_disjoint(cast(Layout, marked[place]), DisjointSplit(prediction.dim, 0, split))
    return tuple(marked)


def operand_facts(query: RuleQuery, operands: Sequence[Layout | None]) -> tuple[OperandFacts | None, ...]:
    """Return the operand facts that disjoint partial placements of a call's operands express; () if there are none."""
    source = next((name for _, name in query.factors.groups.values()), None)
    facts: list[OperandFacts | None] = []
    numbers: dict[Split, int] = {}
    for layout in operands:
        mark = None if layout is None else next((p for p in layout.placements if type(p) is DisjointPartial), None)
        parted = (
            None if mark is None else DisjointSplit(mark.dim, numbers.setdefault(mark.split, len(numbers)), mark.split, source)
        )
        facts.append(None if parted is None else OperandFacts(parted))
    return tuple(facts) if numbers else ()


def list_strategies(query: RuleQuery, operands: Sequence[Layout | None]) -> tuple[BoundStrategy, ...]:
    """Return all strategies that the rule has for operands with these layouts, and cache them in the query."""
    known = operand_facts(query, operands)
    key = "lines", known
    if key not in query.answers:
        query.answers[key] = bound_strategies_of(query.rule, query.factors, replace(query.call, operand_facts=known)).strategies
    return cast("tuple[BoundStrategy, ...]", query.answers[key])
