"""Coalesce: several redistributions at once, in which simultaneous transfers share one collective per group.

Plans advance in rounds: each runs its local steps up to its next collective, then these collectives are issued. They are merged
if kind, mesh dims and (for reductions) op and dtype agree. All collectives of a round are issued before any is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.caches import memoize
from ..comm import Communicator, Pending, shards_of
from ..comm.compared_operations import count_as_operation
from ..comm.events import issue_for_cause
from ..comm.flat_rows import concat_to_row, flatten_to_bytes, tensor_from_bytes
from ..comm.local_reduce import divide_in_place
from ..comm.map_ranks import communicator_of
from ..comm.pack import Box, view_region
from ..cost.link import collective_seconds, local_seconds
from ..placement import Monoid
from .executor import BoundStep, LocalValue, get_or_bind_steps, route_of_step
from .flat_buffer import FlatBuffer, align_bytes
from .step import AllGather, AllReduce, Exchange, Plan, ReduceScatter, Step

Merged = Pending[list[LocalValue]]
MergedStart = Callable[[list[LocalValue], list[LocalValue | None]], Merged]  # (values, memory for gathered results) -> results


def execute_many(
    plans: Sequence[Plan], locals_: Sequence[LocalValue], *, out: Sequence[LocalValue] | None = None, large_alone: bool = False
) -> Pending[list[LocalValue]]:
    """Start several redistribution plans together, with merged collectives, and return their pending local values.

    Args:
        out: memory for the results, without autograd; gathered blocks are received into it.
        large_alone: give a tensor a collective of its own if packing it takes longer than one more collective. Collectives
            overlap.
    """
    values, targets = list(locals_), [None] * len(plans) if out is None else list(out)
    rounds = _make_rounds(tuple(plans), large_alone)
    pending = _issue_round(rounds[0], values, targets)
    return Pending(lambda: _finish_rounds(plans, rounds, pending, values, targets))


class _Round(NamedTuple):
    """Round of execution: local steps of some plans, then collectives, which are issued before any of them is waited for.

    Attributes:
        local: pairs of a plan's index and a local step.
        groups: the indices of plans with one collective, the function that issues it, and which of the plans end with it.
    """

    local: tuple[tuple[int, Callable[[LocalValue], LocalValue]], ...]
    groups: tuple[tuple[tuple[int, ...], MergedStart, tuple[bool, ...]], ...]


@memoize(512)
def _make_rounds(plans: tuple[Plan, ...], large_alone: bool) -> tuple[_Round, ...]:
    """Return the rounds in which plans advance together: local steps, then merged collectives. The last has only local steps."""
    remaining = [list(itertools.zip_longest(plan.steps, bound)) if (bound := get_or_bind_steps(plan)) else [] for plan in plans]
    rounds: list[_Round] = []
    while not rounds or rounds[-1].groups:
        local: list[tuple[int, Callable[[LocalValue], LocalValue]]] = []
        groups: dict[Hashable, list[int]] = {}
        for i, steps in enumerate(remaining):
            while steps and steps[0][1].start is None:
                local.append((i, steps.pop(0)[1].run))
            if steps:
                step = steps[0][0]
                groups.setdefault(i if large_alone and not _is_small(step) else _merge_key(step, i), []).append(i)
        merged_groups = []
        for group in groups.values():
            start = _merge_start([remaining[i].pop(0) for i in group])
            merged_groups.append((tuple(group), start, tuple([not remaining[i] for i in group])))
        rounds.append(_Round(tuple(local), tuple(merged_groups)))
    return tuple(rounds)


def _merge_start(steps: Sequence[tuple[Step, BoundStep]]) -> MergedStart:
    """Return the function that starts the collective of one step, or one collective merged from several steps."""
    if len(steps) > 1:
        kinds = tuple([step for step, _ in steps])
        return issue_for_cause(kinds, _bind_merged(kinds))
    start = steps[0][1].start
    assert start is not None
    return lambda values, out: start(values[0]).then(lambda value: [value])


def _issue_round(round_: _Round, values: list[LocalValue], out: list[LocalValue | None]) -> list[Merged]:
    """Run the local steps of a round, and start its collectives."""
    for i, run in round_.local:
        values[i] = run(values[i])
    return [
        start([values[i] for i in group], [out[i] if last else None for i, last in zip(group, ends, strict=True)])
        for group, start, ends in round_.groups
    ]


def _finish_rounds(
    plans: Sequence[Plan], rounds: Sequence[_Round], pending: list[Merged], values: list[LocalValue], out: list[LocalValue | None]
) -> list[LocalValue]:
    """Wait for the collectives of each round, issue those of the next, and copy results to the memory in ``out``."""
    for round_, next_round in itertools.pairwise(rounds):
        for (group, _, _), merged in zip(round_.groups, pending, strict=True):
            for i, value in zip(group, merged.wait(), strict=True):
                values[i] = value
        pending = _issue_round(next_round, values, out)
    for i, target in enumerate(out):
        if target is not None and target is not values[i]:
            communicator_of(plans[i].dst.mesh).map(lambda _, to, x: to.data.copy_(x.detach()), target, values[i])
            values[i] = target
    return values


def _is_small(step: Step) -> bool:
    """Return True if packing and unpacking the data of a step takes less time than one more collective."""
    mesh, nbytes = step.before.mesh, step.before.max_local_nbytes + step.after.max_local_nbytes
    return isinstance(step, Exchange) or local_seconds(mesh, nbytes) < collective_seconds(mesh, step.mesh_dims, "exchange", 0)


def merge_kind_of(step: Step) -> Hashable:
    """Return the key of steps that :func:`merged_collective` can issue together; their divisors may differ."""
    return _merge_key(_without_divisor(step), -1)


def _without_divisor(step: Any) -> Any:
    return dataclasses.replace(step, divisor=1) if isinstance(step, (AllReduce, ReduceScatter)) else step


def merged_collective(steps: Sequence[Step]) -> Callable[..., Merged]:
    """Return a function that issues steps of one kind as one collective, for recordings. It does not divide averages."""
    undivided = tuple(map(_without_divisor, steps))
    at_once = communicator_of(steps[0].before.mesh).has_other_processes and not isinstance(steps[0], AllReduce)
    return _wrap_as_recorded_op(issue_for_cause(undivided, _bind_merged(undivided)), steps[0].verb, at_once)


def merged_all_reduce(comm: Communicator, mesh_dims: Sequence[int], op: Any, dtype: torch.dtype) -> Callable[..., Merged]:
    """Return a function that issues several all-reduces over ``mesh_dims`` as one, for recordings."""
    return _wrap_as_recorded_op(_bind_flat_all_reduce(comm, mesh_dims, op, dtype, 1), "all_reduce", False)


def _wrap_as_recorded_op(merged: MergedStart, name: str, at_once: bool) -> Callable[..., Merged]:
    """Wrap ``merged`` as a named operation of a tape: it takes separate local values, and its results share no memory.

    Args:
        at_once: as in :class:`..comm.communicator.BoundReduction`.
    """

    def issue(*values: LocalValue) -> Merged:
        return merged(list(values), [None] * len(values)).then(lambda results: [_in_own_storage(x) for x in results])

    issue.__name__ = f"{name.replace(' ', '_').replace('-', '_')}_together"
    setattr(issue, "at_once", at_once)  # noqa: B010  no attribute of functions that types know
    return issue


def _in_own_storage(local: LocalValue) -> LocalValue:
    alone = all(x.untyped_storage().nbytes() == x.numel() * x.itemsize for x in shards_of(local))
    return local if alone else local.clone(memory_format=torch.contiguous_format)


def _merge_key(step: Step, index: int) -> Hashable:
    """Return the key that steps have in common if they can share one collective; a monoid's all-reduce has its own."""
    over = (step.before.mesh, step.mesh_dims)
    match step:
        case AllReduce(op=Monoid()):
            return index
        case AllReduce(op=op, divisor=divisor) | ReduceScatter(op=op, divisor=divisor):
            return (type(step), *over, op, divisor, step.before.dtype)
        case _:
            return over


@memoize(512)
def _bind_merged(steps: tuple[Any, ...]) -> MergedStart:
    """Return the function that runs steps of one kind as one collective; regions and groups are computed once."""
    match steps[0]:
        case AllReduce():
            start = _bind_all_reduce(steps)
        case ReduceScatter():
            start = _bind_reduce_scatter(steps)
        case _ if all(isinstance(step, AllGather) for step in steps):
            start = _bind_all_gather(steps)
        case _:
            start = _bind_exchange(steps)
    return count_as_operation([step.before for step in steps], steps[0].mesh_dims, type(steps[0]).__name__, start)


# --- reductions: the elements of all tensors in one flat row --------------------------------------------------------------
def _bind_all_reduce(steps: tuple[Any, ...]) -> MergedStart:
    first = steps[0]
    return _bind_flat_all_reduce(communicator_of(first.before.mesh), first.mesh_dims, first.op, first.before.dtype, first.divisor)


def _bind_flat_all_reduce(comm: Communicator, mesh_dims: Sequence[int], op: Any, dtype: torch.dtype, divisor: int) -> MergedStart:
    """Return the function that runs several all-reduces as one, on a row of their concatenated operands."""
    reduction = comm.bind_all_reduce(mesh_dims, op, dtype)
    bound = reduction.run_donated or reduction.run

    def unpack_reduced(member: int, reduced: Tensor, *parts: Tensor) -> list[Tensor]:
        rows = (divide_in_place(reduced, divisor) if divisor > 1 else reduced).split([part.numel() for part in parts])
        return [row.view(part.shape) for row, part in zip(rows, parts, strict=True)]

    def start(values: list[LocalValue], out: list[LocalValue | None]) -> Merged:
        row = comm.map(lambda _, *parts: torch.cat([part.reshape(-1) for part in parts]), *values)
        return bound(row).then(lambda reduced: comm.map(unpack_reduced, reduced, *values))

    return start


def _bind_reduce_scatter(steps: tuple[Any, ...]) -> MergedStart:
    """Return the function that runs several reduce-scatters as one, of rows in which their operands are packed."""
    mesh, every, dtype, divisor = steps[0].before.mesh, range(len(steps)), steps[0].before.dtype, steps[0].divisor
    comm, rows = communicator_of(mesh), _flat_rows(steps)
    bound = comm.bind_row_reduce_scatter(
        steps[0].mesh_dims, lambda member: rows[member].addend_counts(every, 0), steps[0].op, dtype
    )

    def pack_addends(member: int, *parts: Tensor) -> Tensor:
        return rows[member].pack_addends(every, parts, dtype, parts[0].device)

    def unpack_reduced(member: int, reduced: Tensor) -> list[Tensor]:
        return rows[member].split_reduced(every, divide_in_place(reduced, divisor) if divisor > 1 else reduced)[:-1]

    return lambda values, out: bound(comm.map(pack_addends, *values)).then(lambda reduced: comm.map(unpack_reduced, reduced))


# --- transfers: all tensors in one flat row per rank, as bytes if dtypes differ -------------------------------------------
def _bind_all_gather(steps: tuple[Any, ...]) -> MergedStart:
    """Return the function that runs several all-gathers as one, on rows of their concatenated operands."""
    comm, rows = communicator_of(steps[0].before.mesh), _flat_rows(steps)
    row_dtype = next(iter(rows.values())).row_dtype
    bound = comm.bind_row_all_gather(steps[0].mesh_dims, lambda member: rows[member].lengths, row_dtype)

    def unpack_gathered(member: int, arrived: Tensor, *targets: Tensor | None) -> list[Tensor]:
        """Return the tensors of one rank from the gathered bytes, written into the targets where there are any."""
        own = rows[member]
        results = [
            arrived.new_empty(shape, dtype=dtype) if target is None else target
            for target, shape, dtype in zip(targets, own.shapes, own.dtypes, strict=True)
        ]
        own.copy_gathered(arrived, (), own.gathered_regions([x.data for x in results]))
        return results

    def start(values: list[LocalValue], out: list[LocalValue | None]) -> Merged:
        row = comm.map(lambda member, *parts: rows[member].pack_row(parts, concat_to_row), *values)
        return bound(row).then(lambda arrived: use_targets(comm.map(unpack_gathered, arrived, *out), out))

    def use_targets(results: list[LocalValue], out: list[LocalValue | None]) -> list[LocalValue]:
        return [x if target is None else target for x, target in zip(results, out, strict=True)]

    return start


def broadcast_many(comm: Communicator, values: Sequence[LocalValue], mesh_dims: Sequence[int]) -> list[LocalValue]:
    """Broadcast local values from the first rank of each group, all as bytes in one collective, and return new tensors."""
    order = sorted(range(len(values)), key=lambda i: -values[i].dtype.itemsize)

    def pack_bytes(member: int, *parts: Tensor) -> Tensor:
        return torch.cat([flatten_to_bytes(x) for x in parts])

    def unpack_bytes(member: int, row: Tensor, *parts: Tensor) -> list[Tensor]:
        """Split a row of bytes into new tensors with the shapes and dtypes of ``parts``."""
        chunks = row.split([x.numel() * x.itemsize for x in parts])
        return [
            torch.empty_like(x).copy_(tensor_from_bytes(chunk, x.shape, x.dtype)) for x, chunk in zip(parts, chunks, strict=True)
        ]

    sent = [values[i] for i in order]
    arrived = comm.map(unpack_bytes, comm.broadcast(comm.map(pack_bytes, *sent), mesh_dims).wait(), *sent)
    return [arrived[order.index(i)] for i in range(len(values))]


def _flat_rows(steps: tuple[Any, ...]) -> dict[int, FlatBuffer]:
    """Return the flat buffer of merged gather or reduce-scatter steps, for each member in this process."""
    gathers, mesh, mesh_dims = isinstance(steps[0], AllGather), steps[0].before.mesh, steps[0].mesh_dims
    pairs = [(step.before, step.after) if gathers else (step.after, step.before) for step in steps]
    dtypes, sharded = [step.before.dtype for step in steps], [True] * len(steps)
    members = communicator_of(mesh).held
    return {
        member: FlatBuffer.from_layouts(pairs, dtypes, sharded, member, mesh.members_of(mesh_dims, member)) for member in members
    }


def _bind_exchange(steps: tuple[Any, ...]) -> MergedStart:
    """Return the function that runs several exchanges as one; data is ordered by receiver, then by tensor."""
    comm, sizes = communicator_of(steps[0].before.mesh), [step.before.dtype.itemsize for step in steps]

    @functools.cache
    def boxes_of(member: int, side: str) -> list[tuple[Box | None, ...]]:
        return list(zip(*(getattr(route_of_step(step, member), side) for step in steps), strict=True))

    @functools.cache
    def lengths_of(member: int, side: str) -> list[list[int]]:
        each = boxes_of(member, side)
        return [[0 if box is None else box.numel * size for box, size in zip(own, sizes, strict=True)] for own in each]

    def pack_sends(member: int, *parts: Tensor) -> Tensor:
        """Pack all regions that a rank sends, of all tensors, into one row of bytes in the order of receivers."""
        pairs = [pair for own in boxes_of(member, "sends") for pair in zip(parts, own, strict=True)]
        row = [flatten_to_bytes(view_region(part, box)) for part, box in pairs if box is not None]
        return torch.cat(row) if row else parts[0].new_empty(0, dtype=torch.uint8)

    def place_received(member: int, arrived: Tensor, *parts: Tensor) -> list[Tensor]:
        """Return the results of all steps of one member, filled from what it received and what it keeps."""
        results = []
        chunks = iter(arrived.split([length for own in lengths_of(member, "receives") for length in own]))
        for part, own in zip(parts, (route_of_step(step, member) for step in steps), strict=True):
            results.append(part.new_empty(own.new))
            if own.kept is not None:
                view_region(results[-1], own.kept[1]).copy_(view_region(part.detach(), own.kept[0]))
        for each in boxes_of(member, "receives"):
            for result, box, chunk in zip(results, each, chunks, strict=False):
                if box is not None:
                    view_region(result, box).copy_(align_bytes(chunk, result.itemsize).view(result.dtype).view(box.size))
        return results

    def row_lengths(side: str) -> Callable[[int], list[int]]:
        return lambda member: [sum(own) for own in lengths_of(member, side)]

    bound = comm.bind_row_exchange(steps[0].mesh_dims, row_lengths("sends"), row_lengths("receives"), torch.uint8)
    return lambda values, out: bound(comm.map(pack_sends, *values)).then(
        lambda arrived: comm.map(place_received, arrived, *values)
    )
