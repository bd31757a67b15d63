"""Operators that read how operands are laid out in memory: they get blocks in the order of the global strides.

The strides of a DTensor are those of the global tensor; a local may lie otherwise (``from_local``, what a local operator made of
a block). Most operators do not care. Some choose by strides, raise because of them, or read memory without a look at them: under
``Rule.as_laid_out`` locals that lie otherwise are copied first, so that they do what they would with the global tensor.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from ..base.memory_order import Stride, dense_in
from ..comm import PerRank, communicator_of
from ..layout.layout import Layout
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from .frame import Frame, Step


def order_inputs_in_memory(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Copy local operands whose memory order differs from that of their layouts, where the rule asks for it
    (``Rule.as_laid_out``): slices, and redistributed operands."""
    if plan.rule is None or not plan.rule.as_laid_out:
        return None
    moved = {slot for slot, _ in plan.moves}
    single = {name: x for name, x in plan.call.arguments.items() if isinstance(x, Layout) and name not in operator.mutated}
    single |= {name: x for name, x in zip(plan.call.names, plan.operands, strict=True) if (name, None) in moved}
    places = [(form.place(name), _strides_of(x)) for name, x in single.items() if x.ndim > 1]
    if not places:
        return None

    def step(frame: Frame) -> None:
        for place, strides in places:
            local = frame.local(place)
            if type(local) is not torch.Tensor or local.stride() != strides[0]:
                frame.put_local(place, _ordered(local, strides))

    return step


def _strides_of(layout: Layout) -> list[Stride]:
    """The strides of the blocks held here, by member where all ranks live in this process.

    Dims that the global tensor repeats (stride 0) stand outermost: nothing is known of their place, and operators that read rows
    need these whole.
    """
    mesh = layout.mesh
    order = sorted(range(layout.ndim), key=lambda d: (layout.stride[d] != 0, -layout.stride[d]))
    return [dense_in(layout.shape_of(member), order) for member in communicator_of(mesh).held]


def _ordered(local: Any, strides: list[Stride]) -> Any:
    if not isinstance(local, PerRank):
        return _one(local, strides[0])
    ordered = [_one(shard, stride) for shard, stride in zip(local.shards, strides, strict=True)]
    return local if all(map(is_, ordered, local.shards)) else PerRank(ordered)


def _one(x: torch.Tensor, stride: Stride) -> torch.Tensor:
    """``x`` with these strides; those of dims of one element, that are repeated, or of no elements at all, mean nothing."""
    have = x.stride()
    if have == stride or not x.numel():
        return x
    if all(a in (b, 0) or size == 1 for a, b, size in zip(have, stride, x.shape, strict=True)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
