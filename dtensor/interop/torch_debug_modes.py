"""Torch debug modes: ``DebugMode``, ``CommDebugMode`` and ``MemTracker`` observe the local operators of DTensors.

For torch's own DTensors such a mode returns ``NotImplemented``. The operator of the DTensor then runs with the mode enabled,
which observes its local operators. For a class that it does not know, the mode calls the operator with itself disabled, and
observes nothing. A default dispatch rule of the mode makes it return ``NotImplemented`` for DTensors of this package as well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..base.patches import patch_applied
from ..base.tracing import OBSERVER_MODES
from ..ranks.joint_functions import register_joint_multi_grad_hook
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor
from ..tensor.local_tensors import local_tensors_of
from .default_dispatch_rules import set_default_rule
from .import_hooks import on_import


def install_debug_modes() -> None:
    """Patch torch's recording modes for DTensors, now or when they are imported."""
    on_import("torch.utils._debug_mode", _patch_debug_mode)
    patch_comm_mode = partial(
        _make_mode_defer, where="torch.distributed.tensor.debug.CommDebugMode", record=_record_nothing, shows_ranges=False
    )
    on_import("torch.distributed.tensor.debug._comm_mode", patch_comm_mode)
    on_import("torch.distributed._tools.mem_tracker", _patch_memory_tracker)


def _patch_debug_mode(module: ModuleType) -> None:
    """Make ``DebugMode`` record operators of DTensors, and the local operators that they run."""
    call_record: Any = getattr(module, "_OpCall", None)

    def record(mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        mode._record_call(call_record(func, args, kwargs, mode.call_depth, stack=mode.record_stack_trace))

    _make_mode_defer(module, "torch.utils._debug_mode.DebugMode", _record_nothing if call_record is None else record, True)


def _patch_memory_tracker(module: ModuleType) -> None:
    """Make ``MemTracker`` count the local tensors of all ranks here, and accept gathered parameters, which are no leaves."""
    tracker_class, storages = (getattr(module, name, None) for name in ("MemTracker", "get_untyped_storages"))
    track = getattr(tracker_class, "_track_module_params_and_buffers", None)
    hooks: Any = sys.modules.get("torch.distributed._tools.mod_tracker")
    if tracker_class is None or storages is None or track is None or hooks is None:
        return

    def storages_of_locals(x: Tensor) -> set[Any]:
        return {storage for local in local_tensors_of(x) for storage in storages(local)}

    def track_module(tracker: Any, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        """Track a module, without its gradient hooks if some parameters are no leaves."""
        leaves = all(p.is_leaf for p in module.parameters())  # hooks on the sharded parameters track the gradients
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return track(tracker, module, install_grad_hooks and leaves)

    module.get_untyped_storages = storages_of_locals  # type: ignore[attr-defined]
    tracker_class._track_module_params_and_buffers = track_module
    hooks.register_multi_grad_hook = register_joint_multi_grad_hook
    patch_applied("torch.distributed._tools.mem_tracker.get_untyped_storages")
    patch_applied("torch.distributed._tools.mod_tracker.register_multi_grad_hook")
    _make_mode_defer(module, "torch.distributed._tools.mem_tracker.MemTracker", _record_nothing, shows_ranges=False)


def _record_nothing(mode: Any, func: Any, args: Any, kwargs: Any) -> None: ...


def _make_mode_defer(module: ModuleType, where: str, record: Callable[..., None], shows_ranges: bool) -> None:
    """Make the mode class ``where`` return ``NotImplemented`` for aten operators of DTensors, after it called ``record``.

    ``shows_ranges``: the mode observes profiler ranges.
    """
    mode_class: Any = getattr(module, where.rpartition(".")[2], None)
    if mode_class is None:
        return

    def defer_to_dtensor(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an aten operator of DTensors and return ``NotImplemented``, so that the mode sees its local operators."""
        if func.namespace != "aten" or not any(issubclass(each, (DTensor, PerRank)) for each in types):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        if any(issubclass(each, DTensor) for each in types):
            record(mode, func, args, kwargs or {})
        return NotImplemented

    OBSERVER_MODES[mode_class] = shows_ranges
    set_default_rule(mode_class, defer_to_dtensor)
    patch_applied(where)
