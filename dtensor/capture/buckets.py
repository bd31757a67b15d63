"""Collectives of one group in one, where nobody can tell: the same terms are added in the same order, blocks are only moved.

A site may be issued anywhere between the last write to what it sends and the first use of what it brings. Which steps
those are is a rank's own affair, so the ranks of a group agree, when they have recorded, on how far each site may move.
What a backend adds by itself stays alone: in which order depends on what else there is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.memory_order import contiguous_stride
from ..comm import Communicator, Pending, communicator_of
from ..placement import Monoid
from ..redistribute.batch import as_one, kind_of, reduced_as_one
from .graph import Step, Var, variables

BYTES = 32 * 2**20  # what values that are moved together may take
_ALL_REDUCE: Any = getattr(Communicator.all_reduce, "__wrapped__")  # noqa: B009  what a recorder keeps of a site


@dataclass(slots=True)
class _Site:
    """A collective that may be joined with others of its kind.

    Attributes:
        what: the step of a redistribution, or op and dtype of an all-reduce.
        place, wait: of the steps that issue it and wait for it.
        views: places of the steps that make what it sends, where that is a view of what was there before.
        first, last: among the sites of its kind, the first and the last one at whose place it may be issued.
    """

    comm: Any
    mesh_dims: tuple[int, ...]
    what: Any
    nbytes: int
    place: int = 0
    wait: int = 0
    views: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0


def bucketed(steps: list[Step], facts: Mapping[Var, Any], lasting: frozenset[int]) -> list[Step]:
    """``steps`` with fewer collectives. The ranks of a group call it at the same time, with what they have recorded.

    Args:
        lasting: memory that the steps are given, of which at another call several may be one.
    """
    groups: dict[int, list[list[_Site]]] = {}  # by the place at which they are issued
    kinds = [sites for sites in _by_kind(steps, facts).values() if len(sites) > 1]
    if kinds:
        uses = _Uses(steps, lasting)
        for sites in kinds:
            for number, site in enumerate(sites):
                _find_window(site, number, sites, uses, facts)
            _agree(sites)
            for group, at in _groups(sites):
                groups.setdefault(sites[at].place, []).append(group)
    views: dict[int, int] = {}  # steps that come earlier, with what needs them first
    gone: set[int] = set()
    for at, found in sorted(groups.items(), reverse=True):
        moved = [site for group in found for site in group]
        views |= {place: at for site in moved for place in site.views if place > at}
        gone.update(*((site.place, site.wait) for site in moved))
    gone |= views.keys()
    made: list[Step] = []
    for place, step in enumerate(steps):
        if place in groups:
            made += [steps[view] for view in sorted(views) if views[view] == place]
            made += [one for group in groups[place] for one in _together(group, steps)]
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
    if step.fn is _ALL_REDUCE and len(step.args) == 4:
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


class _Uses:
    """By memory, the places of the steps that make or write it, and of those that use it in any way."""

    def __init__(self, steps: Sequence[Step], lasting: frozenset[int]) -> None:
        self.steps, self.lasting = steps, lasting
        self.made: dict[Var, int] = {}
        self.written: dict[int, list[int]] = {}
        self.used: dict[int, list[int]] = {}
        known: set[Var] = set()
        for place, step in enumerate(steps):
            for var in step.inputs:
                known.add(var)
            for var in step.outputs:
                if var not in known:  # an operation in place gives what it was given
                    known.add(var)
                    self.made[var] = place
            writes = step.writes if step.writes.isdisjoint(lasting) else step.writes | lasting
            for storage in writes:
                self.written.setdefault(storage, []).append(place)
            for storage in {var.storage for var in step.inputs} | writes:
                self.used.setdefault(storage, []).append(place)

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


def _find_window(site: _Site, number: int, sites: Sequence[_Site], uses: _Uses, facts: Mapping[Var, Any]) -> None:
    """How far this rank may move a site."""
    issue, wait = uses.steps[site.place], uses.steps[site.wait]
    sent, brought = list(issue.inputs), list(wait.outputs)
    site.first = site.last = number
    if any(var not in facts or not _is_row_major(facts[var]) for var in brought):
        return
    site.views = [place for var in sent for place in uses.views(var)]
    moved = {var for place in site.views for var in (*uses.steps[place].outputs, *uses.steps[place].inputs)} | set(sent)
    made = [uses.made[var] for var in moved if var in uses.made and uses.made[var] not in site.views]
    memory = {var.storage for var in sent}
    writes = [place for storage in memory for place in uses.written.get(storage, ())]
    ready = max([*made, *(place for place in writes if place < site.place)], default=-1)
    of_results = (place for var in brought for place in uses.used.get(var.storage, ()) if place > site.wait)
    needed = min([*of_results, *(place for place in writes if place > site.place)], default=len(uses.steps))
    site.first = next(k for k, other in enumerate(sites) if other.place > ready)
    site.last = max(k for k, other in enumerate(sites) if other.place < needed)


def _is_row_major(fact: Any) -> bool:
    """Of memory of its own, which is what collectives that are joined give."""
    offset, shape, stride, _, conjugated, negated = fact
    return not (offset or conjugated or negated) and all(
        size == 1 or own == step for size, own, step in zip(shape, stride, contiguous_stride(tuple(shape)), strict=True)
    )


def _agree(sites: Sequence[_Site]) -> None:
    """Windows that all ranks of the group have."""
    comm = sites[0].comm
    if comm.talks:
        told = comm.all_gather_object([(site.first, site.last) for site in sites], sites[0].mesh_dims)
        for site, windows in zip(sites, zip(*told, strict=True), strict=True):
            site.first, site.last = max(first for first, _ in windows), min(last for _, last in windows)


def _groups(sites: Sequence[_Site]) -> Iterator[tuple[list[_Site], int]]:
    """Sites whose windows have a place in common, and which one: where the first of those left finds most company."""
    left = dict(enumerate(sites))
    while left:
        number, one = next(iter(left.items()))
        at = max(range(one.first, one.last + 1), key=lambda k: (len(_at(left, k)), -abs(k - number)))
        group, nbytes = [number], one.nbytes
        for k in _at(left, at):
            if k != number and nbytes + sites[k].nbytes <= BYTES:
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
    if issued[0].fn is _ALL_REDUCE:
        run, sent = reduced_as_one(one.comm, one.mesh_dims, *one.what), [step.args[1] for step in issued]
    else:
        run, sent = as_one([site.what for site in group]), [step.args[0] for step in issued]
    pending, within = issued[0].out, issued[0].within
    brought = tuple(steps[site.wait].out for site in group)
    return [
        Step(run, tuple(sent), {}, pending, keep=True, site=True, within=within),
        Step(Pending.wait, (pending,), {}, brought, keep=True, site=True, within=within),
    ]
