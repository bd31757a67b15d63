"""Positions that name what each rank has itself: the fact stands on the tensor, beside its layout, and plans are made with it.

The places that a rank finds in its block are positions in it: who reads or writes by them need not ask whose they are. That holds
for a tensor of places as it was made, and for views of it: a write ends it, and where nobody counts writes there is none. Nor in
recordings and traced programs, which are to hold for other values. All of it follows from the program, so it is the same on all
ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.recorder_hooks import ACTIVE
from ..base.torch_internals import tree_leaves
from ..base.tracing import under_way
from ..layout.layout import Layout
from ..layout.splits import Split
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from . import wrap
from .cached_redistribute import counted_versions
from .frame import Frame, Step

NAMES = "_names"  # the attribute of a tensor of positions


class Names:
    """By column of a tensor of places how the dim is cut that they are positions of (None: a rank may name others')."""

    __slots__ = ("columns", "versions")

    def __init__(self, columns: tuple[Split | None, ...], versions: Any) -> None:
        self.columns, self.versions = columns, versions


def names_of(x: Any) -> Names | None:
    """What is known of positions now."""
    found = x.__dict__.get(NAMES) if type(x) is wrap.TENSOR else None
    if type(found) is not Names or found.versions is None or found.versions != counted_versions(x) or ACTIVE or under_way():
        return None
    return found


def note_names(x: Any, columns: tuple[Split | None, ...]) -> None:
    if any(columns) and type(x) is wrap.TENSOR:
        x.__dict__[NAMES] = Names(columns, counted_versions(x))


def propagate_local_indices(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Pass on to views, column by column, that an index tensor refers to this rank's own shard only."""
    if not operator.is_view or plan.how != "rule" or not plan.starts or plan.moves or plan.communicates:
        return None
    first = plan.call.operands[0]
    if first.dtype is not torch.int64 or not first.splits or first.splits[0] is None:
        return None
    rows = first.shape[0]
    layouts = [layout for layout in tree_leaves(plan.results) if isinstance(layout, Layout)]

    def step(frame: Frame) -> None:
        base = frame.args[0]
        known = names_of(base) if NAMES in base.__dict__ else None
        if known is not None:
            for x, layout, start in zip(tree_leaves(frame.output), layouts, plan.starts, strict=True):
                if len(columns := _shown(known.columns, layout, start // layout.dtype.itemsize, rows)) == 1:
                    note_names(x, columns)

    return step


def _shown(columns: tuple[Split | None, ...], layout: Layout, start: int, rows: int) -> tuple[Split | None, ...]:
    """The columns that a view shows which begins so many elements after them: they lie one behind the other."""
    if len(columns) == 1:
        return columns
    if not rows or layout.ndim != 1 or layout.stride != (1,) or start % rows + layout.shape[0] > rows:
        return ()
    return columns[start // rows : start // rows + 1]
