"""Tensors made of several: subclasses that name their parts in ``__tensor_flatten__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch_internals import is_traceable_wrapper_subclass


def part_by_part(fn: Callable[[Any], Any], x: Any) -> Any:
    """``fn(x)``; of a tensor made of several a copy whose parts are what ``fn`` gives of each, which keeps their shapes."""
    if not is_traceable_wrapper_subclass(x):
        return fn(x)
    made = x.clone()
    for name in made.__tensor_flatten__()[0]:
        part = getattr(made, name)
        part.copy_(part_by_part(fn, part))
    return made
