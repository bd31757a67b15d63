"""Strategy selection: choose the cheapest strategy of a rule for each mesh dim. Pure: a function of global facts only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base.symbolic_sizes import contains_symbols
from ..comm.local_reduce import DTYPES_WITHOUT_SUM
from ..layout.expanded_storage import storage_layout
from ..layout.layout import Layout
from ..layout.splits import Split, chunk_sizes
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial
from ..rules.call import Call, Meta, NumberKind
from ..rules.dim_windows import cover_window_sizes, window_block_sizes
from ..rules.op_traits import traits_of
from ..rules.rule import Along, Dims, Factors, R, Rule, Spec, Strategy, StrategyChoice, find_dim
from .factored_dims import NotBlocks, compose_splits, split_of_factor
from .flops import work_of
from .owner_strategies import disjoint_strategies_fit, find_disjoint_results, iter_disjoint_strategies, select_single_owner
from .strategy_cost import rank_strategies, select_free_strategies
from .strategy_table import StrategySelection, StrategyTable, get_or_build_table, spec_to_placement

_MAX_COMBINATIONS = 256


# The function that selects strategies: ``select_strategies``, or in ``dtensor.testing`` one that forces them.
StrategySelector = Callable[[Rule, Factors, Call, Mapping[int, int]], StrategySelection | None]


def select_strategies(rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]) -> StrategySelection | None:
    """Return the cheapest valid strategy for each mesh dim with the layouts that follow, or None if the rule allows none.

    Args:
        inplace_results: result -> operand that the result is written into. Its placements must be those of the operand.
    """
    table = bound_strategies_of(rule, factors, call)
    selection = _select_cheapest(rule, table, factors, call, inplace_results)
    return (
        replace(selection, by_numbers=True)
        if selection is not None and table.by_numbers and _depends_on_number_kinds(call, selection)
        else selection
    )


def _depends_on_number_kinds(call: Call, selection: StrategySelection) -> bool:
    """Return True if Python numbers of other kinds may select other strategies: a value is partial, or a kind is ``ANY``."""
    partial = any(
        op is not None for layout in (*call.operands, *selection.results) if layout is not None for op in layout.partials
    )
    return partial or any(kind is NumberKind.ANY for _, kind in call.number_kinds)


def _select_cheapest(
    rule: Rule, table: StrategyTable, factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> StrategySelection | None:
    """Return the selection without communication, else the single owner's, else the cheapest combination over mesh dims.

    The single owner's is also preferred to one that leaves partial results.
    """
    misaligned, selection = _select_free(rule, table, factors, call, inplace_results)
    if selection is None or any(result is not None and result.is_partial for result in selection.results):
        selection = select_single_owner(rule, factors, call) or selection
    if selection is not None:  # the search below would find it first
        return selection
    ranked = _rank_on_all_mesh_dims(rule, table, factors, call, inplace_results, misaligned)
    best: tuple[tuple[float, ...], int, StrategySelection] | None = None
    for cost, picked in _iter_best_first(ranked):
        if best is not None and cost[:2] > best[0]:
            break
        selection = realize_selection(rule, picked, factors, call, inplace_results)
        if selection is None:
            continue
        redistributed = _count_redistributed(call, selection)
        if redistributed == 0:
            return selection
        candidate = cost[:2], redistributed, selection
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    return None if best is None else best[2]


def rank_all_strategies(
    rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> list[list[tuple[Any, Strategy]]]:
    """Return for each mesh dim all strategies with their costs, the cheapest first, as :func:`select_strategies` ranks them."""
    table = bound_strategies_of(rule, factors, call)
    free_exists, selection = _select_free(rule, table, factors, call, inplace_results)
    return _rank_on_all_mesh_dims(rule, table, factors, call, inplace_results, free_exists and selection is None)


def _select_free(
    rule: Rule, table: StrategyTable, factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> tuple[bool, StrategySelection | None]:
    """Return whether all mesh dims have strategies without communication, and their selection if no operand moves."""
    free = select_free_strategies(table, factors, call, inplace_results)
    selection = None if free is None else realize_selection(rule, free, factors, call, inplace_results)
    return free is not None, None if selection is None or _count_redistributed(call, selection) else selection


def _rank_on_all_mesh_dims(
    rule: Rule, table: StrategyTable, factors: Factors, call: Call, inplace_results: Mapping[int, int], misaligned: bool
) -> list[list[tuple[Any, Strategy]]]:
    """Return for each mesh dim all strategies with their costs, the cheapest first."""
    work = work_of(rule, factors, call)
    return [
        rank_strategies(table, factors, call, inplace_results, mesh_dim, work, misaligned) for mesh_dim in range(call.mesh.ndim)
    ]


def bound_strategies_of(rule: Rule, factors: Factors, call: Call) -> StrategyTable:
    """Return the table of the strategies that the rule has for this call, with those for disjoint partial operands."""
    partials = tuple(rule.partials(call) if callable(rule.partials) else rule.partials)
    table = get_or_build_table(factors, partials, call)
    if not call.disjoint_splits:
        return table
    return replace(table, strategies=(*table.strategies, *iter_disjoint_strategies(rule, factors, call, len(table.strategies))))


def realize_selection(
    rule: Rule, strategies: tuple[Strategy, ...], factors: Factors, call: Call, inplace_results: Mapping[int, int]
) -> StrategySelection | None:
    """Return the layouts that follow from one strategy for each mesh dim, or None if strategies conflict or the rule refuses.

    If the rule does not allow the blocks (one is empty, or they are uneven), even blocks are tried.
    """
    try:
        selection = _derive_layouts(strategies, factors, call, inplace_results)
        if selection is not None and any(
            layout.dtype in DTYPES_WITHOUT_SUM and any(layout.partials) for layout in selection.results if layout
        ):
            return None
        if selection is not None and not rule.allows(
            selection.choice
        ):  # the rule refuses these blocks: one is empty, or they are uneven
            selection = (
                _derive_layouts(strategies, factors, call, inplace_results, evenly=True) if selection.choice.splits else None
            )
            if selection is None or not rule.allows(selection.choice):
                return None
    except NotBlocks:
        return None
    if selection is None:
        return None
    if not (call.disjoint_splits or factors.groups):
        return selection
    disjoint_results = find_disjoint_results(factors, call, strategies, selection.operands, selection.results)
    if not disjoint_strategies_fit(strategies, call, selection.operands, selection.choice.splits, disjoint_results):
        return None
    return replace(selection, disjoint_results=disjoint_results) if disjoint_results else selection


def _count_redistributed(call: Call, selection: StrategySelection) -> int:
    """Return how many operands the selection redistributes."""
    return sum(
        [
            current is not required and not current.has_same_blocks(required)
            for current, required in zip(call.operands, selection.operands, strict=True)
        ]
    )


def _iter_best_first(ranked: list[list[tuple[Any, Strategy]]]) -> Iterator[tuple[tuple[float, ...], tuple[Strategy, ...]]]:
    """Yield combinations of one strategy for each mesh dim in the order of their summed costs, at most ``_MAX_COMBINATIONS``.

    Then yield the combination of the most expensive strategies.
    """
    if not all(ranked):
        return
    start = (0,) * len(ranked)
    heap, visited = [(_sum_costs(ranked, start), start)], {start}
    for _ in range(_MAX_COMBINATIONS):
        if not heap:
            return
        cost, indices = heapq.heappop(heap)
        yield cost, tuple(ranked[i][k][1] for i, k in enumerate(indices))
        for i in range(len(indices)):
            successor = (*indices[:i], indices[i] + 1, *indices[i + 1 :])
            if successor[i] < len(ranked[i]) and successor not in visited:
                visited.add(successor)
                heapq.heappush(heap, (_sum_costs(ranked, successor), successor))
    last = tuple(len(column) - 1 for column in ranked)
    yield _sum_costs(ranked, last), tuple(column[-1][1] for column in ranked)


def _sum_costs(ranked: list[list[tuple[Any, Strategy]]], indices: tuple[int, ...]) -> tuple[float, ...]:
    costs = [ranked[i][k][0] for i, k in enumerate(indices)]
    return tuple(map(sum, zip(*costs, strict=True)))


def _derive_layouts(
    strategies: tuple[Strategy, ...], factors: Factors, call: Call, inplace_results: Mapping[int, int], evenly: bool = False
) -> StrategySelection | None:
    """Return the selection of one strategy for each mesh dim with its layouts, or None if strategies contradict each other."""
    active = [(mesh_dim, strategy) for mesh_dim, strategy in enumerate(strategies) if call.mesh.shape[mesh_dim] > 1]
    kernels = {strategy.factor: strategy.kernel for _, strategy in active if strategy.kernel is not None}
    if any(kernels.get(strategy.factor, strategy.kernel) is not strategy.kernel for _, strategy in active):
        return None
    if len(kernels) > 1 and (
        len({kernel.run for kernel in kernels.values()}) > 1 or not all(kernel.joint for kernel in kernels.values())
    ):
        return None
    mesh_dims_of: dict[str, list[int]] = {}
    for mesh_dim, strategy in active:
        for name in _sharded_factors(strategy):
            mesh_dims_of.setdefault(name, []).append(mesh_dim)
    splits = {
        name: _choose_split(name, mesh_dims, factors, call, inplace_results, evenly) for name, mesh_dims in mesh_dims_of.items()
    }

    def splits_of(side: str, i: int) -> Mapping[str, Split]:
        """Return the splits of the factors for one tensor, those of windows with their own block sizes."""
        windows = {name: factors.windows[side, i, name] for name in splits if (side, i, name) in factors.windows}
        return (
            {
                **splits,
                **{n: Split(splits[n].mesh_dims, window_block_sizes(splits[n].sizes, window)) for n, window in windows.items()},
            }
            if windows
            else splits
        )

    fixed, mesh = call.fixed_operands, call.mesh
    operands = []
    for i, layout in enumerate(call.operands):
        if i not in fixed:
            specs = [strategy.operands[i] for strategy in strategies]
            factor_sizes = _local_factor_sizes(factors, "operand", i, factors.operands[i])
            layout = _derive_layout(mesh, factors.operands[i], specs, splits_of("operand", i), factor_sizes, layout, (layout,))
        operands.append(layout)
    for i in _replicated_kernel_operands(active, factors, mesh_dims_of) if kernels else ():
        operands[i] = operands[i].to_replicated()
    results: list[Layout | None] = []
    tensors = iter(range(len(factors.results)))
    for meta in call.results:
        if meta is None:
            results.append(None)
            continue
        r = next(tensors)
        specs = [strategy.results[r] for strategy in strategies]
        factor_sizes = _local_factor_sizes(factors, "result", r, factors.results[r])
        results.append(_derive_layout(mesh, factors.results[r], specs, splits_of("result", r), factor_sizes, meta, call.operands))
    kernel_strategy = next(
        (strategy for _, strategy in active if strategy.kernel is not None and strategy.factor in splits), None
    )
    return StrategySelection(StrategyChoice(call, factors, strategies, splits), tuple(operands), tuple(results), kernel_strategy)


def _replicated_kernel_operands(
    active: Sequence[tuple[int, Strategy]], factors: Factors, mesh_dims_of: Mapping[str, Sequence[int]]
) -> Iterator[int]:
    """Yield the operands that a kernel needs replicated though other strategies shard their factors."""
    for i, dims in enumerate(factors.operands):
        sharded_mesh_dims = {mesh_dim for names in dims for name in names for mesh_dim in mesh_dims_of.get(name, ())}
        if any(
            strategy.kernel is not None and mesh_dim in sharded_mesh_dims and strategy.operands[i] == R
            for mesh_dim, strategy in active
        ):
            yield i


def _sharded_factors(strategy: Strategy) -> Iterable[str]:
    """Return the factors that a strategy shards: its own, and those of operands and results that it exchanges."""
    if strategy.factor is None:
        return ()
    return dict.fromkeys(
        (strategy.factor, *(spec.factor for spec in (*strategy.operands, *strategy.results) if isinstance(spec, Along)))
    )


def _choose_split(
    name: str, mesh_dims: list[int], factors: Factors, call: Call, inplace_results: Mapping[int, int], evenly: bool = False
) -> Split:
    """Return how ``mesh_dims`` shard the factor ``name``: as an operand is sharded already, or in even blocks.

    Written operands come first, then the largest. ``evenly`` forces even blocks over the same ranks. If operands are sharded
    differently some move anyhow, so even blocks are taken if the fullest rank then has fewer positions. Written operands keep
    their blocks.
    """
    wanted_mesh_dims, size = set(mesh_dims), factors.sizes[name]
    sharded: list[tuple[int, int, Split]] = []  # operand, its dim, the split of that dim
    for i, dims in enumerate(factors.operands):
        d = find_dim(dims, name)
        current = None if d is None else call.operands[i].splits[d]
        if d is not None and current is not None:
            sharded.append((i, d, current))
    if any(
        at != sharded[0][2] or factors.operands[i][d] != factors.operands[sharded[0][0]][sharded[0][1]] for i, d, at in sharded
    ):
        written = set(inplace_results.values())
        sharded.sort(key=lambda item: (item[0] not in written, -call.operands[item[0]].numel, item[0]))
    windowed_splits: list[tuple[tuple[int, ...], tuple[int, ...], range]] = []
    full_splits: list[Split] = []
    for i, d, current in sharded:
        window = factors.windows.get(("operand", i, name))
        names = factors.operands[i][d]
        factor_split = split_of_factor(
            names, name, current, wanted_mesh_dims, _local_factor_sizes(factors, "operand", i, (names,)), call.mesh.shape
        )
        if factor_split is not None and window is None:
            if i in inplace_results.values():
                return factor_split
            full_splits.append(factor_split)
        if factor_split is not None and window is not None:
            windowed_splits.append((*factor_split, window))
    if full_splits:
        even = chunk_sizes(size, tuple(call.mesh.shape[i] for i in full_splits[0].mesh_dims))
        if max(even) == max(full_splits[0].sizes) and not evenly:
            return full_splits[0]
        use_even = (
            evenly
            or any(factor_split != full_splits[0] for factor_split in full_splits)
            or _result_outgrows_operands(name, factors, call, full_splits[0].sizes)
        )
        return Split(full_splits[0].mesh_dims, even) if use_even else full_splits[0]
    ordered = windowed_splits[0][0] if windowed_splits else tuple(sorted(mesh_dims))
    default = chunk_sizes(size, tuple(call.mesh.shape[i] for i in ordered))
    if not windowed_splits:
        return Split(ordered, default)
    return Split(
        ordered,
        cover_window_sizes(default, [(blocks, window) for nesting, blocks, window in windowed_splits if nesting == ordered]),
    )


def _local_factor_sizes(factors: Factors, side: str, i: int, dims: Dims) -> Mapping[str, int]:
    """Return the size of each factor as operand or result ``i`` has it: of composite dims the sizes of windows."""
    composite = {(side, i, name) for names in dims if len(names) > 1 for name in names} if factors.windows else set()
    window_sizes = {key[2]: len(factors.windows[key]) for key in composite & factors.windows.keys()}
    return {**factors.sizes, **window_sizes} if window_sizes else factors.sizes


def _result_outgrows_operands(name: str, factors: Factors, call: Call, sizes: Sequence[int]) -> bool:
    """Return True if results become more than twice as large as the operands, which are uneven parts of another tensor.

    Parts show in blocks of which the first is not the largest. Results that are only shaped like an operand keep its blocks,
    because gradients are stored in them.
    """
    computed = traits_of(call.func).memory_use == "all" and all(
        result_sizes.alias_info is None for result_sizes in call.func._schema.returns
    )
    if sizes[0] == max(sizes) or not computed:
        return False
    operand_sizes = [storage_layout(layout).numel for layout in call.operands]
    metas = [meta for meta in call.results if meta is not None]
    result_sizes = [
        math.prod(meta.shape) for dims, meta in zip(factors.results, metas, strict=True) if find_dim(dims, name) is not None
    ]
    return sum(result_sizes) > 2 * sum(operand_sizes)


def _derive_layout(
    mesh: DeviceMesh,
    dims: Dims,
    specs: Sequence[Spec],
    splits: Mapping[str, Split],
    sizes: Mapping[str, int],
    meta: Meta | Layout,
    candidates: Sequence[Layout],
) -> Layout:
    """Return the layout of a tensor with these factors if each mesh dim follows its spec.

    ``candidates``: layouts that are reused if they are equal.
    """
    shape = mesh.shape
    tensor_splits = tuple([compose_splits(names, splits, sizes) for names in dims])
    partials = tuple(
        [spec.reduce_op if isinstance(spec, Partial) and n > 1 else None for spec, n in zip(specs, shape, strict=True)]
    )
    if 1 in shape:  # mesh dims of one rank keep the placement of the strategy
        singleton_placements = {i: spec_to_placement(spec, dims) for i, spec in enumerate(specs) if shape[i] == 1}
        return Layout.from_splits(mesh, tensor_splits, partials, meta.shape, meta.stride, meta.dtype, singleton_placements)
    for layout in () if contains_symbols(meta.shape) else candidates:  # comparing symbolic sizes would add guards
        if (
            not layout.has_symbols
            and layout.splits == tensor_splits
            and layout.partials == partials
            and layout.shape == meta.shape
            and layout.stride == meta.stride
            and layout.dtype is meta.dtype
        ):
            return layout
    return Layout.from_splits(mesh, tensor_splits, partials, meta.shape, meta.stride, meta.dtype)
