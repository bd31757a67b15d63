"""Owner strategies: only the ranks that own rows, or one operand, compute; others have zeros, or empty shards. Pure.

[Note: Disjoint partial strategies]
The rows of an operand are disjoint if each row is non-zero on one rank only (``rules/disjoint_partial.py``). Two invariants make
strategies of this fact.

1. An operator that computes each position of a factor by itself may run on the owners of the positions. The other ranks compute
   with zeros, so their rows are set to zero again. This is limited to operators on single elements, because others might refuse
   zeros.
2. If groups are sharded, the rows of their products are disjoint: the rank that has a group has its rows, and zeros elsewhere.

[Note: Single-owner strategy]
One position of a sharded dim is on one rank: the matrix of an expert in a sharded stack, and what is computed from it. Two such
operands may be sharded along different dims, so that strategies by dims would move one of them. Instead their owner computes
alone, and the other ranks have empty shards (``dispatch/programs/local_call.py``). Smaller operands that are sharded otherwise
are sent to the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Partial
from ..rules.call import Call, Meta
from ..rules.disjoint_partial import DisjointResult, DisjointSplit
from ..rules.op_traits import returns_view, traits_of
from ..rules.rule import Along, Factors, R, Rule, Spec, Strategy, StrategyChoice, find_dim, find_exact_dim, strategies_of_factors
from .strategy_table import BoundStrategy, StrategySelection, bind_spec

SUM = Partial("sum")


def iter_disjoint_strategies(rule: Rule, factors: Factors, call: Call, count: int) -> Iterator[BoundStrategy]:
    """Yield the strategies that a call has because operands have disjoint rows; their numbers start at ``count``."""
    distinct = {fact.owner_number: fact for fact in call.disjoint_splits if fact is not None}
    by_factor = strategies_of_factors(factors, ())
    for fact in distinct.values():
        candidate_strategies = [
            _strategy_by_group(strategy, factors, call, fact) for strategy in by_factor if fact.source is not None
        ]
        if is_elementwise_on_floats(rule, call):
            candidate_strategies += [_strategy_by_position(strategy, factors, call, fact) for strategy in by_factor]
        for strategy in candidate_strategies:
            if strategy is not None and (strategy.operands[0] == SUM or not call.func._schema.is_mutable):
                operands = [
                    None if i in call.fixed_operands else bind_spec(spec, factors.operands[i])
                    for i, spec in enumerate(strategy.operands)
                ]
                results = [bind_spec(spec, dims) for spec, dims in zip(strategy.results, factors.results, strict=False)]
                yield BoundStrategy(count, strategy, tuple(operands), tuple(results), False)
                count += 1


def is_elementwise_on_floats(rule: Rule, call: Call) -> bool:
    """Return True if the operator is elementwise on floats (results may be bools), cannot raise, and writes to operand 0 only."""
    if torch.Tag.pointwise not in call.func.tags or not writes_at_most_first_operand(call) or rule.run is not None:
        return False
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        return False
    dtypes = [call.operands[i].dtype for i, fact in enumerate(call.disjoint_splits) if fact is not None]
    result_dtypes = [meta.dtype for meta in call.results if meta is not None]
    return all(dtype.is_floating_point or dtype is torch.bool for dtype in (*dtypes, *result_dtypes))


def writes_at_most_first_operand(call: Call) -> bool:
    """Return True if the operator writes nothing, or nothing but its first operand, which it returns."""
    schema = call.func._schema
    mutated = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return not schema.is_mutable or (mutated == [schema.arguments[0].name] == [call.names[0]] and len(schema.returns) == 1)


def _strategy_by_position(strategy: Strategy, factors: Factors, call: Call, fact: DisjointSplit) -> Strategy | None:
    """Return the strategy in which the owners of rows compute the positions of ``strategy``'s factor, or None."""
    name = strategy.factor
    if name is None or strategy.kernel is not None or any(spec != Along(name) for spec in strategy.results):
        return None
    operands: list[Spec] = [SUM if is_disjoint_along(factors, call, i, fact, name) else R for i in range(len(strategy.operands))]
    if SUM not in operands or any(isinstance(spec, Partial) for spec in strategy.operands):
        return None
    return Strategy(tuple(operands), (SUM,) * len(strategy.results), disjoint_split=fact)


def _strategy_by_group(strategy: Strategy, factors: Factors, call: Call, fact: DisjointSplit) -> Strategy | None:
    """Return ``strategy``, which shards groups, for partial operands with rows disjoint by these groups; None without them."""
    operands, changed = list(strategy.operands), False
    for name, (groups, source) in factors.groups.items():
        if strategy.factor != groups or source != fact.source:
            return None
        for i, spec in enumerate(operands):
            if spec == R and is_disjoint_along(factors, call, i, fact, name):
                operands[i], changed = SUM, True
    return Strategy(tuple(operands), strategy.results, strategy.factor, strategy.kernel, disjoint_split=fact) if changed else None


def is_disjoint_along(factors: Factors, call: Call, i: int, fact: DisjointSplit, name: str) -> bool:
    """Return True if operand ``i`` has the disjoint rows of ``fact`` along the dim that is the factor ``name``."""
    disjoint_rows = call.disjoint_splits[i]
    return (
        disjoint_rows is not None
        and disjoint_rows.owner_number == fact.owner_number
        and factors.operands[i][disjoint_rows.dim] == (name,)
    )


# --- selected strategies: consistency and disjoint results ------------------------------------------------------------------
def disjoint_strategies_fit(
    strategies: Sequence[Strategy],
    call: Call,
    operands: Sequence[Layout],
    splits: Mapping[str, Split],
    disjoint_results: Sequence[DisjointResult],
) -> bool:
    """Return True if strategies for disjoint operands cover all mesh dims of the rows, and these operands do not move."""
    for strategy in strategies:
        fact = strategy.disjoint_split
        if fact is None:
            continue
        same_rows = {
            m
            for m, other in enumerate(strategies)
            if other.disjoint_split is not None and other.disjoint_split.owner_number == fact.owner_number
        }
        if same_rows != set(fact.split.mesh_dims):
            return False
        if strategy.factor is not None and splits.get(strategy.factor) != fact.split:
            return False
        if any(spec == SUM and not operands[i].has_same_blocks(call.operands[i]) for i, spec in enumerate(strategy.operands)):
            return False
        if strategy.factor is None and sum(one.masked for one in disjoint_results) < len(strategy.results):
            return False
    return True


def find_disjoint_results(
    factors: Factors, call: Call, strategies: Sequence[Strategy], operands: Sequence[Layout], results: Sequence[Layout | None]
) -> tuple[DisjointResult, ...]:
    """Return the results that have disjoint rows if these strategies are selected."""
    if not writes_at_most_first_operand(call) or not (call.disjoint_splits or factors.groups):
        return ()
    result_layouts = [layout for layout in results if layout is not None]
    disjoint = {
        disjoint_result.result: disjoint_result
        for disjoint_result in _iter_results_of_owners(factors, call, strategies, operands, result_layouts)
    }
    for name, (groups, source) in factors.groups.items():
        mesh_dims = {m for m, strategy in enumerate(strategies) if strategy.factor == groups and call.mesh.shape[m] > 1}
        operand = call.names.index(source) if source in call.names else None
        if not mesh_dims or operand is None or operand in call.plain or not call.operands[operand].is_replicated:
            continue
        operand_splits = [
            operands[i].splits[d] for i, dims in enumerate(factors.operands) if (d := find_dim(dims, groups)) is not None
        ]
        split = operand_splits[0] if operand_splits else None
        for r, dims in enumerate(factors.results):
            d = find_exact_dim(dims, (name,))
            if (
                d is not None
                and split is not None
                and set(split.mesh_dims) == mesh_dims
                and _is_partial_sum(result_layouts[r], mesh_dims)
            ):
                disjoint[r] = DisjointResult(r, d, source=source, split=split)
    return tuple(disjoint.values())


def _iter_results_of_owners(
    factors: Factors, call: Call, strategies: Sequence[Strategy], operands: Sequence[Layout], results: Sequence[Layout]
) -> Iterator[DisjointResult]:
    """Yield the results that have the disjoint rows of an operand: the rank with the operand's row computes the result's."""
    for i, fact in enumerate(call.disjoint_splits):
        if fact is None:
            continue
        names, mesh_dims = factors.operands[i][fact.dim], set(fact.split.mesh_dims)
        factor_strategy = next(
            (
                strategy
                for strategy in strategies_of_factors(factors, ())
                if strategy.factor is not None and (strategy.factor,) == names
            ),
            None,
        )
        if (
            factor_strategy is None
            or factor_strategy.kernel is not None
            or any(isinstance(spec, Partial) for spec in factor_strategy.operands)
        ):
            continue
        selected = [strategies[m] for m in mesh_dims]
        if any(strategy.factor is not None or strategy.kernel is not None for strategy in selected):
            continue
        partial_operands = {j for strategy in selected for j, spec in enumerate(strategy.operands) if isinstance(spec, Partial)}
        if i not in partial_operands or any(
            not is_disjoint_along(factors, call, j, fact, names[0]) or not operands[j].has_same_blocks(call.operands[j])
            for j in partial_operands
        ):
            continue
        masked = any(strategy.disjoint_split is not None for strategy in selected)
        for r, dims in enumerate(factors.results):
            d = find_exact_dim(dims, names)
            if d is None or factor_strategy.results[r] != Along(names[0]) or not _is_partial_sum(results[r], mesh_dims):
                continue
            if results[r].splits[d] == operands[i].splits[fact.dim]:
                yield DisjointResult(r, d, operand=i, masked=masked)


def _is_partial_sum(layout: Layout, mesh_dims: set[int]) -> bool:
    return all(layout.partials[m] == "sum" for m in mesh_dims)


# --- single owner: one rank has several operands completely ------------------------------------------------------------------
def select_single_owner(rule: Rule, factors: Factors, call: Call) -> StrategySelection | None:
    """Return the selection in which the rank that has most operands completely computes alone, or None.

    It applies if one rank has two or more operands completely, and they are at least half of the bytes of all operands.
    """
    if any(layout.is_partial or layout.has_symbols for layout in call.operands) or not _is_pure_tensor_function(rule, call):
        return None
    owners = [find_single_owner(layout) for layout in call.operands]
    owner = max(owners, key=lambda each: (each is not None and owners.count(each), each or ()))
    if owner is None or owners.count(owner) < 2 or any(not meta or not meta.shape or 0 in meta.shape for meta in call.results):
        return None
    owned_operands = [layout for layout, each in zip(call.operands, owners, strict=True) if each == owner]
    if 2 * sum([layout.nbytes for layout in owned_operands]) < sum([layout.nbytes for layout in call.operands]):
        return None
    replicate_all = Strategy((R,) * len(call.operands), (R,) * len(factors.results))
    choice = StrategyChoice(call, factors, (replicate_all,) * call.mesh.ndim, {})
    if not rule.allows(choice):
        return None
    operands = [
        _move_to_owner(x, owner) if any(x.splits) and each != owner else x for x, each in zip(call.operands, owners, strict=True)
    ]
    if None in operands:
        return None
    results = [_result_on_owner(*owner, meta, owned_operands) for meta in call.results if meta is not None]
    return StrategySelection(choice, tuple([x for x in operands if x is not None]), tuple(results))


def _move_to_owner(layout: Layout, owner: tuple[int, int]) -> Layout | None:
    """Return the layout of an operand with all its data on ``owner`` (mesh dim, rank); None unless that mesh dim shards it."""
    mesh_dim, rank = owner
    dims = [d for d, split in enumerate(layout.splits) if split is not None]
    split = layout.splits[dims[0]]
    if len(dims) > 1 or split is None or split.mesh_dims != (mesh_dim,) or 0 in layout.shape:
        return None
    return _layout_on_rank(layout, layout, dims[0], mesh_dim, rank)


def find_single_owner(layout: Layout) -> tuple[int, int] | None:
    """Return (mesh dim, rank) if one rank along a mesh dim has the complete tensor, or None."""
    splits = [split for split in layout.splits if split is not None]
    if len(splits) != 1 or len(splits[0].mesh_dims) != 1 or splits[0].sizes.count(0) != len(splits[0].sizes) - 1:
        return None
    (mesh_dim,) = splits[0].mesh_dims
    return mesh_dim, next(k for k, n in enumerate(splits[0].sizes) if n)


def _result_on_owner(mesh_dim: int, rank: int, meta: Meta, owned_operands: Sequence[Layout]) -> Layout:
    """Return the layout of a result that one rank of ``mesh_dim`` has completely, and the others have no elements of.

    It is sharded along the dim of an operand with the same shape, or along the first dim with several positions.
    """
    same_shape = next((layout for layout in owned_operands if layout.shape == meta.shape), None)
    dims = [d for d, n in enumerate(meta.shape) if (n > 1 if same_shape is None else same_shape.splits[d] is not None)]
    dim = dims[0] if dims else 0
    return _layout_on_rank(owned_operands[0], meta, dim, mesh_dim, rank)


def _layout_on_rank(owned: Layout, meta: Meta | Layout, dim: int, mesh_dim: int, rank: int) -> Layout:
    """Return the layout of a result with all positions of ``dim`` on one rank along ``mesh_dim``, and empty shards elsewhere."""
    mesh = owned.mesh
    sizes = tuple([meta.shape[dim] if k == rank else 0 for k in range(mesh.shape[mesh_dim])])
    splits = [Split((mesh_dim,), sizes) if d == dim else None for d in range(len(meta.shape))]
    return Layout.from_splits(mesh, splits, (None,) * mesh.ndim, meta.shape, meta.stride, meta.dtype)


def _is_pure_tensor_function(rule: Rule, call: Call) -> bool:
    """Return True if the operator only computes tensors from tensors: no view, write, random number or rank."""
    schema, traits = call.func._schema, traits_of(call.func)
    if schema.is_mutable or returns_view(call.func) or traits.reads_flat or traits.per_element or traits.memory_use != "all":
        return False
    if torch.Tag.nondeterministic_seeded in call.func.tags or any(str(returned.type) != "Tensor" for returned in schema.returns):
        return False
    if len(call.results) != len(schema.returns) or any(argument.name == "device" for argument in schema.arguments):
        return False
    return rule.run is None and rule.local_args is None and rule.writes is None and not rule.measured
