"""Tensors inside nested lists, tuples and dicts, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def mapped(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same structure with ``fn(x)`` for every tensor, in order."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return like(value, [mapped(fn, item) for item in value])
    return {key: mapped(fn, item) for key, item in value.items()} if isinstance(value, dict) else value


def filled(value: Any, xs: Iterable[Any]) -> Any:
    """The same structure with ``xs`` in the places of its tensors, in order."""
    following = iter(xs)
    return mapped(lambda _: next(following), value)
