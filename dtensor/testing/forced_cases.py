"""Forced cases: for every sharding strategy of a rule, a case that forces it, with operands in the placements that it needs.

Dispatch would not choose all of these strategies today.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.tensor_tree import fill_tensors, tensor_leaves
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard
from ..propagation.strategy_table import DimPlacement, format_placement
from ..rules.partial_rules import listed_strategies
from ..rules.rule import Rule, parse_partial_strategy
from .call_variants import Variant, resolve_variant_overload
from .force_strategy import DeclaredStrategies, declared_strategies
from .placements import Combination, ragged_shard
from .scatter import FARTHEST, can_be_partial, scatter

TargetPlacements = tuple[DimPlacement | None, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A call, the placements of its tensors, and the strategies to force.

    ``strategies`` has one for each mesh dim; () means that dispatch chooses.
    """

    variant: Variant
    mesh_shape: tuple[int, ...]
    placements: Combination
    strategies: tuple[str, ...] = ()

    @property
    def mesh(self) -> DeviceMesh:
        return self.variant.mesh(self.mesh_shape)


@dataclass(slots=True)
class Coverage:
    """Strategies that a rule declares for the tried calls, and those that ran.

    Attributes:
        declared, forced: strategies by their text.
        rules: the rules of the tried calls, with their numbers of operands and results.
        refused: declared strategies that the rule allowed in no tried case (its ``when``).
        unmet: partial strategies of the rule that no sample's call has.
    """

    declared: set[str] = field(default_factory=set)
    forced: set[str] = field(default_factory=set)
    rules: dict[int, tuple[Rule, set[tuple[int, int]]]] = field(default_factory=dict)

    def add_declared(self, strategies: DeclaredStrategies) -> None:
        self.declared.update(strategies.targets)
        self.rules.setdefault(id(strategies.rule), (strategies.rule, set()))[1].add(strategies.tensor_counts)

    @property
    def refused(self) -> set[str]:
        return self.declared - self.forced

    def unmet(self) -> list[str]:
        """Return the partial strategies listed by a rule that no tried call has."""
        missing = []
        for rule, counts in self.rules.values():
            for text in listed_strategies(rule.partials):
                strategies = [text if not isinstance(text, str) else parse_partial_strategy(text, *count) for count in counts]
                if not any(strategy is not None and _strategy_text(strategy) in self.declared for strategy in strategies):
                    missing.append(str(text))
        return missing


def _strategy_text(strategy: Any) -> str:
    return " -> ".join(",".join(map(format_placement, side)) for side in (strategy.operands, strategy.results))


def make_forced_cases(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Yield one case for each strategy, with uneven and empty shards; on meshes of two dims, cases with pairs of strategies."""
    variant = resolve_variant_overload(variant)
    yield from (
        _cases_on_one_dim(variant, mesh_shape, coverage, rng)
        if len(mesh_shape) == 1
        else _cases_on_two_dims(variant, mesh_shape, coverage, rng)
    )


def _cases_on_one_dim(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Yield a case for each strategy and operand layout on a one-dim mesh, including layouts that strategies need.

    Every layout that a strategy needs is tried. The call on operands in that layout may have other strategies, because rules read
    the layouts; these are tried too.
    """
    mesh, xs = variant.mesh(mesh_shape), tensor_leaves(variant.sample.arguments)
    replicated: Combination = tuple((Replicate(),) for _ in xs)
    pending = [replicated, *_monoid_layouts(xs)]
    known_layouts, redistributed = set(pending), []
    while pending:
        placements = pending.pop(0)
        declared = _query_strategies(variant, mesh, placements)
        if declared is None:
            continue
        coverage.add_declared(declared)
        for text, targets in declared.targets.items():
            if _matches_all(placements, targets):
                yield Case(variant, mesh_shape, placements, (text,))
            elif placements == replicated and not any(isinstance(spec, Partial) for spec in targets):
                redistributed.append(Case(variant, mesh_shape, placements, (text,)))
            for layout in _target_layouts(xs, targets, mesh_shape[0]):
                if layout not in known_layouts:
                    known_layouts.add(layout)
                    pending.append(layout)
        if placements == replicated:
            rng.shuffle(pending)
    yield from redistributed


def _cases_on_two_dims(variant: Variant, mesh_shape: tuple[int, ...], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Yield a case for each strategy alone on one of two mesh dims, then for pairs of strategies."""
    mesh, xs = variant.mesh(mesh_shape), tensor_leaves(variant.sample.arguments)
    declared = _query_strategies(variant, mesh, tuple((Replicate(),) * len(mesh_shape) for _ in xs))
    if declared is None:
        return
    coverage.add_declared(declared)
    for pair in _pair_strategies(list(declared.targets), len(mesh_shape), rng):
        per_dim = [declared.targets[strategy] for strategy in pair]
        placements = tuple(tuple(_as_placement(targets[i]) for targets in per_dim) for i in range(len(xs)))
        available = _query_strategies(variant, mesh, placements) if _is_possible(xs, placements) else None
        if available is not None and set(pair) <= set(available.targets):
            yield Case(variant, mesh_shape, placements, pair)


def _pair_strategies(strategies: list[str], count: int, rng: random.Random) -> list[tuple[str, ...]]:
    """Return strategies for each mesh dim: each paired with the replicated one, then all other pairs in random order."""
    replicated = (strategies[-1],) * (count - 2)
    single = [(strategy, strategies[-1]) if rng.random() < 0.5 else (strategies[-1], strategy) for strategy in strategies]
    others = list(itertools.product(strategies[:-1], repeat=2))
    rng.shuffle(others)
    return [(*pair, *replicated) for pair in (*single, *others)]


def _query_strategies(variant: Variant, mesh: DeviceMesh, placements: Combination) -> DeclaredStrategies | None:
    """Return the strategies that the rule declares for the sample's tensors in these placements; None without a rule."""
    arguments = variant.sample.arguments
    pairs = zip(tensor_leaves(arguments), placements, strict=True)
    args, kwargs = fill_tensors(arguments, [scatter(x, mesh, of_tensor) for x, of_tensor in pairs])
    return declared_strategies(variant.call, args, kwargs)


def _monoid_layouts(xs: Sequence[torch.Tensor]) -> Iterator[Combination]:
    """Yield placements in which the first tensor is partial with a user-defined reduction.

    Rules that pass any partial value have a strategy for a reduction only if an operand has it.
    """
    if xs and xs[0].dtype is not torch.bool and can_be_partial(xs[0].dtype, FARTHEST):
        yield ((Partial(FARTHEST),), *((Replicate(),) for _ in xs[1:]))


def _matches_all(placements: Combination, targets: TargetPlacements) -> bool:
    return all(spec is None or _matches_spec(of_tensor[0], spec) for of_tensor, spec in zip(placements, targets, strict=True))


def _matches_spec(placement: Placement, spec: DimPlacement) -> bool:
    return getattr(placement, "dim", None) == spec if isinstance(spec, int) else placement == spec


def _target_layouts(xs: Sequence[torch.Tensor], targets: TargetPlacements, ranks: int) -> Iterator[Combination]:
    """Yield the operand placements that a strategy needs: with shards as by ``torch.chunk``, and with uneven ones."""
    even = [_as_placement(spec) for spec in targets]
    if _is_possible(xs, tuple((placement,) for placement in even)):
        yield tuple((placement,) for placement in even)
        yield tuple(
            (ragged_shard(placement.dim, x.shape[placement.dim], ranks) if isinstance(placement, Shard) else placement,)
            for placement, x in zip(even, xs, strict=True)
        )


def _as_placement(spec: DimPlacement | None) -> Placement:
    return Replicate() if spec is None else Shard(spec) if isinstance(spec, int) else spec


def _is_possible(xs: Sequence[torch.Tensor], placements: Combination) -> bool:
    """Return True if all tensors can have these placements.

    Elements of a list may have fewer dims than the first, or a dtype that cannot be partial.
    """
    pairs = ((x, p) for x, of_tensor in zip(xs, placements, strict=True) for p in of_tensor)
    return all(
        can_be_partial(x.dtype, p.reduce_op) if isinstance(p, Partial) else not isinstance(p, Shard) or p.dim < x.ndim
        for x, p in pairs
    )
