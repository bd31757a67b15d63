"""Communication report: describe what a plan redistributes, for ``explain``, errors, and the warning before a gather."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

from ...base.units import bytes_text
from ...base.user_frames import find_user_frame
from ...errors import GatherWarning
from ...propagation.op_schema import OperatorSchema
from ...propagation.propagate import CallPlan

_WARNED: set[str] = set()  # names of operators


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """The operator call that issues collectives, for listeners."""

    operator: OperatorSchema
    plan: CallPlan

    def __str__(self) -> str:
        return self.operator.name


def warn_of_gather(plan: CallPlan, name: str) -> None:
    """Warn, once for each operator, that it gathers: with its layouts and the bytes received per rank."""
    if name in _WARNED or not plan.redistributions:
        return
    _WARNED.add(name)
    received = sum(redistribution.bytes for _, redistribution in plan.redistributions)
    layouts = ", ".join(map(repr, plan.call.operands))
    warnings.warn(
        f"{name} has no sharding rule for {layouts}: every rank all-gathers the operands "
        f"({bytes_text(received)} received per rank) and computes the full result. Redistribute to "
        "Replicate() explicitly, or declare a rule with dtensor.register_sharding.",
        GatherWarning,
        stacklevel=_stack_level_of_user(),
    )


def _stack_level_of_user() -> int:
    """Return the stack level of the user's line, counted from the caller as ``warnings`` counts."""
    level, frame, last = 1, sys._getframe(1), find_user_frame(sys._getframe(1))
    while frame is not last and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def describe_plan(plan: CallPlan) -> str:
    """Return the plan as text: what is redistributed, what runs, what is written back."""
    lines = [
        f"  {slot[0]}{'' if slot[1] is None else f'[{slot[1]}]'}: {redistribution}"
        for slot, redistribution in plan.redistributions
    ]
    lines += [f"  write {slot[0]} back: {redistribution}" for slot, redistribution in plan.write_back]
    strategy = None if plan.chosen is None else plan.chosen.kernel_strategy
    if strategy is not None and (kernel := strategy.kernel) is not None:
        lines.append(f"  a kernel with the sharded factor {strategy.factor!r}: {kernel.collectives} collectives of its own")
    if plan.how == "gather":
        lines.append("  no sharding rule applies: every rank computes the full result")
    return "\n".join(lines)
