"""Lookers: have torch's modes that record operators, ``DebugMode``, ``CommDebugMode`` and ``MemTracker``, see DTensors.

Before torch's own DTensors such a mode steps back (``NotImplemented``): they run with the mode in force, which sees what they
do. Of a class that it does not know it calls the operator with itself taken away, and sees nothing of it. By
``register_torch_dispatch``, which says what a mode does with an operator, both step back before ours as well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.late_binding import before_use
from ..base.patches import changed
from ..base.torch_internals import all_operators
from ..base.tracing import LOOKERS
from ..ranks.joint_functions import multi_grad_hook
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from .import_hooks import when_imported

_LIBRARIES: list[torch.library.Library] = []


def teach_lookers() -> None:
    """Have them see what DTensors do, once there may be some, or when they are imported."""
    before_use(partial(when_imported, "torch.utils._debug_mode", _teach_debug_mode))
    teach = partial(_teach, where="torch.distributed.tensor.debug.CommDebugMode", taken_down=_nothing, shows_ranges=False)
    before_use(partial(when_imported, "torch.distributed.tensor.debug._comm_mode", teach))
    before_use(partial(when_imported, "torch.distributed._tools.mem_tracker", _teach_memory_tracker))


def _teach_debug_mode(module: ModuleType) -> None:
    call: Any = getattr(module, "_OpCall", None)

    def taken_down(mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        mode._record_call(call(func, args, kwargs, mode.call_depth, stack=mode.record_stack_trace))

    _teach(module, "torch.utils._debug_mode.DebugMode", _nothing if call is None else taken_down, True)


def _teach_memory_tracker(module: ModuleType) -> None:
    """Have ``MemTracker`` count the local tensors of all ranks here, and accept gathered parameters, which are no leaves."""
    tracker_class, storages = (getattr(module, name, None) for name in ("MemTracker", "get_untyped_storages"))
    track = getattr(tracker_class, "_track_module_params_and_buffers", None)
    hooks: Any = sys.modules.get("torch.distributed._tools.mod_tracker")
    if tracker_class is None or storages is None or track is None or hooks is None:
        return

    def storages_of_locals(x: Tensor) -> set[Any]:
        return {storage for local in locals_of(x) for storage in storages(local)}

    def track_module(tracker: Any, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        leaves = all(p.is_leaf for p in module.parameters())  # the hooks on the sharded parameters track the gradients
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return track(tracker, module, install_grad_hooks and leaves)

    module.get_untyped_storages = storages_of_locals  # type: ignore[attr-defined]
    tracker_class._track_module_params_and_buffers = track_module
    hooks.register_multi_grad_hook = multi_grad_hook
    changed("torch.distributed._tools.mem_tracker.get_untyped_storages")
    changed("torch.distributed._tools.mod_tracker.register_multi_grad_hook")
    _teach(module, "torch.distributed._tools.mem_tracker.MemTracker", _nothing, shows_ranges=False)


def _nothing(mode: Any, func: Any, args: Any, kwargs: Any) -> None: ...


def _teach(module: ModuleType, where: str, taken_down: Callable[..., None], shows_ranges: bool) -> None:
    kind: Any = getattr(module, where.rpartition(".")[2], None)
    if kind is None:
        return

    def steps_back(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(each, (DTensor, PerRank)) for each in types):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        if any(issubclass(each, DTensor) for each in types):
            taken_down(mode, func, args, kwargs or {})
        return NotImplemented

    LOOKERS[kind] = shows_ranges
    changed(where)
    library = torch.library.Library("aten", "FRAGMENT")
    _LIBRARIES.append(library)
    for operator in all_operators():
        if operator.startswith("aten::"):
            torch.library.register_torch_dispatch(operator, kind, steps_back, lib=library)
