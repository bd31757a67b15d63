"""Transfers between two meshes: one exchange among the ranks of both, in which a rank may be of one mesh only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..base.recording import site
from ..mesh.device_mesh import DeviceMesh
from ..mesh.groups import Group, backend_of, group_of
from ..ranks.per_rank import PerRank
from . import events
from .communicator import BoundCollective, Local, Pending
from .regions import Route, region
from .transfer import bind_direct, bind_transfer

Routes = Callable[[int], Route]


def bind_between(
    source: DeviceMesh, target: DeviceMesh, ranks: Sequence[int], route_of: Routes, dtype: torch.dtype
) -> BoundCollective:
    """``bound(x, async_op=False)``: the local on ``target`` of what ``x`` is the local of on ``source``.

    ``ranks`` are those of both meshes; ``route_of(position)`` says what the rank at that position sends and receives. Ranks of
    neither mesh do nothing. It counts as one all-to-all where one of the meshes has all the ranks, else as one ``"send_recv"``.
    """
    run = _BINDERS[target.kind](source, target, tuple(ranks), route_of, dtype)
    kind = "all_to_all" if _spanning(source, target) is not None else "send_recv"
    positions = [tuple(range(len(ranks)))]

    @site
    def issue(x: Local, async_op: bool = False) -> Any:
        if events.listeners:
            nbytes = events.routed(positions, route_of) * dtype.itemsize
            if nbytes:
                events.report(events.Event(kind, (), len(ranks), nbytes))
        return run(x, True) if async_op else run(x, False).wait()

    return issue


def _spanning(source: DeviceMesh, target: DeviceMesh) -> DeviceMesh | None:
    """The mesh that has all the ranks of both."""
    a, b = set(source.ranks), set(target.ranks)
    return source if a >= b else target if b >= a else None


Run = Callable[[Local, bool], Pending[Local]]


def _in_process(source: DeviceMesh, target: DeviceMesh, ranks: tuple[int, ...], route_of: Routes, dtype: torch.dtype) -> Run:
    members = {ranks.index(rank): member for member, rank in enumerate(source.ranks)}
    copies = []
    for position in map(ranks.index, target.ranks):
        route = route_of(position)
        mine = [] if route.kept is None else [(members[position], *route.kept)]
        for sender, new in enumerate(route.receives):
            if new is not None:
                old = route_of(sender).sends[position]
                assert old is not None, "what one receives another sends"
                mine.append((members[sender], old, new))
        copies.append((route.new, mine))

    def run(x: Local, async_op: bool) -> Pending[Local]:
        shards = x.shards if isinstance(x, PerRank) else (x,) * len(source.ranks)
        results = []
        for shape, mine in copies:
            result = shards[0].new_empty(shape)
            for member, old, new in mine:
                region(result, new).copy_(region(shards[member].detach(), old))
            results.append(result)
        return Pending.of(PerRank(results))

    return run


def _dry_run(source: DeviceMesh, target: DeviceMesh, ranks: tuple[int, ...], route_of: Routes, dtype: torch.dtype) -> Run:
    shape = route_of(ranks.index(target.ranks[0])).new
    return lambda x, async_op: Pending.of(x.new_empty(shape))


def _process_groups(source: DeviceMesh, target: DeviceMesh, ranks: tuple[int, ...], route_of: Routes, dtype: torch.dtype) -> Run:
    rank = dist.get_rank()
    if rank not in ranks:
        return lambda x, async_op: Pending.of(x)
    mesh = _spanning(source, target)
    whole = len(ranks) == dist.get_world_size()
    if mesh is None or whole:
        handle = dist.group.WORLD
    else:
        handle = group_of(_root_of(mesh), range(_root_of(mesh).ndim)).handle
    in_torch = dist.get_process_group_ranks(handle)
    order = tuple(in_torch.index(rank) for rank in ranks)
    natural = order == tuple(range(len(in_torch)))
    backend = backend_of(handle, target.device_type)
    group = Group(handle, tuple(range(len(ranks))), ranks.index(rank), None if natural else order, backend)
    if len(in_torch) == len(ranks):
        return bind_transfer(group, route_of, dtype, gathers=False)
    return bind_direct(group, route_of(group.position))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a part of, with all its members."""
    root = mesh._root
    return mesh._derive(tuple((dim,) for dim in range(len(root.shape))), root.names)


_BINDERS = {"process_group": _process_groups, "in_process": _in_process, "dry_run": _dry_run}
