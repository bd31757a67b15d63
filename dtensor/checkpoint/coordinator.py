"""All ranks of a job, when they do one thing together that may go wrong on any of them."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import CheckpointError, RankLostError
from ..mesh.process_groups import made_of
from ..watchdog.collective_hooks import agree, why_lost
from ..watchdog.diagnosis import Verdict, named
from ..watchdog.host_state import error_of

T = TypeVar("T")
R = TypeVar("R")
Parts = list[tuple[str, str]]  # what must be alike on all ranks, by name, in words
NESTING = "its nesting"  # the name of a part that differs wherever a key does


class Ranks:
    """The processes that make a checkpoint together; one process stands alone. The first of them coordinates.

    They talk over a gloo group, in messages between the first rank and each other one, and not by collectives: when a rank
    dies, a collective leaves some ranks with an error and others waiting for them. Here the first rank sees who is gone, and
    still tells the others.
    """

    def __init__(self, what: str, group: Any = None, *, apart: bool = False) -> None:
        """``what`` they begin to do, which all of them must; ``apart``: over a group of their own, for a thread that talks while
        the main thread does."""
        self.alone = not dist.is_initialized()
        self.group = group if self.alone or group is not None else dist.group.WORLD
        self.rank: int = 0 if self.alone else dist.get_rank(self.group)
        self.size: int = 1 if self.alone else dist.get_world_size(self.group)
        self.world_ranks: list[int] = [0] if self.alone else dist.get_process_group_ranks(self.group)
        if not self.alone:
            self._begin(what, apart)

    def _begin(self, what: str, apart: bool) -> None:
        try:
            agree(self.world_ranks, f"{what}{' in the background' if apart else ''}")
            if apart or "gloo" not in str(dist.get_backend_config(self.group)):
                self.group = _gloo_group(self.group, apart)
        except RankLostError as error:
            raise CheckpointError(f"{what}: a rank was lost ({error}); nothing was changed") from error

    @property
    def among(self) -> list[int] | None:
        """The world's ranks that make the checkpoint; None where one process has all ranks."""
        return None if self.alone else self.world_ranks

    @property
    def coordinates(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def together(self, what: str, each: Callable[[], T], then: Callable[[list[T]], R], left: str = "nothing was changed") -> R:
        """``each()`` on every rank, then ``then(results)`` on the first one, whose result all ranks get.

        Args:
            left: what holds if the first rank is lost, perhaps inside of ``then``.

        Cost: a message from every rank to the first one, and one back.

        Raises:
            CheckpointError: on all ranks, with the same words, if any call raised or a rank was lost.
            DivergenceError: ranks do not the same; and what a rank raised before it came here.
        """
        mine = _attempt(each)
        told = mine[0], None if mine[1] is None else _said(mine[1])
        if self.coordinates:
            outcome, reached = self._decide(told, then)
        else:
            outcome, reached = self._asked(told, left)
        value, problem = outcome
        if mine[1] is not None and not isinstance(mine[1], Exception):
            raise mine[1]  # an interrupt, which the others have been told of
        if isinstance(problem, dict):
            raise CheckpointError(f"{what}: {problem['words']}") if problem["kind"] == "lost" else error_of(problem) from reached
        if problem is not None:
            raise CheckpointError(f"{what}: {problem}") from mine[1]
        return value

    def alike(self, what: str, each: Callable[[], Parts], then: Callable[[], R]) -> R:
        """``then()`` on the first rank, whose result all ranks get, if ``each()`` is the same on every rank.

        Cost: a message of a hash from every rank to the first one, and one back; where ranks differ, their parts in two more.

        Raises:
            CheckpointError: as :meth:`together`; ranks differ: what the first that does has otherwise.
        """
        mine: Parts = []

        def hashed() -> str:
            mine.extend(each())
            return hashlib.sha256(repr(mine).encode()).hexdigest()

        def compared(hashes: list[str]) -> tuple[int, R | None]:
            other = other_rank(hashes)
            return (0, then()) if other is None else (other, None)

        other, result = self.together(what, hashed, compared)
        if other:

            def refused(told: list[Parts]) -> None:
                raise CheckpointError(
                    f"the state of rank {other} differs from that of rank 0: {difference(told[0], told[other], other)}; "
                    "what belongs to one rank goes under a key of its own, gathered on all ranks"
                )

            self.together(what, lambda: mine if self.rank in (0, other) else [], refused)
        return cast(R, result)

    def _decide(self, told: Any, then: Callable[[list[Any]], Any]) -> tuple[Any, BaseException | None]:
        gathered, lost = [told], []
        for rank in range(1, self.size):
            try:
                gathered.append(_receive(self.world_ranks[rank], self.group))
            except RuntimeError as error:  # torch's word for a peer that is gone
                lost.append((rank, error))
        if lost:
            outcome: Any = None, self._why_lost([rank for rank, _ in lost], "nothing was changed")
        else:
            outcome = _conclude(gathered, then)
        gone = {rank for rank, _ in lost}
        for rank in range(1, self.size):
            if rank not in gone:
                with contextlib.suppress(RuntimeError):  # lost since: the next time that the ranks meet tells
                    _send(outcome, self.world_ranks[rank], self.group)
        return outcome, lost[0][1] if lost else None

    def _asked(self, told: Any, left: str) -> tuple[Any, BaseException | None]:
        try:
            _send(told, self.world_ranks[0], self.group)
            return _receive(self.world_ranks[0], self.group), None
        except RuntimeError as error:
            return (None, self._why_lost([0], left)), error

    def _why_lost(self, ranks: list[int], left: str) -> Verdict:
        """Why messages with these ranks broke."""
        verdict = why_lost([self.world_ranks[rank] for rank in ranks])
        if verdict is None:
            return {"kind": "lost", "words": f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost; {left}"}
        return verdict | {"words": f"a rank was lost: {verdict['words']}; {left}"} if verdict["kind"] == "lost" else verdict


def difference(first: Parts, others: Parts, rank: int) -> str:
    """What parts of rank 0 and of another ``rank``, which are not the same, differ in.

    >>> difference([("w", "float32[3]"), ("n", "1")], [("w", "float32[3]"), ("n", "2")], 3)
    "'n' is 2 there, 1 on rank 0"
    >>> difference([("w", "float32[3]")], [("w", "float32[3]"), ("n", "2")], 3)
    "'n' is on rank 3 and not on rank 0"
    """
    here, there = dict(first), dict(others)
    for holder, names, missing, lacking in ((rank, there, 0, here), (0, here, rank, there)):
        if alone := [name for name in names if name not in lacking]:
            return f"{_named(alone)} {'is' if len(alone) == 1 else 'are'} on rank {holder} and not on rank {missing}"
    changed = [name for name, words in here.items() if words != there[name]]
    if named := [name for name in changed if name != NESTING]:
        more = f" ({_named(named[1:])} too)" if len(named) > 1 else ""
        return f"{named[0]!r} is {there[named[0]]:.200} there, {here[named[0]]:.200} on rank 0{more}"
    name, other = next(((a, b) for (a, _), (b, _) in zip(first, others, strict=True) if a != b), ("", ""))
    return f"{other!r} comes where {name!r} does on rank 0" if name else "its dicts, lists and tuples are nested otherwise"


def _named(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def other_rank(told: Sequence[object]) -> int | None:
    """The first rank that has told something else than rank 0 has; None if all have told the same."""
    return next((rank for rank, each in enumerate(told) if each != told[0]), None)


# --- messages --------------------------------------------------------------------------------------------------------------
_INLINE = 4096  # bytes that go with the length: most of what ranks say is one message
_TAG = 0x63686B70  # so that a program's own messages are not taken for ours
_GROUPS: dict[Any, Any] = {}


def _gloo_group(group: Any, apart: bool) -> Any:
    known = _GROUPS.get((group, apart))
    if known is None:
        known = _GROUPS[group, apart] = made_of(group, "cpu", "checkpoints")
    return known


def _send(value: Any, to: int, group: Any) -> None:
    data = pickle.dumps(value)
    first = len(data).to_bytes(8, "little") + data[:_INLINE]
    dist.send(_bytes(first.ljust(8 + _INLINE)), to, group, _TAG)
    if len(data) > _INLINE:
        dist.send(_bytes(data[_INLINE:]), to, group, _TAG)


def _receive(source: int, group: Any) -> Any:
    first = torch.empty(8 + _INLINE, dtype=torch.uint8, device="cpu")
    dist.recv(first, source, group, _TAG)
    told = first.numpy().tobytes()
    length, data = int.from_bytes(told[:8], "little"), told[8:]
    if length > _INLINE:
        rest = torch.empty(length - _INLINE, dtype=torch.uint8, device="cpu")
        dist.recv(rest, source, group, _TAG)
        data += rest.numpy().tobytes()
    return pickle.loads(data[:length])


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _attempt(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return fn(), None
    except BaseException as error:
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
