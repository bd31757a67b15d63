"""A module's buffers under data parallelism: replicated DTensors between passes, local tensors while the module runs.

Each rank writes its own (the running statistics of a batch norm differ with the batch); after a training pass that wrote some,
the first rank's values are everybody's again, so that a replicated DTensor is what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import communicator_of
from ...dispatch.versions import Stamp, stamp
from ...layout.layout import Layout
from ...redistribute.batch import broadcast_many
from ...tensor.dtensor import DTensor, wrap
from .layouts import Axes
from .parameters import over_both


class Buffers:
    """The buffers of some modules; not ``shared``: each rank's own, as plain tensors, for good.

    Of a module that other units hold too, around this one or beside it, whichever runs first puts the buffers in place, until it
    has run: the others find them there.
    """

    def __init__(self, modules: Sequence[nn.Module], axes: Axes, shared: bool = True) -> None:
        self.axes = axes
        self.places: list[tuple[nn.Module, str, Layout | None]] = []
        self._inside: list[tuple[nn.Module, str, DTensor, Any, Stamp]] = []
        seen: dict[int, Any] = {}
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if getattr(buffer, "_data_parallel", False):
                    if isinstance(buffer, DTensor) and buffer._layout.mesh == axes.mesh:
                        self.places.append((module, name, None))
                    continue
                inside = buffer._layout if isinstance(buffer, DTensor) else None
                if not shared and inside is None:
                    module._buffers[name] = seen.setdefault(id(buffer), _replicated(buffer, axes, None)._local)
                    continue
                made = seen.get(id(buffer))
                if made is None:
                    made = seen[id(buffer)] = _replicated(buffer, axes, inside)
                module._buffers[name] = made
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


def _replicated(buffer: Tensor, axes: Axes, inside: Layout | None) -> DTensor:
    comm = communicator_of(axes.mesh)
    _, whole = over_both(axes, buffer, inside)
    local = buffer._local if isinstance(buffer, DTensor) else buffer.detach()
    if not local.is_meta:
        local = local.to(axes.mesh.device_type)
    if comm.held:
        local = comm.map(lambda member, x: x.detach().clone(memory_format=torch.contiguous_format), local)
    else:
        local = torch.zeros(whole.local_shape(None), dtype=whole.dtype, device=local.device)
    made = wrap(local, whole)
    made._data_parallel = axes.mesh.device_type  # type: ignore[attr-defined]  # a mark: taken over already
    return made


def _first_ranks(written: list[DTensor], axes: Axes) -> None:
    """The first data-parallel rank's values everywhere: one broadcast of bytes, into new tensors: backward may need the old."""
    comm = communicator_of(axes.mesh)
    distinct = list({id(x): x for x in written}.values())
    with torch.inference_mode(False), torch.no_grad():
        made = broadcast_many(comm, [buffer._local for buffer in distinct], axes.both)
    for buffer, local in zip(distinct, made, strict=True):
        buffer._local = local
