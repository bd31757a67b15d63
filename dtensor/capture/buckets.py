"""Collectives of one group in one, where nobody can tell: the same terms are added in the same order, blocks are only moved.

A site may be issued anywhere between the last write to what it sends and the first use of what it brings; steps that work on
what it brings alone go with it. Which steps those are is a rank's own affair, so the ranks of a group agree, when they have
recorded, on how far each site may move.
What a backend adds by itself stays alone: in which order depends on what else there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..comm import Pending, communicator_of
from ..placement import Monoid
from ..redistribute.batch import as_one, kind_of, reduced_as_one
from .graph import ALL_REDUCE, Step, Var, is_row_major, variables

BYTES = 32 * 2**20  # what values that are moved together may take


@dataclass(slots=True)
class _Site:
    """A collective that may be joined with others of its kind.

    Attributes:
        what: the step of a redistribution, or op and dtype of an all-reduce.
        place, wait: of the steps that issue it and wait for it.
        views: places of the steps that make what it sends, where that is a view of what was there before.
        tail: places of the steps after it that work on what it brings alone; ``needed``: of the first that does otherwise.
        first, last: among the sites of its kind, the first and the last one at whose place it may be issued.
    """

    comm: Any
    mesh_dims: tuple[int, ...]
    what: Any
    nbytes: int
    place: int = 0
    wait: int = 0
    views: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    needed: int = 0
    first: int = 0
    last: int = 0


def bucketed(steps: list[Step], facts: Mapping[Var, Any], lasting: frozenset[int], most: int = BYTES) -> list[Step]:
    """``steps`` with fewer collectives. The ranks of a group call it at the same time, with what they have recorded.

    Args:
        lasting: memory that the steps are given, of which at another call several may be one.
        most: bytes of values that go together, and so are there before or after they need to be.
    """
    groups: dict[int, list[list[_Site]]] = {}  # by the place at which they are issued
    kinds = [sites for sites in _by_kind(steps, facts).values() if len(sites) > 1]
    if kinds:
        uses = Uses(steps, lasting)
        for site in (site for sites in kinds for site in sites):
            _find_end(site, uses, facts)
        for sites in kinds:
            for number, site in enumerate(sites):
                _find_window(site, number, sites, uses)
            _agree(sites)
            for group, at in _groups(sites, most):
                groups.setdefault(sites[at].place, []).append(group)
    before: dict[int, list[int]] = {}  # by the place at which groups are issued, steps that go with them,
    after: dict[int, list[int]] = {}  # and those that follow them
    gone: set[int] = set()
    for at, found in sorted(groups.items(), reverse=True):
        moved = [site for group in found for site in group]
        before[at] = sorted({place for site in moved for place in site.views if place > at} - gone)
        after[at] = sorted(place for site in moved for place in site.tail if place < at)
        gone.update(before[at], after[at], *((site.place, site.wait) for site in moved))
    made: list[Step] = []
    for place, step in enumerate(steps):
        if place in groups:
            made += [steps[view] for view in before[place]]
            made += [one for group in groups[place] for one in _together(group, steps)]
            made += [steps[late] for late in after[place]]
        if place not in gone:
            made.append(step)
    return made


def _by_kind(steps: Sequence[Step], facts: Mapping[Var, Any]) -> dict[Hashable, list[_Site]]:
    """The sites that may be joined, in order: those of one kind are the same on all ranks of their group."""
    waits = {step.args[0]: place for place, step in enumerate(steps) if step.fn is Pending.wait}
    found: dict[Hashable, list[_Site]] = {}
    for place, step in enumerate(steps):
        known = _known(step, facts) if step.site and isinstance(step.out, Var) and step.out in waits else None
        if known is not None:
            kind, site = known
            site.place, site.wait = place, waits[step.out]
            found.setdefault(kind, []).append(site)
    return found


def _known(step: Step, facts: Mapping[Var, Any]) -> tuple[Hashable, _Site] | None:
    """The kind of a site, and what it does; None if it stays alone."""
    if step.fn is ALL_REDUCE and len(step.args) == 4:
        comm, x, mesh_dims, op = step.args
        _, shape, _, dtype, *_ = facts[next(variables(x))]
        site = _Site(comm, tuple(mesh_dims), (op, dtype), shape.numel() * dtype.itemsize)
        kind: Hashable = "all_reduce", id(comm), site.mesh_dims, op, dtype
    else:
        move = getattr(step.fn, "step", None)
        if move is None:
            return None
        comm, op, dtype = communicator_of(move.before.mesh), getattr(move, "op", None), move.before.dtype
        site = _Site(comm, move.mesh_dims, move, max(move.before.max_local_nbytes, move.after.max_local_nbytes))
        kind = type(move), kind_of(move)
    alone = isinstance(op, Monoid) or (op is not None and comm.bind_all_reduce(site.mesh_dims, op, dtype).at_once)
    return None if alone else (kind, site)


class Uses:
    """By memory, the places of the steps that make or write it, and of those that use it in any way.

    Args:
        lasting: memory that the steps are given, of which at another call several may be one.
    """

    def __init__(self, steps: Sequence[Step], lasting: frozenset[int]) -> None:
        self.steps, self.lasting = steps, lasting
        self.made: dict[Var, int] = {}
        self.written: dict[int, list[int]] = {}
        self.used: dict[int, list[int]] = {}
        self.late: dict[int, int] = {}  # what sites bring, and is made of that alone: until when it may not be there yet
        known: set[Var] = set()
        for place, step in enumerate(steps):
            for var in step.inputs:
                known.add(var)
            for var in step.outputs:
                if var not in known:  # an operation in place gives what it was given
                    known.add(var)
                    self.made[var] = place
            for storage in self._writes(step):
                self.written.setdefault(storage, []).append(place)
            for storage in self._touches(step):
                self.used.setdefault(storage, []).append(place)

    def _writes(self, step: Step) -> frozenset[int]:
        return step.writes if step.writes.isdisjoint(self.lasting) else step.writes | self.lasting

    def _touches(self, step: Step) -> set[int]:
        return {var.storage for var in step.inputs} | self._writes(step)

    def after(self, place: int, memory: set[int]) -> tuple[list[int], set[int], int]:
        """The steps after ``place`` that work on this memory alone, which is new there, and what they make; the memory that
        they know; and the place of the first step that uses some of it otherwise."""
        tail: list[int] = []
        coming = [other for storage in memory for other in self.used.get(storage, ()) if other > place]
        heapq.heapify(coming)
        while coming:
            if (at := heapq.heappop(coming)) in tail[-1:]:
                continue
            step = self.steps[at]
            if step.keep or step.site or not self._touches(step) <= memory:
                return tail, memory, at
            tail.append(at)
            for storage in {var.storage for var in step.outputs} - memory:
                memory.add(storage)
                for other in self.used.get(storage, ()):
                    if other > at:
                        heapq.heappush(coming, other)
        return tail, memory, len(self.steps)

    def ready(self, place: int) -> tuple[int, list[int]]:
        """The last step that the site at ``place`` needs; and those that may come along, as they make views of what it sends."""
        sent = list(self.steps[place].inputs)
        views = [at for var in sent for at in self.views(var)]
        moved = {var for at in views for var in (*self.steps[at].outputs, *self.steps[at].inputs)} | set(sent)
        made = [self.made[var] for var in moved if var in self.made and self.made[var] not in views]
        writes = [at for storage in {var.storage for var in sent} for at in self.written.get(storage, ()) if at < place]
        writes += [at for storage in self.steps[place].writes for at in self.used.get(storage, ()) if at < place]
        brought = [self.late[var.storage] - 1 for var in moved if var.storage in self.late]
        return max([*made, *writes, *brought], default=-1), views

    def end(self, issue: int, wait: int) -> int:
        """The first step that uses what a site brings, or writes to what it sends."""
        brought = {var.storage for var in self.steps[wait].outputs}
        used = (place for storage in brought for place in self.used.get(storage, ()) if place > wait)
        return min(self.overwritten(issue), min(used, default=len(self.steps)))

    def overwritten(self, issue: int) -> int:
        """The first step that writes to what a site sends."""
        sent = {var.storage for var in self.steps[issue].inputs}
        written = (place for storage in sent for place in self.written.get(storage, ()) if place > issue)
        return min(written, default=len(self.steps))

    def views(self, var: Var) -> Iterator[int]:
        """The steps that make ``var`` of memory that is there already, last one first."""
        place = self.made.get(var)
        while place is not None:
            step = self.steps[place]
            sources = list(step.inputs)
            if step.keep or step.site or step.writes or len(sources) != 1 or sources[0].storage != var.storage:
                return
            yield place
            var = sources[0]
            place = self.made.get(var)


def _find_end(site: _Site, uses: Uses, facts: Mapping[Var, Any]) -> None:
    """How late a site may bring what it does."""
    brought = list(uses.steps[site.wait].outputs)
    if any(var not in facts or not is_row_major(facts[var]) for var in brought):
        return
    tail, memory, needed = uses.after(site.wait, {var.storage for var in brought})
    site.needed = min(needed, uses.overwritten(site.place))
    site.tail = [place for place in tail if place < site.needed]
    uses.late.update(dict.fromkeys(memory, site.needed))


def _find_window(site: _Site, number: int, sites: Sequence[_Site], uses: Uses) -> None:
    """How far this rank may move a site."""
    site.first = site.last = number
    if site.needed:
        ready, site.views = uses.ready(site.place)
        site.first = next(k for k, other in enumerate(sites) if other.place > ready)
        site.last = max(k for k, other in enumerate(sites) if other.place < site.needed)


def _agree(sites: Sequence[_Site]) -> None:
    """Windows that all ranks of the group have."""
    comm = sites[0].comm
    if comm.talks:
        told = comm.all_gather_object([(site.first, site.last) for site in sites], sites[0].mesh_dims)
        for site, windows in zip(sites, zip(*told, strict=True), strict=True):
            site.first, site.last = max(first for first, _ in windows), min(last for _, last in windows)


def _groups(sites: Sequence[_Site], most: int) -> Iterator[tuple[list[_Site], int]]:
    """Sites whose windows have a place in common, and which one: where the first of those left finds most company."""
    left = dict(enumerate(sites))
    while left:
        number, one = next(iter(left.items()))
        at = max(range(one.first, one.last + 1), key=lambda k: (len(_at(left, k)), -abs(k - number)))
        group, nbytes = [number], one.nbytes
        for k in _at(left, at):
            if k != number and nbytes + sites[k].nbytes <= most:
                group.append(k)
                nbytes += sites[k].nbytes
        for k in group:
            del left[k]
        if len(group) > 1:
            yield [sites[k] for k in group], at


def _at(left: Mapping[int, _Site], place: int) -> list[int]:
    return [k for k, site in left.items() if site.first <= place <= site.last]


def _together(group: Sequence[_Site], steps: Sequence[Step]) -> list[Step]:
    """One collective for all of a group, and the wait for it."""
    issued, one = [steps[site.place] for site in group], group[0]
    if issued[0].fn is ALL_REDUCE:
        run, sent = reduced_as_one(one.comm, one.mesh_dims, *one.what), [step.args[1] for step in issued]
    else:
        run, sent = as_one([site.what for site in group]), [step.args[0] for step in issued]
    pending, within = issued[0].out, issued[0].within
    brought = tuple(steps[site.wait].out for site in group)
    return [
        Step(run, tuple(sent), {}, pending, keep=True, site=True, within=within),
        Step(Pending.wait, (pending,), {}, brought, keep=True, site=True, within=within),
    ]
