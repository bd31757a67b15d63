"""What communication happened: an ``Event`` for each collective, sent to whoever listens where it was issued.

Those who listen may run what issues the collective, and what ends it, to see how long it takes and what it gives. With nobody
listening anywhere a collective pays one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ..base.mode_stack import Scoped
from ..base.torch_internals import count_dispatch_modes, profiler_enabled
from ..base.tracing import shows_ranges
from ..base.units import bytes_text
from ..mesh.device_mesh import DeviceMesh
from ..placement import Monoid
from .local_reduce import Op
from .pack import Route
from .pending import Pending

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """One collective.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"`` or ``"scatter"``
            (``"all_gather_object"``, of 0 bytes, for the exchange of small Python values).
        mesh_dims: dims of ``mesh``, first one major.
        group_size: number of ranks that talk to each other.
        bytes: what one rank receives, the largest over the ranks of the groups that this process sees. For an
            all-reduce what the bandwidth-optimal algorithm receives: ``2 (n - 1) / n`` times the tensor (a
            monoid's terms stay whole, and come from all ``n - 1`` others).
        mesh: the mesh that ``mesh_dims`` belong to.
        direct: whether the program itself called ``torch.distributed``.
        groups: the global ranks of each group that this process sees: its own, with all ranks here each.
    """

    kind: str
    mesh_dims: tuple[int, ...]
    group_size: int
    bytes: int
    mesh: DeviceMesh | None = None
    direct: bool = False
    groups: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.kind} over {self.over or 'a group'}, {self.group_size} ranks, {bytes_text(self.bytes)}"

    @property
    def over(self) -> str:
        """The mesh dims by name."""
        return "+".join(map(str, self.mesh_dims if self.mesh is None else self.mesh.named(self.mesh_dims)))


# Runs what issues a collective, with the locals that it sends where they are known; then what ends it, with None.
Around: TypeAlias = Callable[[Callable[[], Any], Any], Any]
Listener: TypeAlias = Callable[[Event], Around | None]
LISTENING: Scoped[Listener] = Scoped("listening")
listeners = LISTENING.held  # empty: nobody listens anywhere
CAUSES: Scoped[Any] = Scoped(
    "causes"
)  # what collectives are issued for, outermost first: operator calls, steps of redistributions
_OURS: Scoped[None] = Scoped("issuing")


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Inside, ``listener`` is told of the collectives of this thread or task, and of its backward passes."""
    return LISTENING.entered(listener)


def report(event: Event) -> list[Around]:
    """Tells those who listen here; those of them who want to see it run."""
    return [around for listener in LISTENING.values() if (around := listener(event)) is not None]


def reporting(event: Event, issue: Callable[[], T], sent: Any = None) -> T:
    """What ``issue()`` gives, reported with what it sends; where that is :class:`Pending`, its end too."""
    arounds = report(event)
    if shows_ranges():
        arounds = [_ranged(str(event)), *arounds]
    made = _through(arounds, issue, sent)
    return made.within(partial(_through, arounds)) if arounds and isinstance(made, Pending) else made  # type: ignore[return-value]  # itself


def _ranged(name: str) -> Around:
    """As a range of that name in what torch's profiler and ``DebugMode`` show."""

    def run(fn: Callable[[], T], sent: Any = None) -> T:
        with torch.profiler.record_function(f"dtensor::{name}"):
            return fn()

    return run


def _through(arounds: Sequence[Around], fn: Callable[[], T], sent: Any = None) -> T:
    for around in arounds:
        fn = partial(around, fn, sent)
    return fn()


def because(cause: Any, fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, whose collectives are issued for ``cause``: listeners find it in ``CAUSES``, ranges show it."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not (listeners or profiler_enabled() or count_dispatch_modes()):  # written out: this is asked at every step
            return fn(*args, **kwargs)
        with CAUSES.entered(cause) if listeners else nullcontext():
            if not shows_ranges():
                return fn(*args, **kwargs)
            name = "; ".join(map(str, cause)) if isinstance(cause, tuple) else str(cause)
            return _ranged(name)(lambda: fn(*args, **kwargs), None)

    return run


def steps_under_way() -> tuple[Any, ...]:
    """The steps of redistributions that a collective is issued for."""
    return next((cause for cause in reversed(CAUSES.values()) if isinstance(cause, tuple)), ())


def issuing(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, whose calls of ``torch.distributed`` are part of a collective that is reported as a whole."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not listeners:
            return fn(*args, **kwargs)
        with _OURS.entered(None):
            return fn(*args, **kwargs)

    return run


def reported() -> bool:
    """Whether what runs is part of a collective that is reported as a whole."""
    return bool(_OURS)


# --- bytes that one rank receives, per kind ------------------------------------------------------------------------
def reduced(nbytes: int, group_size: int, op: Op = "sum") -> int:
    """All-reduce: all but one n-th of the tensor in each of its two halves, reduce-scatter and all-gather; of the terms of a
    monoid, which stay whole, those of all others."""
    if isinstance(op, Monoid):
        return (group_size - 1) * nbytes
    return -(-2 * (group_size - 1) * nbytes // group_size)


def routed(groups: Sequence[Sequence[int]], route_of: Callable[[int], Route]) -> int:
    """Elements that a transfer brings to a rank, the most over ranks."""
    members = (member for group in groups for member in group)
    return max(sum(box.numel for box in route_of(member).receives if box is not None) for member in members)
