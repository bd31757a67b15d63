"""Memory tracker: records the storages that each rank holds, from the first operator of a program to its end.

A storage counts from the operator that allocated it until it is freed, however many tensors view it. A storage from before the
run counts from the start. The rank and the kind of a storage are known only later: a gradient is allocated as any other value
and becomes a gradient when it is accumulated. The memory over time is therefore computed at the end, from a log of allocations
and frees.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.torch_internals import graph_task
from ..base.user_frames import NO_SOURCE_LINE, SourceLine
from ..comm import events
from ..comm.map_ranks import communicator_of
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, BUFFERS, OTHER = "activations", "communication buffers", "other"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, BUFFERS, OTHER)
_SIZE_CHECKS_PER_OPERATOR = 2000  # bounds the cost of ``check_resized``: programs free memory by resizing it to zero
_PLAIN_LOCAL = DTensor.__dict__["_local"]  # subclasses compute or await their local value: it is not read here


@dataclass(slots=True, eq=False)
class TrackedStorage:
    """Storage with its size, kind and ranks.

    Attributes:
        number: its index in ``tracked_storages`` of the tracker.
        nbytes: its current size.
        kind: one of :data:`KINDS`, as far as it is known.
        before: its bytes at the start of the run.
        place, operator: the user's line and the operator that allocated it.
        ranks: the ranks that hold it. Empty: every rank has one such storage.
        is_certain: True if ``ranks`` was read from a tensor that stores the local tensors of all ranks, False if it was inferred.
        counts: False for memory that no rank would allocate, such as the addends of an all-reduce in one process.
    """

    number: int
    nbytes: int
    kind: str
    before: int = 0
    place: SourceLine = NO_SOURCE_LINE
    operator: str = ""
    ranks: set[int] = field(default_factory=set)
    is_certain: bool = False
    counts: bool = True


@dataclass(frozen=True, slots=True)
class AllocationOrigin:
    """The line and the operator that allocate memory now, and the kind of that memory."""

    place: SourceLine
    operator: str
    kind: str
    counts: bool = True


_FROM_BEFORE = AllocationOrigin(NO_SOURCE_LINE, "", OTHER)


class MemoryTracker:
    """Record every storage, when it was allocated and when it was freed."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, int]] = []  # (nanoseconds, storage number, change in bytes)
        self.tracked_storages: list[TrackedStorage] = []
        self.ranks: set[int] = set()  # ranks of in-process meshes
        self._tracked: dict[int, tuple[TrackedStorage, weakref.ref[Any]]] = {}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}

    # --- allocations and frees -------------------------------------------------------------------------------------------
    def record_results(self, values: Iterable[Tensor], rank: int | None, origin: AllocationOrigin) -> None:
        """Track the storages of an operator's results; a storage that is not tracked yet is new, from ``origin``."""
        for x in values:
            for own, local in local_tensors_by_rank(x):
                self._track_storage(local, rank if own is None else own, own is not None, origin)

    def record_operand(self, x: Tensor) -> int | None:
        """Track the storage of an operand, and return the one rank that holds it, or None if it is unknown or not one.

        A storage that is not tracked yet is from before the run. A leaf that requires a gradient is a parameter. Backward passes
        are excluded from this, because tensors that autograd saved look like leaves.
        """
        owners = [rank for store in self._storages_of(x) if len(store.ranks) == 1 for rank in store.ranks]
        if graph_task() == -1 and type(x) is not PerRank and not x._is_view() and x.requires_grad and x.is_leaf:
            self.set_kind([x], PARAMETERS)
            self._leaves.setdefault(id(x), weakref.ref(x))
        return owners[-1] if owners else None

    def touched_storages(self, values: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        """Return (number of the storage, bytes of the tensor) for each tensor with a tracked storage."""
        entries = [(self._tracked.get(storage._cdata), x) for x in values if (storage := own_storage_of(x)) is not None]
        return tuple((entry[0].number, x.numel() * x.element_size()) for entry, x in entries if entry is not None)

    def set_kind(self, values: Iterable[Tensor], kind: str) -> None:
        """Set what the storages of these tensors are, such as parameters or gradients, for their whole lifetime."""
        for x in values:
            for store in self._storages_of(x):
                store.kind = kind

    def mark_collective_result(self, result: Any) -> None:
        """Count the storages of a collective's result, which in process were made uncounted, as memory of the ranks."""
        for store in self._storages_of(result):
            store.counts = True

    def _storages_of(self, x: Any) -> list[TrackedStorage]:
        """Return the tracked storages of a tensor; one that is not tracked yet counts as from before the run."""
        storages = (self._track_storage(local, rank, rank is not None, None) for rank, local in local_tensors_by_rank(x))
        return [store for store in storages if store is not None]

    def mark_gradients(self) -> None:
        """Mark the storages of the gradients that leaves have now as gradients."""
        for key, leaf in list(self._leaves.items()):
            x = leaf()
            if x is None:
                del self._leaves[key]
            elif x.grad is not None:
                self.set_kind([x.grad], GRADIENTS)

    def check_resized(self) -> None:
        """Log storages that were resized in place. With many storages, only some calls check them."""
        if self.log and len(self.log) % (1 + len(self._tracked) // _SIZE_CHECKS_PER_OPERATOR):
            return
        for store, storage in list(self._tracked.values()):
            alive = storage()
            if alive is not None and alive.nbytes() != store.nbytes:
                self._record_size(store, alive.nbytes())

    def _record_size(self, store: TrackedStorage, nbytes: int) -> None:
        """Log the change of a storage's size in bytes, with the time."""
        if nbytes == store.nbytes:
            return
        self.log.append((time.perf_counter_ns(), store.number, nbytes - store.nbytes))
        store.nbytes = nbytes

    def _track_storage(
        self, x: Tensor, rank: int | None, is_certain: bool, origin: AllocationOrigin | None
    ) -> TrackedStorage | None:
        """Track the storage of a tensor, update its size, and record the ranks that use it."""
        storage = own_storage_of(x)
        if storage is None:
            return None
        entry = self._tracked.get(storage._cdata)
        store = self._add_storage(storage, origin) if entry is None else entry[0]
        if entry is not None and not is_certain:  # a view, or one rank's use of a storage that every rank has
            rank = None
        if store.nbytes != storage.nbytes():
            self._record_size(store, storage.nbytes())
        if rank is not None and (is_certain or not store.is_certain):
            store.ranks = store.ranks | {rank} if store.is_certain and is_certain else {rank}
            store.is_certain = store.is_certain or is_certain
            self.ranks.add(rank)
        return store

    def _add_storage(self, storage: Any, origin: AllocationOrigin | None) -> TrackedStorage:
        """Track a storage until it is freed, and log its size."""
        number, nbytes, source = len(self.tracked_storages), storage.nbytes(), origin or _FROM_BEFORE
        store = TrackedStorage(number, nbytes, source.kind, 0, source.place, source.operator, counts=source.counts)
        self.tracked_storages.append(store)
        if origin is None:
            store.before = nbytes
        else:
            self.log.append((time.perf_counter_ns(), store.number, nbytes))
        key = storage._cdata

        def on_freed(_: Any) -> None:
            self._tracked.pop(key, None)
            self._record_size(store, 0)

        self._tracked[key] = store, weakref.ref(storage, on_freed)
        return store

    def stop_tracking(self) -> None:
        """Mark the last gradients, and stop tracking. The log stays."""
        self.mark_gradients()
        self._tracked.clear()
        self._leaves.clear()

    # --- memory over time ----------------------------------------------------------------------------------------------------
    def current_ranks(self) -> tuple[int, ...]:
        """Return the ranks with memory in this process: all ranks of in-process meshes, or this process's rank."""
        return tuple(sorted(self.ranks)) or (dist.get_rank() if dist.is_initialized() else 0,)

    def sizes_over_time(self, rank: int) -> Iterator[tuple[int, Counter[str]]]:
        """Yield (number of log entries read, bytes by kind) for a rank: at the start, then after each change.

        The yielded counter is one object, updated in place.
        """
        sizes: Counter[str] = Counter()
        for store in self.tracked_storages:
            if self._counts_for_rank(store, rank):
                sizes[store.kind] += store.before
        yield 0, sizes
        for count, (_, number, change) in enumerate(list(self.log), 1):
            store = self.tracked_storages[number]
            if self._counts_for_rank(store, rank):
                sizes[store.kind] += change
                yield count, sizes

    def peak_of(self, rank: int) -> tuple[int, int, dict[str, int]]:
        """Return the peak of a rank in bytes, the number of log entries up to it, and the bytes by kind then."""
        peak_bytes, position, kinds = -1, 0, {}
        for count, sizes in self.sizes_over_time(rank):
            if (total := sizes.total()) > peak_bytes:
                peak_bytes, position, kinds = total, count, dict(sizes)
        return peak_bytes, position, {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}

    def sizes_at(self, rank: int, count: int) -> list[tuple[TrackedStorage, int]]:
        """Return the storages of a rank with their bytes, after the first ``count`` log entries."""
        sizes = {store.number: store.before for store in self.tracked_storages if self._counts_for_rank(store, rank)}
        for _, number, change in self.log[:count]:
            if number in sizes:
                sizes[number] += change
        return [(self.tracked_storages[number], size) for number, size in sizes.items() if size]

    @staticmethod
    def _counts_for_rank(store: TrackedStorage, rank: int) -> bool:
        return store.counts and (not store.ranks or rank in store.ranks)


def gather_from_processes(tracker: MemoryTracker, value: Any) -> list[Any]:
    """Return the values that all processes pass, by rank. Every process must call it.

    The exchange is not reported as a collective of the program. Return ``[value]`` if this process holds all ranks, or if there
    is no real process group.
    """
    is_complete = tracker.ranks or not dist.is_initialized() or dist.get_backend() == "fake"
    if is_complete:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    events.mark_reported(dist.all_gather_object)(gathered, value)
    return gathered


def local_tensors_by_rank(x: Any) -> list[tuple[int | None, Tensor]]:
    """Return (rank, tensor) for each local tensor of ``x``. The rank is None if this process is one rank."""
    if isinstance(x, DTensor):
        if type(x)._local is not _PLAIN_LOCAL:
            return []
        mesh = x._layout.mesh
        own = communicator_of(mesh).shards_by_member(x._local)
        return [(mesh.ranks[k] if mesh.kind == "in_process" else None, local) for k, local in own.items()]
    if isinstance(x, PerRank):
        return list(enumerate(x.shards))
    return [(None, x)] if isinstance(x, Tensor) else []


def own_storage_of(x: Tensor) -> Any:
    """Return the storage of a plain tensor; None if it has none."""
    if x.layout is not torch.strided:
        return None
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a torch.func wrapper, or a subclass of another library
        return None
