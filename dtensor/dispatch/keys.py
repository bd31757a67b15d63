"""The key of a call: its static arguments and the interned layouts of its tensors.

Numbers that only enter the arithmetic (a step size) are keyed by type, so a plan is found again when they change.
"""

from __future__ import annotations

from typing import Any

import torch

from . import wrapping
from .plain_operands import in_autograd

AS_IT_IS = frozenset((type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))  # in a key as in a call
_TRUE, _FALSE = object(), object()  # True == 1 as a dictionary key; these are not
_SYMBOLS: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
TRUTHS: dict[Any, str] = {_TRUE: "True", _FALSE: "False"}


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
    if kind is wrapping.TENSOR:
        key.append(value._layout)
        return value._local
    if kind is bool:
        key.append(_TRUE if value else _FALSE)
        return value
    if kind is list or kind is tuple:
        return _static_list(value, key, by_type, numbers)
    if isinstance(value, torch.Tensor):
        if isinstance(value, wrapping.TENSOR):
            key.append(value._layout)
            return value._local
        key.append((value.shape, _strides(value), value.dtype, in_autograd()))
        return value
    if kind in _SYMBOLS:  # of a program that is traced: looked at where its value decides something
        kind = _SYMBOLS[kind]
        if not by_type:
            return static(kind(value), key, by_type)
        key.append(kind)
        return value
    if kind is torch.Size:
        value = tuple(value)
    key.append(kind if isinstance(value, torch.Generator) else value)
    return value


def stand_in(value: Any, by_type: bool) -> Any:
    """``value`` as plans are made for it: for a symbol its number, or, where it only enters the arithmetic, one of its kind."""
    if type(value) is list or type(value) is tuple:
        return type(value)([stand_in(item, by_type) for item in value])
    kind = _SYMBOLS.get(type(value))
    return value if kind is None else kind(2) if by_type else kind(value)


def _strides(x: torch.Tensor) -> tuple[int, ...] | None:
    return x.stride() if x.layout is torch.strided else None


def _static_list(value: Any, key: list[Any], by_type: bool, numbers: list[Any] | None) -> Any:
    first = type(value[0]) if value else None
    if first is wrapping.TENSOR:
        try:
            layouts, locals_ = [item._layout for item in value], [item._local for item in value]
        except AttributeError:  # a plain tensor or None among them
            pass
        else:
            key.append(len(value))
            key += layouts
            return locals_
    elif first is torch.Tensor and set(map(type, value)) == {first}:  # step counts
        key.append((in_autograd(), *[(x.shape, _strides(x), x.dtype) for x in value]))
        return list(value)
    elif (first is int or first is float) and (len(value) == 1 or len(set(map(type, value))) == 1):  # True == 1 as a key
        key.append((first, len(value)) if by_type else (first, *value))
        if by_type and numbers is not None:
            numbers += value
        return value
    key.append(len(value))
    return [static(item, key, by_type, numbers) for item in value]
