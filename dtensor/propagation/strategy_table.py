"""Strategy tables: the strategies of a rule that factors and dtypes (not sizes) allow, and the placements that each needs.

So a :class:`StrategyTable` serves calls of all sizes. Pure: a function of global facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.caches import BoundedDict
from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import Monoid, Partial, Placement, Replicate, Shard
from ..rules.call import Call, NumberKind
from ..rules.disjoint_partial import DisjointResult
from ..rules.rule import (
    ANY_PARTIAL,
    Along,
    Dims,
    Factors,
    Partials,
    R,
    Spec,
    Strategy,
    StrategyChoice,
    find_dim,
    strategies_of_factors,
)

DimPlacement = int | Placement  # a tensor dim, or Replicate / Partial


@dataclass(frozen=True, slots=True)
class BoundStrategy:
    """A strategy bound to tensor dims: placements of operands and results, None for an operand that is never redistributed."""

    order: int
    strategy: Strategy
    operands: tuple[DimPlacement | None, ...]
    results: tuple[DimPlacement, ...]
    kernel: bool  # it runs the kernel of the call's factors, which the table does not store

    def __str__(self) -> str:
        """Return the notation of partial rules with the sharded tensor dims: ``S(0),R -> S(0)``, ``sum,R -> sum``."""
        operands = [format_placement(R if where is None else where) for where in self.operands]
        owners = " by owners" if self.strategy.disjoint_split is not None else ""
        return f"{','.join(operands)} -> {','.join(map(format_placement, self.results))}{owners}"

    def strategy_for(self, factors: Factors) -> Strategy:
        """Return the strategy, with the kernel of the call's factors filled in if it runs one."""
        strategy = self.strategy
        return replace(strategy, kernel=factors.kernels[strategy.factor]) if self.kernel and strategy.factor else strategy

    @property
    def introduces_sharding(self) -> bool:
        """Return True if results are sharded though no operand is."""
        is_sharded = [any(isinstance(where, int) for where in places) for places in (self.operands, self.results)]
        return is_sharded == [False, True]

    def applies_to(self, mesh_dim: int) -> bool:
        """Return True if the strategy applies to the mesh dim; one for disjoint operands needs a mesh dim of their rows."""
        return self.strategy.disjoint_split is None or mesh_dim in self.strategy.disjoint_split.split.mesh_dims


@dataclass(frozen=True, slots=True)
class StrategyTable:
    """The strategies of a rule, and those without communication by the operand placements that they need.

    ``by_numbers``: other kinds of numbers may have other strategies.
    """

    strategies: tuple[BoundStrategy, ...]
    free: Mapping[tuple[DimPlacement | None, ...], tuple[BoundStrategy, ...]]
    by_numbers: bool = False


@dataclass(frozen=True, slots=True)
class StrategySelection:
    """The selected strategies of a call with the layouts that follow from them.

    Attributes:
        kernel_strategy: the strategy with the kernel that runs (one of them, if a joint kernel has several factors).
        by_numbers: other kinds of numbers may select other strategies.
        disjoint_results: the results that are known to have disjoint rows.
    """

    choice: StrategyChoice
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    kernel_strategy: Strategy | None = None
    by_numbers: bool = False
    disjoint_results: tuple[DisjointResult, ...] = ()

    @property
    def kernel_splits(self) -> dict[str, Split]:
        """Return how the factors of the running kernel are split, by factor."""
        names = {strategy.factor for strategy in self.choice.strategies if strategy.kernel is not None}
        return {name: split for name, split in self.choice.splits.items() if name in names}


def strategies_by_text(bound_strategies: Sequence[BoundStrategy]) -> dict[str, BoundStrategy]:
    """Return bound strategies by their text; equal texts get a number."""
    by_name: dict[str, BoundStrategy] = {}
    for bound in bound_strategies:
        name, count = str(bound), 1
        while name in by_name:
            count += 1
            name = f"{bound} #{count}"
        by_name[name] = bound
    return by_name


def texts_of_strategies(
    strategies: Sequence[Strategy], bound_strategies: Sequence[BoundStrategy], factors: Factors
) -> tuple[str, ...]:
    """Return the text of each selected strategy, as :func:`strategies_by_text` has it for the bound ones."""
    names = {bound.strategy_for(factors): text for text, bound in strategies_by_text(bound_strategies).items()}
    return tuple([names[strategy] for strategy in strategies])


def format_placement(where: DimPlacement) -> str:
    """Return a placement along one mesh dim as text: ``S(0)``, ``sum`` or ``R``."""
    return str(where.reduce_op) if isinstance(where, Partial) else f"S({where})" if isinstance(where, int) else str(where)


_TABLE_CACHE: BoundedDict[Any, StrategyTable] = BoundedDict(2048, "strategy_table.tables")


def get_or_build_table(factors: Factors, partials: Partials, call: Call) -> StrategyTable:
    """Return the table of the strategies that are valid for these factors and dtypes, from a cache over all sizes."""
    monoids = tuple(dict.fromkeys(op for layout in call.operands for op in layout.partials if isinstance(op, Monoid)))
    fixed, dtypes = call.fixed_operands, tuple([meta.dtype for meta in call.results if meta is not None])
    key = (
        factors.operands,
        factors.results,
        frozenset(factors.unsharded),
        frozenset(factors.additive),
        frozenset(factors.reduced.items()),
        tuple([(name, kernel.lacking) for name, kernel in factors.kernels.items()]),
        factors.listed_strategies,
        partials,
        monoids,
        fixed,
        tuple([layout.dtype for layout in call.operands]),
        dtypes,
        call.number_kinds,
    )
    table = _TABLE_CACHE.get(key)
    if table is None:
        strategies = (*partials, *_monoid_strategies(factors, monoids, partials))
        table = _TABLE_CACHE.keep(key, _build_table(factors, strategies, call, fixed, dtypes))
    return table


def _build_table(
    factors: Factors, partials: Partials, call: Call, fixed: frozenset[int], dtypes: tuple[torch.dtype, ...]
) -> StrategyTable:
    """Make the table of strategies that are valid for the call's dims and dtypes, and index those without communication."""
    bound_strategies: list[BoundStrategy] = []
    by_numbers = False
    free: dict[tuple[DimPlacement | None, ...], list[BoundStrategy]] = {}
    for strategy in strategies_of_factors(factors, partials):
        if not all(isinstance(strategy.operands[i], Replicate) for i in fixed) or not _keeps_dtype_algebra(
            strategy, call, dtypes
        ):
            continue
        by_numbers = by_numbers or _needs_number_kinds(strategy, call)
        if not _is_valid_for_numbers(strategy, call, dtypes):
            continue
        uses_call_kernel = strategy.kernel is not None and strategy.kernel is factors.kernels.get(strategy.factor or "")
        if uses_call_kernel:
            strategy = Strategy(strategy.operands, strategy.results, strategy.factor)
        operands = tuple(
            None if i in fixed else bind_spec(spec, dims)
            for i, (spec, dims) in enumerate(zip(strategy.operands, factors.operands, strict=True))
        )
        results = tuple(bind_spec(spec, dims) for spec, dims in zip(strategy.results, factors.results, strict=False))
        bound_strategies.append(bound := BoundStrategy(len(bound_strategies), strategy, operands, results, uses_call_kernel))
        if not (uses_call_kernel or bound.introduces_sharding) and (strategy.kernel is None or strategy.kernel.collectives == 0):
            free.setdefault(operands, []).append(bound)
    return StrategyTable(tuple(bound_strategies), {operands: tuple(group) for operands, group in free.items()}, by_numbers)


def _monoid_strategies(factors: Factors, monoids: tuple[Monoid, ...], partials: Partials) -> Iterator[Strategy]:
    """Yield strategies that keep operands partial by a user's monoid, which acts on single elements and has no final step.

    They exist only where partial values of any built-in reduction pass.
    """
    for op in monoids if set(ANY_PARTIAL) <= set(partials) else ():
        if op.elementwise and op.finalize is None:
            yield Strategy((Partial(op),) * len(factors.operands), (Partial(op),) * len(factors.results))


def _keeps_dtype_algebra(strategy: Strategy, call: Call, results: tuple[torch.dtype, ...]) -> bool:
    """Return True if a strategy for partial values stays correct in the dtypes of operands and results.

    Sums and products of integers wrap in their own dtype, and bools add by ``or``. So addends may not change dtype first, except
    to a floating dtype that holds all their values. Addends are larger than their sum, so rounding each of them differs from
    rounding the sum. Max and min pass conversions that keep the order. Integers have no mean. A product that is accumulated in
    more bits than a byte has no addends of one byte.
    """
    # replicated results do not depend on partial operands
    dtypes = [dtype for spec, dtype in zip(strategy.results, results, strict=False) if isinstance(spec, Partial)]
    if strategy.factor is not None:
        return strategy.kernel is not None or not any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)
    for i, spec in enumerate(strategy.operands):
        if isinstance(spec, Partial):
            source = call.operands[i].dtype
            if spec.reduce_op == "avg" and not (source.is_floating_point or source.is_complex):
                return False
            keeps = _conversion_keeps_order if spec.reduce_op in ("max", "min") else _represents_all_values
            if not all(dtype == source or keeps(source, dtype) for dtype in dtypes):
                return False
    return True


def _needs_number_kinds(strategy: Strategy, call: Call) -> bool:
    """Return True if :func:`_is_valid_for_numbers` reads the kinds of numbers for this strategy."""
    of_operands = any(where == i for where, _ in call.number_kinds for i, _ in strategy.needs)
    return of_operands or (_leaves_partial_sum(strategy) and any(isinstance(where, str) for where, _ in call.number_kinds))


def _is_valid_for_numbers(strategy: Strategy, call: Call, results: tuple[torch.dtype, ...]) -> bool:
    """Return True if multipliers and divisors of partial values are known to be finite, or non-zero.

    Numbers that are no operands scale an addend (``alpha``) or have no influence. They must be finite in all dtypes of the call.
    """
    largest_kind = NumberKind.HALF if torch.float16 in results else NumberKind.WIDE
    kinds = dict(call.number_kinds)
    for i, need in strategy.needs:
        kind, dtype = kinds.get(i), call.operands[i].dtype
        if kind is None and (need == "nonzero" or dtype.is_floating_point or dtype.is_complex):
            return False
        if kind is not None and (kind > largest_kind or (need == "nonzero" and kind is NumberKind.ZERO)):
            return False
    return not _leaves_partial_sum(strategy) or all(
        kind <= largest_kind for where, kind in kinds.items() if isinstance(where, str)
    )


def _leaves_partial_sum(strategy: Strategy) -> bool:
    return any(isinstance(spec, Partial) and spec.reduce_op in ("sum", "avg") for spec in strategy.results)


def _represents_all_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if the floating or complex dtype ``target`` has all values of ``source``, at least their real parts."""
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target)):
        return False
    old, new = torch.finfo(source), torch.finfo(target)
    return new.eps <= old.eps and new.max >= old.max


def _conversion_keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if converting dtype ``source`` to ``target`` is non-decreasing for all values, NaN included.

    This holds for conversions into floats, and into integers that hold all values.
    """
    if target is torch.bool or source.is_complex or target.is_complex:
        return False
    if target.is_floating_point or source is torch.bool:
        return True
    if source.is_floating_point:
        return False
    old, new = torch.iinfo(source), torch.iinfo(target)
    return bool(new.min <= old.min and old.max <= new.max)


def bind_spec(spec: Spec, dims: Dims) -> DimPlacement:
    """Return the placement that a spec gives to a tensor with these factors: a tensor dim where it shards one."""
    if isinstance(spec, Along):
        dim = find_dim(dims, spec.factor)
        return Replicate() if dim is None else dim
    return spec


def spec_to_placement(spec: Spec, dims: Dims) -> Placement:
    """Return the placement that a spec gives to a tensor with these factors, as a ``Placement``."""
    where = bind_spec(spec, dims)
    return Shard(where) if isinstance(where, int) else where
