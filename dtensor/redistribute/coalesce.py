"""Several redistributions at once: what their plans have to send at the same time goes in one collective per group.

Plans advance in rounds: local steps up to the next collective of each, then these collectives, merged where kind, mesh dims and
(for reductions) op and dtype agree. All of a round are issued before any is waited for.

Here alone several tensors become what one collective carries; what data parallelism gathers and reduces are
:class:`.flat_buffer.Rows`
too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.caches import remembered
from ..comm import Communicator, Pending, communicator_of, shards_of
from ..comm.checked_collectives import counted_with
from ..comm.events import because
from ..comm.flat_rows import flat_bytes, from_bytes, joined
from ..comm.local_reduce import divided
from ..comm.pack import Box, region
from ..cost.link import collective_seconds, local_seconds
from ..placement import Monoid
from .executor import Bound, Local, bound_of, route
from .flat_buffer import Rows, aligned
from .step import AllGather, AllReduce, Exchange, Plan, ReduceScatter, Step

Merged = Pending[list[Local]]
Together = Callable[[list[Local], list[Local | None]], Merged]  # of values, and memory for what is gathered


def execute_many(
    plans: Sequence[Plan], locals_: Sequence[Local], *, out: Sequence[Local] | None = None, large_alone: bool = False
) -> Pending[list[Local]]:
    """The local values after ``plans``. As :func:`.executor.start` for each.

    Args:
        out: memory for them, which autograd is not told of; gathered blocks arrive in it.
        large_alone: what takes longer to be packed than one more collective has one of its own, at the same time.
    """
    values, targets = list(locals_), [None] * len(plans) if out is None else list(out)
    rounds = _rounds(tuple(plans), large_alone)
    pending = _issue(rounds[0], values, targets)
    return Pending(lambda: _finish(plans, rounds, pending, values, targets))


class _Round(NamedTuple):
    """What is done for which plans: local steps, then collectives, which are issued before any of them is waited for.

    Attributes:
        groups: the plans that go in one, what issues it, and which of them end with it.
    """

    local: tuple[tuple[int, Callable[[Local], Local]], ...]
    groups: tuple[tuple[tuple[int, ...], Together, tuple[bool, ...]], ...]


@remembered(512)
def _rounds(plans: tuple[Plan, ...], large_alone: bool) -> tuple[_Round, ...]:
    """The last one has local steps alone."""
    left = [list(itertools.zip_longest(plan.steps, found)) if (found := bound_of(plan)) else [] for plan in plans]
    rounds: list[_Round] = []
    while not rounds or rounds[-1].groups:
        local: list[tuple[int, Callable[[Local], Local]]] = []
        groups: dict[Hashable, list[int]] = {}
        for i, steps in enumerate(left):
            while steps and steps[0][1].start is None:
                local.append((i, steps.pop(0)[1].run))
            if steps:
                step = steps[0][0]
                groups.setdefault(i if large_alone and not _packs(step) else _kind(step, i), []).append(i)
        made = []
        for group in groups.values():
            start = _together([left[i].pop(0) for i in group])
            made.append((tuple(group), start, tuple([not left[i] for i in group])))
        rounds.append(_Round(tuple(local), tuple(made)))
    return tuple(rounds)


def _together(steps: Sequence[tuple[Step, Bound]]) -> Together:
    if len(steps) > 1:
        kinds = tuple([step for step, _ in steps])
        return because(kinds, _merged(kinds))
    start = steps[0][1].start
    assert start is not None
    return lambda values, out: start(values[0]).then(lambda value: [value])


def _issue(one: _Round, values: list[Local], out: list[Local | None]) -> list[Merged]:
    for i, run in one.local:
        values[i] = run(values[i])
    return [
        start([values[i] for i in group], [out[i] if last else None for i, last in zip(group, ends, strict=True)])
        for group, start, ends in one.groups
    ]


def _finish(
    plans: Sequence[Plan], rounds: Sequence[_Round], pending: list[Merged], values: list[Local], out: list[Local | None]
) -> list[Local]:
    for one, following in itertools.pairwise(rounds):
        for (group, _, _), merged in zip(one.groups, pending, strict=True):
            for i, value in zip(group, merged.wait(), strict=True):
                values[i] = value
        pending = _issue(following, values, out)
    for i, target in enumerate(out):
        if target is not None and target is not values[i]:
            communicator_of(plans[i].dst.mesh).map(lambda _, to, x: to.data.copy_(x.detach()), target, values[i])
            values[i] = target
    return values


def _packs(step: Step) -> bool:
    """Whether packing what it sends, and unpacking what arrives, takes less than one more collective. Parts that are exchanged
    are packed anyhow, and of several exchanges the busiest ranks are others."""
    mesh, nbytes = step.before.mesh, step.before.max_local_nbytes + step.after.max_local_nbytes
    return isinstance(step, Exchange) or local_seconds(mesh, nbytes) < collective_seconds(mesh, step.mesh_dims, "exchange", 0)


def kind_of(step: Step) -> Hashable:
    """What steps must have in common to go in one collective, divisions aside."""
    return _kind(_undivided(step), -1)


def _undivided(step: Any) -> Any:
    return dataclasses.replace(step, divisor=1) if isinstance(step, (AllReduce, ReduceScatter)) else step


def as_one(steps: Sequence[Step]) -> Callable[..., Merged]:
    """What issues the collectives of steps of one kind as one, given a local for each; means are not divided."""
    undivided = tuple(map(_undivided, steps))
    at_once = communicator_of(steps[0].before.mesh).talks and not isinstance(steps[0], AllReduce)
    return _of_several(because(undivided, _merged(undivided)), steps[0].verb, at_once)


def reduced_as_one(comm: Communicator, mesh_dims: Sequence[int], op: Any, dtype: torch.dtype) -> Callable[..., Merged]:
    """The same of all-reduces over mesh dims."""
    return _of_several(_reduced(comm, mesh_dims, op, dtype, 1), "all_reduce", False)


def _of_several(together: Together, name: str, at_once: bool) -> Callable[..., Merged]:
    """``together`` of locals, with results that share no memory: who gets them may write to one.

    Args:
        at_once: as of :class:`..comm.backend_base.Reduction`.
    """

    def issue(*values: Local) -> Merged:
        return together(list(values), [None] * len(values)).then(lambda made: [_own(x) for x in made])

    issue.__name__ = f"{name.replace(' ', '_').replace('-', '_')}_together"
    setattr(issue, "at_once", at_once)  # noqa: B010  no attribute of functions that types know
    return issue


def _own(local: Local) -> Local:
    alone = all(x.untyped_storage().nbytes() == x.numel() * x.itemsize for x in shards_of(local))
    return local if alone else local.clone(memory_format=torch.contiguous_format)


def _kind(step: Step, index: int) -> Hashable:
    """Steps of one kind go in one collective; terms of a monoid stay whole, so each of them alone."""
    over = (step.before.mesh, step.mesh_dims)
    match step:
        case AllReduce(op=Monoid()):
            return index
        case AllReduce(op=op, divisor=divisor) | ReduceScatter(op=op, divisor=divisor):
            return (type(step), *over, op, divisor, step.before.dtype)
        case _:
            return over


@remembered(512)
def _merged(steps: tuple[Any, ...]) -> Together:
    """Steps of one kind as one; regions and groups are worked out once."""
    match steps[0]:
        case AllReduce():
            made = _all_reduce(steps)
        case ReduceScatter():
            made = _reduce_scatter(steps)
        case _ if all(isinstance(step, AllGather) for step in steps):
            made = _all_gather(steps)
        case _:
            made = _exchange(steps)
    return counted_with([step.before for step in steps], steps[0].mesh_dims, type(steps[0]).__name__, made)


# --- reductions: the elements of all tensors in one row -------------------------------------------------------------------
def _all_reduce(steps: tuple[Any, ...]) -> Together:
    first = steps[0]
    return _reduced(communicator_of(first.before.mesh), first.mesh_dims, first.op, first.before.dtype, first.divisor)


def _reduced(comm: Communicator, mesh_dims: Sequence[int], op: Any, dtype: torch.dtype, divisor: int) -> Together:
    reduction = comm.bind_all_reduce(mesh_dims, op, dtype)
    bound = reduction.taking or reduction.run

    def apart(member: int, reduced: Tensor, *parts: Tensor) -> list[Tensor]:
        rows = (divided(reduced, divisor) if divisor > 1 else reduced).split([part.numel() for part in parts])
        return [row.view(part.shape) for row, part in zip(rows, parts, strict=True)]

    def start(values: list[Local], out: list[Local | None]) -> Merged:
        row = comm.map(lambda _, *parts: torch.cat([part.reshape(-1) for part in parts]), *values)
        return bound(row).then(lambda reduced: comm.map(apart, reduced, *values))

    return start


def _reduce_scatter(steps: tuple[Any, ...]) -> Together:
    mesh, every, dtype, divisor = steps[0].before.mesh, range(len(steps)), steps[0].before.dtype, steps[0].divisor
    comm, rows = communicator_of(mesh), _rows_of(steps)
    bound = comm.bind_scatter(steps[0].mesh_dims, lambda member: rows[member].parts(every, 0), steps[0].op, dtype)

    def terms(member: int, *parts: Tensor) -> Tensor:
        return rows[member].terms(every, parts, dtype, parts[0].device)

    def apart(member: int, reduced: Tensor) -> list[Tensor]:
        return rows[member].split(every, divided(reduced, divisor) if divisor > 1 else reduced)[:-1]

    return lambda values, out: bound(comm.map(terms, *values)).then(lambda reduced: comm.map(apart, reduced))


# --- transfers: all tensors in one row per rank, as bytes where dtypes differ ---------------------------------------------
def _all_gather(steps: tuple[Any, ...]) -> Together:
    comm, rows = communicator_of(steps[0].before.mesh), _rows_of(steps)
    seen = next(iter(rows.values())).seen
    bound = comm.bind_gather(steps[0].mesh_dims, lambda member: rows[member].lengths, seen)

    def unpacked(member: int, arrived: Tensor, *targets: Tensor | None) -> list[Tensor]:
        own = rows[member]
        made = [
            arrived.new_empty(shape, dtype=dtype) if target is None else target
            for target, shape, dtype in zip(targets, own.shapes, own.dtypes, strict=True)
        ]
        own.unpack(arrived, (), own.targets([x.data for x in made]))
        return made

    def start(values: list[Local], out: list[Local | None]) -> Merged:
        row = comm.map(lambda member, *parts: rows[member].pack(parts, joined), *values)
        return bound(row).then(lambda arrived: settled(comm.map(unpacked, arrived, *out), out))

    def settled(made: list[Local], out: list[Local | None]) -> list[Local]:
        return [x if target is None else target for x, target in zip(made, out, strict=True)]

    return start


def broadcast_many(comm: Communicator, values: Sequence[Local], mesh_dims: Sequence[int]) -> list[Local]:
    """The first group position's values everywhere, in new memory: one broadcast of bytes, wider dtypes first."""
    order = sorted(range(len(values)), key=lambda i: -values[i].dtype.itemsize)

    def packed(member: int, *parts: Tensor) -> Tensor:
        return torch.cat([flat_bytes(x) for x in parts])

    def apart(member: int, row: Tensor, *parts: Tensor) -> list[Tensor]:
        pieces = row.split([x.numel() * x.itemsize for x in parts])
        return [torch.empty_like(x).copy_(from_bytes(piece, x.shape, x.dtype)) for x, piece in zip(parts, pieces, strict=True)]

    sent = [values[i] for i in order]
    arrived = comm.map(apart, comm.broadcast(comm.map(packed, *sent), mesh_dims).wait(), *sent)
    return [arrived[order.index(i)] for i in range(len(values))]


def _rows_of(steps: tuple[Any, ...]) -> dict[int, Rows]:
    """The rows of steps that gather, or (mirrored) that reduce, of each member held here."""
    gathers, mesh, mesh_dims = isinstance(steps[0], AllGather), steps[0].before.mesh, steps[0].mesh_dims
    pairs = [(step.before, step.after) if gathers else (step.after, step.before) for step in steps]
    dtypes, cut = [step.before.dtype for step in steps], [True] * len(steps)
    members = communicator_of(mesh).held
    return {member: Rows.of(pairs, dtypes, cut, member, mesh.members_of(mesh_dims, member)) for member in members}


def _exchange(steps: tuple[Any, ...]) -> Together:
    """By position and tensor, what is sent; so it arrives."""
    comm, sizes = communicator_of(steps[0].before.mesh), [step.before.dtype.itemsize for step in steps]

    @functools.cache
    def boxes(member: int, side: str) -> list[tuple[Box | None, ...]]:
        return list(zip(*(getattr(route(step, member), side) for step in steps), strict=True))

    @functools.cache
    def lengths(member: int, side: str) -> list[list[int]]:
        each = boxes(member, side)
        return [[0 if box is None else box.numel * size for box, size in zip(own, sizes, strict=True)] for own in each]

    def sent(member: int, *parts: Tensor) -> Tensor:
        pairs = [pair for own in boxes(member, "sends") for pair in zip(parts, own, strict=True)]
        row = [flat_bytes(region(part, box)) for part, box in pairs if box is not None]
        return torch.cat(row) if row else parts[0].new_empty(0, dtype=torch.uint8)

    def placed(member: int, arrived: Tensor, *parts: Tensor) -> list[Tensor]:
        results = []
        pieces = iter(arrived.split([length for own in lengths(member, "receives") for length in own]))
        for part, own in zip(parts, (route(step, member) for step in steps), strict=True):
            results.append(part.new_empty(own.new))
            if own.kept is not None:
                region(results[-1], own.kept[1]).copy_(region(part.detach(), own.kept[0]))
        for each in boxes(member, "receives"):
            for result, box, piece in zip(results, each, pieces, strict=False):
                if box is not None:
                    region(result, box).copy_(aligned(piece, result.itemsize).view(result.dtype).view(box.size))
        return results

    def total(side: str) -> Callable[[int], list[int]]:
        return lambda member: [sum(own) for own in lengths(member, side)]

    bound = comm.bind_exchange(steps[0].mesh_dims, total("sends"), total("receives"), torch.uint8)
    return lambda values, out: bound(comm.map(sent, *values)).then(lambda arrived: comm.map(placed, arrived, *values))
