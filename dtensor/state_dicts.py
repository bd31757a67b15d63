"""Torch's own tools for state dicts (``torch.distributed.checkpoint.state_dict``), told about this package's DTensors.

``get_model_state_dict``, ``set_model_state_dict`` and their siblings gather, broadcast and cut by asking whether a value is one
of torch's DTensors; others count as plain, and are left cut where a full state dict was asked for, or are sent to ranks that
expect another size. Private torch API: ``torch.distributed._state_dict_utils``, of which four names are replaced once it is
imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comm import PerRank
from .distribute import distribute_tensor
from .mesh import DeviceMesh
from .tensor import DTensor, wrap
from .when_imported import when_imported


def teach_state_dicts() -> None:
    """Have torch's tools take this package's DTensors, now or when they are imported."""
    when_imported("torch.distributed._state_dict_utils", _teach)


def _teach(module: Any) -> None:
    iterate, broadcast, distribute, theirs = (
        getattr(module, name, None) for name in ("_iterate_state_dict", "_broadcast_tensors", "distribute_tensor", "DTensor")
    )
    if (
        iterate is None or broadcast is None or distribute is None or theirs is None
    ):  # a build without distributed, or another torch
        return

    def iterate_state_dict(value: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        return iterate(value, sharded, _like(dtensor, plain) if isinstance(value, DTensor) else dtensor, plain, **options)

    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: list[str], *rest: Any) -> None:
        own = {key: local[key] for key in keys if isinstance(local.get(key), DTensor)}
        local.update({key: torch.empty(0) for key in own})  # the whole value takes its place
        broadcast(full, local, keys, *rest)
        for key, x in own.items():
            local[key] = _holding(x, local[key])

    def distribute_to(value: Tensor, mesh: Any, placements: Any) -> Any:
        ours = isinstance(mesh, DeviceMesh)
        return _cut(value, mesh, placements) if ours else distribute(value, mesh, placements)

    module._iterate_state_dict = iterate_state_dict
    module._broadcast_tensors = broadcast_tensors
    module.distribute_tensor = distribute_to
    module.DTensor = _either(theirs)


def _like(dtensor: Any, plain: Any) -> Any:
    """What is done with torch's DTensors, done with one of ours."""
    what = getattr(dtensor, "__qualname__", "").split(".")[0]
    if what == "_gather_state_dict":
        return lambda x, *_: _whole(x)
    if what == "_create_cpu_state_dict":
        return lambda x, *rest: x if x.ndim == 0 else wrap(_each(plain, x._local, rest), x._layout)
    return dtensor


def _each(fn: Any, local: Any, rest: Any) -> Any:
    return PerRank(fn(shard, *rest) for shard in local.shards) if isinstance(local, PerRank) else fn(local, *rest)


def _whole(x: DTensor) -> Tensor:
    """One plain tensor, also of the copies on a submesh in one process, unless they differ."""
    with torch.no_grad():
        found = x.full_tensor()
    if isinstance(found, PerRank) and all(torch.equal(shard, found.shards[0]) for shard in found.shards[1:]):
        return found.shards[0]
    return found


def _cut(value: Tensor, mesh: Any, placements: Any) -> DTensor:
    """Every rank has the whole value."""
    with torch.no_grad():
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _holding(x: DTensor, value: Tensor) -> DTensor:
    """``x`` with this value, in its own memory where it has any."""
    made = _cut(value.to(x.dtype), x.device_mesh, x.placements)
    if x.is_meta:
        return made
    with torch.no_grad():
        x.copy_(made)
    return x


def _either(theirs: Any) -> Any:
    """A class that both kinds of DTensors are instances of, otherwise torch's."""

    class Meta(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, (theirs, DTensor))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    return Meta("DTensor", (), {})
