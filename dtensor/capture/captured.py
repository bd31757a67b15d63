"""``capture``: a function recorded at its first call, and replayed over local tensors afterwards."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from ..base.recorder_hooks import current
from ..base.torch_internals import (
    DeviceContext,
    autocast_enabled,
    count_dispatch_modes,
    count_function_modes,
    current_function_modes,
    pytree,
)
from ..base.tracing import only_looked_at
from ..errors import ArgumentError, CaptureError
from ..plan.program_plan import ProgramPlan
from .guard_discovery import Environment
from .guard_set import Ran
from .plan_driven import Plans, Way
from .program import Program, Sources
from .record_run import Recording
from .recording_check import NEW, Shared, agreed, confirmed, groups_heard
from .replay import replayed
from .signature import Signature, modes, sign

P = ParamSpec("P")
T = TypeVar("T")
KEPT = 16  # recordings of one function
TRIES = 3  # runs that may leave other variables behind than they found, as one that makes a cache does


class CaptureInfo(NamedTuple):
    """How a captured function has been called: recordings kept, the most that are, and calls that recorded, replayed, and ran as
    they are (beyond the limit, or inside another recording).

    Of this process; no communication.

    >>> import dtensor as dt
    >>> dt.capture(lambda x: x).cache_info()
    CaptureInfo(kept=0, limit=..., recorded=0, replayed=0, plain=0)
    """

    kept: int
    limit: int
    recorded: int
    replayed: int
    plain: int


class _Any:
    """Equal to the entry of any float in a survey's key."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and other[0] is float

    __hash__ = None  # type: ignore[assignment]  # of lists that are not hashed


class _Kept:
    """A recording and the key of the survey that it was made for, with floats that may change left open.

    ``bit``: by which the ranks know it that made it together.
    """

    def __init__(self, environment: Environment, program: Program, confirmed: bool, bit: int) -> None:
        self.key, self.program, self.confirmed, self.bit = list(environment.key), program, confirmed, bit
        self.changing = tuple(place for _, place in program.numbers if place not in program.guarded)
        for place in self.changing:
            self.key[place] = _Any()
        self._seen: tuple[Environment, int] = environment, environment.version

    @property
    def ready(self) -> bool:
        """Whether calls can be replayed."""
        return self.confirmed and self.program.ready

    def differing(self, environment: Environment) -> set[int] | None:
        """The floats in which the survey differs from the one that this was made for; None if it differs in more."""
        if len(self.key) != len(environment.key):
            return None
        places = {place for place, (mine, its) in enumerate(zip(self.key, environment.key, strict=True)) if mine != its}
        return places if places <= environment.floats.keys() else None

    def serves(self, signature: Signature, environment: Environment) -> Sources | None:
        """What the program is to be run with, if it computes what the function would now."""
        now = environment, environment.version
        if self._seen != now:
            if self.key != environment.key:
                return None
            self._seen = now
        program, tensors = self.program, environment.tensors
        if not program.guards.hold(tensors):
            return None
        left = program.leaves
        gradients = left.gradients(tensors) if left.numbers or left.between else ()
        return None if gradients is None else (signature.tensors, tensors, gradients, environment.floats)


class _Surveyed(threading.local):
    """What the function reads; threads survey for themselves, as a survey is brought up to date in place.

    Two are kept, the last one first: what is set to and fro (the last of several microbatches reduces) is not surveyed anew.
    """

    found: tuple[Environment, ...] = ()

    def now(self, fn: Any, ran: Ran) -> Environment:
        """The survey, as of now."""
        if self.found and (self.found[0].unchanged() or self.found[0].refreshed()):
            return self.found[0]
        before = self.found[:1]
        self.found = (*(one for one in self.found[1:] if one.unchanged()), *before)
        if len(self.found) == len(before):
            self.found = Environment(fn, ran), *before
        return self.found[0]


def _watched() -> bool:
    """Whether somebody records, or the user's modes want to see each operation, which a replay would not show them."""
    if current() is not None or not only_looked_at():
        return True
    return count_function_modes() > 0 and any(type(mode) is not DeviceContext for mode in current_function_modes())


class Captured(Generic[P, T]):
    """See :func:`capture`.

    A call communicates what the function does, replayed or not.

    >>> import torch, dtensor as dt
    >>> f = dt.capture(lambda x: x * 2)
    >>> isinstance(f, dt.Captured), f(dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)))).sum().item()
    (True, 6.0)

    What the function raises is raised.
    """

    def __init__(self, fn: Callable[P, T], limit: int, plans: Plans | None = None, trusted: Collection[str] = ()) -> None:
        self.fn, self._plans, self._trusted = fn, plans, trusted
        self._limit = limit
        self._entries: dict[Any, list[_Kept]] = {}
        self._surveyed = _Surveyed()
        self._ran = Ran()
        self._tries = self._recorded = self._replayed = self._plain = 0
        self._shared: dict[Any, Shared] = {}  # by meshes of the arguments: one slice may make calls that other ranks do not
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if ((count_dispatch_modes() or count_function_modes()) and _watched()) or torch.compiler.is_compiling():
            self._plain += 1
            return self.fn(*args, **kwargs)
        signature = sign(args, kwargs)
        environment = self._surveyed.now(self.fn, self._ran)
        key = (signature.key, modes())
        kept = sources = None
        shared = self._shared.get(signature.meshes) if self._shared else None
        if shared is not None and shared.may_disagree(signature.plain):
            kept, sources, room = self._agreed(key, shared, signature, environment)
        else:
            for kept in self._entries.get(key, ()):
                if (sources := kept.serves(signature, environment)) is not None:
                    break
            else:
                kept = None
            room = kept is not None or self._has_room()
        if kept is not None and sources is not None and kept.ready:
            self._replayed += 1
            return _replay(kept.program, sources)
        return self._record(key, signature, environment, kept) if room else self._full(*args, **kwargs)

    def _agreed(self, key: Any, shared: Shared, *now: Any) -> tuple[_Kept | None, Sources | None, bool]:
        """What to replay where ranks could disagree, as plain tensors' sizes may change on one of them: they tell each other what
        they could. Otherwise what waits to be confirmed, and whether there is room for a recording on all of them."""
        serving = [(one, found) for one in self._entries.get(key, ()) if (found := one.serves(*now)) is not None]
        ready = {kept.bit: (kept, sources) for kept, sources in serving if kept.ready}
        waiting = next((kept for kept, _ in serving if not kept.ready), None)
        room = NEW if waiting is not None or self._has_room() else 0
        common = agreed(shared.groups, room + sum(ready))
        if common > NEW:  # the last one that all made together
            return *ready[1 << common.bit_length() - 1], True
        return waiting, None, bool(common)

    def _has_room(self) -> bool:
        return sum(map(len, self._entries.values())) < self._limit

    def _full(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._plain:
            warnings.warn(
                f"capture: {self.__name__} was recorded {self._limit} times for different shapes, layouts, "  # type: ignore[attr-defined]
                "numbers or modes. Further calls run without a recording. Pass numbers that change as 0-d "
                "tensors, or raise the limit: capture(fn, limit=...)",
                stacklevel=3,
            )
        self._plain += 1
        return self.fn(*args, **kwargs)

    def _record(self, key: Any, signature: Signature, environment: Environment, waiting: _Kept | None = None) -> T:
        """``waiting``: a recording that serves, but waits for its backward pass or for another one that confirms it."""
        self._recorded += 1
        if self._plans is not None and self._plans.wants(key):
            return self._plans.make(key, self.fn, signature)
        way = Way() if self._plans is None else self._plans.way(key)
        entries = self._entries.get(key, [])
        changing = () if waiting is None else waiting.changing
        if waiting is None:  # floats that have changed between calls are variables from now on
            differing = [(kept.differing(environment), kept) for kept in entries]
            changing = next((tuple({*found, *kept.changing}) for found, kept in differing if found), ())
        recording = Recording(self.fn, signature, environment, changing, self._trusted)
        with groups_heard() as groups:
            result, program, changed = recording.run(way.within, way.together)
        if self._plans is not None and not way.followed():
            return result
        if recording.ran:  # the next survey knows
            self._ran.extend(recording.ran)
            self._surveyed, self._tries = _Surveyed(), 0
        same = program is not None and (not program.followed or (waiting is not None and confirmed(waiting.program, program)))
        found = agreed(groups, 0 if changed else 3 if same else 1)
        shared = self._shared.get(signature.meshes) or Shared()
        shared.add(groups, recording.alike)
        bit = 0
        if shared.may_disagree(signature.plain):
            self._shared[signature.meshes] = shared
            bit = shared.next_bit()
        if program is not None and found:
            kept = _Kept(environment, program, found > 1, bit)
            self._entries[key] = [*(one for one in entries if one is not waiting), kept]
            self._tries = 0
        else:
            self._tries += 1
            if self._tries >= TRIES:
                raise CaptureError(
                    f"capture: {changed or 'a variable on another rank'} changed in each of {TRIES} calls, and a "
                    "replay would not change it. Keep it out of the captured function, or store it in a tensor that "
                    "is written to in place"
                )
        return result

    # --- to look at ----------------------------------------------------------------------------------------------------
    def programs(self) -> list[Program]:
        """The recordings that are kept."""
        return [kept.program for entries in self._entries.values() for kept in entries]

    def plans(self) -> list[ProgramPlan]:
        """The plans that calls follow, with ``plan="program"`` one for each kind of call."""
        return [] if self._plans is None else list(self._plans)

    def source(self) -> str:
        """The text that runs at a replay, for each recording: Python over the local tensors of this process."""
        texts = []
        for number, program in enumerate(self.programs()):
            state = "" if program.ready else ", not replayed before a backward pass was seen"
            texts.append(f"# recording {number}{state}\n{program.compile().source.text}")
            texts += [backward.source.text for backward in program.backwards.values() if backward.source is not None]
        return "\n".join(texts)

    def cache_info(self) -> CaptureInfo:
        """See :class:`CaptureInfo`."""
        return CaptureInfo(len(self.programs()), self._limit, self._recorded, self._replayed, self._plain)

    def clear(self) -> None:
        """Forget the recordings."""
        self._entries.clear()
        self._surveyed, self._tries = _Surveyed(), 0


def _replay(program: Program, sources: Sources) -> Any:
    if autocast_enabled():  # what it casts is in the tape
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False, dtype=torch.float16):
            bases = _bases(program, sources)
    else:
        bases = _bases(program, sources)
    made = program.finish(bases, sources)
    return made[0] if program.alone else pytree.tree_unflatten(made, program.tree)


def _bases(program: Program, sources: Sources) -> Sequence[Any]:
    if not program.differentiable:
        return program.run(program.compile(), sources)
    rest: dict[int, Any] = {}
    made = replayed(program, sources, rest, *[sources[kind][number] for kind, number in program.differentiable])
    if not rest:
        return made
    made = iter(made)
    return [rest[number] if number in rest else next(made) for number in range(len(program.bases))]


def capture(
    fn: Callable[P, T],
    *,
    limit: int = KEPT,
    plan: str | ProgramPlan | None = None,
    memory: float | None = None,
    trusted: Collection[str] = (),
) -> Captured[P, T]:
    """``fn``, recorded when it is first called and replayed afterwards over local tensors, without dispatch of DTensors.

    Forward and backward tapes stand behind one autograd function, so gradients, hooks and optimizers work as ever. Replays give
    bit for bit what ``fn`` gives and issue the same collectives. See docs/capture.md.

    Args:
        fn: a function or module of DTensors; what it reads besides its arguments is found and guarded.
        limit: most recordings kept, one for each kind of call (layouts, Python values, modes); further ones run as they are.
        plan: ``"program"``: the first call of a kind runs as it is and is planned, the next is recorded by that plan (see
            docs/plan.md); results are equal up to the order of additions. Or a plan, as ``dt.plan`` made or a file has it.
        memory: bytes that a rank may hold at once of what the planned step takes, makes and keeps for backward; makes
            ``plan="program"`` the default.
        trusted: modules of compiled code whose functions may be called while ``fn`` is recorded, since what they give depends on
            their arguments alone. Of other libraries than torch and numpy they are refused, as they might read anything.

    Raises:
        CaptureError: when ``fn`` does what a replay could not do again, on all ranks alike; it says what to do instead.
        PlanError: no plan was found that fits into ``memory``, as of ``dt.plan``.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> f = dt.capture(lambda x: (x * 2).sum())
    >>> f(x).item(), f(x + 1).item(), f.cache_info().replayed
    (6.0, 12.0, 1)
    """
    if not callable(fn):
        raise ArgumentError(f"capture takes a function or a module, got {fn!r}")
    if plan is None and memory is not None:
        plan = "program"
    return Captured(fn, limit, None if plan is None else Plans(plan, memory), trusted)
