"""What the rows of a call cost on one mesh dim: what they move and compute, and what they leave owing. Pure: a function of global
facts only.

Prices depend on sizes, but a row that finds all operands where it wants them is free whatever their size, and is found by a
look-up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..cost.link import device_of, link_of
from ..layout.expanded_storage import stored
from ..layout.layout import Layout
from ..placement import Partial, Replicate, Shard
from ..rules.call import Call
from ..rules.flops import Work, elsewhere, row_seconds
from ..rules.rule import Factors, Kernel, Row
from .strategy_table import Line, Table, Where

LOCAL_STEP = 1e-7  # seconds: a local slice or zero costs next to nothing
Kept = Mapping[int, int]  # result -> operand that the result is written into


def free_rows(table: Table, factors: Factors, call: Call, kept: Kept) -> tuple[Row, ...] | None:
    """Per mesh dim the best of the rows that move nothing; None if some mesh dim has none.

    Terms are debt: whether to pass them on or to add them up first is a question of prices, so none is free where there are some.
    """
    picked = []
    for mesh_dim, ranks in enumerate(call.mesh.shape):
        if any(layout.partials[mesh_dim] is not None for layout in call.operands):
            return None
        lines = [
            line
            for line in table.free.get(_here(call, mesh_dim), ())
            if all(line.results[r] == call.operands[i].along(mesh_dim) for r, i in kept.items() if r < len(line.results))
        ]
        if not lines or ranks == 1:  # of one rank, rows with moves are free too
            return None
        nbytes = call.result_bytes()
        if all(map(_leaves_terms, lines)) and _grows(factors, call, mesh_dim, nbytes):
            return None
        if len(lines) > 1:
            lines.sort(key=lambda line: (_memory(line, nbytes, 1 / ranks), line.order))
        picked.append(lines[0].row)
    return tuple(picked)


def ranked(
    table: Table, factors: Factors, call: Call, kept: Kept, mesh_dim: int, work: Work, apart: bool
) -> list[tuple[Any, Row]]:
    """All rows by price on one mesh dim: (seconds of communication, now and owed, and of products, whether it shards what nobody
    has sharded, operands that change, bytes per rank of the results, declaration order).

    A result in terms is owed a reduction. What is gathered for an operand that stays cut is gathered together, with one latency;
    not so where nothing stays, for who leaves everything whole has later operators computed on every rank. Work counts where
    products take longer than memory. A value that is not cut is not cut only because that is free: results keep the placements
    that their operands suggest. ``apart``: what rows find along the right dims does not lie in the right blocks.
    """
    ranks, fixed, nbytes = call.mesh.shape[mesh_dim], call.fixed, call.result_bytes()
    owed = _debts(table, factors, call, nbytes, mesh_dim, apart)
    device, work = device_of(call.mesh), elsewhere(work, call, mesh_dim)
    multiplies = work.flops / device.rate(work.dtype) > work.nbytes / device.memory
    current = [layout.along(mesh_dim) for layout in call.operands]
    lasting = _lasting(factors, current)
    together = link_of(call.mesh, (mesh_dim,)).all_gather.seconds(ranks, 0)
    moving: dict[tuple[int, Where, float], float] = {}
    priced = []
    for line in table.lines:
        if not line.on(mesh_dim):
            continue
        row = line.row_for(factors)
        seconds, gathers, stays, changes, invented = 0.0, 0, False, 0, row.factor is not None
        part = _largest_part(line, call, current, mesh_dim)
        for i, target in enumerate(line.operands):
            if i in fixed or target is None:
                continue
            cost = moving.get((i, target, part))
            if cost is None:
                cost = moving[i, target, part] = _brought(call, i, current[i], target, mesh_dim, part)
            seconds += cost
            changes += cost > 0
            gathers += cost > LOCAL_STEP and isinstance(current[i], int) and isinstance(target, Replicate)
            stays = stays or (isinstance(target, int) and current[i] == target)
            invented = invented and not isinstance(current[i], int)
        for r in kept:
            if r < min(len(line.results), len(nbytes)):
                cost = _move(line.results[r], current[kept[r]], call.operands[kept[r]], mesh_dim)
                seconds += cost
                changes += cost > 0
        if stays and gathers > 1:
            seconds -= (gathers - 1) * together
        anew, owners = row.factor is not None and _cuts_anew(line, call, current, lasting), _by_owners(line, factors, call)
        for r, where in enumerate(line.results):
            if r not in kept and not isinstance(where, Replicate):
                summed, cut = owed[r]
                seconds += summed if isinstance(where, Partial) and not owners else cut if anew or owners else 0.0
        if multiplies:
            seconds += row_seconds(device, work, row, ranks, factors.sizes, part)
        if row.kernel is not None:
            seconds += kernel_seconds(row, call, mesh_dim)
        priced.append(((seconds if ranks > 1 else 0.0, invented, changes, _memory(line, nbytes, part), line.order), row))
    priced.sort(key=lambda item: item[0])
    return priced


def _brought(call: Call, i: int, source: Where, target: Where, mesh_dim: int, part: float) -> float:
    """Seconds to have an operand where a row wants it."""
    layout = call.operands[i]
    cost = _move(source, target, layout, mesh_dim, part)
    if target != source and call.wanted(i):
        cost += _move(target, source, layout, mesh_dim)  # and what becomes of it back again
    if isinstance(target, Partial):
        return cost
    cost = min([cost, *[_from_sum(at, target, layout, mesh_dim) for at in call.sums(i, mesh_dim)]])
    return cost / 2 if call.passed(i, mesh_dim) else cost  # by this use and those to come


def _lasting(factors: Factors, current: Sequence[Where]) -> set[int]:
    """The operands that are cut along a dim that some result has."""
    made = {name for dims in factors.results for names in dims for name in names}
    return {i for i, at in enumerate(current) if isinstance(at, int) and not made.isdisjoint(factors.operands[i][at])}


def kernel_seconds(row: Row, call: Call, mesh_dim: int) -> float:
    """Seconds of the collectives of a row's kernel."""
    ranks = call.mesh.shape[mesh_dim]
    if row.kernel is None or ranks == 1:
        return 0.0
    rate = link_of(call.mesh, (mesh_dim,)).exchange
    return row.kernel.collectives * rate.seconds(ranks, 0) + row.kernel.nbytes(call) / rate.bandwidth


def _debts(
    table: Table, factors: Factors, call: Call, nbytes: list[int], mesh_dim: int, apart: bool
) -> list[tuple[float, float]]:
    """Seconds that each result costs later on: if it is left in terms, to add them up; if it is cut as no operand was, to cut it
    as the others are. None of them where a row moves nothing and there are no terms yet, but where all such rows leave terms
    that are larger than what is cut, or make terms of one that was whole, or find it in other blocks: then what scattering them
    takes.

    Latencies do not count: what is owed may be paid together with something else. But where some row leaves a cut as it is, who
    cuts otherwise has it to change once more. On the other mesh dims a result is as small a part as that of any operand.
    """
    current, terms = _here(call, mesh_dim), 2
    if not any(isinstance(where, Partial) for where in current):
        fitting = [
            line
            for line in table.lines
            if all(map(_fits, current, line.operands)) and _moves_nothing(line, factors) and not _cuts_one(line, factors, call)
        ]
        asked = any(isinstance(line.row.kernel, Kernel) for line in table.lines)  # who owns each element could be
        grow = all(map(_leaves_terms, fitting)) and (asked or _grows(factors, call, mesh_dim, nbytes))
        if fitting and not apart and not grow:
            return [(0.0, 0.0)] * len(nbytes)
        terms = 1 if fitting else 2
    link = link_of(call.mesh, (mesh_dim,))
    parts = [
        math.prod(n for i, n in enumerate(call.mesh.shape) if i != mesh_dim and isinstance(layout.placements[i], Shard))
        for layout in call.operands
    ]
    sizes = [size / max(parts, default=1) for size in nbytes]
    ranks = call.mesh.shape[mesh_dim]
    stays = any(
        isinstance(at, int) and at == to and factors.sizes.get(line.row.factor or "", ranks) >= ranks
        for line in table.lines
        for at, to in zip(current, line.operands, strict=True)
    )
    again = link.exchange.seconds(ranks, 0) if stays else 0.0
    return [(terms * size / link.all_reduce.bandwidth, again + size / ranks / link.exchange.bandwidth) for size in sizes]


def _cuts_anew(line: Line, call: Call, current: Sequence[Where], lasting: Collection[int]) -> bool:
    """Whether the results' cut is no operand's, or a smaller one's than one that moves, whose cut they could have had
    (``lasting``: those operands). Of two as large, one of which becomes whole for the other's sake, the first decides."""
    cut = [
        i for i, (at, target) in enumerate(zip(current, line.operands, strict=True)) if isinstance(at, int) and target is not None
    ]
    stays = [i for i in cut if line.operands[i] == current[i]]
    moves = [i for i in cut if line.operands[i] != current[i] and i in lasting]
    if not stays or not moves:
        return not stays
    nbytes = [layout.nbytes for layout in call.operands]
    held, moved = max(stays, key=nbytes.__getitem__), max(moves, key=nbytes.__getitem__)
    if moved < held and isinstance(line.operands[moved], Replicate):
        return nbytes[moved] >= nbytes[held]
    return nbytes[moved] > nbytes[held]


def _here(call: Call, mesh_dim: int) -> tuple[Where | None, ...]:
    fixed = call.fixed
    return tuple([None if i in fixed else layout.along(mesh_dim) for i, layout in enumerate(call.operands)])


def _fits(where: Where | None, wanted: Where | None) -> bool:
    """Whether it is there, or is added once: what is whole counts as a term on one rank."""
    return where == wanted or (isinstance(where, Replicate) and isinstance(wanted, Partial))


def _moves_nothing(line: Line, factors: Factors) -> bool:
    """Of a row that finds its operands where it wants them."""
    kernel = line.row_for(factors).kernel
    return kernel is None or kernel.collectives == 0


def _cuts_one(line: Line, factors: Factors, call: Call) -> bool:
    """Whether its factor has one position, of a dim that has more: groups of a convolution that are none."""
    name = line.row.factor
    if name is None or factors.sizes.get(name) != 1:
        return False
    return any(
        isinstance(at, int) and layout.shape[at] > 1
        for at, layout in zip(line.operands, call.operands, strict=True)
        if at is not None
    )


def _leaves_terms(line: Line) -> bool:
    return any(isinstance(where, Partial) for where in line.results)


def _grows(factors: Factors, call: Call, mesh_dim: int, nbytes: list[int]) -> bool:
    """Whether the results are more than twice as large as all operands that are cut; or what is cut is added to a whole one that
    is as large as they are."""
    if any(
        call.operands[i].nbytes >= sum(nbytes) and isinstance(call.operands[i].along(mesh_dim), Replicate)
        for i in factors.additive
    ):
        return True
    cut = [stored(layout).nbytes for layout in call.operands if isinstance(layout.along(mesh_dim), int)]
    return bool(cut) and 2 * sum(cut) < sum(nbytes)


def _by_owners(line: Line, factors: Factors, call: Call) -> bool:
    """Whether the rows of a line's results are parted: each has one owner, whom later operations find it with."""
    row = line.row
    if row.parted is not None or any(row.factor == groups for groups, _ in factors.groups.values()):
        return True
    return any(fact is not None and isinstance(where, Partial) for fact, where in zip(call.parted, line.operands, strict=False))


def _memory(line: Line, nbytes: list[int], part: float) -> float:
    return sum(size * part if isinstance(where, int) else size for where, size in zip(line.results, nbytes, strict=False))


def _largest_part(line: Line, call: Call, current: Sequence[Where], mesh_dim: int) -> float:
    """Which part of what a row cuts the fullest rank of a mesh dim has: as in the operands that stay, if they are cut alike."""
    parts = {
        _part(layout, at, mesh_dim)
        for at, target, layout in zip(current, line.operands, call.operands, strict=True)
        if isinstance(at, int) and at == target
    }
    return parts.pop() if len(parts) == 1 else 1 / call.mesh.shape[mesh_dim]


def _part(layout: Layout, dim: int, mesh_dim: int) -> float:
    """Which part of a tensor dim, as far as other mesh dims leave it, the fullest rank of a mesh dim has."""
    placement, ranks, split = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim], layout.splits[dim]
    if split is None or (isinstance(placement, Shard) and placement.sizes is None):
        return 1 / ranks
    return min(1.0, max(split.sizes) * len(split.sizes) / (layout.shape[dim] or 1) / ranks)


def _from_sum(at: int | None, target: Where, layout: Layout, mesh_dim: int) -> float:
    """Seconds to have terms as ``target`` from where they were added up before: cut along a dim, or whole."""
    if at is None or at == target:
        return LOCAL_STEP
    ranks, link = layout.mesh.shape[mesh_dim], link_of(layout.mesh, (mesh_dim,))
    nbytes = stored(layout).max_local_nbytes / ranks
    return (
        link.exchange.seconds(ranks, nbytes) if isinstance(target, int) else link.all_gather.seconds(ranks, nbytes * (ranks - 1))
    )


def _move(source: Where, target: Where, layout: Layout, mesh_dim: int, part: float = 0.0) -> float:
    """Seconds to change one mesh dim's placement, other mesh dims as they are. An exchange takes what its fullest rank sends or
    gets (``part``: of what will be cut)."""
    if source == target:
        return 0.0
    if isinstance(source, Replicate):
        return LOCAL_STEP
    nbytes, ranks = stored(layout).max_local_nbytes, layout.mesh.shape[mesh_dim]
    link = link_of(layout.mesh, (mesh_dim,))
    match source, target:
        case (Partial(), Partial()):
            return 1.5 * link.all_reduce.seconds(ranks, 2 * nbytes)  # never better than having it whole
        case (Partial(), _):
            # Scattering moves half of what reducing everywhere does, but the next operation usually gathers it again.
            return link.all_reduce.seconds(ranks, 2 * nbytes)
        case (int(), int()):
            most = nbytes * part / _part(layout, source, mesh_dim) if part else 0.0
            return link.exchange.seconds(ranks, max(nbytes, most))
        case (int(), Partial()):
            return 1.5 * link.all_gather.seconds(ranks, nbytes * (ranks - 1))
        case _:
            return link.all_gather.seconds(ranks, nbytes * (ranks - 1))
