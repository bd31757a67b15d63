"""Version counters: whether the memory of a tensor was written to, also where several tensors got the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from operator import attrgetter
from typing import Any

import torch

from ..base.torch_internals import DisableTorchFunctionSubclass, DispatchKey, is_key_excluded
from ..ranks.per_rank import shards_of

SHARED = "_shared"  # the attribute of a tensor that has its ``Shared``
_GROUPS = count()
_ADDRESS, _VERSION = torch.Tensor.data_ptr, attrgetter("_version")


class Shared:
    """What a tensor, its views and what was detached of them have in common: one counter of torch's.

    Attributes:
        given: somebody has their locals, and is not counted when writing to them.
        counter: what has the counter, where others count apart.
        group: all that are the same memory and count apart.
    """

    __slots__ = ("__weakref__", "counter", "given", "group")

    def __init__(self) -> None:
        self.given = False
        self.counter: _Counter | None = None
        self.group: _Group | None = None


class _Counter:
    """Of whom torch counts the writes, ``of()`` (None: it is gone), and what it had counted when somebody asked."""

    __slots__ = ("last", "of")

    def __init__(self, of: Callable[[], Any]) -> None:
        self.of, self.last = of, 0


Members = tuple[tuple[weakref.ref[Shared], _Counter], ...]


class _Group:
    """All that got the same memory without being views of each other, and how often all of them together have been written to.

    What those that vanished have counted stays counted: when one vanishes is no fact of the program, as one rank may keep it.

    Attributes:
        number: of this group alone.
        state: what those have counted that vanished, and the others.
    """

    __slots__ = ("number", "state")

    def __init__(self, gone: int, members: Members) -> None:
        self.number, self.state = next(_GROUPS), (gone, members)

    def writes(self) -> int | None:
        """None: one of them counts nothing."""
        gone, members = self.state
        total, live = gone, []
        for ref, counter in members:
            x = counter.of()
            if x is not None and x.is_inference():
                return None
            counter.last = counter.last + 1 if x is None else x._version
            total += counter.last
            if x is None or ref() is None:
                gone += counter.last
            else:
                live.append((ref, counter))
        self.state = gone, tuple(live)
        return total

    def tensors(self) -> list[Shared]:
        """What those have in common that live."""
        return [found for ref, _ in self.state[1] if (found := ref()) is not None]


def shared(x: Any) -> Shared:
    found: Shared | None = x.__dict__.get(SHARED)
    if found is None:
        found = x.__dict__[SHARED] = Shared() if x._base is None else shared(x._base)
    return found


def versions_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """What changes whenever the memory of ``x`` is written to; None where nobody counts."""
    base = x._base
    root = x if base is None else base
    found: Shared | None = root.__dict__.get(SHARED)
    if found is None or found.group is None:
        try:
            return -1, root._version
        except RuntimeError:  # in inference mode nobody counts
            return None
    writes = found.group.writes()
    return None if writes is None else (found.group.number, writes)


def counting(x: Any) -> Any:
    """Whose counter tells of writes to the memory of ``x``: another's where it was made apart; None if that is gone."""
    found = x.__dict__.get("_counted", x)
    return found() if isinstance(found, weakref.ref) else found


class Stamp:
    """What tensors were: equal to another one while none of them was written to or replaced. It holds their pieces, for an
    address that is free may be that of the next one."""

    __slots__ = ("_held", "_versions", "_where")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, versions: list[Any], held: list[torch.Tensor]) -> None:
        self._versions, self._held = versions, held
        self._where = [*map(id, held), *map(_ADDRESS, held)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp) and self._versions == other._versions and self._where == other._where

    def lies_as(self, other: Stamp | None) -> bool:
        """Whether the pieces are the same tensors in the same memory, written to or not."""
        return other is not None and self._where == other._where


def stamp(*tensors: Any) -> Stamp:
    """Changes whenever the value of one does: it was written to as a whole, what is the same memory too (``x.data``), or in its
    pieces, or it has others."""
    locals_: list[Any] = [x._local if hasattr(x, "_layout") else x for x in tensors]
    held = [shard for local in locals_ for shard in ((local,) if type(local) is torch.Tensor else shards_of(local))]
    with DisableTorchFunctionSubclass():  # an attribute is read in half of the time
        versions = [versions_of(x) for x, local in zip(tensors, locals_, strict=True) if local is not x]
        return Stamp([*versions, *map(_VERSION, held)], held)


def counted_together(x: torch.Tensor, y: torch.Tensor) -> None:
    """From now on ``x`` and ``y`` are one memory, and each has its own version (``x.data``, ``x.data = y``, ``x.set_(y)``)."""
    roots = [t if t._base is None else t._base for t in (x, y)]
    pair = [shared(root) for root in roots]
    if pair[0] is pair[1]:
        return
    for one, root in zip(pair, roots, strict=True):
        if one.group is None:
            one.counter = _Counter(_counter(root))
            one.group = _Group(0, ((weakref.ref(one), one.counter),))
    groups = dict.fromkeys(one.group for one in pair if one.group)
    for group in groups:
        group.writes()  # those that vanished are counted, and left behind
    states = [group.state for group in groups]
    made = _Group(sum(gone for gone, _ in states), tuple(member for _, members in states for member in members))
    given = any(member.given for member in made.tensors())
    for member in made.tensors():
        member.given, member.group = given, made


def pass_version_on(x: Any, root: torch.Tensor) -> None:
    """``root`` is now what ``x`` was: those that got the same memory otherwise count with it."""
    found: Shared | None = x.__dict__.pop(SHARED, None)
    if found is not None:
        root.__dict__[SHARED] = found
        if found.counter is not None and found.counter.of() is x:
            found.counter.of = weakref.ref(root)


def _counter(root: Any) -> Callable[[], Any]:
    """What gives a tensor with the version counter of ``root``: one that was detached, without memory; or itself, if it is a view
    that is computed, or where torch, below autograd, gives what it detaches a counter of its own."""
    if isinstance(type(root)._local, property) or is_key_excluded(DispatchKey.ADInplaceOrView):
        return weakref.ref(root)
    made: Any = torch.Tensor.detach(root)
    made.__dict__.clear()  # no circle: when a member vanishes must not be up to a collector, which runs when it will on each rank
    del made._local
    return lambda: made
