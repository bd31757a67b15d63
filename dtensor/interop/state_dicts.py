"""State dicts: patches of torch's own tools (``torch.distributed.checkpoint.state_dict``) for DTensors of this package.

``get_model_state_dict``, ``set_model_state_dict`` and related functions gather, broadcast and shard values that are torch's
DTensors. All others count as plain tensors: they would stay sharded in a full state dict, or be sent to ranks that expect another
size. The patches concern private torch API:

- ``torch.distributed._state_dict_utils``: four names are replaced after its import.
- ``torch.distributed.checkpoint.state_dict``: two functions. They ask the process group for the first rank. With all ranks in
  this process there is no process group, and this process is the first rank.
- ``StateDictStager`` (``torch.distributed.checkpoint.async_save``): a method that copies a tensor subclass attribute by
  attribute. For DTensors it copies the local tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.patches import patch_applied
from ..comm import PerRank, each_shard, shards_of
from ..comm.map_ranks import communicator_of
from ..mesh.device_mesh import DeviceMesh
from ..tensor.copies import user_attributes
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor, wrap
from .import_hooks import on_import


def install_state_dicts() -> None:
    """Patch torch's state-dict tools for DTensors, now or when they are imported."""
    on_import("torch.distributed._state_dict_utils", _patch_utils)
    on_import("torch.distributed.checkpoint.state_dict", _patch_for_ranks_in_process)
    on_import("torch.distributed.checkpoint._state_dict_stager", _patch_stager)


def _patch_utils(module: Any) -> None:
    """Patch torch's state-dict utilities so that they gather, broadcast and shard DTensors of this library."""
    iterate, broadcast, distribute, theirs = (
        getattr(module, name, None) for name in ("_iterate_state_dict", "_broadcast_tensors", "distribute_tensor", "DTensor")
    )
    if iterate is None or broadcast is None or distribute is None or theirs is None:
        return  # torch was built without distributed, or has other names

    def iterate_state_dict(value: Any, sharded: Any, dtensor: Any, plain: Any, **options: Any) -> Any:
        """Iterate a state dict as torch does, with its DTensor function for DTensors of this library."""
        return iterate(
            value, sharded, _adapt_function(dtensor, plain) if isinstance(value, DTensor) else dtensor, plain, **options
        )

    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: list[str], *rest: Any) -> None:
        """Broadcast the first rank's full tensors, then write them into the local DTensors."""
        distributed = {key: local[key] for key in keys if isinstance(local.get(key), DTensor)}
        local.update({key: torch.empty(0, device="cpu") for key in distributed})  # replaced by the full value
        broadcast(full, local, keys, *rest)
        for key, x in distributed.items():
            local[key] = _set_value(x, local[key])

    def distribute_to(value: Tensor, mesh: Any, placements: Any) -> Any:
        is_own_mesh = isinstance(mesh, DeviceMesh)
        return _shard_full(value, mesh, placements) if is_own_mesh else distribute(value, mesh, placements)

    patch_applied("torch.distributed._state_dict_utils")
    module._iterate_state_dict = iterate_state_dict
    module._broadcast_tensors = broadcast_tensors
    module.distribute_tensor = distribute_to
    module.DTensor = _make_either_class(theirs)


def _patch_for_ranks_in_process(module: Any) -> None:
    """Patch torch's state-dict functions for all ranks in one process: no broadcast, and full states onto meta models."""
    verify, load = (getattr(module, name, None) for name in ("_verify_options", "_load_model_state_dict"))
    if verify is None or load is None:
        return

    def verify_options(model: Any, *args: Any, **options: Any) -> Any:
        """Verify the options as torch does, and turn off the broadcast from the first rank if all ranks are here."""
        info = verify(model, *args, **options)
        if info.broadcast_from_rank0 and _has_all_ranks(model):
            info.broadcast_from_rank0 = False  # this process has the values of the first rank, and all ranks
        return info

    def load_model(model: nn.Module, state: dict[str, Any], info: Any) -> Any:
        loads_onto_meta = info.full_state_dict and _has_all_ranks(model) and all(x.is_meta for x in _tensors_of(model))
        return _load_onto_meta(model, state, info.strict) if loads_onto_meta else load(model, state, info)

    patch_applied("torch.distributed.checkpoint.state_dict")
    module._verify_options, module._load_model_state_dict = verify_options, load_model


def _patch_stager(module: Any) -> None:
    """Patch torch's state-dict stager (``async_save``) to copy the local tensors of DTensors."""
    stager_class = getattr(module, "StateDictStager", None)
    offload = getattr(stager_class, "_offload_tensor", None)
    if stager_class is None or offload is None:
        return

    def offload_tensor(stager: Any, x: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        """Copy a tensor to host memory; for a DTensor, copy its local tensors and user attributes."""

        def stage_value(value: Any) -> Any:
            return stager.deepcopy_with_tensor_offload(value, memo, non_blocking=non_blocking)

        if isinstance(x, PerRank):
            return each_shard(stage_value, x)
        if not isinstance(x, DTensor):
            return offload(stager, x, memo, non_blocking)
        result: Any = wrap(stage_value(x._local), x._layout)
        result.__dict__.update(stage_value(user_attributes(x)))
        return result

    patch_applied("torch.distributed.checkpoint._state_dict_stager")
    stager_class._offload_tensor = offload_tensor


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _load_onto_meta(model: nn.Module, state: dict[str, Any], strict: bool) -> Any:
    """Load a full state dict into a model on the meta device, sharded; torch would ask the process group for a device."""
    own_state = model.state_dict()
    distributed = {key: x for key, x in own_state.items() if isinstance(x, DTensor) and isinstance(state.get(key), Tensor)}
    sharded = {key: _shard_full(state[key].to(x.dtype), x.device_mesh, x.placements) for key, x in distributed.items()}
    return model.load_state_dict({**state, **sharded}, strict=strict, assign=True)


def _has_all_ranks(model: nn.Module) -> bool:
    return any(isinstance(x, DTensor) and communicator_of(x.device_mesh).holds_all for x in _tensors_of(model))


def _adapt_function(dtensor: Any, plain: Any) -> Any:
    """Return what replaces torch's function for its DTensors (gather, or copy to the host) for those of this package."""
    name = getattr(dtensor, "__qualname__", "").split(".")[0]
    if name == "_gather_state_dict":
        return _to_full_tensor
    if name == "_create_cpu_state_dict":
        return lambda x, *rest: x if x.ndim == 0 else wrap(each_shard(plain, x._local, *rest), x._layout)
    return dtensor


def _to_full_tensor(x: DTensor, *_: Any) -> Tensor:
    """Return the global value as one plain tensor; in process a PerRank tensor if copies on a submesh differ."""
    with torch.no_grad():
        full = x.full_tensor()
    first, *others = shards_of(full)
    return first if all(torch.equal(shard, first) for shard in others) else full


def _shard_full(value: Tensor, mesh: Any, placements: Any) -> DTensor:
    """Return a full tensor that every rank has as a DTensor; nothing is sent."""
    with torch.no_grad():
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _set_value(x: DTensor, value: Tensor) -> DTensor:
    """Write a full tensor into the DTensor ``x`` and return it; a new DTensor if ``x`` is on the meta device."""
    distributed = _shard_full(value.to(x.dtype), x.device_mesh, x.placements)
    if x.is_meta:
        return distributed
    with torch.no_grad():
        x.copy_(distributed)
    return x


def _make_either_class(theirs: Any) -> Any:
    """Return a class that torch's DTensors and those of this package are instances of. Its attributes are torch's."""

    class Meta(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, (theirs, DTensor))

        def __getattr__(cls, name: str) -> Any:
            return getattr(theirs, name)

    return Meta("DTensor", (), {})
