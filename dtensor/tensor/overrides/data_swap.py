"""Data swap: whether ``x.data = y`` may give ``x`` the implementation object of ``y``.

Neither a DTensor nor a :class:`PerRank` has memory of its own. A plain tensor that got the implementation of one of them would
read invalid memory and end the process. ``Module._apply`` asks the same question, and makes a new parameter if the answer is no.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...base.torch_internals import DispatchKeySet
from ...ranks.per_rank import PerRank
from ..dtensor import DTensor
from .register import KEYS_BELOW, overload_named

OPERATOR = "aten::_has_compatible_shallow_copy_type"


def has_compatible_data(keys: DispatchKeySet, x: Tensor, y: Tensor) -> Any:
    """Return True if both tensors are DTensors, or both PerRank, or neither, and torch finds their kinds compatible."""
    same_kind = all(isinstance(x, kind) is isinstance(y, kind) for kind in (DTensor, PerRank))
    return same_kind and overload_named(OPERATOR).redispatch(keys & KEYS_BELOW, x, y)
