"""Program plans: the plans of a captured function with ``plan=``, and how a call of a planned kind is recorded."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..plan.make_plan import run_and_plan
from ..plan.plan_executor import PlanExecutor
from ..plan.program_plan import ProgramPlan
from .guards.signature import Signature
from .replay.passes import MAX_BUCKET_BYTES

MAX_PLANS = 3  # plans for one kind of call that later runs may leave, as a run does that makes an optimizer's state


class RecordingMode(NamedTuple):
    """Settings of one recording: the plan to run it by, and the limit of joined collectives.

    Attributes:
        around: a context manager to enter around the call.
        is_followed: returns True if the run has followed its plan to the end; called after the run.
        bucket_bytes: most bytes of one joined collective, which may be available earlier or later than needed.
    """

    around: AbstractContextManager[Any] = nullcontext()
    is_followed: Callable[[], bool] = functools.partial(bool, 1)
    bucket_bytes: int = MAX_BUCKET_BYTES


class ProgramPlans:
    """The program plans of one function: a call of a new kind is planned, and the next one is recorded by the plan.

    Args:
        plan: ``"program"``, or a plan for all kinds of calls.
        memory: bytes that a rank may hold at once.
    """

    def __init__(self, plan: str | ProgramPlan, memory: float | None = None) -> None:
        """Check the options of ``capture(plan=, memory=)``; a given plan serves all kinds of calls."""
        if plan != "program" and not isinstance(plan, ProgramPlan):
            raise ArgumentError(f'capture takes plan="program" or a ProgramPlan, got {plan!r}')
        if plan != "program" and memory is not None:
            raise ArgumentError(
                'capture takes memory= only with plan="program"; for a ProgramPlan pass the limit to dt.plan(memory=)'
            )
        self._fixed = plan if isinstance(plan, ProgramPlan) else None
        self._memory = math.inf if memory is None else memory
        self._plans: dict[Any, ProgramPlan] = {}
        self._failures: dict[Any, int] = {}

    def __iter__(self) -> Iterator[ProgramPlan]:
        return iter(self._plans.values() if self._fixed is None else (self._fixed,))

    def needs_plan(self, key: Any) -> bool:
        """Return True if the next call of the kind ``key`` is to be planned, not recorded."""
        return self._fixed is None and key not in self._plans and self._failures.get(key, 0) < MAX_PLANS

    def run_and_plan(self, key: Any, fn: Callable[..., Any], signature: Signature) -> Any:
        """Run ``fn`` without capture, return its result, and store the plan of its program for the kind ``key``."""
        args, kwargs = signature.rebuild(signature.tensors)
        result, self._plans[key] = run_and_plan(fn, args, kwargs, memory=self._memory)
        return result

    def recording_mode(self, key: Any) -> RecordingMode:
        """Return the settings to record a call of the kind ``key`` with: by its plan, if there is one."""
        plan = self._fixed or self._plans.get(key)
        if plan is None:
            return RecordingMode()
        executor, spare = PlanExecutor(plan), max(0.0, self._memory - plan.peak_bytes)
        is_followed = functools.partial(self._check_followed, key, executor)
        return RecordingMode(executor, is_followed, int(min(MAX_BUCKET_BYTES, spare)))

    def _check_followed(self, key: Any, executor: PlanExecutor) -> bool:
        """Return True if the recording followed the plan, or the user gave it; else drop the plan."""
        if executor.is_complete:
            return True
        if self._fixed is not None or self._failures.get(key, 0) == MAX_PLANS - 1:
            warnings.warn(
                "capture: the program differs from the one that was planned, and runs without the plan from here "
                f"on: {executor.difference}",
                stacklevel=4,  # the line that calls the captured function
            )
        self._failures[key] = self._failures.get(key, 0) + 1
        self._plans.pop(key, None)
        return self._fixed is not None
