"""dtensor: SPMD math on distributed tensors."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from .base.late_binding import register_provider as _register_provider
from .base.modes import explicit, implicit_replication, remember
from .comm import PerRank, per_rank
from .comm.map_ranks import map_ranks
from .dispatch.cache_info import CacheInfo, cache_info
from .interop.default_dispatch_rules import install_default_rules as _install_default_rules
from .interop.dlpack import install_dlpack as _install_dlpack
from .interop.dynamo import define_inplace_operators as _define_inplace_operators
from .interop.dynamo import skip_library_frames as _skip_library_frames
from .interop.flex_registration import install_flex_attention as _install_flex_attention
from .interop.saved_on_host import install_save_on_cpu as _install_save_on_cpu
from .interop.state_dicts import install_state_dicts as _install_state_dicts
from .interop.torch_compile import install_substitutes as _install_substitutes
from .interop.torch_compile import register_constants as _register_constants
from .interop.torch_debug_modes import install_debug_modes as _install_debug_modes
from .layout.layout import Layout
from .mesh.device_mesh import DeviceMesh, init_device_mesh
from .placement import Monoid, Partial, Partition, Placement, Placements, Replicate, Shard, partition
from .random.seed import manual_seed, random_mode
from .rules.registry import register_declaring_module as _register_declaring_module
from .tensor.async_tensor import AsyncCollectiveTensor
from .tensor.create import empty, full, linspace, logspace, ones, rand, randn, zeros
from .tensor.distribute import distribute_tensor
from .tensor.dtensor import DTensor
from .tensor.local_map import local_map
from .tensor.modules.distribute_module import distribute_module
from .tensor.overrides.table import install_overrides as _install_overrides
from .tensor.redistribute_many import redistribute_many
from .tensor.replica_check import follow_check_level as _follow_check_level
from .tensor.views.inplace_view_ops import install_inplace_view_methods as _install_inplace_view_methods
from .tensor.views.lazy_view import LazyView as _LazyView
from .tensor.views.lazy_view import install_view_dispatch as _install_view_dispatch
from .tensor.views.view_writeback import dispatch_view as _dispatch_view
from .user_rules.register_sharding import register_sharding, unregister_sharding
from .watchdog.levels import check_ranks
from .watchdog.levels import set_level_from_environment as _set_level_from_environment

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
    "CaptureInfo": "capture.captured",
    "Captured": "capture.captured",
    "capture": "capture.captured",
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

    class _Root(ModuleType):
        """The package root: keeps functions such as ``dtensor.capture`` when Python imports the package of the same name."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in _LAZY_NAMES and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Root


# The root connects the packages: lower packages do not import those above them, and no module registers anything at import.
_register_declaring_module("dtensor.rules.aten.library")
_register_provider("dtensor.sharding_spec.scattered_tensor", "reshard", "sharding_metadata")
_register_provider("dtensor.interop.dcp_protocol", "write_items", "chunks", "shard_at")
_register_provider("dtensor.debug.html", "html_of")
_register_provider("dtensor.rules.aten.reduction", "library_monoid")
_register_provider("dtensor.tensor.overrides.flex_attention", "compute_flex_attention")
_set_level_from_environment()
_follow_check_level()

# What the library defines on its tensors.
_install_view_dispatch(_dispatch_view)
_install_inplace_view_methods()

# What the library changes in torch; ``interop/patch_catalog.py`` lists it.
_install_default_rules(DTensor, _LazyView, AsyncCollectiveTensor, PerRank)
_install_overrides()
_skip_library_frames()
_install_state_dicts()
_install_debug_modes()
_install_dlpack()
_install_save_on_cpu()
_register_constants(DeviceMesh, Layout, Shard, Replicate, Partial, Monoid, Partition)
_install_substitutes()
_install_flex_attention()
_define_inplace_operators(DTensor)
_define_inplace_operators(PerRank)
