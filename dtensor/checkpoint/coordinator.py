"""Coordinator: messages between the first rank and all others of a job, for steps that may fail on any rank."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import CheckpointError, RankLostError
from ..mesh.process_groups import make_library_group
from ..watchdog.collective_hooks import diagnose_lost_ranks, log_event
from ..watchdog.diagnosis import Diagnosis, format_ranks
from ..watchdog.host_state import make_diagnosis_error

T = TypeVar("T")
R = TypeVar("R")
StateParts = list[tuple[str, str]]  # (name, text) of all that must be equal on all ranks
NESTING_PART = "its nesting"  # name of the part that differs if any key differs


class RankGroup:
    """Processes that make a checkpoint together; a program without a process group is one process. The first rank coordinates.

    They use a gloo group and messages between the first rank and each other rank, not collectives. If a rank dies, a collective
    leaves some ranks with an error and others waiting. Here the first rank detects which ranks are gone and still answers the
    others.
    """

    def __init__(self, what: str, group: Any = None, *, separate_group: bool = False) -> None:
        """Check that all ranks begin ``what``. ``separate_group=True``: for a thread that communicates beside the main thread."""
        self.is_single_process = not dist.is_initialized()
        self.group = group if self.is_single_process or group is not None else dist.group.WORLD
        self.rank: int = 0 if self.is_single_process else dist.get_rank(self.group)
        self.size: int = 1 if self.is_single_process else dist.get_world_size(self.group)
        self.world_ranks: list[int] = [0] if self.is_single_process else dist.get_process_group_ranks(self.group)
        if not self.is_single_process:
            self._check_call(what, separate_group)

    def _check_call(self, what: str, separate_group: bool) -> None:
        """Log the call for divergence detection, and choose the gloo group that carries the messages."""
        try:
            log_event(self.world_ranks, f"{what}{' in the background' if separate_group else ''}")
            if separate_group or "gloo" not in str(dist.get_backend_config(self.group)):
                self.group = _get_or_make_gloo_group(self.group, separate_group)
        except RankLostError as error:
            raise CheckpointError(f"{what}: a rank was lost ({error}); nothing was changed") from error

    @property
    def participants(self) -> list[int] | None:
        """Return the world ranks that make the checkpoint, or None if one process has all ranks."""
        return None if self.is_single_process else self.world_ranks

    @property
    def is_coordinator(self) -> bool:
        """Return True if this is the first rank."""
        return self.rank == 0

    def run_on_all(self, what: str, each: Callable[[], T], then: Callable[[list[T]], R], left: str = "nothing was changed") -> R:
        """Call ``each()`` on every rank, then ``then(results)`` on the first rank; return its result on all ranks.

        Args:
            left: state of the folder, for the error, if the first rank is lost, perhaps inside of ``then``.

        Cost: a message from every rank to the first one, and one back.

        Raises:
            CheckpointError: on all ranks, with the same text, if any call raised or a rank was lost.
            DivergenceError: ranks make different calls. An error that a rank raised before this call is reported too.
        """
        own = _call_and_catch(each)
        report = own[0], None if own[1] is None else _error_text(own[1])
        if self.is_coordinator:
            outcome, reached = self._collect_and_decide(report, then)
        else:
            outcome, reached = self._report_and_receive(report, left)
        value, problem = outcome
        if own[1] is not None and not isinstance(own[1], Exception):
            raise own[1]  # an interrupt, which was reported to the others
        if isinstance(problem, dict):
            raise (
                CheckpointError(f"{what}: {problem['words']}") if problem["kind"] == "lost" else make_diagnosis_error(problem)
            ) from reached
        if problem is not None:
            raise CheckpointError(f"{what}: {problem}") from own[1]
        return value

    def run_if_same(self, what: str, each: Callable[[], StateParts], then: Callable[[], R]) -> R:
        """Call ``then()`` on the first rank if ``each()`` is equal on every rank, and return its result on all ranks.

        Cost: a message of a hash from every rank to the first one, and one back. If ranks differ, two more with their parts.

        Raises:
            CheckpointError: as :meth:`run_on_all`; or ranks differ, with the difference of the first that does.
        """
        own: StateParts = []

        def hash_parts() -> str:
            own.extend(each())
            return hashlib.sha256(repr(own).encode()).hexdigest()

        def compare_hashes(hashes: list[str]) -> tuple[int, R | None]:
            other = first_differing_rank(hashes)
            return (0, then()) if other is None else (other, None)

        other, result = self.run_on_all(what, hash_parts, compare_hashes)
        if other:

            def raise_difference(parts: list[StateParts]) -> None:
                """Raise a CheckpointError about the difference between the state of rank 0 and of rank ``other``."""
                text = describe_difference(parts[0], parts[other], other)
                raise CheckpointError(
                    f"the state of rank {other} differs from that of rank 0: {text}; "
                    "what belongs to one rank goes under a key of its own, gathered on all ranks"
                )

            self.run_on_all(what, lambda: own if self.rank in (0, other) else [], raise_difference)
        return cast(R, result)

    def _collect_and_decide(self, report: Any, then: Callable[[list[Any]], Any]) -> tuple[Any, BaseException | None]:
        """Receive the reports of all ranks on rank 0, decide the common outcome by ``then``, and send it to all."""
        gathered, lost = [report], []
        for rank in range(1, self.size):
            try:
                gathered.append(_receive_message(self.world_ranks[rank], self.group))
            except RuntimeError as error:  # gloo raises it if the other process is gone
                lost.append((rank, error))
        if lost:
            outcome: Any = None, self._diagnose_loss([rank for rank, _ in lost], "nothing was changed")
        else:
            outcome = _decide_outcome(gathered, then)
        lost_ranks = {rank for rank, _ in lost}
        for rank in range(1, self.size):
            if rank not in lost_ranks:
                with contextlib.suppress(RuntimeError):  # lost meanwhile: the next exchange reports it
                    _send_message(outcome, self.world_ranks[rank], self.group)
        return outcome, lost[0][1] if lost else None

    def _report_and_receive(self, report: Any, left: str) -> tuple[Any, BaseException | None]:
        """Send this rank's report to rank 0, and return the outcome that rank 0 sends back."""
        try:
            _send_message(report, self.world_ranks[0], self.group)
            return _receive_message(self.world_ranks[0], self.group), None
        except RuntimeError as error:
            return (None, self._diagnose_loss([0], left)), error

    def _diagnose_loss(self, ranks: list[int], left: str) -> Diagnosis:
        """Return the watchdog's diagnosis why messages with these ranks failed, with ``left``, the state of the folder."""
        verdict = diagnose_lost_ranks([self.world_ranks[rank] for rank in ranks])
        if verdict is None:
            return {"kind": "lost", "words": f"{format_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} lost; {left}"}
        return verdict | {"words": f"a rank was lost: {verdict['words']}; {left}"} if verdict["kind"] == "lost" else verdict


def describe_difference(first: StateParts, others: StateParts, rank: int) -> str:
    """Return text about the difference between the unequal state parts of rank 0 and of another ``rank``.

    >>> describe_difference([("w", "float32[3]"), ("n", "1")], [("w", "float32[3]"), ("n", "2")], 3)
    "'n' is 2 there, 1 on rank 0"
    >>> describe_difference([("w", "float32[3]")], [("w", "float32[3]"), ("n", "2")], 3)
    "'n' is on rank 3 and not on rank 0"
    """
    here, there = dict(first), dict(others)
    for holder, names, missing, lacking in ((rank, there, 0, here), (0, here, rank, there)):
        if alone := [name for name in names if name not in lacking]:
            return f"{_join_names(alone)} {'is' if len(alone) == 1 else 'are'} on rank {holder} and not on rank {missing}"
    changed = [name for name, words in here.items() if words != there[name]]
    if named := [name for name in changed if name != NESTING_PART]:
        more = f" ({_join_names(named[1:])} too)" if len(named) > 1 else ""
        return f"{named[0]!r} is {there[named[0]]:.200} there, {here[named[0]]:.200} on rank 0{more}"
    name, other = next(((a, b) for (a, _), (b, _) in zip(first, others, strict=True) if a != b), ("", ""))
    return f"{other!r} comes where {name!r} does on rank 0" if name else "its dicts, lists and tuples are nested otherwise"


def _join_names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def first_differing_rank(values: Sequence[object]) -> int | None:
    """Return the first rank with a value that differs from that of rank 0, or None if all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


# --- messages --------------------------------------------------------------------------------------------------------------
_INLINE_BYTES = 4096  # bytes that are sent with the length, so that most values are one message
_MESSAGE_TAG = 0x63686B70  # distinguishes these messages from those of the program
_GROUPS: dict[Any, Any] = {}


def _get_or_make_gloo_group(group: Any, separate_group: bool) -> Any:
    """Return the cached gloo group over the ranks of ``group``, or create it, separate for background threads."""
    cached = _GROUPS.get((group, separate_group))
    if cached is None:
        ranks = dist.get_process_group_ranks(group)
        cached = _GROUPS[group, separate_group] = make_library_group(group, ranks, "cpu", "checkpoints")
    return cached


def _send_message(value: Any, to: int, group: Any) -> None:
    """Send a pickled value to a rank: one message with its length and first bytes, and a second one if it is long."""
    data = pickle.dumps(value)
    first = len(data).to_bytes(8, "little") + data[:_INLINE_BYTES]
    dist.send(_to_byte_tensor(first.ljust(8 + _INLINE_BYTES)), to, group, _MESSAGE_TAG)
    if len(data) > _INLINE_BYTES:
        dist.send(_to_byte_tensor(data[_INLINE_BYTES:]), to, group, _MESSAGE_TAG)


def _receive_message(source: int, group: Any) -> Any:
    """Receive a value that :func:`_send_message` sent, and unpickle it."""
    first = torch.empty(8 + _INLINE_BYTES, dtype=torch.uint8, device="cpu")
    dist.recv(first, source, group, _MESSAGE_TAG)
    received = first.numpy().tobytes()
    length, data = int.from_bytes(received[:8], "little"), received[8:]
    if length > _INLINE_BYTES:
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8, device="cpu")
        dist.recv(rest, source, group, _MESSAGE_TAG)
        data += rest.numpy().tobytes()
    return pickle.loads(data[:length])


def _to_byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _call_and_catch(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call ``fn()``, and return ``(result, None)`` or ``(None, exception)``."""
    try:
        return fn(), None
    except BaseException as error:
        return None, error


def _decide_outcome(gathered: list[Any], then: Callable[[list[Any]], Any]) -> tuple[Any, str | None]:
    """Return ``(then(values), None)``, or ``(None, error text)`` if a rank reports an error or ``then`` raises."""
    failed = [(rank, problem_text) for rank, (_, problem_text) in enumerate(gathered) if problem_text is not None]
    if failed:
        rank, problem_text = failed[0]
        all_equal = all(other == problem_text for _, other in failed) and len(failed) == len(gathered)
        suffix = "" if all_equal else f" (rank {rank}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''})"
        return None, problem_text + suffix
    value, problem = _call_and_catch(lambda: then([value for value, _ in gathered]))
    return value, None if problem is None else _error_text(problem)


def _error_text(error: BaseException) -> str:
    """Return the text about an exception that is sent to the other ranks."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
