"""DLPack patch: ``torch.utils.dlpack.to_dlpack``, the older way to export the memory of a tensor, for DTensors.

Torch's function is compiled. It reads the data pointer of a tensor without a check, and that of a DTensor is null: a reader of
the capsule ends the process. For a DTensor the patched function returns ``x.__dlpack__()``, as ``torch.from_dlpack(x)`` calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.patches import patch_applied
from ..errors import LayoutError
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor


def install_dlpack() -> None:
    """Patch torch's ``to_dlpack`` so that for a DTensor it exports a copy of the global value."""
    for where, module in (("torch.utils.dlpack.to_dlpack", torch.utils.dlpack), ("torch.to_dlpack", torch)):
        if hasattr(module, "to_dlpack"):
            patch_applied(where)
            module.to_dlpack = to_dlpack


_torch_to_dlpack: Any = vars(torch.utils.dlpack)["to_dlpack"]


def to_dlpack(tensor: Tensor, **options: Any) -> Any:
    """Return the DLPack capsule of a tensor; for a DTensor it holds a copy of the global value."""
    if isinstance(tensor, DTensor):
        return tensor.__dlpack__(**options)
    if isinstance(tensor, PerRank):
        raise LayoutError("a PerRank tensor is several tensors, without one memory to export; pass one of x.shards")
    return _torch_to_dlpack(tensor, **options)


to_dlpack.__doc__ = _torch_to_dlpack.__doc__
