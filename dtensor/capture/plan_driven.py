"""Functions captured by a plan of the whole program: planned at the first call of a kind, recorded by that plan at the next."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..plan.api import planned
from ..plan.plan_executor import Following
from ..plan.program_plan import ProgramPlan
from .buckets import BYTES
from .signature import Signature

TRIES = 3  # plans for one kind of call that later runs may leave, as the run does that makes an optimizer's state


class Way(NamedTuple):
    """How a function is recorded: inside of what it runs, what tells afterwards whether its plan was followed to its end, and how
    many bytes of values collectives may move together, and so before or after they need to be there."""

    within: AbstractContextManager[Any] = nullcontext()
    followed: Callable[[], bool] = functools.partial(bool, 1)
    together: int = BYTES


class Plans:
    """The plans of one function, one for each kind of call.

    Args:
        given: ``"program"``, or the plan for all of them.
        memory: bytes that a rank may hold at once.
    """

    def __init__(self, given: str | ProgramPlan, memory: float | None = None) -> None:
        if given != "program" and not isinstance(given, ProgramPlan):
            raise ArgumentError(f'capture takes plan="program" or a ProgramPlan, got {given!r}')
        if given != "program" and memory is not None:
            raise ArgumentError(
                'capture takes memory= only with plan="program"; for a ProgramPlan pass the limit to dt.plan(memory=)'
            )
        self._given = given if isinstance(given, ProgramPlan) else None
        self._memory = math.inf if memory is None else memory
        self._found: dict[Any, ProgramPlan] = {}
        self._left: dict[Any, int] = {}

    def __iter__(self) -> Any:
        return iter(self._found.values() if self._given is None else (self._given,))

    def wants(self, key: Any) -> bool:
        """Whether calls of this kind are still to be planned."""
        return self._given is None and key not in self._found and self._left.get(key, 0) < TRIES

    def make(self, key: Any, fn: Callable[..., Any], signature: Signature) -> Any:
        """What ``fn`` gives; it runs as it is, and is planned."""
        args, kwargs = signature.rebuild(signature.tensors)
        made, self._found[key] = planned(fn, args, kwargs, memory=self._memory)
        return made

    def way(self, key: Any) -> Way:
        """How calls of this kind are recorded."""
        plan = self._given or self._found.get(key)
        if plan is None:
            return Way()
        following, spare = Following(plan), max(0.0, self._memory - plan.peak_bytes)
        return Way(following, functools.partial(self._followed, key, following), int(min(BYTES, spare)))

    def _followed(self, key: Any, following: Following) -> bool:
        if following.followed:
            return True
        if self._given is not None or self._left.get(key, 0) == TRIES - 1:
            warnings.warn(
                "capture: the program differs from the one that was planned, and runs without the plan from here "
                f"on: {following.left}",
                stacklevel=6,
            )
        self._left[key] = self._left.get(key, 0) + 1
        self._found.pop(key, None)
        return self._given is not None
