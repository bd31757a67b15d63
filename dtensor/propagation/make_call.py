"""Make calls: build the :class:`Call` that rules read from an operator and its arguments. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..rules.call import Call
from ..rules.disjoint_partial import NO_FACTS, OperandFacts
from .op_schema import OperatorSchema

ArgumentSlot = tuple[str, int | None]  # (argument, position in its list or None)


def make_call(
    operator: OperatorSchema,
    mesh: DeviceMesh,
    bound: dict[str, Any],
    plain: Collection[ArgumentSlot] = (),
    facts: Mapping[ArgumentSlot, OperandFacts] = NO_FACTS,
) -> tuple[Call, tuple[ArgumentSlot, ...]]:
    """Return the call that rules read, with operands flattened in schema order, and the slot of each operand.

    ``out=`` arguments are results. Numbers that rules see as operands are replicated layouts.
    """
    operands: list[Layout] = []
    slots: list[ArgumentSlot] = []
    plain_positions: set[int] = set()
    for slot, item in iter_operand_slots(operator, bound):
        if isinstance(item, (int, float, complex)):
            plain_positions.add(len(slots))
            item = Layout.replicated(mesh, (), (), torch.float32)
        if isinstance(item, Layout):
            if slot in plain:
                plain_positions.add(len(slots))
            operands.append(item)
            slots.append(slot)
    names = tuple(name for name, _ in slots)
    scalars = operator.scalars.difference(names)
    call = Call(operator.func, mesh, bound, tuple(operands), names, plain=frozenset(plain_positions), scalars=scalars)
    call.operand_facts = tuple(map(facts.get, slots)) if facts else ()
    return call, tuple(slots)


def iter_operand_slots(operator: OperatorSchema, bound: Mapping[str, Any]) -> Iterator[tuple[ArgumentSlot, Any]]:
    """Yield the slot and the value of each argument that may be an operand, in schema order. ``out=`` arguments are results."""
    for name in operator.names:
        if name in operator.outs or not (name in operator.tensors or name in operator.number_operands):
            continue
        value = bound.get(name)
        is_list = isinstance(value, (list, tuple)) and name in operator.tensors
        for index, item in enumerate(value) if is_list else ((None, value),):  # type: ignore[arg-type]  # a list
            if isinstance(item, (int, float, complex, torch.Tensor, Layout)):
                yield (name, index), item
