"""Choose, for each mesh dim, the row of a rule that costs least. Pure: a function of global facts only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Layout, Split, chunk_sizes
from .mesh import DeviceMesh
from .placement import Monoid, Partial, Placement, Replicate, Shard
from .redistribute.cost import link_of
from .rules.call import Call, Meta
from .rules.compound import NotBlocks, composed, cut_in
from .rules.rule import ANY_PARTIAL, Along, Choice, Dims, Factors, Partials, Row, Rule, Spec, candidates, stands
from .rules.windows import covering, windowed

LOCAL_STEP = 1e-7  # seconds: a local slice or zero costs next to nothing
_TRIES = 256


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice with the layouts that follow from it."""

    choice: Choice
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]

    @property
    def kernel_row(self) -> Row | None:
        """The row whose kernel runs (one of them, if a joint kernel has several factors)."""
        return next((row for row in self.choice.rows if row.kernel is not None and row.factor in self.choice.splits), None)

    @property
    def kernel_splits(self) -> dict[str, Split]:
        """How the kernel's factors are cut."""
        names = {row.factor for row in self.choice.rows if row.kernel is not None}
        return {name: split for name, split in self.choice.splits.items() if name in names}


def choose(rule: Rule, factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    """The cheapest valid choice; None if the rule allows none.

    Args:
        kept: result -> operand that the result is written into (in place): its placement must come back.
    """
    partials = rule.partials(call) if callable(rule.partials) else rule.partials
    rows = [
        row
        for row in candidates(factors, (*partials, *_monoid_rows(factors, call, partials)))
        if _allowed(row, call) and sound_dtypes(row, call)
    ]
    ranked = [_rank(rows, mesh_dim, factors, call, kept) for mesh_dim in range(call.mesh.ndim)]
    best: tuple[tuple[float, ...], int, Chosen] | None = None
    for price, picked in _best_first(ranked):
        if best is not None and price[:2] > best[0]:
            break
        try:
            chosen = _realize(picked, factors, call, kept)
        except NotBlocks:
            continue
        if chosen is None or not (rule.when is None or rule.when(chosen.choice)):
            continue
        moved = sum(not have.same_data(need) for have, need in zip(call.operands, chosen.operands, strict=True))
        if moved == 0:
            return chosen
        if best is None or moved < best[1]:  # of equal prices, which do not see uneven blocks, the one that moves less
            best = price[:2], moved, chosen
    return None if best is None else best[2]


def _monoid_rows(factors: Factors, call: Call, partials: Partials) -> Iterator[Row]:
    """Where terms of any named reduction pass, so do those of a user's, if it acts element by element and is not finished yet."""
    if not set(ANY_PARTIAL) <= set(partials):
        return
    for op in dict.fromkeys(op for layout in call.operands for op in layout.partials):
        if isinstance(op, Monoid) and op.elementwise and op.finalize is None:
            yield Row((Partial(op),) * len(factors.operands), (Partial(op),) * len(factors.results))


def _allowed(row: Row, call: Call) -> bool:
    return all(isinstance(row.operands[i], Replicate) for i in call.fixed)


def sound_dtypes(row: Row, call: Call) -> bool:
    """Whether the dtypes of a partial row keep its algebra.

    Sums and products of integers wrap in their own dtype and bools add by ``or``, so terms may not change dtype first, except
    to a floating dtype that holds all values of theirs: terms are larger than their sum, so rounding each of them to fewer bits
    is not what rounding the sum is. Max and min pass conversions that keep the order. There is no mean of integers.
    """
    if row.factor is not None:
        return True
    results = zip(row.results, _tensors(call.results), strict=False)
    dtypes = [meta.dtype for spec, meta in results if isinstance(spec, Partial)]  # results that are whole take nothing from terms
    for i, spec in enumerate(row.operands):
        if isinstance(spec, Partial):
            source = call.operands[i].dtype
            if spec.reduce_op == "avg" and not (source.is_floating_point or source.is_complex):
                return False
            if not all(dtype == source or _converts(spec.reduce_op, source, dtype) for dtype in dtypes):
                return False
    return True


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
    if torch.bool in (source, target) or source.is_complex or target.is_complex:
        return False
    if target.is_floating_point:
        return True
    if source.is_floating_point:
        return False
    old, new = torch.iinfo(source), torch.iinfo(target)
    return bool(new.min <= old.min and old.max <= new.max)


def _rank(rows: list[Row], mesh_dim: int, factors: Factors, call: Call, kept: Mapping[int, int]) -> list[tuple[Any, Row]]:
    priced = [(_price(row, mesh_dim, factors, call, kept), order, row) for order, row in enumerate(rows)]
    priced.sort(key=lambda item: (item[0], item[1]))
    return [((*price, order), row) for price, order, row in priced]


def _price(row: Row, mesh_dim: int, factors: Factors, call: Call, kept: Mapping[int, int]) -> tuple[float, ...]:
    """(seconds of communication, whether it shards what nobody has sharded, operands that change, bytes per rank of the results).

    A replicated or partial value is not cut only because that is free: results keep the placements that their operands suggest.
    """
    ranks = call.mesh.shape[mesh_dim]
    seconds, changes, memory = 0.0, 0, 0.0
    invented = row.factor is not None
    for i, (spec, layout) in enumerate(zip(row.operands, call.operands, strict=True)):
        if i in call.fixed:
            continue
        target = _target(spec, factors.operands[i], factors.sizes)
        current = _current(layout, mesh_dim)
        cost = _move(current, target, layout, mesh_dim)
        seconds += cost
        changes += cost > 0
        invented = invented and not isinstance(current, int)
    for r, (spec, meta) in enumerate(zip(row.results, _tensors(call.results), strict=False)):
        target = _target(spec, factors.results[r], factors.sizes)
        nbytes = math.prod(meta.shape) * meta.dtype.itemsize
        memory += nbytes / ranks if isinstance(target, int) else nbytes
        if r in kept:
            layout = call.operands[kept[r]]
            cost = _move(target, _current(layout, mesh_dim), layout, mesh_dim)
            seconds += cost
            changes += cost > 0
    if row.kernel is not None and ranks > 1:
        rate = link_of(call.mesh, (mesh_dim,)).exchange
        seconds += row.kernel.collectives * rate.seconds(ranks, 0) + row.kernel.nbytes(call) / rate.bandwidth
    return seconds if ranks > 1 else 0.0, invented, changes, memory


def _tensors(results: Sequence[Meta | None]) -> list[Meta]:
    return [meta for meta in results if meta is not None]


Where = int | Placement  # a tensor dim, or Replicate / Partial


def _current(layout: Layout, mesh_dim: int) -> Where:
    placement = layout.placements[mesh_dim]
    return placement.dim if isinstance(placement, Shard) else placement


def _target(spec: Spec, dims: Dims, sizes: Mapping[str, int]) -> Where:
    if isinstance(spec, Along):
        dim = stands(dims, spec.factor)
        return Replicate() if dim is None else dim
    return spec


def _move(source: Where, target: Where, layout: Layout, mesh_dim: int) -> float:
    """Seconds to change one mesh dim's placement, other mesh dims as they are."""
    if source == target:
        return 0.0
    if isinstance(source, Replicate):
        return LOCAL_STEP
    nbytes, ranks = layout.max_local_nbytes, layout.mesh.shape[mesh_dim]
    link = link_of(layout.mesh, (mesh_dim,))
    match source, target:
        case (Partial(), Partial()):
            return 1.5 * link.all_reduce.seconds(ranks, 2 * nbytes)  # never better than having it whole
        case (Partial(), _):
            # Scattering moves half of what reducing everywhere does, but the next operation usually gathers it again.
            return link.all_reduce.seconds(ranks, 2 * nbytes)
        case (int(), int()):
            return link.exchange.seconds(ranks, nbytes)
        case (int(), Partial()):
            return 1.5 * link.all_gather.seconds(ranks, nbytes * (ranks - 1))
        case _:
            return link.all_gather.seconds(ranks, nbytes * (ranks - 1))


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


def _realize(rows: tuple[Row, ...], factors: Factors, call: Call, kept: Mapping[int, int]) -> Chosen | None:
    """The layouts that follow from one row per mesh dim; None if they contradict each other."""
    kernels = {
        row.factor: row.kernel for row, size in zip(rows, call.mesh.shape, strict=True) if row.kernel is not None and size > 1
    }
    if len(kernels) > 1 and (
        len({kernel.run for kernel in kernels.values()}) > 1 or not all(kernel.joint for kernel in kernels.values())
    ):
        return None
    used: dict[str, list[int]] = {}
    for mesh_dim, row in enumerate(rows):
        if row.factor is not None and call.mesh.shape[mesh_dim] > 1:
            used.setdefault(row.factor, []).append(mesh_dim)
    splits = {name: _split(name, mesh_dims, factors, call, kept) for name, mesh_dims in used.items()}

    def splits_of(side: str, i: int) -> Mapping[str, Split]:
        cut = {name: factors.windows[side, i, name] for name in splits if (side, i, name) in factors.windows}
        return (
            {**splits, **{n: Split(splits[n].mesh_dims, windowed(splits[n].sizes, window)) for n, window in cut.items()}}
            if cut
            else splits
        )

    operands = tuple(
        layout
        if i in call.fixed
        else place(
            call.mesh, factors.operands[i], [row.operands[i] for row in rows], splits_of("operand", i), factors.sizes, layout
        )
        for i, layout in enumerate(call.operands)
    )
    tensors = iter(range(len(factors.results)))
    results = tuple(
        None
        if meta is None
        else place(
            call.mesh,
            factors.results[(r := next(tensors))],
            [row.results[r] for row in rows],
            splits_of("result", r),
            factors.sizes,
            meta,
        )
        for meta in call.results
    )
    return Chosen(Choice(call, factors, rows, splits), operands, results)


def _split(name: str, mesh_dims: list[int], factors: Factors, call: Call, kept: Mapping[int, int]) -> Split:
    """How ``name`` is cut by ``mesh_dims``: as in the operand that already is (written ones first, then the largest)."""
    wanted, size = set(mesh_dims), factors.sizes[name]
    written = set(kept.values())
    order = sorted(range(len(call.operands)), key=lambda i: (i not in written, -call.operands[i].numel, i))
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], range]] = []
    for i in order:
        dims = factors.operands[i]
        d = stands(dims, name)
        current = None if d is None else call.operands[i].splits[d]
        if d is None or current is None:
            continue
        window = factors.windows.get(("operand", i, name))
        sizes = factors.sizes if window is None else {**factors.sizes, name: len(window)}
        found = cut_in(dims[d], name, current, wanted, sizes, call.mesh.shape)
        if found is not None and window is None:
            return found
        if found is not None and window is not None:
            pieces.append((*found, window))
    ordered = pieces[0][0] if pieces else tuple(sorted(mesh_dims))
    default = chunk_sizes(size, tuple(call.mesh.shape[i] for i in ordered))
    return Split(ordered, covering(default, [(blocks, window) for nesting, blocks, window in pieces if nesting == ordered]))


def place(
    mesh: DeviceMesh,
    dims: Dims,
    specs: Sequence[Spec],
    splits: Mapping[str, Split],
    sizes: Mapping[str, int],
    meta: Meta | Layout,
) -> Layout:
    """The layout of a tensor with these factors when each mesh dim follows its spec."""
    tensor_splits = [composed(names, splits, sizes) for names in dims]
    partials = tuple(spec.reduce_op if isinstance(spec, Partial) and mesh.shape[i] > 1 else None for i, spec in enumerate(specs))
    idle = {i: _idle(spec, dims, sizes) for i, spec in enumerate(specs) if mesh.shape[i] == 1}
    return Layout.from_splits(mesh, tensor_splits, partials, meta.shape, meta.stride, meta.dtype, idle)


def _idle(spec: Spec, dims: Dims, sizes: Mapping[str, int]) -> Placement:
    where = _target(spec, dims, sizes)
    return Shard(where) if isinstance(where, int) else where
