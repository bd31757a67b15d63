"""Every row that a rule declares for a sample, with operands that lie as the row wants them: what dispatch may one day choose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.tensor_tree import filled, tensors
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard
from ..propagation.strategy_table import Where, word
from ..rules.partial_rules import written
from ..rules.rule import Rule, parse_partial
from .force_strategy import Rows, rows_of
from .placements import Combination, ragged_shard
from .scatter import FARTHEST, can_be_partial, scatter
from .variants import Variant, resolved

Wanted = tuple[Where | None, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A call, where its tensors lie, and the rows that it is to follow, one for each mesh dim (none: what dispatch chooses)."""

    variant: Variant
    mesh_shape: tuple[int, ...]
    placements: Combination
    rows: tuple[str, ...] = ()

    @property
    def mesh(self) -> DeviceMesh:
        return self.variant.mesh(self.mesh_shape)


@dataclass(slots=True)
class Coverage:
    """The rows that a rule declares for what was tried, and those that ran.

    Attributes:
        declared, forced: rows by their text; a row of another text is another row.
        refused: of the declared ones those that the rule itself allows in no case that was tried (its ``when``).
        unmet: partial rows of the rule that no sample's call has.
    """

    declared: set[str] = field(default_factory=set)
    forced: set[str] = field(default_factory=set)
    rules: dict[int, tuple[Rule, set[tuple[int, int]]]] = field(default_factory=dict)

    def see(self, rows: Rows) -> None:
        self.declared.update(rows.wanted)
        self.rules.setdefault(id(rows.rule), (rows.rule, set()))[1].add(rows.counts)

    @property
    def refused(self) -> set[str]:
        return self.declared - self.forced

    def unmet(self) -> list[str]:
        """Rows of terms that are written out in a rule, which no call that was tried has."""
        found = []
        for rule, counts in self.rules.values():
            for text in written(rule.partials):
                made = [text if not isinstance(text, str) else parse_partial(text, *count) for count in counts]
                if not any(row is not None and _text(row) in self.declared for row in made):
                    found.append(str(text))
        return found


def _text(row: Any) -> str:
    return " -> ".join(",".join(map(word, side)) for side in (row.operands, row.results))


def row_cases(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """One case for each row, uneven and empty blocks included; on meshes of two dims rows in pairs."""
    variant = resolved(variant)
    yield from _alone(variant, mesh_shape, coverage, rng) if len(mesh_shape) == 1 else _pairs(variant, mesh_shape, coverage, rng)


def _alone(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """The rows of each layout of the operands that a row wants, those of that layout's own call among them: rules look at it."""
    mesh, xs = variant.mesh(mesh_shape), tensors(variant.sample.given)
    whole: Combination = tuple((Replicate(),) for _ in xs)
    pending = [whole, *_terms_of_monoids(xs)]
    seen, moved = set(pending), []
    while pending:
        where = pending.pop(0)
        rows = _rows(variant, mesh, where)
        if rows is None:
            continue
        coverage.see(rows)
        for text, wanted in rows.wanted.items():
            if _lies(where, wanted):
                yield Case(variant, mesh_shape, where, (text,))
            elif where == whole and not any(isinstance(spec, Partial) for spec in wanted):
                moved.append(Case(variant, mesh_shape, where, (text,)))
            for layout in _laid_out(xs, wanted, mesh_shape[0]):
                if layout not in seen:
                    seen.add(layout)
                    pending.append(layout)
        if where == whole:
            rng.shuffle(pending)
    yield from moved


def _pairs(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Each row beside none, and beside another one, on either mesh dim."""
    mesh, xs = variant.mesh(mesh_shape), tensors(variant.sample.given)
    rows = _rows(variant, mesh, tuple((Replicate(),) * len(mesh_shape) for _ in xs))
    if rows is None:
        return
    coverage.see(rows)
    for pair in _paired(list(rows.wanted), len(mesh_shape), rng):
        per_dim = [rows.wanted[own] for own in pair]
        where = tuple(tuple(_placement(wanted[i]) for wanted in per_dim) for i in range(len(xs)))
        found = _rows(variant, mesh, where) if _possible(xs, where) else None
        if found is not None and set(pair) <= set(found.wanted):
            yield Case(variant, mesh_shape, where, pair)


def _paired(rows: list[str], count: int, rng: random.Random) -> list[tuple[str, ...]]:
    """Every row beside none, then all other pairs in a random order; on further mesh dims none."""
    none = (rows[-1],) * (count - 2)
    beside = [(row, rows[-1]) if rng.random() < 0.5 else (rows[-1], row) for row in rows]
    others = list(itertools.product(rows[:-1], repeat=2))
    rng.shuffle(others)
    return [(*pair, *none) for pair in (*beside, *others)]


def _rows(variant: Variant, mesh: DeviceMesh, where: Combination) -> Rows | None:
    given = variant.sample.given
    args, kwargs = filled(given, [scatter(x, mesh, own) for x, own in zip(tensors(given), where, strict=True)])
    return rows_of(variant.call, args, kwargs)


def _terms_of_monoids(xs: Sequence[torch.Tensor]) -> Iterator[Combination]:
    """Terms of a user's reduction: rules that let all terms pass have a row for it once it is there."""
    if xs and xs[0].dtype is not torch.bool and can_be_partial(xs[0].dtype, FARTHEST):
        yield ((Partial(FARTHEST),), *((Replicate(),) for _ in xs[1:]))


def _lies(where: Combination, wanted: Wanted) -> bool:
    return all(spec is None or _same(own[0], spec) for own, spec in zip(where, wanted, strict=True))


def _same(placement: Placement, spec: Where) -> bool:
    return getattr(placement, "dim", None) == spec if isinstance(spec, int) else placement == spec


def _laid_out(xs: Sequence[torch.Tensor], wanted: Wanted, ranks: int) -> Iterator[Combination]:
    """The layouts that a row wants: split as by ``torch.chunk``, and otherwise."""
    even = [_placement(spec) for spec in wanted]
    if _possible(xs, tuple((own,) for own in even)):
        yield tuple((own,) for own in even)
        yield tuple(
            (ragged_shard(own.dim, x.shape[own.dim], ranks) if isinstance(own, Shard) else own,)
            for own, x in zip(even, xs, strict=True)
        )


def _placement(spec: Where | None) -> Placement:
    return Replicate() if spec is None else Shard(spec) if isinstance(spec, int) else spec


def _possible(xs: Sequence[torch.Tensor], where: Combination) -> bool:
    """Not where a list has elements of fewer dims than its first, or dtypes that have no such terms."""
    pairs = ((x, p) for x, own in zip(xs, where, strict=True) for p in own)
    return all(
        can_be_partial(x.dtype, p.reduce_op) if isinstance(p, Partial) else not isinstance(p, Shard) or p.dim < x.ndim
        for x, p in pairs
    )
