"""dtensor: SPMD math on distributed tensors."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from .base.modes import explicit, implicit_replication, remember
from .comm import PerRank, per_rank
from .comm.map_ranks import map_ranks
from .dispatch.cache_info import CacheInfo, cache_info
from .install import install_library as _install_library
from .layout.layout import Layout
from .mesh.device_mesh import DeviceMesh, init_device_mesh
from .placement import Monoid, Partial, Partition, Placement, Placements, Replicate, Shard, partition
from .random.seed import manual_seed, random_mode
from .tensor.async_tensor import AsyncCollectiveTensor
from .tensor.create import empty, full, linspace, logspace, ones, rand, randn, zeros
from .tensor.distribute import distribute_tensor
from .tensor.dtensor import DTensor
from .tensor.local_map import local_map
from .tensor.modules.distribute_module import distribute_module
from .tensor.redistribute_many import redistribute_many
from .user_rules.register_sharding import register_sharding, unregister_sharding
from .watchdog.levels import check_ranks

__version__ = "0.1.0"

__all__ = [
    "AsyncCollectiveTensor",
    "CacheInfo",
    "CaptureInfo",
    "Captured",
    "DTensor",
    "DeviceMesh",
    "Explanation",
    "Layout",
    "Memory",
    "Monoid",
    "Partial",
    "Partition",
    "PerRank",
    "Placement",
    "Placements",
    "ProgramPlan",
    "Replicate",
    "Shard",
    "Sharding",
    "__version__",
    "auto_shard",
    "budget",
    "cache_info",
    "capture",
    "check_ranks",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "explicit",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "local_map",
    "logspace",
    "manual_seed",
    "map_ranks",
    "memory",
    "ones",
    "partition",
    "per_rank",
    "plan",
    "rand",
    "randn",
    "random_mode",
    "redistribute_many",
    "register_sharding",
    "remember",
    "trace",
    "unregister_sharding",
    "zeros",
]

# Packages that are imported at their first use: their imports take time.
_LAZY_PACKAGES = (
    "checkpoint",
    "debug",
    "device_mesh",
    "experimental",
    "fsdp",
    "functional",
    "hf",
    "parallel",
    "placement_types",
    "sharded_tensor",
    "sharding_spec",
    "testing",
)
_LAZY_NAMES = {  # public name -> module that defines it
    "CaptureInfo": "capture.captured_function",
    "Captured": "capture.captured_function",
    "capture": "capture.captured_function",
    "ProgramPlan": "plan.program_plan",
    "Sharding": "plan.auto_sharding",
    "auto_shard": "plan.auto_sharding",
    "plan": "plan.make_plan",
    "Explanation": "debug.explain",
    "budget": "debug.budget",
    "explain": "debug.explain",
    "Memory": "debug.memory_report",
    "memory": "debug.memory_report",
    "collect_state_dict": "sharding_spec.shard_model",
    "shard_model": "sharding_spec.shard_model",
    "trace": "debug.trace",
}

if TYPE_CHECKING:  # a type checker that sees __getattr__ would accept any name
    from . import checkpoint as checkpoint
    from . import debug as debug
    from . import device_mesh as device_mesh
    from . import experimental as experimental
    from . import fsdp as fsdp
    from . import functional as functional
    from . import hf as hf
    from . import parallel as parallel
    from . import placement_types as placement_types
    from . import sharded_tensor as sharded_tensor
    from . import sharding_spec as sharding_spec
    from . import testing as testing
    from .capture import Captured as Captured
    from .capture import CaptureInfo as CaptureInfo
    from .capture import capture as capture
    from .debug.budget import budget as budget
    from .debug.explain import Explanation as Explanation
    from .debug.explain import explain as explain
    from .debug.memory_report import Memory as Memory
    from .debug.memory_report import memory as memory
    from .debug.trace import trace as trace
    from .plan import ProgramPlan as ProgramPlan
    from .plan import Sharding as Sharding
    from .plan import auto_shard as auto_shard
    from .plan import plan as plan
    from .sharding_spec.shard_model import collect_state_dict as collect_state_dict
    from .sharding_spec.shard_model import shard_model as shard_model
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY_PACKAGES:
            return import_module(f".{name}", __name__)
        if name in _LAZY_NAMES:
            return getattr(import_module(f".{_LAZY_NAMES[name]}", __name__), name)
        from .base.public_names import advise_on_name  # only an error needs it

        advice = advise_on_name(name, __name__, (*__all__, *_LAZY_NAMES), (*_LAZY_PACKAGES, "clusters"))
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # Python's text of an ImportError has no advice
        if advice and is_import and find_spec(f"{__name__}.{name}") is None:
            raise ImportError(f"cannot import name {name!r} from {__name__!r}: {advice}", name=__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice and f': {advice}'}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY_PACKAGES, *_LAZY_NAMES})

    class _Root(ModuleType):
        """The package root: keeps functions such as ``dtensor.capture`` when Python imports the package of the same name."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in _LAZY_NAMES and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Root


_install_library()
