"""``RankValues``: one Python value per member, and when the values of all members count as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import LayoutError


class RankValues(tuple[Any, ...]):
    """One arbitrary Python value per member of the mesh, in member order.

    ``map`` and ``map_ranks`` take it apart again. It refuses ``bool()`` where members disagree.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        truths = {bool(value) for value in self}
        if len(truths) > 1:
            raise LayoutError(f"the truth of {self!r} differs between ranks; reduce it with any() or all()")
        return True in truths

    def __repr__(self) -> str:
        return "RankValues(" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self)) + ")"


_PLAIN = (bool, int, float, complex, str, list, tuple)


def agreed(values: list[Any], what: str) -> Any:
    """The value that all ranks have, bit for bit; a ``RankValues`` of objects that have no value to compare.

    Raises:
        LayoutError: plain values that differ, with ``what`` they are.
    """
    first = values[0]
    if all(_same(first, value) for value in values[1:]):
        if isinstance(first, np.ndarray):
            first.flags.writeable = False  # it is the first rank's memory: a write would leave the others behind
        return first
    if not isinstance(first, (*_PLAIN, np.ndarray, torch.dtype, torch.device)):
        return RankValues(values)
    shown = ", ".join(f"rank {rank}: {_short(value)}" for rank, value in enumerate(values))
    raise LayoutError(
        f"{what} differs between ranks ({shown}); take one rank's tensor from .shards, or run per-rank code with "
        "dtensor.map_ranks(lambda coordinate, x: ..., x, mesh=mesh)"
    )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, str, torch.Size)):
        return bool(a == b)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, _PLAIN):
        return repr(a) == repr(b)  # repr tells 0.0 from -0.0, 1 from True, and takes nan for nan, at any depth
    return isinstance(a, (torch.dtype, torch.device)) and bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
