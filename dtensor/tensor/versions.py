"""Version counters: whether the memory of a tensor was written to, also where several tensors got the same memory."""

from __future__ import annotations

import weakref
from itertools import count

import torch

_GROUPS = count()


def versions_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """What changes whenever the memory of ``x`` is written to; None where nobody counts.

    Views share their base's version. Tensors that got the same memory otherwise form a group.
    """
    root = x if x._base is None else x._base
    number, refs = root.__dict__.get("_shared", _ALONE)
    tensors = [root] if refs is None else [member for ref in refs if (member := ref()) is not None]
    if any(member.is_inference() for member in tensors):
        return None
    return (number, *[member._version for member in tensors])


_ALONE = (-1, None)


def counted_together(x: torch.Tensor, y: torch.Tensor) -> None:
    """From now on ``x`` and ``y`` are the same memory, and each has its own version (``x.data``, ``x.data = y``, ``x.set_(y)``).

    The group has a number, so that what one of them wrote before it vanished is not forgotten.
    """
    roots = [t if t._base is None else t._base for t in (x, y)]
    if roots[0] is roots[1]:
        return
    refs = [ref for root in roots for ref in root.__dict__.get("_shared", (0, [weakref.ref(root)]))[1] if ref() is not None]
    group = next(_GROUPS), refs
    for ref in refs:
        ref().__dict__["_shared"] = group


def pass_version_on(x: torch.Tensor, root: torch.Tensor) -> None:
    """``root`` is now what ``x`` was: those that got the same memory otherwise count with it."""
    group = x.__dict__.pop("_shared", None)
    if group is not None:
        root.__dict__["_shared"] = group
        group[1][:] = [weakref.ref(root) if ref() is x else ref for ref in group[1]]
