"""Events: an ``Event`` for each collective, which is sent to the listeners of the thread that issues it.

A listener may wrap the call that issues the collective, and the call that completes it, to measure them or to read the result.
Without any listener a collective costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ..base.mode_stack import ModeStack
from ..base.torch_internals import count_dispatch_modes, profiler_enabled
from ..base.tracing import has_range_observer
from ..base.units import bytes_text
from ..mesh.device_mesh import DeviceMesh
from ..placement import Monoid
from .local_reduce import Op
from .pack import SendRecvPlan
from .pending import Pending

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Description of one collective.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"scatter"`` or
            ``"send_recv"`` (``"all_gather_object"``, of 0 bytes, for the exchange of small Python values).
        mesh_dims: dims of ``mesh``, the first one major.
        group_size: number of ranks in a group.
        bytes: bytes that one rank receives, the maximum over the ranks of the groups that this process sees. For an all-reduce
            those of the bandwidth-optimal algorithm: ``2 (n - 1) / n`` times the tensor. The addends of a monoid are not split,
            so each rank receives ``n - 1`` of them.
        mesh: the mesh of ``mesh_dims``.
        direct: whether the program itself called ``torch.distributed``.
        groups: the global ranks of each group that this process sees: its own group, or all groups if all ranks are in this
            process.
    """

    kind: str
    mesh_dims: tuple[int, ...]
    group_size: int
    bytes: int
    mesh: DeviceMesh | None = None
    direct: bool = False
    groups: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.kind} over {self.dims_text or 'a group'}, {self.group_size} ranks, {bytes_text(self.bytes)}"

    @property
    def dims_text(self) -> str:
        """Return the names of the mesh dims."""
        return "+".join(map(str, self.mesh_dims if self.mesh is None else self.mesh.named(self.mesh_dims)))


# Calls its first argument: the function that issues a collective (second argument: the local value that is sent, if known),
# later the function that completes it (second argument: None).
CollectiveWrapper: TypeAlias = Callable[[Callable[[], Any], Any], Any]
Listener: TypeAlias = Callable[[Event], CollectiveWrapper | None]
LISTENING: ModeStack[Listener] = ModeStack("listening")
listeners = LISTENING.held  # empty: no listener in any thread
# The operator calls and redistribution steps for which collectives are issued, outermost first.
CAUSES: ModeStack[Any] = ModeStack("causes")
_REPORTED: ModeStack[None] = ModeStack("issuing")


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Return a context manager in which ``listener`` gets the events of this thread or task, and of its backward passes."""
    return LISTENING.entered(listener)


def report_event(event: Event) -> list[CollectiveWrapper]:
    """Send an event to the listeners, and return the wrappers of those that want to see it run."""
    return [wrapper for listener in LISTENING.values() if (wrapper := listener(event)) is not None]


def issue_reported(event: Event, issue: Callable[[], T], sent: Any = None) -> T:
    """Return ``issue()``, run inside the wrappers of listeners. A :class:`Pending` result completes inside them too."""
    wrappers = report_event(event)
    if has_range_observer():
        wrappers = [_profiler_range(str(event)), *wrappers]
    result = _run_in_wrappers(wrappers, issue, sent)
    if not wrappers or not isinstance(result, Pending):
        return result
    return result.wrap_completion(partial(_run_in_wrappers, wrappers))  # type: ignore[return-value]  # it is result itself


def _profiler_range(name: str) -> CollectiveWrapper:
    """Return a wrapper that shows the call as a range with this name in torch's profiler and ``DebugMode``."""

    def run_in_range(fn: Callable[[], T], sent: Any = None) -> T:
        with torch.profiler.record_function(f"dtensor::{name}"):
            return fn()

    return run_in_range


def _run_in_wrappers(wrappers: Sequence[CollectiveWrapper], fn: Callable[[], T], sent: Any = None) -> T:
    """Run ``fn`` inside all ``wrappers`` of listeners; the last one is outermost."""
    for wrapper in wrappers:
        fn = partial(wrapper, fn, sent)
    return fn()


def issue_for_cause(cause: Any, fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``fn`` so that its collectives are issued for ``cause``: listeners find it in ``CAUSES``, profiler ranges show it."""

    def run_for_cause(*args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn``; listeners and profilers attribute its collectives to ``cause``."""
        if not (listeners or profiler_enabled() or count_dispatch_modes()):  # inlined for speed: this runs at each step
            return fn(*args, **kwargs)
        with CAUSES.entered(cause) if listeners else nullcontext():
            if not has_range_observer():
                return fn(*args, **kwargs)
            name = "; ".join(map(str, cause)) if isinstance(cause, tuple) else str(cause)
            return _profiler_range(name)(lambda: fn(*args, **kwargs), None)

    return run_for_cause


def current_redistribution_steps() -> tuple[Any, ...]:
    """Return the redistribution steps for which a collective is issued, empty if there are none."""
    return next((cause for cause in reversed(CAUSES.values()) if isinstance(cause, tuple)), ())


def mark_reported(fn: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``fn`` so that listeners get no event for its ``torch.distributed`` calls: its caller reports the collective."""

    @wraps(fn)
    def run_marked(*args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn``; :func:`is_reported` is True for the ``torch.distributed`` calls in it."""
        if not listeners:
            return fn(*args, **kwargs)
        with _REPORTED.entered(None):
            return fn(*args, **kwargs)

    return run_marked


def is_reported() -> bool:
    """Return True if the current ``torch.distributed`` call is part of a collective for which listeners get an event."""
    return bool(_REPORTED)


# --- bytes that one rank receives, per kind ------------------------------------------------------------------------
def all_reduce_bytes(nbytes: int, group_size: int, op: Op = "sum") -> int:
    """Return the bytes that a rank receives in an all-reduce of ``nbytes``.

    Reduce-scatter and all-gather each bring all but one n-th of the tensor. The addends of a monoid are not split.
    """
    if isinstance(op, Monoid):
        return (group_size - 1) * nbytes
    return -(-2 * (group_size - 1) * nbytes // group_size)


def max_received(groups: Sequence[Sequence[int]], route_of: Callable[[int], SendRecvPlan]) -> int:
    """Return the number of elements that a rank receives in a transfer, the maximum over all members of ``groups``."""
    members = (member for group in groups for member in group)
    return max(sum(box.numel for box in route_of(member).receives if box is not None) for member in members)
