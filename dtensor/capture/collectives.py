"""Collectives of a tape: bucketing joins collectives of one group, and overlap runs collectives during computation.

Neither pass changes a bit of a result. A joined collective adds the same addends in the same order, or only moves blocks.

A collective may be issued anywhere between the last write to its input and the first use of its result. Steps that use only its
result move together with it. Each rank finds these places on its own tape, so for bucketing the ranks of a group agree on them
when they have recorded. A reduction that the backend adds up by itself is not joined, because its order of additions depends on
the size of the message.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..comm import Pending, communicator_of
from ..placement import Monoid
from ..redistribute.coalesce import kind_of, merged_all_reduce, merged_collective
from .tape import ALL_REDUCE, DefUse, LocalMetadata, Step, Var, iter_vars

MAX_BUCKET_BYTES = 32 * 2**20  # of the values of one joined collective


@dataclass(slots=True)
class _Collective:
    """A collective that may be joined with others of its kind.

    Attributes:
        operation: the step of a redistribution, or ``(op, dtype)`` of an all-reduce.
        nbytes: bytes of the largest local value that it sends or delivers.
        issue, wait: places of the steps that issue it and wait for it.
        views: places of the steps that make views of its input.
        tail: places of the steps after ``wait`` that use only its result.
        needed_at: place of the first step that uses the result otherwise; 0 if the collective must not move.
        first, last: the window. Numbers of the first and the last collective of its kind at which it may be issued.
    """

    comm: Any
    mesh_dims: tuple[int, ...]
    operation: Any
    nbytes: int
    issue: int = 0
    wait: int = 0
    views: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    needed_at: int = 0
    first: int = 0
    last: int = 0


def bucket_collectives(
    steps: list[Step],
    metadata: Mapping[Var, LocalMetadata],
    external: frozenset[int],
    max_bytes: int = MAX_BUCKET_BYTES,
) -> list[Step]:
    """Return steps with fewer, larger collectives. All ranks of a group call it at the same time, for their own tapes.

    Args:
        steps: the steps of one tape.
        metadata: of the local tensors.
        external: storage numbers of memory that the tape gets. At another call, several of them may be one memory.
        max_bytes: most bytes in one joined collective. So many may be available earlier or later than needed.
    """
    buckets: dict[int, list[list[_Collective]]] = {}  # by the place at which they are issued
    kinds = [same_kind for same_kind in _group_by_kind(steps, metadata).values() if len(same_kind) > 1]
    if kinds:
        uses = DefUse(steps, external)
        for collective in (one for same_kind in kinds for one in same_kind):
            _find_tail(collective, uses, metadata)
        for same_kind in kinds:
            for number, collective in enumerate(same_kind):
                _find_window(collective, number, same_kind, uses)
            _agree_on_windows(same_kind)
            for bucket, at in _make_buckets(same_kind, max_bytes):
                buckets.setdefault(same_kind[at].issue, []).append(bucket)
    views_at: dict[int, list[int]] = {}  # by place of issue: steps that move before the joined collectives,
    tails_at: dict[int, list[int]] = {}  # and steps that move behind them
    moved: set[int] = set()
    for at, joined in sorted(buckets.items()):
        members = [collective for bucket in joined for collective in bucket]
        views_at[at] = sorted({place for one in members for place in one.views if place > at} - moved)
        tails_at[at] = sorted(place for one in members for place in one.tail if place < at)
        moved.update(views_at[at], tails_at[at], *((one.issue, one.wait) for one in members))
    result: list[Step] = []
    for place, step in enumerate(steps):
        if place in buckets:
            result += [steps[view] for view in views_at[place]]
            result += [one for bucket in buckets[place] for one in _join_bucket(bucket, steps)]
            result += [steps[late] for late in tails_at[place]]
        if place not in moved:
            result.append(step)
    return result


def _group_by_kind(steps: Sequence[Step], metadata: Mapping[Var, LocalMetadata]) -> dict[Hashable, list[_Collective]]:
    """Return the collectives that may be joined, by kind and in order. All ranks of a group have equal lists of a kind."""
    waits = {step.args[0]: place for place, step in enumerate(steps) if step.fn is Pending.wait}
    by_kind: dict[Hashable, list[_Collective]] = {}
    for place, step in enumerate(steps):
        if step.is_library_op and isinstance(step.out, Var) and step.out in waits:
            entry = _describe_collective(step, metadata)
            if entry is not None:
                kind, collective = entry
                collective.issue, collective.wait = place, waits[step.out]
                by_kind.setdefault(kind, []).append(collective)
    return by_kind


def _describe_collective(step: Step, metadata: Mapping[Var, LocalMetadata]) -> tuple[Hashable, _Collective] | None:
    """Return the kind of a collective and its description; None if it must not be joined."""
    if step.fn is ALL_REDUCE and len(step.args) == 4:
        comm, x, mesh_dims, op = step.args
        meta = metadata[next(iter_vars(x))]
        dtype = meta.dtype
        collective = _Collective(comm, tuple(mesh_dims), (op, dtype), meta.shape.numel() * dtype.itemsize)
        kind: Hashable = "all_reduce", id(comm), collective.mesh_dims, op, dtype
    else:
        move = getattr(step.fn, "step", None)
        if move is None:
            return None
        comm, op, dtype = communicator_of(move.before.mesh), getattr(move, "op", None), move.before.dtype
        collective = _Collective(comm, move.mesh_dims, move, max(move.before.max_local_nbytes, move.after.max_local_nbytes))
        kind = type(move), kind_of(move)
    backend_adds = op is not None and not isinstance(op, Monoid) and comm.bind_all_reduce(collective.mesh_dims, op, dtype).at_once
    return None if isinstance(op, Monoid) or backend_adds else (kind, collective)


def _find_tail(collective: _Collective, uses: DefUse, metadata: Mapping[Var, LocalMetadata]) -> None:
    """Find the place at which the collective's result must be available, and the steps that use only this result."""
    delivered = list(uses.steps[collective.wait].outputs)
    if any(var not in metadata or not metadata[var].is_row_major for var in delivered):
        return
    tail, memory, needed_at = uses.find_tail(collective.wait, {var.storage for var in delivered})
    collective.needed_at = min(needed_at, uses.find_overwrite(collective.issue, collective.wait))
    collective.tail = [place for place in tail if place < collective.needed_at]
    uses.available_by.update(dict.fromkeys(memory, collective.needed_at))


def _find_window(collective: _Collective, number: int, same_kind: Sequence[_Collective], uses: DefUse) -> None:
    """Find the window of a collective on this rank's tape."""
    collective.first = collective.last = number
    if collective.needed_at:
        ready, collective.views = uses.find_ready(collective.issue)
        collective.first = next(k for k, other in enumerate(same_kind) if other.issue > ready)
        collective.last = max(k for k, other in enumerate(same_kind) if other.issue < collective.needed_at)


def _agree_on_windows(same_kind: Sequence[_Collective]) -> None:
    """Reduce each window to the part that all ranks of the group allow. Communicates once, if ranks are processes."""
    comm = same_kind[0].comm
    if comm.talks:
        by_rank = comm.all_gather_object([(one.first, one.last) for one in same_kind], same_kind[0].mesh_dims)
        for one, windows in zip(same_kind, zip(*by_rank, strict=True), strict=True):
            one.first, one.last = max(first for first, _ in windows), min(last for _, last in windows)


def _make_buckets(same_kind: Sequence[_Collective], max_bytes: int) -> Iterator[tuple[list[_Collective], int]]:
    """Yield ``(collectives, number)``: collectives to be joined, and the number of the one at whose place they are issued.

    The first collective that is not joined yet chooses the number in its window that is in the most other windows.
    """
    rest = dict(enumerate(same_kind))
    while rest:
        number, one = next(iter(rest.items()))
        at = max(range(one.first, one.last + 1), key=lambda k: (len(_allowed_at(rest, k)), -abs(k - number)))
        bucket, nbytes = [number], one.nbytes
        for k in _allowed_at(rest, at):
            if k != number and nbytes + same_kind[k].nbytes <= max_bytes:
                bucket.append(k)
                nbytes += same_kind[k].nbytes
        for k in bucket:
            del rest[k]
        if len(bucket) > 1:
            yield [same_kind[k] for k in bucket], at


def _allowed_at(rest: Mapping[int, _Collective], number: int) -> list[int]:
    return [k for k, one in rest.items() if one.first <= number <= one.last]


def _join_bucket(bucket: Sequence[_Collective], steps: Sequence[Step]) -> list[Step]:
    """Return the joined collective of a bucket and the wait for it."""
    issued, first = [steps[one.issue] for one in bucket], bucket[0]
    if issued[0].fn is ALL_REDUCE:
        run, sent = merged_all_reduce(first.comm, first.mesh_dims, *first.operation), [step.args[1] for step in issued]
    else:
        run, sent = merged_collective([one.operation for one in bucket]), [step.args[0] for step in issued]
    pending, operator = issued[0].out, issued[0].operator
    delivered = tuple(steps[one.wait].out for one in bucket)
    return [
        Step(run, tuple(sent), {}, pending, required=True, is_library_op=True, operator=operator),
        Step(Pending.wait, (pending,), {}, delivered, required=True, is_library_op=True, operator=operator),
    ]


# --- overlap ---------------------------------------------------------------------------------------------------------------
def overlap_collectives(
    steps: Sequence[Step], metadata: Mapping[Var, LocalMetadata], external: frozenset[int], max_bytes: int
) -> list[Step]:
    """Return the steps in an order in which collectives run during computation.

    A collective is issued once its input is ready, and waited for at the first use of its result. Only collectives that
    progress without this rank's ``wait()`` (``at_once``) move. The order of library operations stays, so ranks need not agree.

    Args:
        steps: the steps of one tape.
        metadata: of the local tensors.
        external: storage numbers of memory that the tape gets. At another call, several of them may be one memory.
        max_bytes: most bytes that the pending collectives send and deliver at one time.
    """
    if not any(map(_runs_at_once, steps)):
        return list(steps)
    return _delay_waits(_advance_issues(steps, metadata, external, max_bytes), metadata, external, max_bytes)


def _runs_at_once(step: Step) -> bool:
    return step.is_library_op and getattr(step.fn, "at_once", False)


def _wait_places(steps: Sequence[Step]) -> dict[Any, int]:
    """Return for each pending collective that may be reordered the index of the step that waits for it."""
    issued = {step.out for step in steps if _runs_at_once(step)}
    waits = ((step.args[0], place) for place, step in enumerate(steps) if step.fn is Pending.wait)
    return {pending: place for pending, place in waits if pending in issued}


def _count_bytes(issue: Step, wait: Step, metadata: Mapping[Var, LocalMetadata]) -> int:
    """Return the bytes that a collective sends and delivers."""
    known = (metadata[var] for var in {*issue.inputs, *wait.outputs} if var in metadata)
    return sum(prod(meta.shape) * meta.dtype.itemsize for meta in known)


def _advance_issues(
    steps: Sequence[Step], metadata: Mapping[Var, LocalMetadata], external: frozenset[int], max_bytes: int
) -> list[Step]:
    uses, waits = DefUse(steps, external), _wait_places(steps)
    keys = [(place, 1, place) for place in range(len(steps))]
    advanced: list[tuple[int, int]] = []  # (original place, bytes) of collectives that are issued before their place
    last = -1  # place of the library operation before
    for place, step in enumerate(steps):
        if not step.is_library_op or (step.fn is Pending.wait and step.args[0] in waits):
            continue
        at = place
        if step.out in waits:
            nbytes = _count_bytes(step, steps[waits[step.out]], metadata)
            ready, views = uses.find_ready(place)
            at = max(ready, last)
            advanced = [(until, size) for until, size in advanced if until > at]
            while advanced and nbytes + sum(size for _, size in advanced) > max_bytes:
                at = max(at, min(until for until, _ in advanced))
                advanced = [(until, size) for until, size in advanced if until > at]
            if at < place - 1 and nbytes <= max_bytes:
                advanced.append((place, nbytes))
                for moved in (place, *(view for view in views if view > at)):
                    keys[moved] = min(keys[moved], (at, 2, moved))
            else:
                at = place
        last = at
    return [step for _, step in sorted(zip(keys, steps, strict=True), key=lambda pair: pair[0])]


def _delay_waits(
    steps: Sequence[Step], metadata: Mapping[Var, LocalMetadata], external: frozenset[int], max_bytes: int
) -> list[Step]:
    uses, waits = DefUse(steps, external), _wait_places(steps)
    pending: dict[Step, tuple[int, int]] = {}  # by the step that waits: the place at which it must be done, and bytes
    result: list[Step] = []
    for place, step in enumerate(steps):
        if step.out in waits and _runs_at_once(step):
            nbytes = _count_bytes(step, steps[waits[step.out]], metadata)
            while pending and nbytes + sum(size for _, size in pending.values()) > max_bytes:
                result.append(oldest := next(iter(pending)))
                del pending[oldest]
        elif step.fn is Pending.wait and step.args[0] in waits:
            continue
        due = [wait for wait, (until, _) in pending.items() if until <= place]
        for wait in due:
            result.append(wait)
            del pending[wait]
        result.append(step)
        if step.out in waits and _runs_at_once(step):
            wait = steps[waits[step.out]]
            pending[wait] = uses.find_first_use(place, waits[step.out]), nbytes
    return [*result, *pending]
