"""The operands of a call: where they live, and what stands for each while it is planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..base.memory_order import contiguous_stride
from ..base.tensor_tree import listed, tensors
from ..base.validation import strided
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.make_call import Slot, make_call
from ..propagation.op_schema import Operator
from ..propagation.propagate import Plan, gather, propagate
from ..propagation.select_strategy import Chooser, choose
from .cross_mesh import apart, meshes_of
from .disjoint_partial import facts_of_call
from .plain_tensor_args import admit


def plan_for(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser = choose) -> Plan:
    """The plan of a call with these arguments; nothing runs."""
    bound = operator.bind(args, kwargs)
    return plan_of_bound(operator, bound, tuple(meshes_of(bound.values())), choose)


def plan_of_bound(operator: Operator, bound: dict[str, Any], meshes: Sequence[DeviceMesh], choose: Chooser = choose) -> Plan:
    """The same for arguments by name, and the meshes that they live on."""
    if len(meshes) != 1:
        raise apart(operator.name, meshes)
    (mesh,) = meshes
    plain: set[Slot] = set()
    layouts = laid_out(operator, bound, mesh, plain)
    if plain and any(x.layout != torch.strided for x in tensors(list(bound.values()))):  # no rule speaks of sparse ones
        return gather(operator, *make_call(operator, mesh, layouts, plain), None)
    return propagate(operator, mesh, layouts, frozenset(plain), choose, facts_of_call(operator, bound))


def laid_out(operator: Operator, bound: dict[str, Any], mesh: DeviceMesh, plain: set[Slot] | None = None) -> dict[str, Any]:
    """Arguments with layouts in the place of tensors: of a plain one, whose slot is added to ``plain``, a replicated one."""
    found: set[Slot] = set() if plain is None else plain
    for value in chain.from_iterable(map(listed, bound.values())):
        if isinstance(value, torch.Tensor) and not hasattr(value, "_layout"):
            strided(value, operator.name, sparse=True)
    return {
        name: _layout(value, (name, None), operator, mesh, found) if name in operator.tensors else value
        for name, value in bound.items()
    }


def _layout(value: Any, slot: Slot, operator: Operator, mesh: DeviceMesh, plain: set[Slot]) -> Any:
    """Tensors replaced by their layouts, plain ones by a replicated layout where they are allowed."""
    if isinstance(value, (list, tuple)):
        return [_layout(item, (slot[0], i), operator, mesh, plain) for i, item in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "_layout"):
        return value._layout
    admit(value, *slot, operator)
    plain.add(slot)
    stride = value.stride() if value.layout == torch.strided else contiguous_stride(tuple(value.shape))
    return Layout.replicated(mesh, value.shape, stride, value.dtype)
