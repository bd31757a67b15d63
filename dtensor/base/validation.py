"""Arguments of public functions: whole numbers, sizes, tensors. Wrong ones raise before anything is communicated."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ArgumentError, LayoutError, MixedTensorError, UnsupportedOperationError
from .symbolic_sizes import size_of

_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def whole(value: Any, what: str) -> int:
    """``value`` as an int: Python's, numpy's, a 0-d tensor's; no bool, no float, no text.

    >>> whole(3, "dim")
    3
    """
    found = index_of(value)
    if found is None:
        raise ArgumentError(f"{what} takes ints, got {value!r}")
    return found


def index_of(value: Any) -> int | None:
    """What :func:`whole` takes as an int; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):  # of a program that is traced
        found: int = size_of(value)
        return found
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def wholes(values: Any, what: str) -> tuple[int, ...]:
    """A sequence of whole numbers as a tuple."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{what} takes a sequence of ints, got {values!r}")
    return tuple(whole(value, what) for value in values)


def sizes_of(values: Any, what: str) -> tuple[int, ...]:
    """Whole numbers that are not negative."""
    given = wholes(values, what)
    if any(value < 0 for value in given):
        raise LayoutError(f"{what} must be non-negative, got {given}")
    return given


def element_type(dtype: Any) -> torch.dtype:
    """``dtype``, if a distributed tensor can have it."""
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype takes a torch.dtype, got {dtype!r}; write torch.float32, for example")
    if dtype in _QUANTIZED:
        raise UnsupportedOperationError(f"a DTensor cannot have dtype {dtype}; distribute x.dequantize() or x.int_repr()")
    return dtype


def refuse_foreign(tensor: torch.Tensor, what: str) -> None:
    """Raises for a distributed tensor that is none of ours, which to us would be a plain one of its global shape."""
    kind = type(tensor)
    if kind is not torch.Tensor and hasattr(kind, "device_mesh") and not hasattr(tensor, "_layout"):
        raise MixedTensorError(
            f"{what} got a {kind.__name__} of {kind.__module__.removesuffix('._api')} on "
            f"{tensor.device_mesh}, but takes DTensors of dtensor and plain tensors. Import both from one "  # type: ignore[attr-defined]
            "library, or pass the local tensor: dtensor.DTensor.from_local(x.to_local(), mesh, placements, "
            "shape=x.shape, stride=x.stride())"
        )


def strided(tensor: Any, what: str, sparse: bool = False) -> torch.Tensor:
    """``tensor``, if it is one with sizes and strides: it can be cut into blocks; or (``sparse``) one that is always whole."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} takes a torch.Tensor, got {type(tensor).__name__}; write torch.as_tensor(value)")
    refuse_foreign(tensor, what)
    if tensor.is_quantized:
        element_type(tensor.dtype)
    if tensor.is_nested or (tensor.layout is not torch.strided and not sparse):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedOperationError(
            f"{what} takes strided tensors, got a {kind} one; pass x.to_dense(), or its component tensors one by one"
        )
    return tensor
