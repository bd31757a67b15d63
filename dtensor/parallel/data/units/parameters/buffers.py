"""Module buffers under data parallelism: local tensors while the module runs, then DTensors that replicate rank 0's values.

Each rank writes its own local tensor: the running statistics of a batch norm depend on the batch. After a training pass that
wrote buffers, the first rank's values are broadcast, so that the replicated DTensors are replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .....comm import PerRank
from .....comm.map_ranks import communicator_of
from .....layout.layout import Layout
from .....redistribute.coalesce import broadcast_many
from .....state.version_counters import VersionSnapshot, take_snapshot
from .....tensor.dtensor import DTensor, wrap
from ...settings.dp_modes import MeshAxes
from .fsdp_param_init import broadcast_from_first, make_unsharded_layout, tensors_with_values


class ModuleBuffers:
    """Buffers of a unit's modules. If not ``shared``, each rank keeps buffers of its own, as plain tensors.

    A module may belong to several units. The unit that runs first puts the local tensors in place until it has run, and the
    others find them there.
    """

    def __init__(self, modules: Sequence[nn.Module], axes: MeshAxes, shared: bool = True) -> None:
        self.axes = axes
        self.locations: list[tuple[nn.Module, str, Layout | None]] = []  # and the layout on the tensor-parallel mesh
        self._in_use: list[tuple[nn.Module, str, DTensor, Any, VersionSnapshot]] = []
        found = [(module, name, x) for module in modules for name, x in module._buffers.items() if x is not None]
        new = {id(x): x for _, _, x in found if not getattr(x, "_data_parallel", False)}
        made = {key: _copy_for_ranks(x.detach(), axes) for key, x in new.items() if not shared and not isinstance(x, DTensor)}
        shared_buffers = [x for key, x in new.items() if key not in made]
        with_values = set(map(id, tensors_with_values(communicator_of(axes.mesh), axes.all_dims, shared_buffers)))
        for module, name, buffer in found:
            key, tp_layout = id(buffer), buffer._layout if isinstance(buffer, DTensor) else None
            if key not in new:
                if tp_layout is not None and tp_layout.mesh == axes.mesh:
                    self.locations.append((module, name, None))
                continue
            if key not in made:
                made[key] = _replicate_buffer(buffer, axes, tp_layout, key in with_values)
            module._buffers[name] = made[key]
            if isinstance(made[key], DTensor):
                self.locations.append((module, name, tp_layout))

    def put_local(self, has_distributed_batch: bool) -> None:
        """Replace the DTensor buffers in the modules by local tensors, unless the batch is a DTensor over the mesh."""
        if has_distributed_batch or self._in_use:
            return
        for module, name, tp_layout in self.locations:
            buffer = module._buffers[name]
            if not isinstance(buffer, DTensor):
                continue
            value = buffer._local if tp_layout is None else wrap(buffer._local, tp_layout)
            self._in_use.append((module, name, buffer, value, take_snapshot(buffer)))
            module._buffers[name] = value

    def restore_dtensors(self, synchronize: bool = True) -> None:
        """Put the DTensor buffers back into the modules, and broadcast those that training wrote to if ``synchronize``."""
        written: set[nn.Module] = set()  # by module: batch norm advances the version counter of one of its buffers only
        for module, name, buffer, value, version in self._in_use:
            current = module._buffers[name]
            if current is not value and isinstance(current, Tensor):
                with torch.inference_mode(False), torch.no_grad():  # later passes, which may train, read this tensor
                    source = current._local if isinstance(current, DTensor) else current
                    buffer._local = torch.empty_like(buffer._local).copy_(source)
            if current is not value or take_snapshot(buffer) != version:
                written.add(module)
            module._buffers[name] = buffer
        changed = [buffer for module, _, buffer, _, _ in self._in_use if module in written and module.training]
        self._in_use = []
        if changed and synchronize:
            _broadcast_buffers(changed, self.axes)


def _replicate_buffer(buffer: Tensor, axes: MeshAxes, tp_layout: Layout | None, has_values: bool) -> DTensor:
    """Return a buffer as a DTensor that has the first rank's value, replicated over the data-parallel mesh."""
    comm = communicator_of(axes.mesh)
    _, layout = make_unsharded_layout(axes, buffer, tp_layout)
    local = buffer._local if isinstance(buffer, DTensor) else buffer.detach()
    if not comm.held:
        local = torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=local.device)
    else:
        local = _copy_for_ranks(local if has_values else local.to("meta"), axes)
        if has_values and (isinstance(local, PerRank) or not comm.holds_all):
            local = broadcast_from_first(comm, local, axes.all_dims)
    made = wrap(local, layout)
    made._data_parallel = axes.mesh.device_type  # type: ignore[attr-defined]  # marks a buffer that belongs to a unit
    return made


def _copy_for_ranks(local: Any, axes: MeshAxes) -> Any:
    """Return copies of a buffer's value on the mesh's device, one for each local rank; a meta tensor stays meta."""
    value = local if local.is_meta else local.to(axes.mesh.device_type)
    copied = communicator_of(axes.mesh).map(lambda member, x: x.detach().clone(memory_format=torch.contiguous_format), value)
    return local if copied is None else copied  # None: on a rank outside the mesh


def _broadcast_buffers(buffers: list[DTensor], axes: MeshAxes) -> None:
    """Replace the buffers' local tensors by the first data-parallel rank's values, with one broadcast of bytes.

    The local tensors are new: backward may need the old ones.
    """
    comm = communicator_of(axes.mesh)
    distinct = list({id(x): x for x in buffers}.values())
    with torch.inference_mode(False), torch.no_grad():
        locals_ = broadcast_many(comm, [buffer._local for buffer in distinct], axes.all_dims)
    for buffer, local in zip(distinct, locals_, strict=True):
        buffer._local = local
