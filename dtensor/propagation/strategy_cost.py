"""Strategy cost: seconds of communication, computation and deferred communication of a strategy on one mesh dim. Pure.

Costs depend on sizes. A strategy that finds all operands placed as it needs is free for all sizes, and is found by look-up.

[Note: Cost heuristics]
Each heuristic is a function of this module. ``docs/cost_model.md`` gives the reasons. ``benchmarks/every_family.py`` compares the
bytes and FLOPs of model families with those of programs written by hand.

======================================  ===================================================================================
``select_free_strategies``              take a strategy without communication, if no operand is partial
``_redistribute_seconds``               reduce a partial value at the price of an all-reduce, because it is often gathered later
``_operand_seconds``                    halve the price of a reduction that an earlier operator deferred
``_from_reduced_copy_seconds``          use the cached reduction of a partial operand instead of reducing again
``_deferred_costs``                     charge results for the communication that later operators need
``_grows_results``                      gather a sharded operand before its partial results outgrow it (tables of positions)
``_changes_sharding``                   let the larger operand decide the sharding of the result (batch norm under FSDP)
``_has_row_owners``                     charge disjoint partial results like sharded ones (mixtures of experts)
``_shards_single_position``             ignore factors of size one (convolutions with one group)
``_result_bytes_per_rank``              prefer smaller results per rank if all else is equal
======================================  ===================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..cost.link import get_device, get_link
from ..layout.expanded_storage import storage_layout
from ..layout.layout import Layout
from ..placement import Partial, Replicate, Shard
from ..rules.call import Call
from ..rules.rule import Factors, Kernel, Strategy
from .flops import OperatorWork, divide_by_other_mesh_dims, strategy_compute_seconds
from .strategy_table import BoundStrategy, DimPlacement, StrategyTable

LOCAL_STEP = 1e-7  # seconds of a local slice, or of making zeros
InplaceResults = Mapping[int, int]  # result -> operand that the result is written into


def select_free_strategies(
    table: StrategyTable, factors: Factors, call: Call, inplace_results: InplaceResults
) -> tuple[Strategy, ...] | None:
    """Return for each mesh dim the best strategy without communication, or None if some mesh dim has none.

    A partial operand is never free: reducing it now or later is a question of cost.
    """
    picked = []
    for mesh_dim, ranks in enumerate(call.mesh.shape):
        if any(layout.partials[mesh_dim] is not None for layout in call.operands):
            return None
        candidates = [
            bound
            for bound in table.free.get(_current_placements(call, mesh_dim), ())
            if all(
                bound.results[r] == call.operands[i].placement_along(mesh_dim)
                for r, i in inplace_results.items()
                if r < len(bound.results)
            )
        ]
        if not candidates or ranks == 1:  # on one rank, strategies that redistribute are free too
            return None
        nbytes = call.result_bytes()
        if all(map(_leaves_partial, candidates)) and _grows_results(factors, call, mesh_dim, nbytes):
            return None
        if len(candidates) > 1:
            candidates.sort(key=lambda bound: (_result_bytes_per_rank(bound, nbytes, 1 / ranks), bound.order))
        picked.append(candidates[0].strategy)
    return tuple(picked)


def rank_strategies(
    table: StrategyTable,
    factors: Factors,
    call: Call,
    inplace_results: InplaceResults,
    mesh_dim: int,
    work: OperatorWork,
    misaligned: bool,
) -> list[tuple[Any, Strategy]]:
    """Return all strategies of one mesh dim with their costs, the cheapest first.

    A cost is a tuple. It has the seconds of communication (now and deferred) and of products, whether unsharded values become
    sharded, how many operands change, the bytes of results per rank, and the order of declaration.

    Products count if they take longer than memory. An unsharded value
    is not sharded only because that is free. ``misaligned``: free strategies find their operands along the right dims, in other
    blocks.
    """
    ranks, fixed, nbytes = call.mesh.shape[mesh_dim], call.fixed_operands, call.result_bytes()
    deferred = _deferred_costs(table, factors, call, nbytes, mesh_dim, misaligned)
    device, work = get_device(call.mesh), divide_by_other_mesh_dims(work, call, mesh_dim)
    is_compute_bound = work.flops / device.rate(work.dtype) > work.nbytes / device.memory
    current = [layout.placement_along(mesh_dim) for layout in call.operands]
    keeps_result_dim = _operands_sharing_result_dims(factors, current)
    seconds_of: dict[tuple[int, DimPlacement, float], float] = {}
    ranked = []
    for bound in table.strategies:
        if not bound.applies_to(mesh_dim):
            continue
        strategy = bound.strategy_for(factors)
        seconds, changed_operands, introduces_sharding = 0.0, 0, strategy.factor is not None
        fraction = _largest_shard_fraction(bound, call, current, mesh_dim)
        for i, target in enumerate(bound.operands):
            if i in fixed or target is None:
                continue
            cost = seconds_of.get((i, target, fraction))
            if cost is None:
                cost = seconds_of[i, target, fraction] = _operand_seconds(call, i, current[i], target, mesh_dim, fraction)
            seconds += cost
            changed_operands += cost > 0
            introduces_sharding = introduces_sharding and not isinstance(current[i], int)
        for r, i in inplace_results.items():
            if r < min(len(bound.results), len(nbytes)):
                cost = _redistribute_seconds(bound.results[r], current[i], call.operands[i], mesh_dim)
                seconds += cost
                changed_operands += cost > 0
        is_resharded = strategy.factor is not None and _changes_sharding(bound, call, current, keeps_result_dim)
        has_owners = _has_row_owners(bound, factors, call)
        for r, placement in enumerate(bound.results):
            if r not in inplace_results and not isinstance(placement, Replicate):
                seconds += _deferred_seconds(placement, deferred[r], is_resharded, has_owners)
        if is_compute_bound:
            seconds += strategy_compute_seconds(device, work, strategy, ranks, factors.sizes, fraction)
        if strategy.kernel is not None:
            seconds += kernel_seconds(strategy, call, mesh_dim)
        result_bytes = _result_bytes_per_rank(bound, nbytes, fraction)
        cost_terms = (seconds if ranks > 1 else 0.0, introduces_sharding, changed_operands, result_bytes, bound.order)
        ranked.append((cost_terms, strategy))
    ranked.sort(key=lambda item: item[0])
    return ranked


def _operand_seconds(call: Call, i: int, source: DimPlacement, target: DimPlacement, mesh_dim: int, fraction: float) -> float:
    """Return the seconds to redistribute operand ``i`` to the placement that a strategy needs.

    If later operators prefer the present placement, moving back counts too. If an earlier operator deferred the reduction, this
    use pays half.
    """
    layout = call.operands[i]
    cost = _redistribute_seconds(source, target, layout, mesh_dim, fraction)
    if target != source and call.has_preferred_layout(i):
        cost += _redistribute_seconds(target, source, layout, mesh_dim)  # and redistribute it back
    if isinstance(target, Partial):
        return cost
    copies = [_from_reduced_copy_seconds(dim, target, layout, mesh_dim) for dim in call.cached_reduction_dims(i, mesh_dim)]
    cost = min([cost, *copies])
    return cost / 2 if call.is_reduction_deferred(i, mesh_dim) else cost  # shared with later uses


def _operands_sharing_result_dims(factors: Factors, current: Sequence[DimPlacement]) -> set[int]:
    """Return the indices of the operands that are sharded along a dim that some result has."""
    result_factors = {name for dims in factors.results for names in dims for name in names}
    return {
        i for i, dim in enumerate(current) if isinstance(dim, int) and not result_factors.isdisjoint(factors.operands[i][dim])
    }


def kernel_seconds(strategy: Strategy, call: Call, mesh_dim: int) -> float:
    """Return the estimated seconds of the collectives that a strategy's kernel issues on a mesh dim."""
    ranks = call.mesh.shape[mesh_dim]
    if strategy.kernel is None or ranks == 1:
        return 0.0
    rate = get_link(call.mesh, (mesh_dim,)).exchange
    return strategy.kernel.collectives * rate.seconds(ranks, 0) + strategy.kernel.nbytes(call) / rate.bandwidth


def _deferred_costs(
    table: StrategyTable, factors: Factors, call: Call, nbytes: list[int], mesh_dim: int, misaligned: bool
) -> list[tuple[float, float]]:
    """Return for each result the seconds that later operators pay: to reduce it if partial, to reshard it if newly sharded.

    Both are 0 if a strategy needs no communication, and no operand is partial. This does not hold if all such strategies leave
    partial results that are larger than what is sharded, make a replicated operand partial, or find other blocks. Then a partial
    result defers a reduce-scatter, otherwise an all-reduce.

    Latencies do not count, because deferred communication may be batched. But if some strategy keeps a sharding, resharding
    counts its latency. On the other mesh dims a result is as small a part as that of any operand.
    """
    current, reduction_passes = _current_placements(call, mesh_dim), 2
    if not any(isinstance(where, Partial) for where in current):
        free = [
            bound
            for bound in table.strategies
            if all(map(_is_free_for, current, bound.operands))
            and ((kernel := bound.strategy_for(factors).kernel) is None or kernel.collectives == 0)
            and not _shards_single_position(bound, factors, call)
        ]
        has_kernel = any(
            isinstance(bound.strategy.kernel, Kernel) for bound in table.strategies
        )  # the kernel could send each element from its owner
        grows = all(map(_leaves_partial, free)) and (has_kernel or _grows_results(factors, call, mesh_dim, nbytes))
        if free and not misaligned and not grows:
            return [(0.0, 0.0)] * len(nbytes)
        reduction_passes = 1 if free else 2
    link = get_link(call.mesh, (mesh_dim,))
    shard_counts = [
        math.prod(n for i, n in enumerate(call.mesh.shape) if i != mesh_dim and isinstance(layout.placements[i], Shard))
        for layout in call.operands
    ]
    sizes = [size / max(shard_counts, default=1) for size in nbytes]
    ranks = call.mesh.shape[mesh_dim]
    keeps_sharded = any(
        isinstance(at, int) and at == to and factors.sizes.get(bound.strategy.factor or "", ranks) >= ranks
        for bound in table.strategies
        for at, to in zip(current, bound.operands, strict=True)
    )
    resharding_latency = link.exchange.seconds(ranks, 0) if keeps_sharded else 0.0
    return [
        (reduction_passes * size / link.all_reduce.bandwidth, resharding_latency + size / ranks / link.exchange.bandwidth)
        for size in sizes
    ]


def _deferred_seconds(placement: DimPlacement, costs: tuple[float, float], is_resharded: bool, has_owners: bool) -> float:
    """Return the deferred cost of one result that is not replicated; a disjoint partial result counts like a sharded one."""
    reduction, resharding = costs
    if isinstance(placement, Partial) and not has_owners:
        return reduction
    return resharding if is_resharded or has_owners else 0.0


def _changes_sharding(
    bound: BoundStrategy, call: Call, current: Sequence[DimPlacement], keeps_result_dim: Collection[int]
) -> bool:
    """Return True if the results are sharded as no operand is, or as a smaller operand than one that moves.

    ``keeps_result_dim``: operands with a sharding that results could keep. Of two equally large operands, one of which is
    replicated for the other, the first decides.
    """
    sharded = [
        i
        for i, (at, target) in enumerate(zip(current, bound.operands, strict=True))
        if isinstance(at, int) and target is not None
    ]
    unchanged = [i for i in sharded if bound.operands[i] == current[i]]
    changed = [i for i in sharded if bound.operands[i] != current[i] and i in keeps_result_dim]
    if not unchanged or not changed:
        return not unchanged
    nbytes = [layout.nbytes for layout in call.operands]
    largest_unchanged, largest_changed = max(unchanged, key=nbytes.__getitem__), max(changed, key=nbytes.__getitem__)
    if largest_changed < largest_unchanged and isinstance(bound.operands[largest_changed], Replicate):
        return nbytes[largest_changed] >= nbytes[largest_unchanged]
    return nbytes[largest_changed] > nbytes[largest_unchanged]


def _current_placements(call: Call, mesh_dim: int) -> tuple[DimPlacement | None, ...]:
    fixed = call.fixed_operands
    return tuple([None if i in fixed else layout.placement_along(mesh_dim) for i, layout in enumerate(call.operands)])


def _is_free_for(current: DimPlacement | None, target: DimPlacement | None) -> bool:
    """Return True if an operand is placed as needed, or is replicated and becomes partial (its value on one rank)."""
    return current == target or (isinstance(current, Replicate) and isinstance(target, Partial))


def _shards_single_position(bound: BoundStrategy, factors: Factors, call: Call) -> bool:
    """Return True if the strategy shards a factor of size one in a larger operand dim: it is not free of communication."""
    name = bound.strategy.factor
    if name is None or factors.sizes.get(name) != 1:
        return False
    return any(
        isinstance(dim, int) and layout.shape[dim] > 1
        for dim, layout in zip(bound.operands, call.operands, strict=True)
        if dim is not None
    )


def _leaves_partial(bound: BoundStrategy) -> bool:
    return any(isinstance(where, Partial) for where in bound.results)


def _grows_results(factors: Factors, call: Call, mesh_dim: int, nbytes: list[int]) -> bool:
    """Return True if results are more than twice as large as all sharded operands, or no larger than an added replicated one."""
    if any(
        call.operands[i].nbytes >= sum(nbytes) and isinstance(call.operands[i].placement_along(mesh_dim), Replicate)
        for i in factors.additive
    ):
        return True
    sharded_bytes = [
        storage_layout(layout).nbytes for layout in call.operands if isinstance(layout.placement_along(mesh_dim), int)
    ]
    return bool(sharded_bytes) and 2 * sum(sharded_bytes) < sum(nbytes)


def _has_row_owners(bound: BoundStrategy, factors: Factors, call: Call) -> bool:
    """Return True if each row of the results has one owner, which later operators use."""
    strategy = bound.strategy
    if strategy.disjoint_split is not None or any(strategy.factor == groups for groups, _ in factors.groups.values()):
        return True
    return any(
        fact is not None and isinstance(where, Partial) for fact, where in zip(call.disjoint_splits, bound.operands, strict=False)
    )


def _result_bytes_per_rank(bound: BoundStrategy, nbytes: list[int], fraction: float) -> float:
    return sum(size * fraction if isinstance(where, int) else size for where, size in zip(bound.results, nbytes, strict=False))


def _largest_shard_fraction(bound: BoundStrategy, call: Call, current: Sequence[DimPlacement], mesh_dim: int) -> float:
    """Return the largest fraction of the sharded factor on one rank: that of operands that stay, if they agree."""
    fractions = {
        _shard_fraction(layout, current_placement, mesh_dim)
        for current_placement, target, layout in zip(current, bound.operands, call.operands, strict=True)
        if isinstance(current_placement, int) and current_placement == target
    }
    return fractions.pop() if len(fractions) == 1 else 1 / call.mesh.shape[mesh_dim]


def _shard_fraction(layout: Layout, dim: int, mesh_dim: int) -> float:
    """Return the fraction of a tensor dim, as other mesh dims leave it, on the fullest rank of the mesh dim."""
    placement, ranks, split = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim], layout.splits[dim]
    if split is None or (isinstance(placement, Shard) and placement.sizes is None):
        return 1 / ranks
    return min(1.0, max(split.sizes) * len(split.sizes) / (layout.shape[dim] or 1) / ranks)


def _from_reduced_copy_seconds(sharded_dim: int | None, target: DimPlacement, layout: Layout, mesh_dim: int) -> float:
    """Return the seconds to make ``target`` from the cached reduced copy of a partial operand.

    The copy is sharded along ``sharded_dim``, or replicated (None).
    """
    if sharded_dim is None or sharded_dim == target:
        return LOCAL_STEP
    ranks, link = layout.mesh.shape[mesh_dim], get_link(layout.mesh, (mesh_dim,))
    nbytes = storage_layout(layout).max_local_nbytes / ranks
    return (
        link.exchange.seconds(ranks, nbytes) if isinstance(target, int) else link.all_gather.seconds(ranks, nbytes * (ranks - 1))
    )


def _redistribute_seconds(
    source: DimPlacement, target: DimPlacement, layout: Layout, mesh_dim: int, fraction: float = 0.0
) -> float:
    """Return the seconds to change the placement on one mesh dim, with the other mesh dims unchanged.

    An exchange takes what its fullest rank sends or receives. ``fraction``: the largest fraction of the target on one rank.
    """
    if source == target:
        return 0.0
    if isinstance(source, Replicate):
        return LOCAL_STEP
    nbytes, ranks = storage_layout(layout).max_local_nbytes, layout.mesh.shape[mesh_dim]
    link = get_link(layout.mesh, (mesh_dim,))
    match source, target:
        case (Partial(), Partial()):
            return 1.5 * link.all_reduce.seconds(ranks, 2 * nbytes)  # never cheaper than replicating it
        case (Partial(), _):
            # A reduce-scatter moves half of what an all-reduce moves, but the next operator usually gathers the result.
            return link.all_reduce.seconds(ranks, 2 * nbytes)
        case (int(), int()):
            largest_transfer = nbytes * fraction / _shard_fraction(layout, source, mesh_dim) if fraction else 0.0
            return link.exchange.seconds(ranks, max(nbytes, largest_transfer))
        case (int(), Partial()):
            return 1.5 * link.all_gather.seconds(ranks, nbytes * (ranks - 1))
        case _:
            return link.all_gather.seconds(ranks, nbytes * (ranks - 1))
