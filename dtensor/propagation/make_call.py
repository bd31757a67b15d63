"""From an operator and its arguments to the :class:`Call` that rules look at. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..rules.call import Call
from ..rules.disjoint_partial import NOTHING, Known
from .op_schema import Operator

Slot = tuple[str, int | None]  # an argument, and the position inside it if it is a list


def make_call(
    operator: Operator,
    mesh: DeviceMesh,
    bound: dict[str, Any],
    plain: Collection[Slot] = (),
    known: Mapping[Slot, Known] = NOTHING,
) -> tuple[Call, tuple[Slot, ...]]:
    """The call with its operands flattened in schema order, and the slot of each (``out=`` arguments are results)."""
    operands: list[Layout] = []
    slots: list[Slot] = []
    fixed: set[int] = set()
    for slot, item in places_of(operator, bound):
        if isinstance(item, (int, float, complex)):
            fixed.add(len(slots))
            item = Layout.replicated(mesh, (), (), torch.float32)
        if isinstance(item, Layout):
            if slot in plain:
                fixed.add(len(slots))
            operands.append(item)
            slots.append(slot)
    names = tuple(name for name, _ in slots)
    scalars = operator.scalars.difference(names)
    call = Call(operator.func, mesh, bound, tuple(operands), names, plain=frozenset(fixed), scalars=scalars)
    call.known = tuple(map(known.get, slots)) if known else ()
    return call, tuple(slots)


def places_of(operator: Operator, bound: Mapping[str, Any]) -> Iterator[tuple[Slot, Any]]:
    """What may be operands of a call, in schema order, with where they stand (``out=`` arguments are results)."""
    for name in operator.names:
        if name in operator.outs or not (name in operator.tensors or name in operator.number_operands):
            continue
        value = bound.get(name)
        listed = isinstance(value, (list, tuple)) and name in operator.tensors
        for index, item in enumerate(value) if listed else ((None, value),):  # type: ignore[arg-type]  # a list
            if isinstance(item, (int, float, complex, torch.Tensor, Layout)):
                yield (name, index), item
