"""Wrapper subclass: apply a function to each inner tensor that a tensor names in ``__tensor_flatten__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_internals import is_traceable_wrapper_subclass


def map_inner_tensors(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return ``fn(x)``. For a traceable wrapper subclass return a copy in which ``fn`` is applied to each inner tensor; ``fn``
    must keep their shapes.
    """
    if not is_traceable_wrapper_subclass(x):
        return fn(x)
    copy = x.clone()
    for name in copy.__tensor_flatten__()[0]:
        inner = getattr(copy, name)
        inner.copy_(map_inner_tensors(fn, inner))
    return copy
