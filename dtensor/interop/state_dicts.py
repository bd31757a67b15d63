"""Torch's own tools for state dicts (``torch.distributed.checkpoint.state_dict``), told about this package's DTensors.

``get_model_state_dict``, ``set_model_state_dict`` and their siblings gather, broadcast and cut by asking whether a value is one
of torch's DTensors; others count as plain, and are left cut where a full state dict was asked for, or are sent to ranks that
expect another size. Private torch API: ``torch.distributed._state_dict_utils``, of which four names are replaced once it is
imported, and two of ``torch.distributed.checkpoint.state_dict``, which asks the process group who is first: with all ranks in
this process there is none, and it is this process. A method of ``StateDictStager`` (``torch.distributed.checkpoint.async_save``)
copies a subclass attribute by attribute; for DTensors it copies the local tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.patches import changed
from ..comm import PerRank, communicator_of, each_shard, shards_of
from ..mesh.device_mesh import DeviceMesh
from ..tensor.copies import user_attributes
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor, wrap
from .import_hooks import on_import


def teach_state_dicts() -> None:
    """Have torch's tools take this package's DTensors, now or when they are imported."""
    on_import("torch.distributed._state_dict_utils", _patch_utils)
    on_import("torch.distributed.checkpoint.state_dict", _patch_options)
    on_import("torch.distributed.checkpoint._state_dict_stager", _patch_stager)


def _patch_utils(module: Any) -> None:
    iterate, broadcast, distribute, theirs = (
        getattr(module, name, None) for name in ("_iterate_state_dict", "_broadcast_tensors", "distribute_tensor", "DTensor")
    )
    if (
        iterate is None or broadcast is None or distribute is None or theirs is None
    ):  # a build without distributed, or another torch
        return

    def iterate_state_dict(value: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        return iterate(
            value, sharded, _adapt_function(dtensor, plain) if isinstance(value, DTensor) else dtensor, plain, **options
        )

    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: list[str], *rest: Any) -> None:
        own = {key: local[key] for key in keys if isinstance(local.get(key), DTensor)}
        local.update({key: torch.empty(0, device="cpu") for key in own})  # the whole value takes its place
        broadcast(full, local, keys, *rest)
        for key, x in own.items():
            local[key] = _set_value(x, local[key])

    def distribute_to(value: Tensor, mesh: Any, placements: Any) -> Any:
        ours = isinstance(mesh, DeviceMesh)
        return _shard_full(value, mesh, placements) if ours else distribute(value, mesh, placements)

    changed("torch.distributed._state_dict_utils")
    module._iterate_state_dict = iterate_state_dict
    module._broadcast_tensors = broadcast_tensors
    module.distribute_tensor = distribute_to
    module.DTensor = _make_either_class(theirs)


def _patch_options(module: Any) -> None:
    verify, load = (getattr(module, name, None) for name in ("_verify_options", "_load_model_state_dict"))
    if verify is None or load is None:
        return

    def verify_options(model: Any, *args: Any, **options: Any) -> Any:
        info = verify(model, *args, **options)
        if info.broadcast_from_rank0 and _has_all_ranks(model):
            info.broadcast_from_rank0 = False  # this process holds the first rank's values, and all ranks
        return info

    def load_model(model: nn.Module, state: dict[str, Any], info: Any) -> Any:
        here = info.full_state_dict and _has_all_ranks(model) and all(x.is_meta for x in _tensors_of(model))
        return _load_onto_meta(model, state, info.strict) if here else load(model, state, info)

    changed("torch.distributed.checkpoint.state_dict")
    module._verify_options, module._load_model_state_dict = verify_options, load_model


def _patch_stager(module: Any) -> None:
    stager_class = getattr(module, "StateDictStager", None)
    offload = getattr(stager_class, "_offload_tensor", None)
    if stager_class is None or offload is None:
        return

    def offload_tensor(stager: Any, x: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        def staged(value: Any) -> Any:
            return stager.deepcopy_with_tensor_offload(value, memo, non_blocking=non_blocking)

        if isinstance(x, PerRank):
            return each_shard(staged, x)
        if not isinstance(x, DTensor):
            return offload(stager, x, memo, non_blocking)
        made: Any = wrap(staged(x._local), x._layout)
        made.__dict__.update(staged(user_attributes(x)))
        return made

    changed("torch.distributed.checkpoint._state_dict_stager")
    stager_class._offload_tensor = offload_tensor


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _load_onto_meta(model: nn.Module, state: dict[str, Any], strict: bool) -> Any:
    """Where nothing has a device yet, torch's function asks the process group for one."""
    asked = model.state_dict()
    ours = {key: x for key, x in asked.items() if isinstance(x, DTensor) and isinstance(state.get(key), Tensor)}
    laid = {key: _shard_full(state[key].to(x.dtype), x.device_mesh, x.placements) for key, x in ours.items()}
    return model.load_state_dict({**state, **laid}, strict=strict, assign=True)


def _has_all_ranks(model: nn.Module) -> bool:
    return any(isinstance(x, DTensor) and communicator_of(x.device_mesh).holds_all for x in _tensors_of(model))


def _adapt_function(dtensor: Any, plain: Any) -> Any:
    """What is done with torch's DTensors, done with one of ours."""
    what = getattr(dtensor, "__qualname__", "").split(".")[0]
    if what == "_gather_state_dict":
        return lambda x, *_: _to_full_tensor(x)
    if what == "_create_cpu_state_dict":
        return lambda x, *rest: x if x.ndim == 0 else wrap(each_shard(plain, x._local, *rest), x._layout)
    return dtensor


def _to_full_tensor(x: DTensor) -> Tensor:
    """One plain tensor, also of the copies on a submesh in one process, unless they differ."""
    with torch.no_grad():
        found = x.full_tensor()
    first, *others = shards_of(found)
    return first if all(torch.equal(shard, first) for shard in others) else found


def _shard_full(value: Tensor, mesh: Any, placements: Any) -> DTensor:
    """Every rank has the whole value."""
    with torch.no_grad():
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _set_value(x: DTensor, value: Tensor) -> DTensor:
    """``x`` with this value, in its own memory where it has any."""
    made = _shard_full(value.to(x.dtype), x.device_mesh, x.placements)
    if x.is_meta:
        return made
    with torch.no_grad():
        x.copy_(made)
    return x


def _make_either_class(theirs: Any) -> Any:
    """A class that both kinds of DTensors are instances of, otherwise torch's."""

    class Meta(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, (theirs, DTensor))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    return Meta("DTensor", (), {})
