"""Report: describe what a plan redistributes, for ``explain``, errors, and the warning of an operator that gathers."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

from ..base.units import bytes_text
from ..base.user_frames import users_frame
from ..errors import GatherWarning
from ..propagation.op_schema import Operator
from ..propagation.propagate import Plan

_ANNOUNCED: set[str] = set()


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """An operator call that communicates, for those who listen to what it issues."""

    operator: Operator
    plan: Plan

    def __str__(self) -> str:
        return self.operator.name


def announce(plan: Plan, name: str) -> None:
    """Warn, once per operator, that it gathers: its layouts and the bytes."""
    if name in _ANNOUNCED or not plan.moves:
        return
    _ANNOUNCED.add(name)
    moved = sum(move.bytes for _, move in plan.moves)
    layouts = ", ".join(map(repr, plan.call.operands))
    warnings.warn(
        f"{name} has no sharding rule for {layouts}: every rank all-gathers the operands "
        f"({bytes_text(moved)} received per rank) and computes the full result. Redistribute to "
        "Replicate() explicitly, or declare a rule with dtensor.register_sharding.",
        GatherWarning,
        stacklevel=_users_frame(),
    )


def _users_frame() -> int:
    """The stack level of the user's line, as ``warnings`` counts from who called."""
    level, frame, last = 1, sys._getframe(1), users_frame(sys._getframe(1))
    while frame is not last and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def describe(plan: Plan) -> str:
    """The plan in words: what moves, what runs, what comes out."""
    lines = [f"  {slot[0]}{'' if slot[1] is None else f'[{slot[1]}]'}: {move}" for slot, move in plan.moves]
    lines += [f"  write {slot[0]} back: {move}" for slot, move in plan.write_back]
    kernel = None if plan.chosen is None else plan.chosen.kernel_row
    if kernel is not None and kernel.kernel is not None:
        lines.append(f"  a kernel with the sharded factor {kernel.factor!r}: {kernel.kernel.collectives} collectives of its own")
    if plan.how == "gather":
        lines.append("  no sharding rule applies: every rank computes the full result")
    return "\n".join(lines)
