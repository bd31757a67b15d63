"""A module's buffers under data parallelism: replicated DTensors between passes, local tensors while the module runs.

Each rank writes its own (the running statistics of a batch norm differ with the batch); after a training pass that wrote some,
the first rank's values are everybody's again, so that a replicated DTensor is what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import PerRank, communicator_of
from ...dispatch.version_counters import Stamp, stamp
from ...layout.layout import Layout
from ...redistribute.coalesce import broadcast_many
from ...tensor.dtensor import DTensor, wrap
from .dp_modes import Axes
from .managed_param import of_first, on_first, over_both


class Buffers:
    """The buffers of some modules; not ``shared``: each rank's own, as plain tensors, for good.

    Of a module that other units hold too, around this one or beside it, whichever runs first puts the buffers in place, until it
    has run: the others find them there.
    """

    def __init__(self, modules: Sequence[nn.Module], axes: Axes, shared: bool = True) -> None:
        self.axes = axes
        self.places: list[tuple[nn.Module, str, Layout | None]] = []
        self._inside: list[tuple[nn.Module, str, DTensor, Any, Stamp]] = []
        found = [(module, name, x) for module in modules for name, x in module._buffers.items() if x is not None]
        new = {id(x): x for _, _, x in found if not getattr(x, "_data_parallel", False)}
        made = {key: _own_copy(x.detach(), axes) for key, x in new.items() if not shared and not isinstance(x, DTensor)}
        filled = set(map(id, on_first(communicator_of(axes.mesh), axes.both, [x for key, x in new.items() if key not in made])))
        for module, name, buffer in found:
            key, inside = id(buffer), buffer._layout if isinstance(buffer, DTensor) else None
            if key not in new:
                if inside is not None and inside.mesh == axes.mesh:
                    self.places.append((module, name, None))
                continue
            if key not in made:
                made[key] = _replicated(buffer, axes, inside, key in filled)
            module._buffers[name] = made[key]
            if isinstance(made[key], DTensor):
                self.places.append((module, name, inside))

    def enter(self, distributed: bool) -> None:
        """Local tensors in place."""
        if distributed or self._inside:
            return
        for module, name, inside in self.places:
            outside = module._buffers[name]
            if not isinstance(outside, DTensor):
                continue
            value = outside._local if inside is None else wrap(outside._local, inside)
            self._inside.append((module, name, outside, value, stamp(outside)))
            module._buffers[name] = value

    def leave(self, agree: bool = True) -> None:
        """DTensors in place again, made equal on all ranks (if they are to ``agree``) where training wrote to them."""
        written: set[nn.Module] = set()  # batch norm does not count up the version of all that it writes, but of one buffer
        for module, name, outside, value, versions in self._inside:
            now = module._buffers[name]
            if now is not value and isinstance(now, Tensor):
                with torch.inference_mode(False), torch.no_grad():  # what stays serves passes to come, which may train
                    outside._local = torch.empty_like(outside._local).copy_(now._local if isinstance(now, DTensor) else now)
            if now is not value or stamp(outside) != versions:
                written.add(module)
            module._buffers[name] = outside
        changed = [outside for module, _, outside, _, _ in self._inside if module in written and module.training]
        self._inside = []
        if changed and agree:
            _first_ranks(changed, self.axes)


def _replicated(buffer: Tensor, axes: Axes, inside: Layout | None, filled: bool) -> DTensor:
    """Return a buffer with the first rank's value, on all ranks; not ``filled``: without values."""
    comm = communicator_of(axes.mesh)
    _, whole = over_both(axes, buffer, inside)
    local = buffer._local if isinstance(buffer, DTensor) else buffer.detach()
    if not comm.held:
        local = torch.zeros(whole.local_shape(None), dtype=whole.dtype, device=local.device)
    else:
        local = _own_copy(local if filled else local.to("meta"), axes)
        if filled and (isinstance(local, PerRank) or not comm.holds_all):
            local = of_first(comm, local, axes.both)
    made = wrap(local, whole)
    made._data_parallel = axes.mesh.device_type  # type: ignore[attr-defined]  # a mark: taken over already
    return made


def _own_copy(local: Any, axes: Axes) -> Any:
    """Return a copy of a buffer's value on the device, a piece for each rank here; a meta tensor stays one."""
    there = local if local.is_meta else local.to(axes.mesh.device_type)
    copied = communicator_of(axes.mesh).map(lambda member, x: x.detach().clone(memory_format=torch.contiguous_format), there)
    return local if copied is None else copied  # None: on a rank outside of the mesh


def _first_ranks(written: list[DTensor], axes: Axes) -> None:
    """The first data-parallel rank's values everywhere: one broadcast of bytes, into new tensors: backward may need the old."""
    comm = communicator_of(axes.mesh)
    distinct = list({id(x): x for x in written}.values())
    with torch.inference_mode(False), torch.no_grad():
        made = broadcast_many(comm, [buffer._local for buffer in distinct], axes.both)
    for buffer, local in zip(distinct, made, strict=True):
        buffer._local = local
