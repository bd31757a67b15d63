"""Wrap: make a DTensor of a local tensor and its layout, or write a local value into a tensor. Nothing is checked here, because
every operator call wraps.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_internals import make_wrapper_subclass, set_conj
from ..layout.layout import Layout

TENSOR: Any = None  # the DTensor class, installed by tensor/dtensor.py
_make_pending: Any = None
BATCH_TENSORS = "_batch_tensors"  # the attribute of a tensor that waits for a batch: weak references to all tensors of the batch
_make_wrapper = make_wrapper_subclass
_CPU = torch.device("cpu")


def install_tensor_class(tensor_type: Any) -> None:
    """Set the class of the tensors that this module makes: the DTensor class, which is in a higher layer."""
    global TENSOR
    TENSOR = tensor_type


def install_pending(make_pending: Any) -> None:
    """Set the function that :func:`wrap_pending` calls, which is in a higher layer."""
    global _make_pending
    _make_pending = make_pending


def wrap_local(local: Any, layout: Layout) -> Any:
    """Make the DTensor with this local value and layout."""
    options = layout.wrapper_args
    if options is None:
        layout = layout.with_known_sizes() if layout.has_symbols else layout
        stride = None if layout.dense else layout.stride
        options = (TENSOR, layout.shape, stride, None, None, layout.dtype, torch.strided, _CPU)
        layout.wrapper_args = None if layout.has_symbols else options
    x = _make_wrapper(*options) if local.is_cpu else _make_wrapper(*options[:-1], local.device)
    x._local = local
    x._layout = layout
    if layout.is_complex and local.is_conj():
        set_conj(x, True)  # torch resolves lazy conjugation above __torch_dispatch__, so it must see the bit there
    return x


def wrap_view(local: Any, layout: Layout, base: Any, start: int = 0) -> Any:
    """Make the DTensor with this local value and layout, with the storage offset of a view of ``base``.

    Args:
        start: bytes from the first element of ``base`` to the first element of the view.
    """
    if not (start or base._storage_start):
        return wrap_local(local, layout)
    offset = storage_offset_of_view(base, layout, start)
    x = _make_wrapper(TENSOR, layout.shape, layout.stride, offset, None, layout.dtype, torch.strided, local.device)
    x._local, x._layout, x._storage_start = local, layout, offset
    if layout.is_complex and local.is_conj():
        set_conj(x, True)
    return x


def storage_offset_of_view(base: Any, layout: Layout, start: int) -> int:
    """Return the storage offset of a view of ``base``, in elements of its layout; ``start`` as for :func:`wrap_view`."""
    return (
        (base._storage_start * base._layout.dtype.itemsize + start) // layout.dtype.itemsize
        if start or base._storage_start
        else 0
    )


def write_value(target: Any, value: Any) -> Any:
    """Copy ``value`` into ``target``, which has the same shape, and return ``target``.

    Args:
        target: a DTensor (its local value is written), a local value, or a plain tensor to which all ranks write one value.
        value: a local value in the layout of ``target``, replicated if ``target`` is plain; or a DTensor, which is
            redistributed to the layout of ``target``.
    """
    if value is target:
        return target
    if hasattr(value, "_layout"):
        return target.copy_(value)
    destination = target._local if hasattr(target, "_layout") else target
    if value is not destination:
        destination.copy_(
            value if hasattr(destination, "shards") else getattr(value, "shards", (value,))[0]
        )  # all ranks have the same value
    return target


def wrap_pending(pending: Any, layout: Layout, like: Any) -> Any:
    """Return a DTensor with a local value that is still being received, on the device of ``like``."""
    return _make_pending(pending, layout, like)
