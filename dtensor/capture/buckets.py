"""Collectives of one group in one, where nobody can tell: the same terms are added in the same order, blocks are only moved.

A site may be issued anywhere between the last write to what it sends and the first use of what it brings; steps that work on
what it brings alone go with it. Which steps those are is a rank's own affair, so the ranks of a group agree, when they have
recorded, on how far each site may move.
What a backend adds by itself stays alone: in which order depends on what else there is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..comm import Pending, communicator_of
from ..placement import Monoid
from ..redistribute.coalesce import as_one, kind_of, reduced_as_one
from .def_use import Uses
from .tape import ALL_REDUCE, Step, Var, is_row_major, variables

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
    before: dict[int, list[int]] = {}  # by the place at which groups are issued, steps that go with the first of them,
    after: dict[int, list[int]] = {}  # and those that follow them
    gone: set[int] = set()
    for at, found in sorted(groups.items()):
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


def _find_end(site: _Site, uses: Uses, facts: Mapping[Var, Any]) -> None:
    """How late a site may bring what it does."""
    brought = list(uses.steps[site.wait].outputs)
    if any(var not in facts or not is_row_major(facts[var]) for var in brought):
        return
    tail, memory, needed = uses.after(site.wait, {var.storage for var in brought})
    site.needed = min(needed, uses.overwritten(site.place, site.wait))
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
