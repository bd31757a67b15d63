"""Validation of arguments of public functions: ints, sizes, dtypes, tensors. Wrong arguments raise before any communication."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ArgumentError, LayoutError, MixedTensorError, UnsupportedOperationError
from .symbolic_sizes import hashable_size

_QUANTIZED_DTYPES = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def check_int(value: Any, what: str) -> int:
    """Return ``value`` as an int. Ints of Python and numpy and 0-d integer tensors are ints; bools, floats and strings raise.

    >>> check_int(3, "dim")
    3
    """
    index = as_index(value)
    if index is None:
        raise ArgumentError(f"{what} takes ints, got {value!r}")
    return index


def as_index(value: Any) -> int | None:
    """Return ``value`` as an int (or a hashable symbol while traced) if :func:`check_int` accepts it, else None."""
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):  # while a program is traced
        size: int = hashable_size(value)
        return size
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_ints(values: Any, what: str) -> tuple[int, ...]:
    """Return a sequence of ints as a tuple; raise ArgumentError for anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{what} takes a sequence of ints, got {values!r}")
    return tuple(check_int(value, what) for value in values)


def check_sizes(values: Any, what: str) -> tuple[int, ...]:
    """Return a sequence of non-negative ints as a tuple; raise for anything else."""
    sizes = check_ints(values, what)
    if any(value < 0 for value in sizes):
        raise LayoutError(f"{what} must be non-negative, got {sizes}")
    return sizes


def check_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype`` if a DTensor can have it; raise for quantized dtypes and other objects."""
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype takes a torch.dtype, got {dtype!r}; write torch.float32, for example")
    if dtype in _QUANTIZED_DTYPES:
        raise UnsupportedOperationError(f"a DTensor cannot have dtype {dtype}; distribute x.dequantize() or x.int_repr()")
    return dtype


def refuse_torch_dtensor(tensor: torch.Tensor, what: str) -> None:
    """Raise MixedTensorError for a distributed tensor of another library.

    It would otherwise count as a plain tensor of its global shape.
    """
    kind = type(tensor)
    if kind is not torch.Tensor and hasattr(kind, "device_mesh") and not hasattr(tensor, "_layout"):
        raise MixedTensorError(
            f"{what} got a {kind.__name__} of {kind.__module__.removesuffix('._api')} on "
            f"{tensor.device_mesh}, but takes DTensors of dtensor and plain tensors. Import both from one "  # type: ignore[attr-defined]
            "library, or pass the local tensor: dtensor.DTensor.from_local(x.to_local(), mesh, placements, "
            "shape=x.shape, stride=x.stride())"
        )


def check_strided(tensor: Any, what: str, sparse: bool = False) -> torch.Tensor:
    """Return ``tensor`` if it has strides, so that it can be sharded, else raise. ``sparse=True`` also accepts sparse ones."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} takes a torch.Tensor, got {type(tensor).__name__}; write torch.as_tensor(value)")
    refuse_torch_dtensor(tensor, what)
    if tensor.is_quantized:
        check_dtype(tensor.dtype)
    if tensor.is_nested or (tensor.layout is not torch.strided and not sparse):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedOperationError(
            f"{what} takes strided tensors, got a {kind} one; pass x.to_dense(), or its component tensors one by one"
        )
    return tensor
