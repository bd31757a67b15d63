"""Gradients of what was moved go back to where that lies."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..base.mode_stack import Scoped
from ..cost.link import link_of
from ..layout.layout import Layout
from ..placement import Replicate, Shard
from .alias_base import recorded

PLANNED: Scoped[Callable[[], bool]] = Scoped("planned")  # asks whether a plan says where operands are to lie, and moves them
BRINGING = ContextVar("bringing back", default=False)  # what is moved now is moved for the calls: no program asked for it


def brought(grad: Any, move: Callable[[], Any]) -> Any:
    """``move()``: a gradient where its value lies, for the calls that meet both; itself where a plan says what they are given."""
    if PLANNED.held and PLANNED.last(bool)():
        return grad
    token = BRINGING.set(True)
    try:
        return move()
    finally:
        BRINGING.reset(token)


def bring_back(x: Any, part: bool) -> bool:
    """Have the gradient of ``x``, which is moved, brought to where ``x`` lies once all of its terms are there: half of what
    adding them up everywhere moves, and the pass back meets what the pass forward left where that lies. Whether it has one."""
    if not (x.requires_grad and torch.is_grad_enabled() and recorded(x)):
        return False
    layout, known = x._layout, x.grad_fn.metadata  # of the node: what is written to in place has another
    key = "dtensor", x.output_nr
    if key in known or layout.reduced() is not layout or not any(layout.splits):
        return True
    known[key] = True

    def bring(grad: Any) -> Any:
        have = getattr(grad, "_layout", None)
        if have is None or have.mesh != layout.mesh:
            return None
        pairs = list(zip(layout.placements, have.placements, strict=True))
        if any(isinstance(found, Shard) and not isinstance(own, Shard) for own, found in pairs):
            return None  # it is cut in smaller blocks
        cut = [(own, found) for own, found in pairs if isinstance(own, Shard)]
        if all(found in (own, Replicate()) or (part and isinstance(found, Shard)) for own, found in cut):
            return None  # who puts parts' gradients together has them moved together
        wanted = have.replace(placements=[own if isinstance(own, Shard) else found for own, found in pairs])
        ragged = any(isinstance(where, Shard) and where.sizes is not None for pair in cut for where in pair)
        if ragged and _takes_long(wanted, have):
            return None  # it stays as even as it is
        return brought(grad, lambda: grad.redistribute(placements=wanted.placements))

    x.register_hook(bring)
    return True


def _takes_long(wanted: Layout, have: Layout) -> bool:
    """Whether somebody gets more than he has, and not only a little: what each operation that meets what lies there would take is
    one more collective at least."""
    most, ranks, rate = wanted.max_local_nbytes, wanted.mesh.size(), link_of(wanted.mesh).exchange
    return most > have.max_local_nbytes and rate.seconds(ranks, most) > 1.25 * rate.seconds(ranks, 0)
