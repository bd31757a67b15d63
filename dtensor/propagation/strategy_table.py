"""The rows of a rule that a call allows, and where each wants its operands. Pure: a function of global facts only.

Both follow from how the rule's factors stand in the tensor dims and from dtypes, not from sizes: a :class:`Table` serves calls of
all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.caches import Bounded
from ..placement import Monoid, Partial, Placement, Replicate, Shard
from ..rules.call import Call, Kind
from ..rules.rule import ANY_PARTIAL, Along, Dims, Factors, Partials, R, Row, Spec, candidates, stands

Where = int | Placement  # a tensor dim, or Replicate / Partial


@dataclass(frozen=True, slots=True)
class Line:
    """A row with where it wants operands and leaves results; operands that are never moved have None."""

    order: int
    row: Row
    operands: tuple[Where | None, ...]
    results: tuple[Where, ...]
    kernel: bool  # the row runs the kernel that a call's factors have for its factor: the table holds none of a call's own

    def __str__(self) -> str:
        """As rows of terms are written, with the tensor dims that are sharded: ``S(0),R -> S(0)``, ``sum,R -> sum``."""
        operands = [word(R if where is None else where) for where in self.operands]
        owners = " by owners" if self.row.parted is not None else ""
        return f"{','.join(operands)} -> {','.join(map(word, self.results))}{owners}"

    def row_for(self, factors: Factors) -> Row:
        """The row with the kernel that a call's factors have for it."""
        row = self.row
        return replace(row, kernel=factors.kernels[row.factor]) if self.kernel and row.factor else row

    @property
    def invents(self) -> bool:
        """Whether it cuts results though no operand is cut."""
        cut = [any(isinstance(where, int) for where in places) for places in (self.operands, self.results)]
        return cut == [False, True]

    def on(self, mesh_dim: int) -> bool:
        """Whether it is a row for that mesh dim: for parted operands, one of those that part them."""
        return self.row.parted is None or mesh_dim in self.row.parted.split.mesh_dims


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, and by what they want those that are free then. ``by_numbers``: other kinds of numbers may have other rows."""

    lines: tuple[Line, ...]
    free: Mapping[tuple[Where | None, ...], tuple[Line, ...]]
    by_numbers: bool = False


def by_text(lines: Sequence[Line]) -> dict[str, Line]:
    """Rows by what they say; those that say the same are numbered."""
    found: dict[str, Line] = {}
    for line in lines:
        text, count = str(line), 1
        while text in found:
            count += 1
            text = f"{line} #{count}"
        found[text] = line
    return found


def texts_of(rows: Sequence[Row], lines: Sequence[Line], factors: Factors) -> tuple[str, ...]:
    """Which of these lines rows are, by what they say."""
    named = {line.row_for(factors): text for text, line in by_text(lines).items()}
    return tuple([named[row] for row in rows])


def word(where: Where) -> str:
    """``S(0)``, ``sum``, ``R``."""
    return str(where.reduce_op) if isinstance(where, Partial) else f"S({where})" if isinstance(where, int) else str(where)


_TABLES: Bounded[Any, Table] = Bounded(2048, "prices.tables")


def table_of(factors: Factors, partials: Partials, call: Call) -> Table:
    """The rows that hold for these factors and dtypes, cached."""
    monoids = tuple(dict.fromkeys(op for layout in call.operands for op in layout.partials if isinstance(op, Monoid)))
    fixed, dtypes = call.fixed, tuple([meta.dtype for meta in call.results if meta is not None])
    key = (
        factors.operands,
        factors.results,
        frozenset(factors.whole),
        frozenset(factors.additive),
        frozenset(factors.reduced.items()),
        tuple([(name, kernel.lacking) for name, kernel in factors.kernels.items()]),
        factors.rows,
        partials,
        monoids,
        fixed,
        tuple([layout.dtype for layout in call.operands]),
        dtypes,
        call.kinds,
    )
    found = _TABLES.get(key)
    if found is None:
        rows = (*partials, *_monoid_rows(factors, monoids, partials))
        found = _TABLES.keep(key, _table(factors, rows, call, fixed, dtypes))
    return found


def _table(factors: Factors, partials: Partials, call: Call, fixed: frozenset[int], dtypes: tuple[torch.dtype, ...]) -> Table:
    lines: list[Line] = []
    by_numbers = False
    free: dict[tuple[Where | None, ...], list[Line]] = {}
    for row in candidates(factors, partials):
        if not all(isinstance(row.operands[i], Replicate) for i in fixed) or not _sound_dtypes(row, call, dtypes):
            continue
        by_numbers = by_numbers or _asks_for_numbers(row, call)
        if not _holds_for(row, call, dtypes):
            continue
        own = row.kernel is not None and row.kernel is factors.kernels.get(row.factor or "")
        if own:
            row = Row(row.operands, row.results, row.factor)
        operands = tuple(
            None if i in fixed else where_of(spec, dims)
            for i, (spec, dims) in enumerate(zip(row.operands, factors.operands, strict=True))
        )
        results = tuple(where_of(spec, dims) for spec, dims in zip(row.results, factors.results, strict=False))
        lines.append(line := Line(len(lines), row, operands, results, own))
        if not (own or line.invents) and (row.kernel is None or row.kernel.collectives == 0):
            free.setdefault(operands, []).append(line)
    return Table(tuple(lines), {operands: tuple(alike) for operands, alike in free.items()}, by_numbers)


def _monoid_rows(factors: Factors, monoids: tuple[Monoid, ...], partials: Partials) -> Iterator[Row]:
    """Where terms of any named reduction pass, so do those of a user's, if it acts element by element and is not finished yet."""
    for op in monoids if set(ANY_PARTIAL) <= set(partials) else ():
        if op.elementwise and op.finalize is None:
            yield Row((Partial(op),) * len(factors.operands), (Partial(op),) * len(factors.results))


def _sound_dtypes(row: Row, call: Call, results: tuple[torch.dtype, ...]) -> bool:
    """Whether the dtypes of a partial row keep its algebra.

    Sums and products of integers wrap in their own dtype and bools add by ``or``, so terms may not change dtype first, except
    to a floating dtype that holds all values of theirs: terms are larger than their sum, so rounding each of them to fewer bits
    is not what rounding the sum is. Max and min pass conversions that keep the order. There is no mean of integers.
    A product that is added up in more bits than a byte has none of its terms in a byte.
    """
    # results that are whole take nothing from terms
    dtypes = [dtype for spec, dtype in zip(row.results, results, strict=False) if isinstance(spec, Partial)]
    if row.factor is not None:
        return row.kernel is not None or not any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)
    for i, spec in enumerate(row.operands):
        if isinstance(spec, Partial):
            source = call.operands[i].dtype
            if spec.reduce_op == "avg" and not (source.is_floating_point or source.is_complex):
                return False
            if not all(dtype == source or _converts(spec.reduce_op, source, dtype) for dtype in dtypes):
                return False
    return True


def _asks_for_numbers(row: Row, call: Call) -> bool:
    """Whether :func:`_holds_for` looks at numbers."""
    of_operands = any(where == i for where, _ in call.kinds for i, _ in row.needs)
    return of_operands or (_adds_up(row) and any(isinstance(where, str) for where, _ in call.kinds))


def _holds_for(row: Row, call: Call, results: tuple[torch.dtype, ...]) -> bool:
    """Whether what multiplies or divides terms is known to be finite, or not to be zero.

    Numbers that are no operands scale what is added up (``alpha``) or do no harm: they must be finite in all dtypes at hand.
    """
    enough = Kind.HALF if torch.float16 in results else Kind.WIDE
    kinds = dict(call.kinds)
    for i, what in row.needs:
        kind, dtype = kinds.get(i), call.operands[i].dtype
        if kind is None and (what == "nonzero" or dtype.is_floating_point or dtype.is_complex):
            return False
        if kind is not None and (kind > enough or (what == "nonzero" and kind is Kind.ZERO)):
            return False
    return not _adds_up(row) or all(kind <= enough for where, kind in kinds.items() if isinstance(where, str))


def _adds_up(row: Row) -> bool:
    return any(isinstance(spec, Partial) and spec.reduce_op in ("sum", "avg") for spec in row.results)


def _converts(op: Any, source: torch.dtype, target: torch.dtype) -> bool:
    if op in ("max", "min"):
        return _keeps_order(source, target)
    return _holds(source, target)


def _holds(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a floating (or complex) dtype has the other's values, real parts at least."""
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target)):
        return False
    old, new = torch.finfo(source), torch.finfo(target)
    return new.eps <= old.eps and new.max >= old.max


def _keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether conversion is non-decreasing for all values, NaN included: into floats, and into integers that hold all values."""
    if target is torch.bool or source.is_complex or target.is_complex:
        return False
    if target.is_floating_point or source is torch.bool:
        return True
    if source.is_floating_point:
        return False
    old, new = torch.iinfo(source), torch.iinfo(target)
    return bool(new.min <= old.min and old.max <= new.max)


def where_of(spec: Spec, dims: Dims) -> Where:
    """Where a spec has a tensor with these factors."""
    if isinstance(spec, Along):
        dim = stands(dims, spec.factor)
        return Replicate() if dim is None else dim
    return spec


def spelled(spec: Spec, dims: Dims) -> Placement:
    """What a row wants of a tensor, as a placement."""
    where = where_of(spec, dims)
    return Shard(where) if isinstance(where, int) else where
