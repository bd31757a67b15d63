"""Version counters: whether the memory of a tensor was written to, also where several tensors got the same memory."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch

from ..base.torch_internals import DispatchKey, is_key_excluded
from ..ranks.per_rank import shards_of

_GROUPS = count()


def versions_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """What changes whenever the memory of ``x`` is written to; None where nobody counts.

    Views share their base's version. Tensors that got the same memory otherwise form a group.
    """
    root = x if x._base is None else x._base
    counter = root.__dict__.get("_counter", root)
    number, refs = counter.__dict__.get("_group", (-1, None))
    members = [root] if refs is None else [member for ref in refs if (member := ref()) is not None]
    if any(member.is_inference() for member in members):
        return None
    return (number, *[member._version for member in members])


def stamp(x: Any) -> list[Any]:
    """Changes whenever the value of a tensor does: it was written to as a whole or in its pieces, or has others."""
    local, now = (x._local, [x._version]) if hasattr(x, "_layout") else (x, [])
    for shard in shards_of(local):
        now += id(shard), shard.data_ptr(), shard._version
    return now


def counted_together(x: torch.Tensor, y: torch.Tensor) -> None:
    """From now on ``x`` and ``y`` are the same memory, and each has its own version (``x.data``, ``x.data = y``, ``x.set_(y)``).

    The group has a number, so that what one of them wrote before it vanished is not forgotten. Its members are not the tensors,
    which ``torch.utils.swap_tensors`` exchanges only where nobody refers to them weakly, but their counters.
    """
    roots = [t if t._base is None else t._base for t in (x, y)]
    if roots[0] is roots[1]:
        return
    refs = [ref for root in roots for ref in _counter(root).__dict__["_group"][1] if ref() is not None]
    group = next(_GROUPS), refs
    for ref in refs:
        ref().__dict__["_group"] = group


def counting_as(x: Any, detached: Any) -> Any:
    """``detached`` of ``x``, which shares its counter: those that count with ``x`` count with it."""
    detached.__dict__["_counter"] = x.__dict__.get("_counter", x)
    return detached


def pass_version_on(x: Any, root: torch.Tensor) -> None:
    """``root`` is now what ``x`` was: those that got the same memory otherwise count with it."""
    if "_counter" in x.__dict__:
        root.__dict__["_counter"] = x.__dict__.pop("_counter")
    elif "_group" in x.__dict__:
        group = root.__dict__["_group"] = x.__dict__.pop("_group")
        group[1][:] = [weakref.ref(root) if ref() is x else ref for ref in group[1]]


def _counter(root: Any) -> Any:
    """What has the version counter of ``root``, lives as long and knows its group: a detached tensor without memory; or itself,
    if it is a view that is computed, or where torch, below autograd, gives what it detaches a counter of its own."""
    made: Any = root.__dict__.get("_counter", root)
    if "_group" not in made.__dict__:
        if not isinstance(type(root)._local, property) and not is_key_excluded(DispatchKey.ADInplaceOrView):
            made = torch.Tensor.detach(root)
            del made._local
            root.__dict__["_counter"] = made
        made.__dict__["_group"] = 0, [weakref.ref(made)]
    return made
