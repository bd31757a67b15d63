"""Choose, for each mesh dim, the row of a rule that costs least. Pure: a function of global facts only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base.symbolic_sizes import has_symbols
from ..comm.local_reduce import NOT_ADDED
from ..cost.link import collective_seconds
from ..layout.expanded_storage import stored
from ..layout.layout import Layout
from ..layout.splits import Split, chunk_sizes
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial
from ..redistribute.intervals import largest, missing
from ..rules.call import Call, Kind, Meta
from ..rules.dim_windows import covering, windowed
from ..rules.factored_dims import NotBlocks, composed, cut_in
from ..rules.flops import work_of
from ..rules.op_traits import facts_of
from ..rules.rule import Along, Choice, Dims, Factors, R, Row, Rule, Spec, stands
from .disjoint_partial_strategies import fits, left_parted, parted_lines
from .single_owner_strategy import by_owner
from .strategy_choice import Chosen
from .strategy_cost import free_rows, ranked
from .strategy_table import Table, spelled, table_of, where_of

_TRIES = 256


# How a row is chosen on each mesh dim: ``choose``, or (in ``dtensor.testing``) rows that are asked for.
Chooser = Callable[[Rule, Factors, Call, Mapping[int, int]], Chosen | None]


def choose(rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    """The cheapest valid choice; None if the rule allows none.

    Args:
        kept: result -> operand that the result is written into (in place): its placement must come back.
    """
    table = declared(rule, factors, call)
    chosen = _cheapest(rule, table, factors, call, kept)
    return replace(chosen, by_numbers=True) if chosen is not None and table.by_numbers and _may_differ(call, chosen) else chosen


def _may_differ(call: Call, chosen: Chosen) -> bool:
    """Where nothing is in terms, and numbers are usual ones, no other row would be better with other numbers."""
    partial = any(op is not None for layout in (*call.operands, *chosen.results) if layout is not None for op in layout.partials)
    return partial or any(kind is Kind.ANY for _, kind in call.kinds)


def _cheapest(rule: Rule, table: Table, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    apart, chosen = _in_place(rule, table, factors, call, kept)
    if chosen is None or any(made is not None and made.is_partial for made in chosen.results):
        chosen = by_owner(rule, factors, call) or chosen
    if chosen is not None:  # what the search below would come to first
        return chosen
    priced = _priced(rule, table, factors, call, kept, apart)
    best: tuple[tuple[float, ...], int, Chosen] | None = None
    for price, picked in _best_first(priced):
        if best is not None and price[:2] > best[0]:
            break
        chosen = realized(rule, picked, factors, call, kept)
        if chosen is None:
            continue
        moved = _moved(call, chosen)
        if moved == 0:
            return chosen
        found = (price[0] + _in_other_blocks(call, picked, factors, chosen), price[1]), moved, chosen
        if best is None or found[:2] < best[:2]:
            best = found
    return None if best is None else best[2]


def prices(rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> list[list[tuple[Any, Row]]]:
    """By mesh dim every row with its price, the cheapest first, as :func:`choose` sees them."""
    table = declared(rule, factors, call)
    found, chosen = _in_place(rule, table, factors, call, kept)
    return _priced(rule, table, factors, call, kept, found and chosen is None)


def _in_place(rule: Rule, table: Table, factors: Factors, call: Call, kept: Mapping[int, int]) -> tuple[bool, Chosen | None]:
    """Whether rows find all operands along the dims where they want them; and the choice, if also in such blocks."""
    free = free_rows(table, factors, call, kept)
    chosen = None if free is None else realized(rule, free, factors, call, kept)
    return free is not None, None if chosen is None or _moved(call, chosen) else chosen


def _priced(
    rule: Rule, table: Table, factors: Factors, call: Call, kept: Mapping[int, int], apart: bool
) -> list[list[tuple[Any, Row]]]:
    work = work_of(rule, factors, call)
    return [ranked(table, factors, call, kept, mesh_dim, work, apart) for mesh_dim in range(call.mesh.ndim)]


def _in_other_blocks(call: Call, rows: tuple[Row, ...], factors: Factors, chosen: Chosen) -> float:
    """Seconds of moving the operands that lie where rows want them, but in other blocks than come of it, which no price sees: in
    one exchange, which takes what the rank gets that gets most of all of them together."""
    ranks, received = call.mesh.shape, []
    mesh_dims: set[int] = set()
    for i, (have, need) in enumerate(zip(call.operands, chosen.operands, strict=True)):
        if have is not need and not have.same_data(need):
            wanted = [where_of(row.operands[i], factors.operands[i]) for row in rows]
            if all(n == 1 or have.along(mesh_dim) == wanted[mesh_dim] for mesh_dim, n in enumerate(ranks)):
                copies = have.nbytes // max(1, stored(have).nbytes) if 0 in have.stride else 1
                received.append(missing(have, need) * have.dtype.itemsize // max(1, copies))
                mesh_dims.update(m for split in (*have.splits, *need.splits) if split is not None for m in split.mesh_dims)
    if not received:
        return 0.0
    return collective_seconds(call.mesh, tuple(sorted(mesh_dims)), "exchange", largest(sum(received[1:], received[0])))


def declared(rule: Rule, factors: Factors, call: Call) -> Table:
    """All rows that the rule has for this call."""
    partials = tuple(rule.partials(call) if callable(rule.partials) else rule.partials)
    table = table_of(factors, partials, call)
    if not call.parted:
        return table
    return replace(table, lines=(*table.lines, *parted_lines(rule, factors, call, len(table.lines))))


def realized(rule: Rule, rows: tuple[Row, ...], factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    """The choice of one row per mesh dim; None if they contradict each other, or the rule does not allow them here."""
    try:
        chosen = _realize(rows, factors, call, kept)
        if chosen is not None and any(layout.dtype in NOT_ADDED and any(layout.partials) for layout in chosen.results if layout):
            return None
        if chosen is not None and not rule.allows(chosen.choice):  # of such blocks: one is empty, or they are not alike
            chosen = _realize(rows, factors, call, kept, evenly=True) if chosen.choice.splits else None
            if chosen is None or not rule.allows(chosen.choice):
                return None
    except NotBlocks:
        return None
    if chosen is None:
        return None
    if not (call.parted or factors.groups):
        return chosen
    left = left_parted(factors, call, rows, chosen.operands, chosen.results)
    if not fits(rows, call, chosen.operands, chosen.choice.splits, left):
        return None
    return replace(chosen, left=left) if left else chosen


def _moved(call: Call, chosen: Chosen) -> int:
    """How many operands change."""
    return sum([have is not need and not have.same_data(need) for have, need in zip(call.operands, chosen.operands, strict=True)])


def _best_first(ranked: list[list[tuple[Any, Row]]]) -> Iterator[tuple[tuple[float, ...], tuple[Row, ...]]]:
    """Combinations of one row per mesh dim in order of summed price, a bounded number of them."""
    if not all(ranked):
        return
    start = (0,) * len(ranked)
    heap, seen = [(_total(ranked, start), start)], {start}
    for _ in range(_TRIES):
        if not heap:
            return
        price, at = heapq.heappop(heap)
        yield price, tuple(ranked[i][k][1] for i, k in enumerate(at))
        for i in range(len(at)):
            following = (*at[:i], at[i] + 1, *at[i + 1 :])
            if following[i] < len(ranked[i]) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (_total(ranked, following), following))
    last = tuple(len(column) - 1 for column in ranked)
    yield _total(ranked, last), tuple(column[-1][1] for column in ranked)


def _total(ranked: list[list[tuple[Any, Row]]], at: tuple[int, ...]) -> tuple[float, ...]:
    prices = [ranked[i][k][0] for i, k in enumerate(at)]
    return tuple(map(sum, zip(*prices, strict=True)))


def _realize(rows: tuple[Row, ...], factors: Factors, call: Call, kept: Mapping[int, int], evenly: bool = False) -> Chosen | None:
    """The layouts that follow from one row per mesh dim; None if they contradict each other."""
    taken = [(mesh_dim, row) for mesh_dim, row in enumerate(rows) if call.mesh.shape[mesh_dim] > 1]
    kernels = {row.factor: row.kernel for _, row in taken if row.kernel is not None}
    if any(kernels.get(row.factor, row.kernel) is not row.kernel for _, row in taken):
        return None
    if len(kernels) > 1 and (
        len({kernel.run for kernel in kernels.values()}) > 1 or not all(kernel.joint for kernel in kernels.values())
    ):
        return None
    used: dict[str, list[int]] = {}
    for mesh_dim, row in taken:
        for name in _cut_by(row):
            used.setdefault(name, []).append(mesh_dim)
    splits = {name: _split(name, mesh_dims, factors, call, kept, evenly) for name, mesh_dims in used.items()}

    def splits_of(side: str, i: int) -> Mapping[str, Split]:
        cut = {name: factors.windows[side, i, name] for name in splits if (side, i, name) in factors.windows}
        return (
            {**splits, **{n: Split(splits[n].mesh_dims, windowed(splits[n].sizes, window)) for n, window in cut.items()}}
            if cut
            else splits
        )

    fixed, mesh = call.fixed, call.mesh
    operands = []
    for i, layout in enumerate(call.operands):
        if i not in fixed:
            specs = [row.operands[i] for row in rows]
            own = _held(factors, "operand", i, factors.operands[i])
            layout = _place(mesh, factors.operands[i], specs, splits_of("operand", i), own, layout, (layout,))
        operands.append(layout)
    for i in _wanted_whole(taken, factors, used) if kernels else ():
        operands[i] = operands[i].whole()
    results: list[Layout | None] = []
    tensors = iter(range(len(factors.results)))
    for meta in call.results:
        if meta is None:
            results.append(None)
            continue
        r = next(tensors)
        specs = [row.results[r] for row in rows]
        own = _held(factors, "result", r, factors.results[r])
        results.append(_place(mesh, factors.results[r], specs, splits_of("result", r), own, meta, call.operands))
    kernel_row = next((row for _, row in taken if row.kernel is not None and row.factor in splits), None)
    return Chosen(Choice(call, factors, rows, splits), tuple(operands), tuple(results), kernel_row)


def _wanted_whole(taken: Sequence[tuple[int, Row]], factors: Factors, used: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Operands that a kernel wants whole though others are cut along their factors."""
    for i, dims in enumerate(factors.operands):
        cut = {mesh_dim for names in dims for name in names for mesh_dim in used.get(name, ())}
        if any(row.kernel is not None and mesh_dim in cut and row.operands[i] == R for mesh_dim, row in taken):
            yield i


def _cut_by(row: Row) -> Iterable[str]:
    """All factors that a row cuts: the one that it is called by, and those that what goes elsewhere comes to lie by."""
    if row.factor is None:
        return ()
    return dict.fromkeys((row.factor, *(spec.factor for spec in (*row.operands, *row.results) if isinstance(spec, Along))))


def _split(name: str, mesh_dims: list[int], factors: Factors, call: Call, kept: Mapping[int, int], evenly: bool = False) -> Split:
    """How ``name`` is cut by ``mesh_dims``: as in the operand that already is (written ones first, then the largest), or
    ``evenly`` by the same ranks.

    Where operands are cut differently some move anyhow, and so would what they grow to: then evenly, if that leaves nobody with
    more (written ones stay).
    """
    wanted, size = set(mesh_dims), factors.sizes[name]
    cut: list[tuple[int, int, Split]] = []  # operand, its dim, how that is cut
    for i, dims in enumerate(factors.operands):
        d = stands(dims, name)
        current = None if d is None else call.operands[i].splits[d]
        if d is not None and current is not None:
            cut.append((i, d, current))
    if any(at != cut[0][2] or factors.operands[i][d] != factors.operands[cut[0][0]][cut[0][1]] for i, d, at in cut):
        written = set(kept.values())
        cut.sort(key=lambda item: (item[0] not in written, -call.operands[item[0]].numel, item[0]))
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], range]] = []
    whole: list[Split] = []
    for i, d, current in cut:
        window = factors.windows.get(("operand", i, name))
        names = factors.operands[i][d]
        found = cut_in(names, name, current, wanted, _held(factors, "operand", i, (names,)), call.mesh.shape)
        if found is not None and window is None:
            if i in kept.values():
                return found
            whole.append(found)
        if found is not None and window is not None:
            pieces.append((*found, window))
    if whole:
        even = chunk_sizes(size, tuple(call.mesh.shape[i] for i in whole[0].mesh_dims))
        if max(even) == max(whole[0].sizes) and not evenly:
            return whole[0]
        dealt = evenly or any(found != whole[0] for found in whole) or _parts_grow(name, factors, call, whole[0].sizes)
        return Split(whole[0].mesh_dims, even) if dealt else whole[0]
    ordered = pieces[0][0] if pieces else tuple(sorted(mesh_dims))
    default = chunk_sizes(size, tuple(call.mesh.shape[i] for i in ordered))
    if not pieces:
        return Split(ordered, default)
    return Split(ordered, covering(default, [(blocks, window) for nesting, blocks, window in pieces if nesting == ordered]))


def _held(factors: Factors, side: str, i: int, dims: Dims) -> Mapping[str, int]:
    """How many positions of each factor these dims of an operand or a result, where they are of several, have."""
    known = factors.windows
    inside = [(side, i, name) for names in dims if len(names) > 1 for name in names] if known else ()
    windows = {key[2]: len(known[key]) for key in inside if key in known}
    return {**factors.sizes, **windows} if windows else factors.sizes


def _parts_grow(name: str, factors: Factors, call: Call, sizes: Sequence[int]) -> bool:
    """Whether a part of something that was cut along a factor, as blocks show of which the first is not the largest, becomes more
    than twice as much as memory has of all operands. What is only made like another (gradients are stored in it) lies as that."""
    computed = facts_of(call.func).touches == "all" and all(made.alias_info is None for made in call.func._schema.returns)
    if sizes[0] == max(sizes) or not computed:
        return False
    given = [stored(layout).numel for layout in call.operands]
    metas = [meta for meta in call.results if meta is not None]
    made = [math.prod(meta.shape) for dims, meta in zip(factors.results, metas, strict=True) if stands(dims, name) is not None]
    return sum(made) > 2 * sum(given)


def _place(
    mesh: DeviceMesh,
    dims: Dims,
    specs: Sequence[Spec],
    splits: Mapping[str, Split],
    sizes: Mapping[str, int],
    meta: Meta | Layout,
    known: Sequence[Layout],
) -> Layout:
    """The layout of a tensor with these factors when each mesh dim follows its spec; ``known``: what it may turn out to be."""
    shape = mesh.shape
    tensor_splits = tuple([composed(names, splits, sizes) for names in dims])
    partials = tuple(
        [spec.reduce_op if isinstance(spec, Partial) and n > 1 else None for spec, n in zip(specs, shape, strict=True)]
    )
    if 1 in shape:  # those mesh dims are spelled as the rule says
        idle = {i: spelled(spec, dims) for i, spec in enumerate(specs) if shape[i] == 1}
        return Layout.from_splits(mesh, tensor_splits, partials, meta.shape, meta.stride, meta.dtype, idle)
    for layout in () if has_symbols(meta.shape) else known:  # symbols would be compared, which makes guards
        if (
            not layout.sized
            and layout.splits == tensor_splits
            and layout.partials == partials
            and layout.shape == meta.shape
            and layout.stride == meta.stride
            and layout.dtype is meta.dtype
        ):
            return layout
    return Layout.from_splits(mesh, tensor_splits, partials, meta.shape, meta.stride, meta.dtype)
