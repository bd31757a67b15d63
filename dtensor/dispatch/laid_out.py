"""Operators that look at how their operands lie in memory: blocks are given to them in the order that the global strides say.

The strides of a DTensor are those of the global tensor; a local may lie otherwise (``from_local``, what a local operator made of
a block). Most operators do not care. Some choose by strides, raise because of them, or read memory without a look at them: under
``Rule.as_laid_out`` locals that lie otherwise are copied first, so that they do what they would with the global tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.memory_order import Stride
from ..comm import PerRank
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import Operator

Runner = Callable[..., Any]


def as_laid_out(plan: Plan, operator: Operator, runner: Runner) -> Runner:
    """``runner``, its operands in the memory order of their layouts."""
    names = {name: k for k, name in enumerate(operator.names[: operator.positional])}
    single = [(name, x) for name, x in plan.call.arguments.items() if isinstance(x, Layout) and name not in operator.mutated]
    places = [(names.get(name), name, _strides_of(layout)) for name, layout in single if layout.ndim > 1]

    def run(args: Any, kwargs: Any, local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        for place, name, strides in places:
            if place is not None and place < len(local_args):
                local_args[place] = _ordered(local_args[place], strides)
            elif name in local_kwargs:
                local_kwargs[name] = _ordered(local_kwargs[name], strides)
        return runner(args, kwargs, local_args, local_kwargs)

    return run


def moved_in_order(plan: Plan, local: dict[str, Any]) -> None:
    """What a plan moved, in place of it, in the memory order of the layouts that it was moved to: a slice is a view."""
    for name, layout in zip(plan.call.names, plan.operands, strict=True):
        if layout.ndim > 1 and any(slot == (name, None) for slot, _ in plan.moves):
            local[name] = _ordered(local[name], _strides_of(layout))


def _strides_of(layout: Layout) -> list[Stride]:
    """The strides of the blocks held here, by member where all ranks live in this process."""
    mesh = layout.mesh
    if mesh.kind == "in_process":
        return [layout.local_stride(coordinate) for coordinate in mesh.coordinates]
    return [layout.local_stride(mesh.get_coordinate())]


def _ordered(local: Any, strides: list[Stride]) -> Any:
    if not isinstance(local, PerRank):
        return _one(local, strides[0])
    ordered = [_one(shard, stride) for shard, stride in zip(local.shards, strides, strict=True)]
    return local if all(map(_is, ordered, local.shards)) else PerRank(ordered)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _one(x: torch.Tensor, stride: Stride) -> torch.Tensor:
    """``x`` with these strides; those of dims of one element, or of no elements at all, mean nothing."""
    have = x.stride()
    if have == stride or not x.numel():
        return x
    if all(a == b or size == 1 for a, b, size in zip(have, stride, x.shape, strict=True)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
