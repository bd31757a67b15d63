"""Install: connect the packages of the library, and make its changes to torch.

Lower packages do not import those above them, so this module registers what they use from there. It makes the changes of the
patch catalog that ``import dtensor`` needs; a class, operator or hook is registered with torch in the module that defines it.
"""

from __future__ import annotations

from .base.late_binding import register_provider
from .comm import PerRank
from .interop.default_dispatch_rules import install_default_rules
from .interop.dlpack import install_dlpack
from .interop.dynamo import define_inplace_operators, skip_library_frames
from .interop.flex_registration import install_flex_attention
from .interop.saved_on_host import install_save_on_cpu
from .interop.state_dicts import install_state_dicts
from .interop.torch_compile import install_substitutes, register_constants
from .interop.torch_debug_modes import install_debug_modes
from .layout.layout import Layout
from .mesh.device_mesh import DeviceMesh
from .placement import Monoid, Partial, Partition, Replicate, Shard
from .rules.registry import add_rule_module
from .tensor.async_tensor import AsyncCollectiveTensor
from .tensor.dtensor import DTensor
from .tensor.overrides.table import install_overrides
from .tensor.replica_check import install_replica_check
from .tensor.views.inplace_view_ops import install_inplace_view_methods
from .tensor.views.lazy_view import LazyView, install_view_dispatch
from .tensor.views.view_writeback import dispatch_view
from .watchdog.levels import set_level_from_environment


def install_library() -> None:
    """Register providers of higher packages, set the check level, and install the patches of torch."""
    add_rule_module("dtensor.rules.aten.library")
    register_provider("dtensor.sharding_spec.scattered_tensor", "reshard", "sharding_metadata")
    register_provider("dtensor.checkpoint.dcp_protocol", "write_items", "chunks", "shard_at")
    register_provider("dtensor.debug.html", "html_of")
    register_provider("dtensor.rules.aten.reduction", "library_monoid")
    register_provider("dtensor.tensor.overrides.flex_attention", "compute_flex_attention")
    set_level_from_environment()
    install_replica_check()

    # What the library defines on its tensors.
    install_view_dispatch(dispatch_view)
    install_inplace_view_methods()

    # What the library changes in torch; ``interop/patch_catalog.py`` lists it.
    install_default_rules(DTensor, LazyView, AsyncCollectiveTensor, PerRank)
    install_overrides()
    skip_library_frames()
    install_state_dicts()
    install_debug_modes()
    install_dlpack()
    install_save_on_cpu()
    register_constants(DeviceMesh, Layout, Shard, Replicate, Partial, Monoid, Partition)
    install_substitutes()
    install_flex_attention()
    define_inplace_operators(DTensor)
    define_inplace_operators(PerRank)
