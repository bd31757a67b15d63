"""The key of a call: its static arguments and the interned layouts of its tensors.

Numbers that only enter the arithmetic (a step size) are keyed by type, so a plan is found again when they change.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from ..base.recorder_hooks import aside
from ..base.symbolic_sizes import OpenSize, settled, size_of, sizes, still_open
from ..base.tensor_tree import listed
from ..base.tracing import has_no_values
from ..layout.layout import Layout
from . import wrap
from .plain_tensor_args import as_plain_gradient, made_by_torch

AS_IT_IS = frozenset((type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))  # in a key as in a call
_TRUE, _FALSE = object(), object()  # True == 1 as a dictionary key; these are not
_KIND = attrgetter("ndim", "layout", "dtype")
_SYMBOLS: dict[type, Any] = {OpenSize: int, torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
TRUTHS: dict[Any, str] = {_TRUE: "True", _FALSE: "False"}


@aside
def _compared(x: torch.Tensor) -> Any:
    """The number in a plain tensor of no dims, for a comparison between ranks: it decides nothing."""
    return x.tolist()


def static(value: Any, key: list[Any], by_type: bool, numbers: list[Any] | None = None) -> Any:
    """The local form of one argument, its part of the key appended; to ``numbers`` those that are in the key by their type."""
    kind = type(value)
    if kind is int or kind is float or kind is complex:
        if by_type:
            key.append(kind)
            if numbers is not None:
                numbers.append(value)
        elif kind is int:
            key.append(value)
        else:
            key += kind, value
        return value
    if kind is wrap.TENSOR:
        key.append(value._layout)
        return value._local
    if kind is bool:
        key.append(_TRUE if value else _FALSE)
        return value
    if kind is list or kind is tuple:
        return static_list(value, key, by_type, numbers)
    if isinstance(value, torch.Tensor):
        if isinstance(value, wrap.TENSOR):
            key.append(value._layout)
            return value._local
        if value.requires_grad:
            as_plain_gradient(value)
        without = has_no_values(value)
        key.append((*_manner(value), made_by_torch(), without))  # what is traced, ranks have not compared
        if numbers is not None and kind is torch.Tensor and not without and not value.dim() and value.device.type == "cpu":
            numbers.append(_compared(value))
        # the zeros of forward-mode gradients have no memory, and what knows that lies above the local operators
        return torch.zeros_like(value) if value._is_zerotensor() else value
    if kind in _SYMBOLS:  # of a program that is traced: looked at where its value decides something
        if by_type:
            key.append(_SYMBOLS[kind])
        elif kind is torch.SymInt or kind is OpenSize:
            key.append(size_of(value))
        else:
            return static(_SYMBOLS[kind](value), key, by_type)
        return value
    if kind is torch.Size:
        value = tuple(value)
    key.append(kind if isinstance(value, torch.Generator) else value)
    return value


def stand_in(value: Any, by_type: bool) -> Any:
    """``value`` as plans are made for it: for a symbol a number of its kind, where any other has the same plan."""
    if isinstance(value, (list, tuple)):
        return type(value)([stand_in(item, by_type) for item in value]) if type(value) in (list, tuple) else value
    kind = _SYMBOLS.get(type(value))
    return value if kind is None else kind(2) if by_type else size_of(value)


def sized_of(values: Iterable[Any]) -> list[Any]:
    """The tensors among them whose sizes are symbols."""
    return [x for one in values for x in listed(one) if (layout := getattr(x, "_layout", None)) is not None and layout.sized]


def settle(values: Iterable[Any]) -> None:
    """Have numbers for the sizes of these tensors from now on, on which the graph is guarded."""
    for x in sized_of(values):
        layout = x._layout
        shape, stride = [tuple(map(settled, values)) for values in (layout.shape, layout.stride)]
        x._layout = Layout.of(layout.mesh, layout.placements, shape, stride, layout.dtype)
        still_open((*layout.shape, *layout.stride))


def _manner(x: torch.Tensor) -> tuple[Any, ...]:
    if x.is_nested:  # it has no sizes, and is refused where the call is planned
        return (x.layout,)
    return sizes(x.shape), sizes(x.stride()) if x.layout is torch.strided else None, x.dtype


def static_list(value: Any, key: list[Any], by_type: bool, numbers: list[Any] | None = None) -> Any:
    """The same of a list or tuple."""
    first = type(value[0]) if value else None
    if first is wrap.TENSOR:
        try:
            layouts, locals_ = [item._layout for item in value], [item._local for item in value]
        except AttributeError:  # a plain tensor or None among them
            pass
        else:
            key.append(len(value))
            key += layouts
            return locals_
    elif first is torch.Tensor and set(map(type, value)) == {first}:
        of_one_kind = set(map(_KIND, value)) == {(0, torch.strided, dtype := value[0].dtype)}  # step counts
        key.append((made_by_torch(), len(value), dtype) if of_one_kind else (made_by_torch(), *map(_manner, value)))
        return list(value)
    elif (first is int or first is float) and (len(value) == 1 or len(set(map(type, value))) == 1):  # True == 1 as a key
        key.append((first, len(value)) if by_type else (first, *value))
        if by_type and numbers is not None:
            numbers += value
        return value
    elif first is bool and set(map(type, value)) == {bool}:
        key.append((bool, *value))
        return value
    key.append(len(value))
    return [static(item, key, by_type, numbers) for item in value]
