"""Captured functions: ``capture`` records a function at its first call and replays it over local tensors at later calls."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from ..base.recorder_hooks import current_recorder
from ..base.torch_internals import (
    DeviceContext,
    count_dispatch_modes,
    count_function_modes,
    current_function_modes,
)
from ..base.tracing import has_only_observers
from ..errors import ArgumentError, CaptureError
from ..plan.program_plan import ProgramPlan
from .guards.guard_discovery import discover_guards
from .guards.guard_set import GuardSet, ObservedCode
from .guards.signature import Signature, current_modes, make_signature
from .program_plans import ProgramPlans, RecordingMode
from .recording.recorded_run import Recording
from .recording.recording_check import HAS_ROOM, RankAgreement, agree_on_bits, check_recording, collect_groups, is_confirmed_by
from .replay.replay_program import ReplayProgram, Sources

P = ParamSpec("P")
T = TypeVar("T")
MAX_RECORDINGS = 16  # default limit of one function
MAX_CHANGING_RUNS = 3  # consecutive runs that may leave other variables than they found, as a run does that fills a cache


class CaptureInfo(NamedTuple):
    """Counts of the recordings of a captured function and of its calls, in this process. Counting does not communicate.

    Attributes:
        kept: recordings that are kept.
        limit: the most recordings that are kept.
        recorded: calls that were recorded.
        replayed: calls that were replayed.
        plain: calls that ran without capture, beyond the limit or inside of another recording.

    >>> import dtensor as dt
    >>> dt.capture(lambda x: x).cache_info()
    CaptureInfo(kept=0, limit=..., recorded=0, replayed=0, plain=0)
    """

    kept: int
    limit: int
    recorded: int
    replayed: int
    plain: int


class _AnyFloat:
    """Placeholder in a guard key that is equal to the entry of any float."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and other[0] is float

    __hash__ = None  # type: ignore[assignment]  # it is only in lists, which are not hashed


class _CachedProgram:
    """Replay program in the cache of a captured function, with the guard key that it was recorded for.

    Args:
        guards: the guard set.
        program: the program. Floats that are variables of its tape may have any value in the key.
        confirmed: whether the program needs no further recording that confirms it.
        bit: identifies the recording on all ranks that made it together.
    """

    def __init__(self, guards: GuardSet, program: ReplayProgram, confirmed: bool, bit: int) -> None:
        self.key, self.program, self.confirmed, self.bit = list(guards.key), program, confirmed, bit
        self.changing = tuple(place for _, place in program.float_inputs if place not in program.guarded_floats)
        for place in self.changing:
            self.key[place] = _AnyFloat()
        self._last_match: tuple[GuardSet, int] = guards, guards.version
        self.replays = 0

    @property
    def ready(self) -> bool:
        """Return True if calls can be replayed: the recording is confirmed, and its backward pass was seen if there is one."""
        return self.confirmed and self.program.ready

    def find_changed_floats(self, guards: GuardSet) -> set[int] | None:
        """Return the places of the only entries that differ from the guard set, if all are floats; else None."""
        if len(self.key) != len(guards.key):
            return None
        places = {place for place, (mine, other) in enumerate(zip(self.key, guards.key, strict=True)) if mine != other}
        return places if places <= guards.floats.keys() else None

    def get_sources(self, signature: Signature, guards: GuardSet) -> Sources | None:
        """Return the tensors and floats to replay with, or None if a guard of the recording fails."""
        match = guards, guards.version
        if self._last_match != match:
            if self.key != guards.key:
                return None
            self._last_match = match
        program, tensors = self.program, guards.tensors
        if not program.metadata_guard.holds(tensors):
            return None
        grad_guards = program.grad_guards
        needs_gradients = grad_guards.numbers or grad_guards.library_states
        gradients = grad_guards.get_gradients(tensors) if needs_gradients else ()
        return None if gradients is None else (signature.tensors, tensors, gradients, guards.floats)


class _ThreadGuards(threading.local):
    """Guard sets of a captured function, for each thread, because a guard set is updated in place.

    Two are kept, the last used one first. So a value that changes to and fro (the last of several microbatches reduces) needs no
    new discovery.
    """

    guard_sets: tuple[GuardSet, ...] = ()

    def get_or_discover(self, fn: Any, observed: ObservedCode) -> GuardSet:
        """Return a guard set that matches the present values: a kept one, updated in its floats, or a new one."""
        if self.guard_sets and (self.guard_sets[0].unchanged() or self.guard_sets[0].update_floats()):
            return self.guard_sets[0]
        last = self.guard_sets[:1]
        self.guard_sets = (*(guards for guards in self.guard_sets[1:] if guards.unchanged()), *last)
        if len(self.guard_sets) == len(last):
            self.guard_sets = discover_guards(fn, observed), *last
        return self.guard_sets[0]


def _must_run_plain() -> bool:
    """Return True if the function must run uncaptured: a recorder is active, or the user's modes must see each operation."""
    if current_recorder() is not None or not has_only_observers():
        return True
    return count_function_modes() > 0 and any(type(mode) is not DeviceContext for mode in current_function_modes())


class Captured(Generic[P, T]):
    """A function that is recorded and replayed; see :func:`capture`.

    Recorded or replayed, a call issues the collectives of the function, and raises the errors of the function.

    >>> import torch, dtensor as dt
    >>> f = dt.capture(lambda x: x * 2)
    >>> isinstance(f, dt.Captured), f(dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)))).sum().item()
    (True, 6.0)
    """

    def __init__(
        self,
        fn: Callable[P, T],
        limit: int,
        plans: ProgramPlans | None = None,
        trusted: Collection[str] = (),
        check: int | None = None,
    ) -> None:
        """Wrap ``fn``; nothing is recorded before the first call."""
        self.fn, self._plans, self._trusted, self._check = fn, plans, trusted, check
        self._limit = limit
        self._entries: dict[Any, list[_CachedProgram]] = {}
        self._thread_guards = _ThreadGuards()
        self._observed = ObservedCode()
        self._changing_runs = self._recorded = self._replayed = self._plain = 0
        # By the meshes of the arguments: ranks of one submesh may make calls that other ranks do not make.
        self._agreements: dict[Any, RankAgreement] = {}
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Replay a recording with guards that hold, or else record the call; beyond the limit run ``fn`` itself."""
        if ((count_dispatch_modes() or count_function_modes()) and _must_run_plain()) or torch.compiler.is_compiling():
            self._plain += 1
            return self.fn(*args, **kwargs)
        signature = make_signature(args, kwargs)
        guards = self._thread_guards.get_or_discover(self.fn, self._observed)
        key = (signature.key, current_modes())
        entry = sources = None
        agreement = self._agreements.get(signature.meshes) if self._agreements else None
        if agreement is not None and agreement.may_disagree(signature.may_differ):
            entry, sources, has_room = self._agree_on_entry(key, agreement, signature, guards)
        else:
            for entry in self._entries.get(key, ()):
                if (sources := entry.get_sources(signature, guards)) is not None:
                    break
            else:
                entry = None
            has_room = entry is not None or self._has_room()
        if entry is not None and sources is not None and entry.ready:
            if self._check is not None:
                entry.replays += 1
                if entry.replays % self._check == 0:
                    return self._record_call(key, signature, guards, entry)
            self._replayed += 1
            return entry.program.replay(sources)
        return self._record_call(key, signature, guards, entry) if has_room else self._run_beyond_limit(*args, **kwargs)

    def _agree_on_entry(
        self, key: Any, agreement: RankAgreement, signature: Signature, guards: GuardSet
    ) -> tuple[_CachedProgram | None, Sources | None, bool]:
        """Return ``(entry, sources, has_room)`` on which all ranks agree, after they exchange what each could replay.

        This is for calls for which ranks could choose differently, because sizes of plain tensors may change on one rank. If all
        ranks can replay a recording, ``sources`` is not None. Otherwise ``entry`` waits to be confirmed, or is None, and
        ``has_room`` is True if all ranks can keep a new recording.
        """
        serving = [
            (entry, sources)
            for entry in self._entries.get(key, ())
            if (sources := entry.get_sources(signature, guards)) is not None
        ]
        ready = {entry.bit: (entry, sources) for entry, sources in serving if entry.ready}
        waiting = next((entry for entry, _ in serving if not entry.ready), None)
        room_bit = HAS_ROOM if waiting is not None or self._has_room() else 0
        common = agree_on_bits(agreement.groups, room_bit + sum(ready))
        if common > HAS_ROOM:  # replay the last recording that all ranks made together
            return *ready[1 << common.bit_length() - 1], True
        return waiting, None, bool(common)

    def _has_room(self) -> bool:
        return sum(map(len, self._entries.values())) < self._limit

    def _run_beyond_limit(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` itself because the limit of recordings is reached, and warn at the first such call."""
        if not self._plain:
            warnings.warn(
                f"capture: {self.__name__} was recorded {self._limit} times for different shapes, layouts, "  # type: ignore[attr-defined]
                "numbers or modes. Further calls run without a recording. Pass numbers that change as 0-d "
                "tensors, or raise the limit: capture(fn, limit=...)",
                stacklevel=3,
            )
        self._plain += 1
        return self.fn(*args, **kwargs)

    def _record_call(self, key: Any, signature: Signature, guards: GuardSet, waiting: _CachedProgram | None = None) -> T:
        """Record a call and return the function's result.

        ``waiting``: a recording with guards that hold. It waits for its backward pass, for a recording that confirms it, or for a
        check.
        """
        self._recorded += 1
        if self._plans is not None and self._plans.needs_plan(key):
            return self._plans.run_and_plan(key, self.fn, signature)
        mode = RecordingMode() if self._plans is None else self._plans.recording_mode(key)
        entries = self._entries.get(key, [])
        changing = () if waiting is None else waiting.changing
        if waiting is None:  # floats that have changed between calls are variables from now on
            differing = [(entry.find_changed_floats(guards), entry) for entry in entries]
            changing = next((tuple({*places, *entry.changing}) for places, entry in differing if places), ())
        recording = Recording(self.fn, signature, guards, changing, self._trusted)
        with collect_groups() as groups:
            result, program, changed = recording.run(mode.around, mode.bucket_bytes)
        if self._plans is not None and not mode.is_followed():
            return result
        if recording.observed:  # the next discovery looks into this code
            self._observed.extend(recording.observed)
            self._thread_guards, self._changing_runs = _ThreadGuards(), 0
        is_confirmed = program is not None and (
            not program.has_floats or (waiting is not None and is_confirmed_by(waiting.program, program))
        )
        if waiting is not None and waiting.ready:
            check_recording(waiting.program, program, groups)
        common = agree_on_bits(groups, 0 if changed else 3 if is_confirmed else 1)  # bit 0: unchanged, bit 1: confirmed
        agreement = self._agreements.get(signature.meshes) or RankAgreement()
        agreement.add_recording(groups, recording.same_on_ranks)
        bit = 0
        if agreement.may_disagree(signature.may_differ):
            self._agreements[signature.meshes] = agreement
            bit = agreement.next_bit()
        if program is not None and common:
            entry = _CachedProgram(guards, program, common > 1, bit)
            self._entries[key] = [*(other for other in entries if other is not waiting), entry]
            self._changing_runs = 0
        else:
            self._changing_runs += 1
            if self._changing_runs >= MAX_CHANGING_RUNS:
                raise CaptureError(
                    f"capture: {changed or 'a variable on another rank'} changed in each of {MAX_CHANGING_RUNS} calls, and a "
                    "replay would not change it. Keep it out of the captured function, or store it in a tensor that "
                    "is written to in place"
                )
        return result

    # --- inspection ----------------------------------------------------------------------------------------------------
    def programs(self) -> list[ReplayProgram]:
        """Return the replay programs of all recordings that are kept."""
        return [entry.program for entries in self._entries.values() for entry in entries]

    def plans(self) -> list[ProgramPlan]:
        """Return the program plans that calls follow: with ``plan="program"`` one for each kind of call."""
        return [] if self._plans is None else list(self._plans)

    def source(self) -> str:
        """Return the Python text that a replay runs over the local tensors of this process, for each recording."""
        texts = []
        for number, program in enumerate(self.programs()):
            state = "" if program.ready else ", not replayed before a backward pass was seen"
            texts.append(f"# recording {number}{state}\n{program.get_or_compile().function.text}")
            texts += [backward.function.text for backward in program.backwards.values() if backward.function is not None]
        return "\n".join(texts)

    def cache_info(self) -> CaptureInfo:
        """Return counts of recordings, replays and plain calls; see :class:`CaptureInfo`."""
        return CaptureInfo(len(self.programs()), self._limit, self._recorded, self._replayed, self._plain)

    def clear(self) -> None:
        """Drop all recordings and guard sets, so that the next call is recorded again."""
        self._entries.clear()
        self._thread_guards, self._changing_runs = _ThreadGuards(), 0


def capture(
    fn: Callable[P, T],
    *,
    limit: int = MAX_RECORDINGS,
    plan: str | ProgramPlan | None = None,
    memory: float | None = None,
    trusted: Collection[str] = (),
    check: int | None = None,
) -> Captured[P, T]:
    """Return ``fn`` as a function that is recorded at its first call and replayed afterwards, without dispatch of DTensors.

    One autograd function runs the forward and backward tapes, so gradients, hooks and optimizers work as in eager mode. A replay
    gives bit for bit the results of ``fn`` and issues the same collectives. See docs/capture.md.

    Args:
        fn: a function or module of DTensors; what it reads besides its arguments is found and guarded.
        limit: most recordings that are kept, one for each kind of call (layouts, Python values, modes). Further calls run without
            capture.
        plan: ``"program"``: the first call of a kind runs without capture and is planned, the next is recorded by that plan (see
            docs/plan.md). Results are equal up to the order of additions. Or a plan of ``dt.plan``, also one from a file.
        memory: bytes that a rank may hold at once of the inputs, results and saved tensors of the planned step; makes
            ``plan="program"`` the default.
        trusted: modules of compiled code with functions that ``fn`` may call, because their results depend only on their
            arguments. Calls into compiled code of libraries other than torch and numpy are refused, because they could read
            anything.
        check: with ``check=n``, each n-th call of a recording is recorded again instead of replayed, and both recordings are
            compared. A difference raises ``CaptureError`` on all ranks. Use it in tests of code in ``trusted``.

    Raises:
        CaptureError: ``fn`` does what a replay could not repeat. All ranks raise, and the message says what to write instead.
        PlanError: no plan fits into ``memory``, as in ``dt.plan``.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> f = dt.capture(lambda x: (x * 2).sum())
    >>> f(x).item(), f(x + 1).item(), f.cache_info().replayed
    (6.0, 12.0, 1)
    """
    if not callable(fn):
        raise ArgumentError(f"capture takes a function or a module, got {fn!r}")
    if check is not None and (type(check) is not int or check < 1):
        raise ArgumentError(f"capture takes a positive integer as check=, or None, got {check!r}")
    if plan is None and memory is not None:
        plan = "program"
    return Captured(fn, limit, None if plan is None else ProgramPlans(plan, memory), trusted, check)
