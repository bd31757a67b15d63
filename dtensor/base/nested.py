"""Tensors inside nested lists, tuples and dicts, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def leaves(value: Any) -> Iterator[Any]:
    """Everything that is no list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def listed(value: Any) -> Sequence[Any]:
    """The items of a list or tuple; of anything else itself."""
    return value if isinstance(value, (list, tuple)) else (value,)


def like(sequence: Any, items: Any) -> Any:
    """``items`` as the same kind of container; named tuples take them one by one."""
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def replace(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same structure with every tensor replaced, in order."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, list):
        return [replace(fn, item) for item in value]
    if isinstance(value, tuple):
        return tuple(replace(fn, item) for item in value)
    if isinstance(value, dict):
        return {key: replace(fn, item) for key, item in value.items()}
    return value
