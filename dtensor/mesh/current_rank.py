"""Whose turn it is: the rank of this process, or where all ranks live here the one that ``map_ranks`` runs for.

What runs is known per thread. Outside of ``map_ranks`` a process that holds all ranks is none of them: what a rank knows of
itself is a number of each there, a ``RankNumber``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..ranks.rank_values import one_or_each, rank_of_all
from .root import Root


class _Running(threading.local):
    at: tuple[Root, int] | None = None  # the member of a root that a function of one rank runs for in this thread


RUNNING = _Running()


@contextmanager
def running_as(root: Root, member: int) -> Iterator[None]:
    """Make ``member`` the current one while a per-rank function runs in this process."""
    before, RUNNING.at = RUNNING.at, (root, member)
    try:
        yield
    finally:
        RUNNING.at = before


def current_member(root: Root) -> int | None:
    """This process's member; in one process the one that ``map_ranks`` runs for, else the first. None: not in the mesh."""
    if root.kind == "process_group":
        rank = dist.get_rank()
        return root.ranks.index(rank) if rank in root.ranks else None
    at = RUNNING.at
    if at is None or root.kind == "dry_run":
        return 0
    if at[0] is root:
        return at[1]
    rank = at[0].ranks[at[1]]
    return root.ranks.index(rank) if rank in root.ranks else 0  # a holder of all ranks is in every mesh


def current_rank(root: Root) -> Any:
    """The current rank: a number; where all ranks live here and none of them runs, each one's."""
    if root.kind == "process_group":
        return dist.get_rank()
    if root.kind == "dry_run":
        return root.ranks[0]
    at = RUNNING.at
    if at is not None:
        return at[0].ranks[at[1]]
    return rank_of_all(root.ranks)


def current_coordinate(root: Root, coordinates: Sequence[tuple[int, ...]], ndim: int) -> tuple[Any, ...] | None:
    """The current rank's index along each mesh dim, None outside of the mesh; each rank's where none of them runs."""
    at = RUNNING.at
    if root.kind == "in_process" and at is None:
        return tuple(map(one_or_each, _columns(coordinates, ndim)))
    if root.kind == "in_process" and at is not None and at[0].ranks[at[1]] not in root.ranks:
        return None
    member = current_member(root)
    return None if member is None else coordinates[member]


def _columns(rows: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    return [tuple(row[k] for row in rows) for k in range(count)]
