"""Wrapping: make a DTensor of a local tensor and its layout. This is the hot path: nothing is checked."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_internals import make_wrapper_subclass, set_conj
from ..layout.layout import Layout

TENSOR: Any = None  # the DTensor class, installed by tensor/dtensor.py
_PENDING: Any = None
SHOWN = "_shown"  # the attribute of one that waits with others: weak references to all of them
# What the library hangs on tensors, of what they are and of what is known of them; all else are the user's own.
IDENTITY = frozenset({"_begins", "_data_parallel", "_memory", "_origin", "_pending", "_place"})
KNOWN = frozenset(
    {
        "_apart",
        "_counted",
        "_forms",
        "_grad_layout",
        "_is_param",
        "_left",
        "_names",
        "_own_uses",
        "_ownerships",
        "_parted",
        "_passed",
        "_parts",
        "_shared",
        "_shown",
        "_wanted",
    }
)
_MAKE = make_wrapper_subclass
_CPU = torch.device("cpu")


def install(tensor_type: Any) -> None:
    """Tell dispatch which class it serves (a layer above this one)."""
    global TENSOR
    TENSOR = tensor_type


def install_pending(pending: Any) -> None:
    """Tell dispatch how to make one whose local is on its way."""
    global _PENDING
    _PENDING = pending


def wrap_local(local: Any, layout: Layout) -> Any:
    """The DTensor with this local and layout."""
    options = layout.made_with
    if options is None:
        layout = layout.known() if layout.sized else layout
        stride = None if layout.dense else layout.stride
        options = (TENSOR, layout.shape, stride, None, None, layout.dtype, torch.strided, _CPU)
        layout.made_with = None if layout.sized else options
    made = _MAKE(*options) if local.is_cpu else _MAKE(*options[:-1], local.device)
    made._local = local
    made._layout = layout
    if layout.is_complex and local.is_conj():
        set_conj(made, True)  # below __torch_dispatch__ nobody carries out a lazy conjugation: torch must see it above
    return made


def wrap_view(local: Any, layout: Layout, base: Any, start: int = 0) -> Any:
    """The DTensor with this local and layout, a view of ``base`` that begins so many bytes after it does."""
    if not (start or base._begins):
        return wrap_local(local, layout)
    begins = begins_after(base, layout, start)
    made = _MAKE(TENSOR, layout.shape, layout.stride, begins, None, layout.dtype, torch.strided, local.device)
    made._local, made._layout, made._begins = local, layout, begins
    if layout.is_complex and local.is_conj():
        set_conj(made, True)
    return made


def begins_after(base: Any, layout: Layout, start: int) -> int:
    """Where a view of ``base`` begins, in elements of its layout; ``start``: bytes after where the base does."""
    return (base._begins * base._layout.dtype.itemsize + start) // layout.dtype.itemsize if start or base._begins else 0


def wrap_pending(pending: Any, layout: Layout, like: Any) -> Any:
    return _PENDING(pending, layout, like)
