"""Joint nodes: the autograd nodes of all ranks as one, and torch's functions that take nodes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.autograd.graph
import torch.utils.module_tracker
from torch import Tensor
from torch.autograd.graph import Node

from ..base.patches import changed, restored
from .joint_autograd import flat, merged
from .per_rank import _BEFORE, PerRank
from .rank_values import RankValues, agreed, one_or_each


class RankNodes(RankValues):
    """The autograd node of each rank, in rank order: what ``grad_fn`` of a ``PerRank`` is.

    Attributes and methods are those of each rank's node: nodes come back as ``RankNodes``, tensors as ``PerRank``.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"nodes of each rank have no {name} of their own")
        values = [getattr(node, name) for node in self]
        return super().__getattr__(name) if all(map(callable, values)) else joined(values, name)


def joined(values: Sequence[Any], name: str) -> Any:
    """Return the ranks' ``values`` of a node's attribute as one: nodes, tensors, numbers, and tuples of these."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if all(isinstance(value, Node) for value in values):
        return RankNodes(values)
    if all(isinstance(value, Tensor) for value in values):
        return PerRank(values)
    if all(type(value) is int for value in values):
        return one_or_each(values)
    if all(isinstance(value, tuple) for value in values):
        alike = len({len(value) for value in values}) == 1
        return tuple(joined(column, name) for column in zip(*values, strict=True)) if alike else RankValues(values)
    kinds = {type(value) for value in values}
    return agreed(list(values), f"`{name}` of a node of each rank") if len(kinds) == 1 else RankValues(values)


def multi_grad_hook(tensors: Sequence[Any], fn: Callable[..., Any], *, mode: str = "all") -> Any:
    """Register ``fn`` once for all ranks: it gets the gradients of all ranks together."""
    if not any(isinstance(x, PerRank) for x in tensors):
        return _PLAIN(tensors, fn, mode=mode)  # type: ignore[arg-type]  # torch's stub lists the modes
    counts = [len(x.shards) if isinstance(x, PerRank) else 0 for x in tensors]

    def joint(grads: Sequence[Tensor | None]) -> None:
        items = iter(grads)
        fn([merged([next(items) for _ in range(count)]) if count else next(items) for count in counts])

    return _PLAIN(flat(tensors), joint if mode == "all" else fn, mode=mode)  # type: ignore[arg-type]  # see above


_PLAIN = torch.autograd.graph.register_multi_grad_hook
_PLACES: tuple[Any, ...] = (torch.autograd.graph, torch.utils.module_tracker)


def watch_hooks() -> None:
    """Have ``register_multi_grad_hook`` take ``PerRank`` tensors, also where ``ModuleTracker`` calls it."""
    for place in _PLACES:
        if place.register_multi_grad_hook is _PLAIN:
            place.register_multi_grad_hook = multi_grad_hook
            changed(f"{place.__name__}.register_multi_grad_hook")


def leave_hooks() -> None:
    """Give torch its own function again."""
    for place in _PLACES:
        if place.register_multi_grad_hook is multi_grad_hook:
            place.register_multi_grad_hook = _PLAIN
            restored(f"{place.__name__}.register_multi_grad_hook")


_BEFORE.append(watch_hooks)
