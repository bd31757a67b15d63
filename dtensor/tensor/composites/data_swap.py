"""``x.data = y``: whether torch may exchange what is below one tensor for what is below another.

A plain tensor would then read memory, of which neither a DTensor nor the tensors of all ranks (``PerRank``) have any: the next
reading of it ended the process. ``Module._apply`` asks the same, and makes a new parameter where the answer is no.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...base.torch_internals import DispatchKeySet
from ...ranks.per_rank import PerRank
from ..dtensor import DTensor
from .above_autograd import BELOW, implemented, overload_named

_NAME = "aten::_has_compatible_shallow_copy_type"


def exchangeable(keys: DispatchKeySet, x: Tensor, y: Tensor) -> Any:
    alike = all(isinstance(x, kind) is isinstance(y, kind) for kind in (DTensor, PerRank))
    return alike and overload_named(_NAME).redispatch(keys & BELOW, x, y)


implemented(_NAME, exchangeable)
