"""Storage: ``x.untyped_storage()`` of a DTensor. It has a size and an identity, but no bytes: these are in local tensors.

The wrapper's own storage is a null pointer that claims to have bytes. Torch's kernels end the process if they read it, for
example by ``set_``, typed storages or sharing. The storage that is returned here is on the meta device, so torch's kernels refuse
it.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch

from ..base.torch_internals import FakeTensor
from ..errors import DTensorError, UnsupportedOperationError

_STORAGE = "_memory"  # attribute of a DTensor: its storage, one for its lifetime, since programs compare storages to find aliases
_STORAGES_BY_OFFSET = "_beginning_at"  # attribute of a fake storage: the hidden storages of local tensors in it, by offset


class HiddenStorage(torch.UntypedStorage):
    """Storage of a global tensor, without bytes of its own."""

    device: Any = torch.device("meta")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedOperationError: the bytes are in the local tensors."""
        raise UnsupportedOperationError(
            "a DTensor has no storage of its own: use x.to_local().untyped_storage() for this rank's shard, "
            "or x.full_tensor().untyped_storage() for a copy of the full tensor"
        )

    __getitem__ = __setitem__ = __reduce__ = tolist = clone = cpu = byteswap = _refuse
    fill_ = copy_ = share_memory_ = pin_memory = _refuse

    def data_ptr(self) -> NoReturn:
        """Raise an error that is no ``NotImplementedError``: safetensors would take address 0 for every DTensor then."""
        raise DTensorError(
            "a DTensor has no address: x.to_local().untyped_storage() is the storage of this rank's shard. To write safetensors "
            "files call dtensor.hf.save_pretrained(model, folder) or dtensor.checkpoint.save_safetensors(state, folder), "
            "instead of model.save_pretrained or safetensors.torch.save_file"
        )

    def resize_(self, size: int) -> HiddenStorage:
        """Return this storage if ``size`` is its size, which torch.compile asks of storages of traced tensors; else raise."""
        return self if size == self.nbytes() else self._refuse()


def storage_of(x: Any) -> torch.UntypedStorage:
    """Return ``x.untyped_storage()``: a :class:`HiddenStorage`, or for traced arguments the one that identifies their memory.

    While a program is traced: torch's own storage, which is not read; for an argument, the storage that shows its aliases.
    """
    torch_storage, argument = torch.Tensor.untyped_storage(x), _traced_storage(x)
    if argument is not None:
        return argument
    if not isinstance(torch_storage.nbytes(), int) or torch_storage.device.type == "meta":
        return torch_storage
    hidden: HiddenStorage | None = x.__dict__.get(_STORAGE)
    if hidden is None or hidden.nbytes() != torch_storage.nbytes():
        hidden = x.__dict__[_STORAGE] = HiddenStorage(torch_storage.nbytes(), device="meta")
        hidden.device = torch_storage.device
    return hidden


def _traced_storage(x: Any) -> torch.UntypedStorage | None:
    """Return the storage that identifies the memory of an argument of a traced program; None for other tensors.

    Torch compares storages to find arguments that are views of each other, if one of them is written to. Local tensors that are
    adjacent in one storage (of a flat buffer) do not alias. Two arguments alias if their local tensors start at the same offset.
    A rank with an empty local tensor has no such offset, so there only the base identifies the memory.
    """
    base = x if x._base is None else x._base
    local = base._root if hasattr(type(base), "_root") else base._local
    if type(local) is not FakeTensor:
        return None
    if not local.numel():
        return cast(torch.UntypedStorage, base.__dict__.setdefault(_STORAGE, HiddenStorage(0, device="meta")))
    storage, offset = local.untyped_storage(), local.storage_offset()
    offset = offset if isinstance(offset, int) else offset.node.hint
    if offset:
        return storage.__dict__.setdefault(_STORAGES_BY_OFFSET, {}).setdefault(offset, HiddenStorage(0, device="meta"))
    result = _StorageStart(0, device="meta")
    result.memory = storage
    return result


class _StorageStart(HiddenStorage):
    """The start of ``memory``: torch identifies it with that storage. It has no size, which may be a symbol."""

    memory: torch.UntypedStorage

    def _weak_ref(self) -> Any:
        return self.memory._weak_ref()
