"""All ranks of a job, when they do one thing together that may go wrong on any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """The processes that make a checkpoint together; one process stands alone. The first of them coordinates."""

    def __init__(self, group: Any = None) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.group = group if self.alone or group is not None else dist.group.WORLD
        self.rank: int = 0 if self.alone else dist.get_rank(self.group)
        self.size: int = 1 if self.alone else dist.get_world_size(self.group)
        self.world_ranks: list[int] = [0] if self.alone else dist.get_process_group_ranks(self.group)

    @property
    def coordinates(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def together(self, what: str, each: Callable[[], T], then: Callable[[list[T]], R]) -> R:
        """``each()`` on every rank, then ``then(results)`` on the first one, whose result all ranks get.

        Cost: a gather to the first rank and a broadcast from it.

        Raises:
            CheckpointError: on all ranks, with the same words, if any call raised or a rank was lost.
        """
        mine = _attempt(each)
        try:
            gathered = self._gather(mine)
            outcome = _conclude(gathered, then) if gathered is not None else None
            value, problem = self._share(outcome)
        except (RuntimeError, ValueError, OSError) as error:  # what torch raises when a peer is gone differs by backend
            raise CheckpointError(f"{what}: a rank was lost on the way ({_first_line(error)}); nothing was changed") from error
        if problem is not None:
            cause = mine[1] if isinstance(mine[1], BaseException) else None
            raise CheckpointError(f"{what}: {problem}") from cause
        return value

    def _gather(self, mine: Any) -> list[Any] | None:
        told = (mine[0], None if mine[1] is None else _said(mine[1]))
        if self.alone:
            return [told]
        results: list[Any] | None = [None] * self.size if self.coordinates else None
        dist.gather_object(told, results, dst=self.world_ranks[0], group=self.group)
        return results

    def _share(self, outcome: Any) -> Any:
        if self.alone:
            return outcome
        box = [outcome]
        dist.broadcast_object_list(box, src=self.world_ranks[0], group=self.group)
        return box[0]


def _attempt(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return fn(), None
    except Exception as error:
        return None, error


def _conclude(gathered: list[Any], then: Callable[[list[Any]], Any]) -> tuple[Any, str | None]:
    failed = [(rank, told) for rank, (_, told) in enumerate(gathered) if told is not None]
    if failed:
        rank, told = failed[0]
        same = all(other == told for _, other in failed) and len(failed) == len(gathered)
        where = "" if same else f" (rank {rank}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''})"
        return None, told + where
    value, problem = _attempt(lambda: then([value for value, _ in gathered]))
    return value, None if problem is None else _said(problem)


def _said(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
