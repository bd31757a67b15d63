"""Rows for operands whose rows are parted (``rules/disjoint_partial.py``), and of which results that is known. Pure.

Two laws. *An operation that treats each position of a factor by itself may be done by the positions' owners*: where a rule allows
any cut of a factor, each slice of the results follows from that slice of the operands alone. Whatever others have there (they
computed with zeros) is made zero again. It is declared for operations on single elements: others might refuse zeros. *Groups that
are cut part the rows of their products*: who holds a group has its rows, and zeros in those of other groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Partial
from ..rules.call import Call
from ..rules.disjoint_partial import Left, Parted
from ..rules.rule import Along, Factors, R, Row, Rule, Spec, alone, candidates, stands
from .strategy_table import Line, where_of

SUM = Partial("sum")


def parted_lines(rule: Rule, factors: Factors, call: Call, count: int) -> Iterator[Line]:
    """The rows that there are beside ``count`` others for operands as they are parted here."""
    known = {fact.by: fact for fact in call.parted if fact is not None}
    whole = candidates(factors, ())
    for fact in known.values():
        found = [_by_group(row, factors, call, fact) for row in whole if fact.source is not None]
        if by_element(rule, call):
            found += [_by_position(row, factors, call, fact) for row in whole]
        for row in found:
            if row is not None and (row.operands[0] == SUM or not call.func._schema.is_mutable):
                operands = [
                    None if i in call.fixed else where_of(spec, factors.operands[i]) for i, spec in enumerate(row.operands)
                ]
                results = [where_of(spec, dims) for spec, dims in zip(row.results, factors.results, strict=False)]
                yield Line(count, row, tuple(operands), tuple(results), False)
                count += 1


def by_element(rule: Rule, call: Call) -> bool:
    """Whether it computes floating numbers (or bools of them) element by element, which raises nothing, and writes nowhere but
    to its first operand."""
    if torch.Tag.pointwise not in call.func.tags or not writes_first(call) or rule.run is not None:
        return False
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return False
    dtypes = [call.operands[i].dtype for i, fact in enumerate(call.parted) if fact is not None]
    made = [meta.dtype for meta in call.results if meta is not None]
    return all(dtype.is_floating_point or dtype is torch.bool for dtype in (*dtypes, *made))


def writes_first(call: Call) -> bool:
    """Whether it writes nowhere but to its first operand, which it returns."""
    schema = call.func._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return not schema.is_mutable or (written == [schema.arguments[0].name] == [call.names[0]] and len(schema.returns) == 1)


def _by_position(row: Row, factors: Factors, call: Call, fact: Parted) -> Row | None:
    """A row that cuts a factor, for operands parted along it."""
    name = row.factor
    if name is None or row.kernel is not None or any(spec != Along(name) for spec in row.results):
        return None
    operands: list[Spec] = [SUM if parted_along(factors, call, i, fact, name) else R for i in range(len(row.operands))]
    if SUM not in operands or any(isinstance(spec, Partial) for spec in row.operands):
        return None
    return Row(tuple(operands), (SUM,) * len(row.results), parted=fact)


def _by_group(row: Row, factors: Factors, call: Call, fact: Parted) -> Row | None:
    """A row that cuts the groups, for operands parted by the same ones."""
    operands, changed = list(row.operands), False
    for name, (groups, source) in factors.groups.items():
        if row.factor != groups or source != fact.source:
            return None
        for i, spec in enumerate(operands):
            if spec == R and parted_along(factors, call, i, fact, name):
                operands[i], changed = SUM, True
    return Row(tuple(operands), row.results, row.factor, row.kernel, parted=fact) if changed else None


def parted_along(factors: Factors, call: Call, i: int, fact: Parted, name: str) -> bool:
    own = call.parted[i]
    return own is not None and own.by == fact.by and factors.operands[i][own.dim] == (name,)


# --- what is chosen ---------------------------------------------------------------------------------------------------------
def fits(rows: Sequence[Row], call: Call, operands: Sequence[Layout], cut: Mapping[str, Split], left: Sequence[Left]) -> bool:
    """Whether the rows for parted operands go together: over all of the mesh dims that part them, which do not move."""
    for row in rows:
        fact = row.parted
        if fact is None:
            continue
        alike = {m for m, other in enumerate(rows) if other.parted is not None and other.parted.by == fact.by}
        if alike != set(fact.split.mesh_dims):
            return False
        if row.factor is not None and cut.get(row.factor) != fact.split:
            return False
        if any(spec == SUM and not operands[i].same_data(call.operands[i]) for i, spec in enumerate(row.operands)):
            return False
        if row.factor is None and sum(one.masked for one in left) < len(row.results):
            return False
    return True


def left_parted(
    factors: Factors, call: Call, rows: Sequence[Row], operands: Sequence[Layout], results: Sequence[Layout | None]
) -> tuple[Left, ...]:
    """The results whose rows are parted when these rows are taken."""
    if not writes_first(call) or not (call.parted or factors.groups):
        return ()
    given = [layout for layout in results if layout is not None]
    found = {left.result: left for left in _by_owners(factors, call, rows, operands, given)}
    for name, (groups, source) in factors.groups.items():
        taken = {m for m, row in enumerate(rows) if row.factor == groups and call.mesh.shape[m] > 1}
        at = call.names.index(source) if source in call.names else None
        if not taken or at is None or at in call.plain or not call.operands[at].is_replicated:
            continue
        cuts = [operands[i].splits[d] for i, dims in enumerate(factors.operands) if (d := stands(dims, groups)) is not None]
        split = cuts[0] if cuts else None
        for r, dims in enumerate(factors.results):
            d = alone(dims, (name,))
            if d is not None and split is not None and set(split.mesh_dims) == taken and _in_terms(given[r], taken):
                found[r] = Left(r, d, source=source, split=split)
    return tuple(found.values())


def _by_owners(
    factors: Factors, call: Call, rows: Sequence[Row], operands: Sequence[Layout], results: Sequence[Layout]
) -> Iterator[Left]:
    for i, fact in enumerate(call.parted):
        if fact is None:
            continue
        names, over = factors.operands[i][fact.dim], set(fact.split.mesh_dims)
        along = next((row for row in candidates(factors, ()) if row.factor is not None and (row.factor,) == names), None)
        if along is None or along.kernel is not None or any(isinstance(spec, Partial) for spec in along.operands):
            continue
        taken = [rows[m] for m in over]
        if any(row.factor is not None or row.kernel is not None for row in taken):
            continue
        terms = {j for row in taken for j, spec in enumerate(row.operands) if isinstance(spec, Partial)}
        if i not in terms or any(
            not parted_along(factors, call, j, fact, names[0]) or not operands[j].same_data(call.operands[j]) for j in terms
        ):
            continue
        masked = any(row.parted is not None for row in taken)
        for r, dims in enumerate(factors.results):
            d = alone(dims, names)
            if d is None or along.results[r] != Along(names[0]) or not _in_terms(results[r], over):
                continue
            if results[r].splits[d] == operands[i].splits[fact.dim]:
                yield Left(r, d, operand=i, masked=masked)


def _in_terms(layout: Layout, mesh_dims: set[int]) -> bool:
    return all(layout.partials[m] == "sum" for m in mesh_dims)
