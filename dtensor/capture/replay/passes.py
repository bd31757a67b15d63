"""Passes over a tape: elimination of dead code and common subexpressions, copy elision, bucketing and overlap of collectives.

A tape belongs to one rank, so a pass may use all that the recording knows of its local tensors. Only local work is removed.
Ranks may use the result of a collective differently, so no rank may decide from its own tape to drop the collective.

In all passes ``external`` is a set of storage numbers: memory that exists outside of the tape (inputs and results). At another
call, several of these inputs may be one memory.

[Note: Bucketing and overlap] Bucketing joins collectives of one group, and overlap runs collectives during computation. Neither
pass changes a bit of a result. A joined collective adds the same addends in the same order, or only moves blocks.

A collective may be issued anywhere between the last write to its input and the first use of its result. Steps that use only its
result move together with it. Each rank finds these places on its own tape, so for bucketing the ranks of a group agree on them
when they have recorded. A reduction that the backend adds up by itself is not joined, because its order of additions depends on
the size of the message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ...base.torch_internals import TensorBase
from ...comm import Pending
from ...comm.map_ranks import communicator_of
from ...placement import Monoid
from ...redistribute.coalesce import merge_kind_of, merged_all_reduce, merged_collective
from ..tracing.tape import ALL_REDUCE, DefUse, LocalMetadata, PerRankVars, Step, Tape, Var, iter_vars, map_step_values

MAX_BUCKET_BYTES = 32 * 2**20  # of the values of one joined collective
_COPY, _CLONE = TensorBase.copy_, torch.clone


def optimize_tape(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Return a tape with fewer steps, the same effects and bit-identical results: dead code, equal steps, copies removed."""
    tape = eliminate_dead_code(eliminate_common_subexpressions(tape, external), external)
    tape = eliminate_dead_code(elide_copies(tape, metadata, external), external)
    return bind_collectives(tape, metadata, external)


def eliminate_dead_code(tape: Tape, external: frozenset[int]) -> Tape:
    """Return the tape without steps of which neither a result nor the written memory is used later."""
    needed = set(tape.results)
    read = {var.storage for var in tape.results} | set(external)  # memory with contents that later steps or the caller read
    live: list[Step] = []
    for step in reversed(tape.steps):
        if step.required or any(var in needed for var in step.outputs) or not step.writes.isdisjoint(read):
            live.append(step)
            for var in step.inputs:
                needed.add(var)
                read.add(var.storage)
    live.reverse()
    constants = {var: value for var, value in tape.constants.items() if var in needed}
    return Tape(tuple(var for var in tape.inputs if var in needed), live, tape.results, constants)


def eliminate_common_subexpressions(tape: Tape, external: frozenset[int]) -> Tape:
    """Return the tape without repeated steps on equal values, unless their result is written or returned."""
    written = {storage for step in tape.steps for storage in step.writes}
    if not written.isdisjoint(external):  # two inputs may share their memory at another call
        written |= external
    fixed = written | external | {var.storage for var in tape.results}
    first_steps: dict[Hashable, Step] = {}
    replacements: dict[Var, Var] = {}
    steps = []
    for step in tape.steps:
        args, kwargs = rename_vars(step.args, replacements), rename_vars(step.kwargs, replacements)
        step = Step(step.fn, args, kwargs, step.out, step.writes, step.required, step.is_library_op, step.operator)
        key = _expression_key(step, fixed, written)
        first = None if key is None else first_steps.setdefault(key, step)
        if first is not None and first is not step:
            replacements.update(zip(step.outputs, first.outputs, strict=True))
        else:
            steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


def _expression_key(step: Step, fixed: set[int] | frozenset[int], written: set[int]) -> Hashable:
    """Return a key that is equal for steps with equal results; None for a step that must stay."""
    if step.required or step.is_library_op or step.writes or any(var.storage in written for var in step.inputs):
        return None
    if any(var.storage in fixed for var in step.outputs):
        return None
    try:
        key = (id(step.fn), _hashable_key(step.args), _hashable_key(step.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _hashable_key(value: Any) -> Hashable:
    """Return a hashable key of a step's argument that contains types, because ``1 == 1.0 == True``."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable_key, value))
    if isinstance(value, dict):
        return tuple((key, _hashable_key(item)) for key, item in value.items())
    if isinstance(value, (Var, PerRankVars)):
        return value
    return type(value), repr(value) if isinstance(value, float) else value


def rename_vars(value: Any, replacements: Mapping[Var, Var]) -> Any:
    """Return a nested value with variables replaced by ``replacements``, at any depth."""

    def rename_leaf(x: Any) -> Any:
        """Return the replacement of a variable, or of each variable of a PerRankVars; any other leaf unchanged."""
        if isinstance(x, PerRankVars):
            return PerRankVars(tuple(replacements.get(var, var) for var in x.items))
        return replacements.get(x, x) if isinstance(x, Var) else x

    return map_step_values(value, rename_leaf) if replacements else value


def elide_copies(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Return the tape with copies replaced by their sources, where the source is not used after the copy."""
    memory = _TapeMemory(tape, external)
    replacements: dict[Var, Var] = {}
    steps = []
    for place, step in enumerate(tape.steps):
        pair = _copy_and_source(step)
        if pair is not None and metadata.get(pair[0]) == metadata.get(pair[1]) and memory.can_replace(place, *pair):
            copy, source = pair
            replacements[copy] = replacements.get(source, source)
        else:
            steps.append(step)
    for step in steps if replacements else ():
        step.args, step.kwargs = rename_vars(step.args, replacements), rename_vars(step.kwargs, replacements)
    return Tape(tape.inputs, steps, tuple(replacements.get(var, var) for var in tape.results), tape.constants)


def _copy_and_source(step: Step) -> tuple[Var, Var] | None:
    """Return the copy that a step makes and its source; None if the step is no copy."""
    if step.fn is _COPY and len(step.args) == 2 and not step.kwargs:
        copy, source = step.args
    elif step.fn is _CLONE and len(step.args) == 1 and set(step.kwargs) <= {"memory_format"}:
        copy, source = step.out, step.args[0]
    else:
        return None
    return (copy, source) if isinstance(copy, Var) and isinstance(source, Var) else None


def bind_collectives(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Return the tape with each all-reduce bound to its group and algorithm, in place if its input is not used again."""
    memory = _TapeMemory(tape, external)
    steps: list[Step] = []
    for place, step in enumerate(tape.steps):
        x = step.args[1] if step.fn is ALL_REDUCE and len(step.args) == 4 else None
        if isinstance(x, Var) and x in metadata:
            comm, _, mesh_dims, op = step.args
            bound = comm.bind_all_reduce(mesh_dims, op, metadata[x].dtype)
            in_place = bound.run_donated is not None and metadata[x].is_row_major and memory.is_only_sent_at(place, x)
            writes = frozenset((x.storage,) if in_place else ())
            step = dataclasses.replace(step, fn=bound.run_donated if in_place else bound.run, args=(x,), writes=writes)
        steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


class _TapeMemory(DefUse):
    """Def-use chains of a tape that also know which memory the tape itself allocates."""

    def __init__(self, tape: Tape, external: frozenset[int]) -> None:
        super().__init__(tape.steps, external)
        self._fixed = external | {var.storage for var in (*tape.inputs, *tape.constants)}
        self._results = {var.storage for var in tape.results}

    def _is_allocation(self, var: Var) -> bool:
        """Return True if a step of the tape allocates this memory, and ``var`` is the first variable of it."""
        return var.index == var.storage and var.storage not in self._fixed

    def can_replace(self, place: int, copy: Var, source: Var) -> bool:
        """Return True if ``source`` can replace its copy made at ``place``: both are the tape's own, and neither is used
        otherwise."""
        if not (self._is_allocation(copy) and self._is_allocation(source)) or source.storage in self._results:
            return False
        if self.is_sent(copy.storage) or self.is_sent(source.storage):
            return False
        if any(at < place for at in self.use_places.get(copy.storage, ())):
            return False
        return max(self.use_places[source.storage]) == place and all(
            at == place for at in self.write_places.get(copy.storage, ())
        )

    def is_only_sent_at(self, place: int, var: Var) -> bool:
        """Return True if the step at ``place`` is the last use of this memory, and the only library operation on it."""
        used = self.use_places.get(var.storage, ())
        library_ops = [other for other in used if self.steps[other].is_library_op]
        is_own = var.storage not in self._fixed and var.storage not in self._results
        return is_own and library_ops == [place] and max(used) == place


# --- bucketing; see [Note: Bucketing and overlap] ----------------------------------------------------------------------------
@dataclass(slots=True)
class _Collective:
    """Collective of a tape that may be joined with others of its kind, and the places to which it may move.

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
    """Return the steps with collectives of one kind joined to fewer, larger ones. All ranks of a group call it.

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
    """Return the collectives of a tape that may be joined, by kind and in order, equal on all ranks of a group."""
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
    """Return the kind and the description of the collective that a step issues; None if it must not be joined."""
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
        kind = type(move), merge_kind_of(move)
    backend_adds = op is not None and not isinstance(op, Monoid) and comm.bind_all_reduce(collective.mesh_dims, op, dtype).at_once
    return None if isinstance(op, Monoid) or backend_adds else (kind, collective)


def _find_tail(collective: _Collective, uses: DefUse, metadata: Mapping[Var, LocalMetadata]) -> None:
    """Set ``needed_at`` and ``tail`` of a collective: where its result must be available, and steps that may move behind it."""
    delivered = list(uses.steps[collective.wait].outputs)
    if any(var not in metadata or not metadata[var].is_row_major for var in delivered):
        return
    tail, memory, needed_at = uses.find_tail(collective.wait, {var.storage for var in delivered})
    collective.needed_at = min(needed_at, uses.find_overwrite(collective.issue, collective.wait))
    collective.tail = [place for place in tail if place < collective.needed_at]
    uses.available_by.update(dict.fromkeys(memory, collective.needed_at))


def _find_window(collective: _Collective, number: int, same_kind: Sequence[_Collective], uses: DefUse) -> None:
    """Set the window of a collective: the first and last collective of its kind at which this rank could issue it."""
    collective.first = collective.last = number
    if collective.needed_at:
        ready, collective.views = uses.find_ready(collective.issue)
        collective.first = next(k for k, other in enumerate(same_kind) if other.issue > ready)
        collective.last = max(k for k, other in enumerate(same_kind) if other.issue < collective.needed_at)


def _agree_on_windows(same_kind: Sequence[_Collective]) -> None:
    """Narrow each window to what all ranks of the group allow. Communicates once, if ranks are processes."""
    comm = same_kind[0].comm
    if comm.has_other_processes:
        by_rank = comm.all_gather_object([(one.first, one.last) for one in same_kind], same_kind[0].mesh_dims)
        for one, windows in zip(same_kind, zip(*by_rank, strict=True), strict=True):
            one.first, one.last = max(first for first, _ in windows), min(last for _, last in windows)


def _make_buckets(same_kind: Sequence[_Collective], max_bytes: int) -> Iterator[tuple[list[_Collective], int]]:
    """Yield ``(collectives, number)``: collectives to join, and the number of the one that gives the place of issue.

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
    """Return two steps: the joined collective of a bucket, and the wait for it."""
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
    """Return the steps reordered so that collectives run during computation: early issues and late waits.

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
    """Return for each pending collective that may move the place of the step that waits for it."""
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
    """Return the steps with collectives issued once their inputs are ready, at most ``max_bytes`` in flight."""
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
    """Return the steps with each wait moved to the first use of what it waits for, at most ``max_bytes`` in flight."""
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
