"""The memory of gathered parameters: given back without losing the tensors that lie in it, and taken again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ...base.recorder_hooks import ACTIVE, effect
from ...base.torch_internals import set_version_counter, storage_use_count
from ...comm import shards_of
from ...dispatch.version_counters import Stamp


class Memory:
    """What some tensors lie in, views of one another or not."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._inside: dict[int, tuple[Tensor, int]] = {}  # by storage a tensor in it, and its bytes
        self._own_uses: list[int] = []  # by storage how many tensors of the owner use it
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """And these; they have their memory now."""
        for x in tensors:
            storage = x.untyped_storage()
            self._inside.setdefault(storage._cdata, (x, storage.nbytes()))

    def __contains__(self, x: Tensor) -> bool:
        return x.layout is torch.strided and x.untyped_storage()._cdata in self._inside

    def note_own_uses(self) -> None:
        """Note that all tensors that use the memory now are the owner's."""
        self._own_uses = [storage_use_count(storage) for storage in self._inside]

    def has_other_uses(self) -> bool:
        """Return True if more tensors use the memory than the owner's, in this process."""
        return any(storage_use_count(storage) > own for storage, own in zip(self._inside, self._own_uses, strict=False))

    def take(self) -> None:
        """All of it is there, with whatever was in it if it was not given back."""
        for x, nbytes in self._inside.values():
            if x.untyped_storage().nbytes() == 0:
                _resize(x, nbytes)

    def give_back(self) -> None:
        """None of it is."""
        for x, _ in self._inside.values():
            _resize(x, 0)


@effect
def _resize(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)


class Aliases:
    """What is made of locals once, for as long as they are the same tensors in the same memory, where it has no other."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._of: Stamp | None = None

    def of(self, locals_: Sequence[Any], now: Stamp, make: Callable[[], list[Any]]) -> list[Any]:
        """What ``make()`` gives of locals that are stamped so."""
        if self._of is not None and self._of.lies_as(now) and not ACTIVE:
            return self._made
        made, there = make(), Memory(x for local in locals_ for x in shards_of(local))
        if not ACTIVE and all(x in there for local in made for x in shards_of(local)):
            self._made, self._of = made, now
        return made


class Lent:
    """Tensors of gathered values that graphs have saved. While their memory is given back autograd is told that they were written
    to: a backward that no unit's output leads to (what a module keeps in an attribute is no output) raises, instead of reading
    from no memory, which ended the process.

    Whoever needs them has them: held here they would hold the graph, and that the unit, in a circle that no collector sees.
    """

    def __init__(self) -> None:
        self._tensors: list[TensorWeakRef] = []
        self._versions: list[int] = []  # while they are away

    def add(self, tensors: Iterable[Tensor]) -> None:
        """And these. Those that nobody has any more are forgotten."""
        if not self._versions:
            self._tensors = [ref for ref in self._tensors if ref() is not None]
        self._tensors += map(TensorWeakRef, tensors)

    def away(self) -> None:
        """Their memory is given back."""
        if self._tensors and not self._versions:
            there = [(ref, x) for ref in self._tensors if (x := ref()) is not None]
            self._tensors, self._versions = [ref for ref, _ in there], [x._version for _, x in there]
            set_version_counter(tuple([x for _, x in there]), tuple([version + 1 for version in self._versions]))

    def back(self) -> None:
        """It is there again, with what was in it."""
        if self._versions:
            there = [
                (x, version) for ref, version in zip(self._tensors, self._versions, strict=False) if (x := ref()) is not None
            ]
            set_version_counter(tuple([x for x, _ in there]), tuple([version for _, version in there]))
            self._versions = []


@dataclass(eq=False, slots=True)
class Whole:
    """What is gathered of a group of parameters now. One that is new says that nothing is.

    Attributes:
        gathered: the buffer is filled.
        seen: the stamp of what is gathered.
        pending: a gather under way.
        kept: between forward and backward neighbours, and what this rank keeps for them.
        buffer, memory: of bytes, in which the values lie, and their memory.
        full, views: the values; what was gathered, which an extension may make them of.
        targets: where rows are copied to.
        lent: what graphs may have saved of the values.
        recorded: a graph may have saved them, also those of frozen parameters, which ``lent`` has not.
        buckets: memory of whole gradients on their way, by what is reduced, by member.
    """

    gathered: bool = False
    seen: Stamp | None = None
    pending: Any = None
    kept: Any = None
    buffer: Any = None
    full: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    lent: Lent = field(default_factory=Lent)
    recorded: bool = False
    buckets: dict[Any, dict[int, list[Tensor]]] = field(default_factory=dict)


class Spare:
    """Host memory for what travels: fresh pages cost more than a copy into old ones. Accelerators' allocators keep theirs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._ones: dict[Any, Tensor] = {}

    def take(self, nbytes: int, device: torch.device) -> Tensor | None:
        """A row of so many bytes or more; None where new memory serves as well: not on the host, and while somebody records."""
        if device.type != "cpu" or ACTIVE:
            return None
        sizes = list(map(Tensor.numel, self._free))
        fitting = [size for size in sizes if size >= nbytes]
        found = self._free.pop(sizes.index(min(fitting or sizes))) if sizes else None
        if found is None or not fitting:  # in the place of a smaller one
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return found

    def ones(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many ones, that nobody writes to; made there: a copy from the host would wait."""
        key = count, dtype, device
        if ACTIVE or key not in self._ones:
            made = torch.ones(count, dtype=dtype, device=device)
            return made if ACTIVE else self._ones.setdefault(key, made)
        return self._ones[key]

    def give_back(self, row: Tensor) -> None:
        """Nobody reads it any more."""
        self._free.append(row)
