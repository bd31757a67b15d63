"""dtensor: SPMD maths on distributed tensors."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import recomposed as _recomposed
from . import sequences as _sequences
from . import sparse_results as _sparse_results
from . import write_through as _write_through
from .caches import CacheInfo, cache_info
from .capture import Captured, CaptureInfo, capture
from .comm import PerRank, map_ranks, per_rank
from .create import empty, full, ones, rand, randn, zeros
from .custom import register_sharding
from .distribute import distribute_module, distribute_tensor
from .explaining import Explanation, explain
from .layout import Layout
from .local_mapping import local_map
from .many import redistribute_many
from .mesh import DeviceMesh, init_device_mesh
from .modes import explicit, implicit_replication
from .placement import Monoid, Partial, Placement, Replicate, Shard
from .random import manual_seed, random_mode
from .state_dicts import teach_state_dicts as _teach_state_dicts
from .tensor import DTensor
from .untraced import keep_from_inlining as _keep_from_inlining
from .untraced import leave_untraced as _leave_untraced
from .untraced import no_opaque_type as _no_opaque_type
from .untraced import written_in_python as _written_in_python

__all__ = [
    "CacheInfo",
    "CaptureInfo",
    "Captured",
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "Layout",
    "Monoid",
    "Partial",
    "PerRank",
    "Placement",
    "Replicate",
    "Shard",
    "cache_info",
    "capture",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "explicit",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "manual_seed",
    "map_ranks",
    "ones",
    "per_rank",
    "rand",
    "randn",
    "random_mode",
    "redistribute_many",
    "register_sharding",
    "zeros",
]

_LAZY = (
    "checkpoint",
    "debug",
    "parallel",
    "sharded_tensor",
    "sharding_spec",
    "testing",
)  # not everybody needs them, and they take their time


if TYPE_CHECKING:  # what the names below are; a checker that saw __getattr__ would take any name for one
    from . import checkpoint as checkpoint
    from . import debug as debug
    from . import parallel as parallel
    from . import sharded_tensor as sharded_tensor
    from . import sharding_spec as sharding_spec
    from . import testing as testing
    from .sharded_model import collect_state_dict as collect_state_dict
    from .sharded_model import shard_model as shard_model
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return import_module(f".{name}", __name__)
        if name in ("shard_model", "collect_state_dict"):
            return getattr(import_module(".sharded_model", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_leave_untraced(__name__)
_keep_from_inlining()
_teach_state_dicts()
_no_opaque_type(DeviceMesh)
_written_in_python(DTensor)
_written_in_python(PerRank)
