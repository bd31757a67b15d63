"""Placement types, under the names of ``torch.distributed.tensor.placement_types``."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import PlacementError
from .placement import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]


class _NestedShard(type):
    """Metaclass for ``isinstance`` checks of placements with the role of PyTorch's ``_StridedShard``; it makes no instances."""

    def __instancecheck__(cls, placement: object) -> bool:
        return isinstance(placement, Shard) and bool(placement.level)

    def __call__(cls, dim: int = 0, *args: Any, split_factor: Any = "n", **kwargs: Any) -> NoReturn:
        raise PlacementError(
            f"_StridedShard(dim={dim}, split_factor={split_factor}) is not a placement here. A dim that a later mesh dim splits "
            f"first is (Shard({dim}, level=1), Shard({dim}, level=0)). A weight that is made of {split_factor} matrices, each "
            f"sharded by itself, is distributed by ColwiseParallel(parts={split_factor})"
        )


class _StridedShard(metaclass=_NestedShard):
    """PyTorch's private placement, for ``isinstance`` only: a ``Shard`` with a ``level`` that is not 0.

    ``split_factor`` is not an attribute of a ``Shard`` here, since a placement knows no mesh. It is the product of the sizes of
    the mesh dims with lower levels.

    >>> [isinstance(placement, _StridedShard) for placement in (Shard(0, level=1), Shard(0, level=0), Shard(0))]
    [True, False, False]
    """
