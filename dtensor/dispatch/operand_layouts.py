"""Operand layouts: replace the tensors of a call by their layouts, and plan the call.

:func:`plan_call` is the one way from the arguments of a call to its plan: for the dispatcher, for lazy views, for ``dt.plan``
and for tests of single strategies. ``explain`` plans a recorded call again, of which it has only the layouts
(:func:`~dtensor.propagation.propagate.propagate_sharding`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from ..base.memory_order import contiguous_stride
from ..base.symbolic_sizes import recompile_if_specialized, specialize_symbols
from ..base.tensor_tree import as_sequence, tensor_leaves
from ..base.validation import check_strided
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.make_call import ArgumentSlot, make_call
from ..propagation.op_schema import OperatorSchema
from ..propagation.propagate import CallPlan, make_gather_plan, propagate_sharding
from ..propagation.select_strategy import StrategySelector, select_strategies
from .cross_mesh import make_mesh_error, meshes_of
from .plain_tensor_args import check_plain_argument
from .programs.facts import facts_of_call


def plan_call(operator: OperatorSchema, bound: dict[str, Any], choose: StrategySelector = select_strategies) -> CallPlan:
    """Return the dispatch plan of a call with these arguments by name; nothing runs.

    Args:
        choose: selects the strategies.

    Raises:
        MeshError: the operands are on several meshes.
    """
    meshes = tuple(meshes_of(bound.values()))
    if len(meshes) != 1:
        raise make_mesh_error(operator.name, meshes)
    (mesh,) = meshes
    plain: set[ArgumentSlot] = set()
    layouts = layouts_of_arguments(operator, bound, mesh, plain)
    if plain and any(x.layout != torch.strided for x in tensor_leaves(list(bound.values()))):  # no rule handles sparse tensors
        return make_gather_plan(operator, *make_call(operator, mesh, layouts, plain), None)
    return propagate_sharding(operator, mesh, layouts, frozenset(plain), choose, facts_of_call(operator, bound))


def layouts_of_arguments(
    operator: OperatorSchema, bound: dict[str, Any], mesh: DeviceMesh, plain: set[ArgumentSlot] | None = None
) -> dict[str, Any]:
    """Return the arguments with a layout in place of each tensor: a replicated layout for a plain tensor.

    Args:
        plain: the slots of plain tensors are added to it.

    Raises:
        MixedTensorError: a plain tensor is not allowed there.
    """
    slots: set[ArgumentSlot] = set() if plain is None else plain
    for value in chain.from_iterable(map(as_sequence, bound.values())):
        if isinstance(value, torch.Tensor) and not hasattr(value, "_layout"):
            check_strided(value, operator.name, sparse=True)
    return {
        name: _replace_tensors(value, (name, None), operator, mesh, slots) if name in operator.tensors else value
        for name, value in bound.items()
    }


def _replace_tensors(value: Any, slot: ArgumentSlot, operator: OperatorSchema, mesh: DeviceMesh, plain: set[ArgumentSlot]) -> Any:
    """Return an argument with layouts in place of tensors; plain tensors are checked, and their slots added to ``plain``."""
    if isinstance(value, (list, tuple)):
        return [_replace_tensors(item, (slot[0], i), operator, mesh, plain) for i, item in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "_layout"):
        return value._layout
    check_plain_argument(value, *slot, operator)
    plain.add(slot)
    stride = value.stride() if value.layout == torch.strided else contiguous_stride(tuple(value.shape))
    return Layout.replicated(mesh, value.shape, stride, value.dtype)


def specialize_sizes(tensors: Iterable[Any]) -> None:
    """Replace symbolic sizes in the layouts of the DTensors among ``tensors`` by numbers, and guard the traced graph on them."""
    for x in tensors:
        layout = getattr(x, "_layout", None)
        if layout is None or not layout.has_symbols:
            continue
        shape, stride = [tuple(map(specialize_symbols, sizes)) for sizes in (layout.shape, layout.stride)]
        x._layout = Layout.of(layout.mesh, layout.placements, shape, stride, layout.dtype)
        recompile_if_specialized((*layout.shape, *layout.stride))
