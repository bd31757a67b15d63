"""Gradient redistribution: a hook on a redistributed operand shards its gradient like it, for half of an all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ...base.mode_stack import ModeStack
from ...cost.link import get_link
from ...layout.layout import Layout
from ...placement import Replicate, Shard
from ...state.version_counters import is_recorded_by_autograd

HAS_PROGRAM_PLAN: ModeStack[Callable[[], bool]] = ModeStack(
    "planned"
)  # returns True if a program plan chooses the layouts of operands
REDISTRIBUTING_GRAD = ContextVar("bringing back", default=False)  # True while dispatch, not the program, redistributes a gradient


def redistribute_grad_unless_planned(grad: Any, redistribute: Callable[[], Any]) -> Any:
    """Return ``redistribute()``, the gradient placed as its value; ``grad`` itself if a program plan chooses layouts."""
    if HAS_PROGRAM_PLAN.held and HAS_PROGRAM_PLAN.last(bool)():
        return grad
    token = REDISTRIBUTING_GRAD.set(True)
    try:
        return redistribute()
    finally:
        REDISTRIBUTING_GRAD.reset(token)


def register_grad_redistribute(x: Any, is_part: bool) -> bool:
    """Register a hook that redistributes the gradient of ``x``, a tensor that is redistributed, to the shards of ``x``.

    That moves half of what an all-reduce of the gradient moves, and the backward pass meets what the forward pass left in the
    same placements.

    Args:
        is_part: ``x`` is one of several views of its base.

    Returns:
        True if autograd records ``x``, so that its gradient passes here.
    """
    if not (x.requires_grad and torch.is_grad_enabled() and is_recorded_by_autograd(x)):
        return False
    layout, metadata = x._layout, x.grad_fn.metadata  # per node: a tensor that is written in place gets another node
    key = "dtensor", x.output_nr
    if key in metadata or layout.reduced() is not layout or not any(layout.splits):
        return True
    metadata[key] = True

    def redistribute_grad(grad: Any) -> Any:
        """Return the gradient redistributed to the shards of its forward value, or None to keep it as it is."""
        present = getattr(grad, "_layout", None)
        if present is None or present.mesh != layout.mesh:
            return None
        pairs = list(zip(layout.placements, present.placements, strict=True))
        if any(isinstance(theirs, Shard) and not isinstance(ours, Shard) for ours, theirs in pairs):
            return None  # the gradient is sharded further
        sharded = [(ours, theirs) for ours, theirs in pairs if isinstance(ours, Shard)]
        if all(theirs in (ours, Replicate()) or (is_part and isinstance(theirs, Shard)) for ours, theirs in sharded):
            return None  # the backward of chunk or unbind redistributes all parts in one exchange
        target = present.replace(placements=[ours if isinstance(ours, Shard) else theirs for ours, theirs in pairs])
        uneven = any(isinstance(each, Shard) and each.sizes is not None for pair in sharded for each in pair)
        if uneven and _makes_slow_rank(target, present):
            return None
        return redistribute_grad_unless_planned(grad, lambda: grad.redistribute(placements=target.placements))

    x.register_hook(redistribute_grad)
    return True


def _makes_slow_rank(target: Layout, present: Layout) -> bool:
    """Return True if ``target`` has larger local tensors than ``present``, large enough to slow down later collectives."""
    most, ranks, rate = target.max_local_nbytes, target.mesh.size(), get_link(target.mesh).exchange
    return most > present.max_local_nbytes and rate.seconds(ranks, most) > 1.25 * rate.seconds(ranks, 0)
