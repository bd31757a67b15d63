"""Where operators wanted a tensor that was not there: those to come want what it grows to so, too.

A cache that lies by channels, where attention wants whole heads, would be gathered for each token, all of it. What is put beside
it is little: the result lies where it is wanted, and only what is new moves (``OperatorTraits.joins``,
``Call.with_preferred_layouts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.recorder_hooks import recorded_by
from ..layout.layout import Layout
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from . import wrap
from .frame import Frame, Step
from .redistribution_cache import WANTED, Wanted, note_wanted, recording


def grown(x: Any, joined: Any) -> bool:
    """Whether a tensor is more than half of all that is joined."""
    if type(x) is not wrap.TENSOR or not isinstance(joined, Sequence):
        return False
    return bool(2 * x._layout.numel > sum([y.numel() for y in joined]))


def wanted_of(x: Any) -> Layout | None:
    """Where an operator wanted ``x``, or the tensor of which it shows some positions."""
    base = None if WANTED in x.__dict__ else x._base
    found = (x if base is None else base).__dict__.get(WANTED)
    if type(found) is not Wanted or not recorded_by(found.recorder, recording()):
        return None
    own, at = x._layout, found.layout
    if base is None:
        return at if at.shape == own.shape else None
    if own.splits != base._layout.splits or own.partials != base._layout.partials:
        return None
    cut = [split for split, n, m in zip((*own.splits, *at.splits), own.shape * 2, at.shape * 2, strict=True) if n != m and split]
    return None if cut else Layout.from_splits(own.mesh, at.splits, at.partials, own.shape, own.stride, own.dtype)


def propagate_preferred_layout(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Note that the result has the layout that operators preferred for the operand that it extends."""
    if plan.chosen is None or not any(own is not None and own.wanted is not None for own in plan.call.known):
        return None

    def step(frame: Frame) -> None:
        made = frame.output
        if type(made) is wrap.TENSOR:
            note_wanted(made, made._layout)

    return step
