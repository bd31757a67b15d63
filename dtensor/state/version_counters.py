"""Version counters: whether the memory of a tensor was written to, by counters, snapshots and checks.

There are three questions. Was the memory of a DTensor written to, under any alias (:func:`versions_of`, :func:`counted_versions`,
:func:`is_unwritten`)? Was it written to, or did the tensor get other memory (:func:`take_snapshot`)? Was one of these tensor
objects written to while messages read it (:class:`WriteCheck`)?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..base.reenable_autograd import reenable_autograd
from ..base.torch_internals import CreationMeta, DisableTorchFunctionSubclass, creation_meta
from ..comm import Pending, shards_of
from ..errors import DTensorError
from .shared_memory import MEMORY_STATE, MemoryState, memory_state_of, named_version_owner, version_owner

_data_ptr, _version = torch.Tensor.data_ptr, attrgetter("_version")


# --- versions -----------------------------------------------------------------------------------------------------------
def versions_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return a value that changes with each write to the memory of ``x``; None if torch counts no writes (inference mode)."""
    base = x._base
    root = x if base is None else base
    state: MemoryState | None = root.__dict__.get(MEMORY_STATE)
    if state is None or state.group is None:
        try:
            return -1, root._version
        except RuntimeError:  # an inference tensor has no version counter
            return None
    writes = state.group.count_writes()
    return None if writes is None else (state.group.number, writes)


def counted_versions(x: Any) -> tuple[int, ...] | None:
    """Return :func:`versions_of` the memory of a DTensor; None also if user code may write to its local tensors uncounted."""
    return None if memory_state_of(x).exposed else versions_of(version_owner(x))


def versions_of_all(tensors: Iterable[Any]) -> tuple[int, ...] | None:
    """Return the versions of the memory of all ``tensors``, joined; None if torch counts no writes to one of them."""
    versions: list[int] = []
    for x in tensors:
        owner = named_version_owner(x)
        counts = None if owner is None else versions_of(owner)
        if counts is None:
            return None
        versions += counts
    return tuple(versions)


def is_unwritten(before: tuple[int, ...] | None, now: tuple[int, ...] | None) -> bool:
    """Return True if memory with these versions was not written to in between; False if torch counts no writes to it."""
    return before is not None and before == now


def is_written_once(before: tuple[int, ...] | None, now: tuple[int, ...] | None) -> bool:
    """Return True if memory with these versions was written to exactly once in between."""
    return before is not None and now == (*before[:-1], before[-1] + 1)


class VersionSnapshot:
    """Snapshot of versions and addresses: equal to a later one if no tensor was written to or got other memory in between.

    It holds the local tensors, since the next allocation may get the address of memory that is free.
    """

    __slots__ = ("_addresses", "_held", "_versions")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, versions: list[Any], held: list[torch.Tensor]) -> None:
        self._versions, self._held = versions, held
        self._addresses = [*map(id, held), *map(_data_ptr, held)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionSnapshot) and self._versions == other._versions and self._addresses == other._addresses

    def has_same_memory(self, other: VersionSnapshot | None) -> bool:
        """Return True if the local tensors are the same objects in the same memory, written to or not."""
        return other is not None and self._addresses == other._addresses


def take_snapshot(*tensors: Any) -> VersionSnapshot:
    """Take a snapshot that changes if one of ``tensors`` is written to, in itself, an alias or its local tensors, or replaced."""
    locals_: list[Any] = [x._local if hasattr(x, "_layout") else x for x in tensors]
    held = [shard for local in locals_ for shard in ((local,) if type(local) is torch.Tensor else shards_of(local))]
    with DisableTorchFunctionSubclass():  # an attribute is read in half of the time
        versions = [versions_of(x) for x, local in zip(tensors, locals_, strict=True) if local is not x]
        return VersionSnapshot([*versions, *map(_version, held)], held)


class WriteCheck:
    """Check whether one of some tensor objects was written to since, in itself or a view; inference tensors have no counter."""

    __slots__ = ("_counted", "_versions")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._counted = [x for x in tensors if not x.is_inference()]
        self._versions = [*map(_version, self._counted)]

    def was_written(self) -> bool:
        """Return True if torch has counted a write."""
        return self._versions != [*map(_version, self._counted)]


def is_recorded_by_autograd(x: Any) -> bool:
    """Return True if autograd recorded how ``x`` was made; torch refuses to say so of views made without recording."""
    if x._base is None:
        return x.grad_fn is not None
    if creation_meta(x) in (CreationMeta.NO_GRAD_MODE, CreationMeta.INFERENCE_MODE):
        return False
    with reenable_autograd():  # after a write to the base torch makes the view, and its node, once more
        return x.grad_fn is not None


def check_unwritten(pending: Pending[Any], sources: Sequence[Any]) -> Pending[Any]:
    """Return ``pending``, which raises if one of ``sources`` (DTensors) was written to while messages read from it.

    Raises:
        DTensorError: when the result is waited for.
    """
    check = WriteCheck(t for x in sources for t in (x, *shards_of(x._local)))

    def wait_and_check() -> Any:
        """Return the received value; raise if a source was written to while it was sent."""
        value = pending.wait()
        if check.was_written():
            raise DTensorError(
                "a tensor was written to in place while redistribute(..., async_op=True) was still sending it: the result may "
                "hold old values or new ones; use the result before writing, or redistribute a copy: x.clone().redistribute(...)"
            )
        return value

    return Pending(wait_and_check)
