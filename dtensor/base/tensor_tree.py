"""Tensor tree: list and map the tensors inside nested values, wrapper subclasses and modules, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .torch_internals import is_traceable_wrapper_subclass


def iter_tree_leaves(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists, tuples and dicts that are none of these, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tree_leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tree_leaves(item)
    else:
        yield value


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return all tensors in the nested ``value``, in order."""
    return [leaf for leaf in iter_tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def as_sequence(value: Any) -> Sequence[Any]:
    """Return a list or tuple unchanged, anything else as a tuple of one item."""
    return value if isinstance(value, (list, tuple)) else (value,)


def rebuild_sequence(sequence: Any, items: Any) -> Any:
    """Return ``items`` in a container of the type of ``sequence``. A named tuple takes the items as separate arguments."""
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return the nested ``value`` with ``fn(x)`` in place of each leaf, which is no list, tuple or dict, called in order."""
    if isinstance(value, (list, tuple)):
        return rebuild_sequence(value, [map_leaves(fn, item) for item in value])
    return {key: map_leaves(fn, item) for key, item in value.items()} if isinstance(value, dict) else fn(value)


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the nested ``value`` with ``fn(x)`` in place of every tensor, called in order."""
    return map_leaves(lambda x: fn(x) if isinstance(x, torch.Tensor) else x, value)


def fill_tensors(value: Any, values: Iterable[Any]) -> Any:
    """Return the nested ``value`` with ``values`` in place of its tensors, in order."""
    remaining = iter(values)
    return map_tensors(lambda _: next(remaining), value)


def map_inner_tensors(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return ``fn(x)``, or a copy of a traceable wrapper subclass with ``fn``, which keeps shapes, on each inner tensor."""
    if not is_traceable_wrapper_subclass(x):
        return fn(x)
    copy = x.clone()
    for name in copy.__tensor_flatten__()[0]:
        inner = getattr(copy, name)
        inner.copy_(map_inner_tensors(fn, inner))
    return copy


# --- tensors of a module itself, without those of submodules ---------------------------------------------------------------
def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the parameters and buffers of ``module`` itself: the dict that holds each, its name, and the tensor."""
    for holder in (module._parameters, module._buffers):
        for name, x in list(holder.items()):
            if x is not None:
                yield holder, name, x
