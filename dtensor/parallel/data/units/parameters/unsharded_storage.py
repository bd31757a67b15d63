"""Unsharded storage: the memory of unsharded parameters, which is freed and allocated again while tensors in it stay alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .....base.recorder_hooks import ACTIVE_RECORDERS, recorded_mutation
from .....base.torch_internals import set_version_counter, storage_use_count
from .....comm import shards_of
from .....state.version_counters import VersionSnapshot


class UnshardedStorage:
    """The storages of some tensors, which are resized to zero bytes and back together."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._by_storage: dict[int, tuple[Tensor, int]] = {}  # a tensor in the storage, and the bytes of the storage
        self._own_use_counts: list[int] = []  # by storage: number of tensors of the parameter group
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add the storages of ``tensors``, which must be allocated."""
        for x in tensors:
            storage = x.untyped_storage()
            self._by_storage.setdefault(storage._cdata, (x, storage.nbytes()))

    def __contains__(self, x: Tensor) -> bool:
        return x.layout is torch.strided and x.untyped_storage()._cdata in self._by_storage

    def count_own_uses(self) -> None:
        """Record how many tensors use each storage now; all of these belong to the parameter group."""
        self._own_use_counts = [storage_use_count(storage) for storage in self._by_storage]

    def has_other_uses(self) -> bool:
        """Return True if more tensors use a storage than :meth:`count_own_uses` recorded."""
        counts = zip(self._by_storage, self._own_use_counts, strict=False)
        return any(storage_use_count(storage) > own_count for storage, own_count in counts)

    def allocate(self) -> None:
        """Allocate the storages that are freed. Those that are not keep their contents."""
        for x, nbytes in self._by_storage.values():
            if x.untyped_storage().nbytes() == 0:
                _resize_storage(x, nbytes)

    def free(self) -> None:
        """Free all storages. The tensors in them stay valid objects without memory."""
        for x, _ in self._by_storage.values():
            _resize_storage(x, 0)


@recorded_mutation
def _resize_storage(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)


class RowViewCache:
    """Cache of views of local tensors. It is valid while the local tensors are the same objects in the same memory."""

    def __init__(self) -> None:
        self._views: list[Any] = []
        self._version: VersionSnapshot | None = None

    def get_or_make(self, locals_: Sequence[Any], version: VersionSnapshot, make: Callable[[], list[Any]]) -> list[Any]:
        """Return the cached views of ``locals_``, or ``make()`` if their memory changed since. ``version``: their snapshot.

        Results in other memory than that of ``locals_`` are copies, which are not cached.
        """
        if self._version is not None and self._version.has_same_memory(version) and not ACTIVE_RECORDERS:
            return self._views
        views, storage = make(), UnshardedStorage(x for local in locals_ for x in shards_of(local))
        if not ACTIVE_RECORDERS and all(x in storage for local in views for x in shards_of(local)):
            self._views, self._version = views, version
        return views


class SavedAliases:
    """Aliases of unsharded values that autograd graphs may have saved.

    While their memory is freed, their version counters are advanced. A backward pass that reads them then raises, instead of
    reading freed memory, which would end the process. Such a pass exists if no output of the unit leads to it: a module may
    keep an intermediate result in an attribute.

    The references are weak. A strong reference would keep the graph alive, and the graph the FSDP unit, in a cycle that the
    garbage collector does not see.
    """

    def __init__(self) -> None:
        self._tensors: list[TensorWeakRef] = []
        self._versions: list[int] = []  # original versions, while the memory is freed

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Remember weak references to ``tensors``, which autograd graphs may save."""
        if not self._versions:
            self._tensors = [ref for ref in self._tensors if ref() is not None]
        self._tensors += map(TensorWeakRef, tensors)

    def invalidate(self) -> None:
        """Advance version counters of the aliases, so that a backward pass that reads freed memory raises."""
        if self._tensors and not self._versions:
            alive = [(ref, x) for ref in self._tensors if (x := ref()) is not None]
            self._tensors, self._versions = [ref for ref, _ in alive], [x._version for _, x in alive]
            set_version_counter(tuple([x for _, x in alive]), tuple([version + 1 for version in self._versions]))

    def restore(self) -> None:
        """Restore version counters of the aliases, because their memory has the same contents again."""
        if self._versions:
            alive = [
                (x, version) for ref, version in zip(self._tensors, self._versions, strict=False) if (x := ref()) is not None
            ]
            set_version_counter(tuple([x for x, _ in alive]), tuple([version for _, version in alive]))
            self._versions = []


@dataclass(eq=False, slots=True)
class UnshardedState:
    """Unsharded values of a parameter group. A new object is the state in which nothing is gathered.

    Attributes:
        is_filled: the buffer contains the values of ``version``.
        version: version snapshot of the sharded parameters whose values are or will be gathered.
        pending: the all-gather in flight.
        resharded_part: between forward and backward, the reshard group and the part that each member here keeps for it.
        buffer: byte buffer that contains the gathered values.
        values: the unsharded values, one for each parameter.
        gathered: the gathered tensors; an all-gather extension computes ``values`` from them.
        copy_targets: views of ``buffer`` into which received rows are copied.
        storage: the memory of ``buffer`` and of tensors that extensions made.
        saved_aliases: aliases of ``values`` that graphs may have saved.
        is_recorded: a graph may have saved values, also those of frozen parameters, which are not in ``saved_aliases``.
        grad_buckets: buffers of unsharded gradients, by what is reduced in them, by member.
    """

    is_filled: bool = False
    version: VersionSnapshot | None = None
    pending: Any = None
    resharded_part: Any = None
    buffer: Any = None
    values: list[Any] = field(default_factory=list)
    gathered: list[Any] = field(default_factory=list)
    copy_targets: list[Any] = field(default_factory=list)
    storage: UnshardedStorage = field(default_factory=UnshardedStorage)
    saved_aliases: SavedAliases = field(default_factory=SavedAliases)
    is_recorded: bool = False
    grad_buckets: dict[Any, dict[int, list[Tensor]]] = field(default_factory=dict)


class SendBufferPool:
    """Pool of host buffers for collectives: a copy into mapped pages costs less than to map new ones.

    Accelerators have caching allocators of their own.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._ones: dict[Any, Tensor] = {}

    def get_or_allocate(self, nbytes: int, device: torch.device) -> Tensor | None:
        """Return a host buffer of at least ``nbytes`` bytes from the pool, or a new one.

        Return None if the caller should allocate: on devices other than the CPU, and while a recorder is active.
        """
        if device.type != "cpu" or ACTIVE_RECORDERS:
            return None
        sizes = list(map(Tensor.numel, self._free))
        fitting = [size for size in sizes if size >= nbytes]
        buffer = self._free.pop(sizes.index(min(fitting or sizes))) if sizes else None
        if buffer is None or not fitting:  # the new buffer replaces a smaller one
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer

    def get_or_make_ones(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a cached tensor of ``count`` ones on ``device``, which callers must not write."""
        key = count, dtype, device
        if ACTIVE_RECORDERS or key not in self._ones:
            made = torch.ones(count, dtype=dtype, device=device)
            return made if ACTIVE_RECORDERS else self._ones.setdefault(key, made)
        return self._ones[key]

    def give_back(self, buffer: Tensor) -> None:
        """Put back a buffer that no collective reads any more."""
        self._free.append(buffer)
