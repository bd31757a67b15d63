"""Current rank: the rank of this process, or of the running ``map_ranks`` function if all ranks live in this process.

The running function is known per thread. Outside of ``map_ranks`` a process with all ranks has no single rank: questions about
the current rank then return a ``RankNumber``, the answer of each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..ranks.rank_values import collapse_if_equal, make_rank_indices
from .root import Root


class _Running(threading.local):
    """The per-rank function that runs in this thread."""

    at: tuple[Root, int] | None = None  # root and member of its rank


RUNNING_RANK = _Running()


@contextmanager
def run_as_member(root: Root, member: int) -> Iterator[None]:
    """Make ``member``, a position in ``root``, the current rank of this thread inside a ``with`` block."""
    before, RUNNING_RANK.at = RUNNING_RANK.at, (root, member)
    try:
        yield
    finally:
        RUNNING_RANK.at = before


def current_member(root: Root) -> int | None:
    """Return this process's position in ``root``, None if it has none; in one process that of the running rank, else 0."""
    if root.kind == "process_group":
        rank = dist.get_rank()
        return root.ranks.index(rank) if rank in root.ranks else None
    running = RUNNING_RANK.at
    if running is None or root.kind == "dry_run":
        return 0
    if running[0] is root:
        return running[1]
    rank = running[0].ranks[running[1]]
    return root.ranks.index(rank) if rank in root.ranks else 0  # a process with all ranks is in every mesh


def current_rank(root: Root) -> Any:
    """Return the current rank: an int, or a ``RankNumber`` if all ranks live in this process and none is running."""
    if root.kind == "process_group":
        return dist.get_rank()
    if root.kind == "dry_run":
        return root.ranks[0]
    running = RUNNING_RANK.at
    if running is not None:
        return running[0].ranks[running[1]]
    return make_rank_indices(root.ranks)


def current_coordinate(root: Root, coordinates: Sequence[tuple[int, ...]], ndim: int) -> tuple[Any, ...] | None:
    """Return the index of the current rank along each mesh dim, None outside of the mesh; ``RankNumber`` if no rank runs."""
    running = RUNNING_RANK.at
    if root.kind == "in_process" and running is None:
        return tuple(collapse_if_equal(tuple(coordinate[dim] for coordinate in coordinates)) for dim in range(ndim))
    if root.kind == "in_process" and running is not None and running[0].ranks[running[1]] not in root.ranks:
        return None
    member = current_member(root)
    return None if member is None else coordinates[member]
