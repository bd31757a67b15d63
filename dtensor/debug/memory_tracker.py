"""What each rank holds: the memory of every tensor that a program makes or uses, from its first operator to its end.

A storage counts from the operator that made it until nobody has it, whichever tensors show it. One that was there before counts
from the beginning. Whose it is and what for turns out later (a gradient is made as any other value and then accumulated), so what
was held when is worked out at the end, from a log of what came and went.
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
from ..base.user_frames import NOWHERE, Place
from ..comm import communicator_of, events
from ..ranks.per_rank import PerRank
from ..tensor.dtensor import DTensor

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, BUFFERS, OTHER = "activations", "communication buffers", "other"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BUFFERS, OTHER)
_AT_ONCE = 2000  # storages whose sizes are looked at after an operator: programs free memory by making it small
_LOCAL = DTensor.__dict__["_local"]  # what is computed or waited for when asked is none of ours to ask for


@dataclass(slots=True, eq=False)
class Store:
    """One storage.

    Attributes:
        kind: of :data:`KINDS`, as far as it is known by now.
        ranks: who holds it; none: each of them one.
        before: bytes that it had at the beginning.
        place, operator: the line and what was called there when it was made.
        counts: False for what only stands for something in one process, such as the terms of a sum on their way.
    """

    number: int
    nbytes: int
    kind: str
    before: int = 0
    place: Place = NOWHERE
    operator: str = ""
    ranks: set[int] = field(default_factory=set)
    sure: bool = False
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Birth:
    """What makes memory just now."""

    place: Place
    operator: str
    kind: str
    counts: bool = True


_BEFORE = Birth(NOWHERE, "", OTHER)


class Holdings:
    """Every storage seen, and when it came and went."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, int]] = []  # nanoseconds, number of the store, bytes more
        self.stores: list[Store] = []
        self.ranks: set[int] = set()  # of meshes whose ranks live here
        self._known: dict[int, tuple[Store, weakref.ref[Any]]] = {}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}

    # --- what comes and goes -------------------------------------------------------------------------------------------
    def made(self, values: Iterable[Tensor], rank: int | None, birth: Birth) -> None:
        """Results of a local operator: memory that is not known is new."""
        for x in values:
            for own, piece in pieces(x):
                self._store(piece, rank if own is None else own, own is not None, birth)

    def given(self, x: Tensor) -> int | None:
        """An operand: what is not known was there before. Whose it is, as far as one rank has it.

        A leaf that gets a gradient is a parameter; in backward passes what autograd has saved looks like one.
        """
        whose = [rank for store in self._shown(x) if len(store.ranks) == 1 for rank in store.ranks]
        if graph_task() == -1 and type(x) is not PerRank and not x._is_view() and x.requires_grad and x.is_leaf:
            self.name([x], PARAMETERS)
            self._leaves.setdefault(id(x), weakref.ref(x))
        return whose[-1] if whose else None

    def touched(self, values: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        """Numbers of the stores that tensors show, with the bytes that they show of them."""
        found = [(self._known.get(storage._cdata), x) for x in values if (storage := storage_of(x)) is not None]
        return tuple((known[0].number, x.numel() * x.element_size()) for known, x in found if known is not None)

    def name(self, values: Iterable[Tensor], kind: str) -> None:
        """These are of that kind, from their beginning on."""
        for x in values:
            for store in self._shown(x):
                store.kind = kind

    def claimed(self, result: Any) -> None:
        """What a collective gave: the ranks' own."""
        for store in self._shown(result):
            store.counts = True

    def _shown(self, x: Any) -> list[Store]:
        """The memory of a tensor that was there before."""
        found = (self._store(piece, rank, rank is not None, None) for rank, piece in pieces(x))
        return [store for store in found if store is not None]

    def accumulated(self) -> None:
        """The gradients that leaves have by now."""
        for key, leaf in list(self._leaves.items()):
            x = leaf()
            if x is None:
                del self._leaves[key]
            elif x.grad is not None:
                self.name([x.grad], GRADIENTS)

    def resized(self) -> None:
        """Looks for memory that has been made smaller or larger in place."""
        if self.log and len(self.log) % (1 + len(self._known) // _AT_ONCE):
            return
        for store, storage in list(self._known.values()):
            alive = storage()
            if alive is not None and alive.nbytes() != store.nbytes:
                self._changed(store, alive.nbytes())

    def _changed(self, store: Store, nbytes: int) -> None:
        if nbytes == store.nbytes:
            return
        self.log.append((time.perf_counter_ns(), store.number, nbytes - store.nbytes))
        store.nbytes = nbytes

    def _store(self, x: Tensor, rank: int | None, sure: bool, birth: Birth | None) -> Store | None:
        storage = storage_of(x)
        if storage is None:
            return None
        known = self._known.get(storage._cdata)
        store = self._new(storage, birth) if known is None else known[0]
        if known is not None and not sure:  # a view; or what one rank uses of what each has
            rank = None
        if store.nbytes != storage.nbytes():
            self._changed(store, storage.nbytes())
        if rank is not None and (sure or not store.sure):
            store.ranks = store.ranks | {rank} if store.sure and sure else {rank}
            store.sure = store.sure or sure
            self.ranks.add(rank)
        return store

    def _new(self, storage: Any, birth: Birth | None) -> Store:
        nbytes, now = storage.nbytes(), birth or _BEFORE
        store = Store(len(self.stores), nbytes, now.kind, 0, now.place, now.operator, counts=now.counts)
        self.stores.append(store)
        if birth is None:
            store.before = nbytes
        else:
            self.log.append((time.perf_counter_ns(), store.number, nbytes))
        key = storage._cdata

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self._changed(store, 0)

        self._known[key] = store, weakref.ref(storage, died)
        return store

    def end(self) -> None:
        """Nothing more is followed."""
        self.accumulated()
        self._known.clear()
        self._leaves.clear()

    # --- what was held -------------------------------------------------------------------------------------------------
    def everyone(self) -> tuple[int, ...]:
        """The ranks whose memory this process sees: all of them, or its own."""
        return tuple(sorted(self.ranks)) or (dist.get_rank() if dist.is_initialized() else 0,)

    def over_time(self, rank: int) -> Iterator[tuple[int, Counter[str]]]:
        """Before and after each entry of the log: how many were read, and the bytes by kind (always the same counter)."""
        held: Counter[str] = Counter()
        for store in self.stores:
            if self._counts(store, rank):
                held[store.kind] += store.before
        yield 0, held
        for count, (_, number, more) in enumerate(list(self.log), 1):
            store = self.stores[number]
            if self._counts(store, rank):
                held[store.kind] += more
                yield count, held

    def peak(self, rank: int) -> tuple[int, int, dict[str, int]]:
        """Most bytes that a rank holds at once; how many entries of the log lead there; the bytes by kind then."""
        most, at, kinds = -1, 0, {}
        for count, held in self.over_time(rank):
            if (total := held.total()) > most:
                most, at, kinds = total, count, dict(held)
        return most, at, {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}

    def held_at(self, rank: int, count: int) -> list[tuple[Store, int]]:
        """What a rank holds after so many entries of the log, in bytes."""
        sizes = {store.number: store.before for store in self.stores if self._counts(store, rank)}
        for _, number, more in self.log[:count]:
            if number in sizes:
                sizes[number] += more
        return [(self.stores[number], size) for number, size in sizes.items() if size]

    @staticmethod
    def _counts(store: Store, rank: int) -> bool:
        return store.counts and (not store.ranks or rank in store.ranks)


def told_by_all(holdings: Holdings, value: Any) -> list[Any]:
    """What each process says, by rank; all ask. Of one process its own. It is no collective of the program's."""
    alone = holdings.ranks or not dist.is_initialized() or dist.get_backend() == "fake"
    if alone:
        return [value]
    told: list[Any] = [None] * dist.get_world_size()
    events.issuing(dist.all_gather_object)(told, value)
    return told


def pieces(x: Any) -> list[tuple[int | None, Tensor]]:
    """The tensors that have the memory of one, each with its rank where several live here."""
    if isinstance(x, DTensor):
        if type(x)._local is not _LOCAL:
            return []
        mesh = x._layout.mesh
        own = communicator_of(mesh).pieces(x._local)
        return [(mesh.ranks[k] if mesh.kind == "in_process" else None, piece) for k, piece in own.items()]
    if isinstance(x, PerRank):
        return list(enumerate(x.shards))
    return [(None, x)] if isinstance(x, Tensor) else []


def storage_of(x: Tensor) -> Any:
    """The memory of a plain tensor; None if it has none of its own."""
    if x.layout is not torch.strided:
        return None
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # under a transform of torch.func, or of another library's class
        return None
