"""What ``x.untyped_storage()`` of a DTensor is: how many bytes there are, and whose. The bytes themselves are the pieces'.

The wrapper's own storage is a null pointer that says it has them, and torch's kernels, given it, end the process: a plain tensor
that is set to it, typed storages, sharing. This one lies on the meta device, so that whoever takes it without asking refuses it.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch

from ..base.torch_internals import FakeTensor
from ..errors import DTensorError, UnsupportedOperationError

_MEMORY = "_memory"  # one for as long as the tensor lives: programs compare storages to see who shares memory
_BEGINNING = "_beginning_at"  # of a storage that stands for memory to come: those of what begins within it


class HiddenStorage(torch.UntypedStorage):
    """The bytes of a global value, which lie in no one place."""

    device: Any = torch.device("meta")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOperationError(
            "a DTensor has no storage of its own: use x.to_local().untyped_storage() for this rank's shard, "
            "or x.full_tensor().untyped_storage() for a copy of the full tensor"
        )

    __getitem__ = __setitem__ = __reduce__ = tolist = clone = cpu = byteswap = _refuse
    fill_ = copy_ = share_memory_ = pin_memory = _refuse

    def data_ptr(self) -> NoReturn:
        """Raise: no ``NotImplementedError``, which safetensors takes for address 0 of every DTensor."""
        raise DTensorError(
            "a DTensor has no address: x.to_local().untyped_storage() is the storage of this rank's shard. To write safetensors "
            "files call dtensor.hf.save_pretrained(model, folder) or dtensor.checkpoint.save_safetensors(state, folder), "
            "instead of model.save_pretrained or safetensors.torch.save_file"
        )

    def resize_(self, size: int) -> HiddenStorage:
        """Itself: of as many bytes as it has, which the compiler asks of what it traces where that has none."""
        return self if size == self.nbytes() else self._refuse()


def storage_of(x: Any) -> torch.UntypedStorage:
    """The storage of a DTensor; of one that is traced, torch's own, which is not read, or for an argument that of its memory."""
    own, argument = torch.Tensor.untyped_storage(x), _stood_for(x)
    if argument is not None:
        return argument
    if not isinstance(own.nbytes(), int) or own.device.type == "meta":
        return own
    made: HiddenStorage | None = x.__dict__.get(_MEMORY)
    if made is None or made.nbytes() != own.nbytes():
        made = x.__dict__[_MEMORY] = HiddenStorage(own.nbytes(), device="meta")
        made.device = own.device
    return made


def _stood_for(x: Any) -> torch.UntypedStorage | None:
    """Where the memory of an argument of a program begins that is traced: arguments of which one is written must be known to be
    views of each other, which torch asks their storages. Pieces that lie side by side in one memory share none: what begins
    where another does is a view of it, or what it is a view of. A rank that has nothing of it is told by what it is a view of
    alone: where its piece begins, the next one does."""
    base = x if x._base is None else x._base
    piece = base._root if hasattr(type(base), "_root") else base._local
    if type(piece) is not FakeTensor:
        return None
    if not piece.numel():
        return cast(torch.UntypedStorage, base.__dict__.setdefault(_MEMORY, HiddenStorage(0, device="meta")))
    memory, start = piece.untyped_storage(), piece.storage_offset()
    start = start if isinstance(start, int) else start.node.hint
    if start:
        return memory.__dict__.setdefault(_BEGINNING, {}).setdefault(start, HiddenStorage(0, device="meta"))
    beginning = _Beginning(0, device="meta")
    beginning.memory = memory
    return beginning


class _Beginning(HiddenStorage):
    """Taken for ``memory``, as which the piece itself is known; but of no size, which may be a symbol there."""

    memory: torch.UntypedStorage

    def _weak_ref(self) -> Any:
        return self.memory._weak_ref()
