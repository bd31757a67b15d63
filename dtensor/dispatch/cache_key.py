"""Cache key: the static arguments of a call and the interned layouts of its tensors, under which its plan is found again.

A number that only enters the arithmetic (a step size) is in the key by its type, so the plan is found again when it changes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from ..base.recorder_hooks import untracked
from ..base.symbolic_sizes import SymbolicSize, hashable_size, hashable_sizes
from ..base.tracing import has_no_values
from ..state import wrap
from .plain_tensor_args import keep_gradient_plain, torch_makes_constants

KEYED_AS_IS = frozenset((type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))
_TRUE, _FALSE = object(), object()  # True == 1 as a dictionary key; these are not
_get_kind = attrgetter("ndim", "layout", "dtype")
_NUMBER_TYPES: dict[type, Any] = {SymbolicSize: int, torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
BOOL_NAMES: dict[Any, str] = {_TRUE: "True", _FALSE: "False"}


@untracked
def _read_number(x: torch.Tensor) -> Any:
    """Return the number in a plain tensor of one element, for a comparison between ranks; no layout depends on it."""
    value = x.tolist()
    while isinstance(value, list):
        (value,) = value
    return value


def append_to_key(value: Any, key: list[Any], by_type: bool, numbers: list[Any] | None = None) -> Any:
    """Append to a plan-cache key the part for one argument, and return the argument's value for the local call.

    Args:
        by_type: a number is in the key by its type.
        numbers: numbers that are in the key by their type are appended to it.
    """
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
        return append_list_to_key(value, key, by_type, numbers)
    if isinstance(value, torch.Tensor):
        if isinstance(value, wrap.TENSOR):
            key.append(value._layout)
            return value._local
        if value.requires_grad:
            keep_gradient_plain(value)
        is_traced = has_no_values(value)
        key.append((*_plain_tensor_key(value), torch_makes_constants(), is_traced))  # ranks have not compared traced values
        if numbers is not None and kind is torch.Tensor and not is_traced and value.numel() == 1 and value.device.type == "cpu":
            numbers.append(_read_number(value))
        # the zeros of forward-mode gradients have no memory, and the key that handles them is above the local operators
        return torch.zeros_like(value) if value._is_zerotensor() else value
    if kind in _NUMBER_TYPES:  # a symbol of a traced program: it is specialized only if a layout depends on it
        if by_type:
            key.append(_NUMBER_TYPES[kind])
        elif kind is torch.SymInt or kind is SymbolicSize:
            key.append(hashable_size(value))
        else:
            return append_to_key(_NUMBER_TYPES[kind](value), key, by_type)
        return value
    if kind is torch.Size:
        value = tuple(value)
    key.append(kind if isinstance(value, torch.Generator) else value)
    return value


def append_list_to_key(value: Any, key: list[Any], by_type: bool, numbers: list[Any] | None = None) -> Any:
    """Append to a plan-cache key the part for a list, and return it with local values; see :func:`append_to_key`."""
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
        are_scalars = set(map(_get_kind, value)) == {(0, torch.strided, dtype := value[0].dtype)}  # step counts
        key.append(
            (torch_makes_constants(), len(value), dtype)
            if are_scalars
            else (torch_makes_constants(), *map(_plain_tensor_key, value))
        )
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
    return [append_to_key(item, key, by_type, numbers) for item in value]


def _plain_tensor_key(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the part of a plan-cache key for a plain tensor: sizes, strides and dtype; only its format if it is nested."""
    if x.is_nested:  # it has no sizes; planning refuses it
        return (x.layout,)
    return hashable_sizes(x.shape), hashable_sizes(x.stride()) if x.layout is torch.strided else None, x.dtype


# --- symbolic sizes -----------------------------------------------------------------------------------------------------
def replace_symbolic_numbers(value: Any, by_type: bool) -> Any:
    """Return ``value`` with a plain number in place of each symbolic number, as plans are made for it.

    Args:
        by_type: the plan is the same for all numbers of a type.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([replace_symbolic_numbers(item, by_type) for item in value]) if type(value) in (list, tuple) else value
    number_type = _NUMBER_TYPES.get(type(value))
    return value if number_type is None else number_type(2) if by_type else hashable_size(value)
