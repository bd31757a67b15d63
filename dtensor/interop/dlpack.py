"""``torch.utils.dlpack.to_dlpack``, the older way to give a tensor's memory away, told about this package's DTensors.

It is compiled code that takes a tensor's pointer and asks nobody; that of a DTensor is null, and who read the capsule ended the
process. ``x.__dlpack__()``, which ``torch.from_dlpack(x)`` and other libraries call, is what a DTensor gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.patches import changed
from ..errors import LayoutError
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor


def teach_dlpack() -> None:
    """Have ``to_dlpack`` of a DTensor give what ``x.__dlpack__()`` gives: a copy of the global value."""
    for where, module in (("torch.utils.dlpack.to_dlpack", torch.utils.dlpack), ("torch.to_dlpack", torch)):
        if hasattr(module, "to_dlpack"):
            changed(where)
            module.to_dlpack = to_dlpack


_torch_to_dlpack: Any = vars(torch.utils.dlpack)["to_dlpack"]


def to_dlpack(tensor: Tensor, **options: Any) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.__dlpack__(**options)
    if isinstance(tensor, PerRank):
        raise LayoutError("a PerRank tensor is several tensors, without one memory to export; pass one of x.shards")
    return _torch_to_dlpack(tensor, **options)


to_dlpack.__doc__ = _torch_to_dlpack.__doc__
