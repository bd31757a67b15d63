"""The few switches that change how operations on distributed tensors behave. All ranks must enter them alike."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ArgumentError
from .mode_stack import Scoped, entering

IMPLICIT_REPLICATION: Scoped[None] = Scoped("implicit_replication")
EXPLICIT: Scoped[None] = Scoped("explicit")
REMEMBERED: Scoped[str] = Scoped("remember")


class Modes:
    """The current switches, of whoever asks. Where it matters, ask first whether the switch is ``held`` anywhere."""

    __slots__ = ()

    @property
    def implicit_replication(self) -> bool:
        return bool(IMPLICIT_REPLICATION)

    @property
    def explicit(self) -> bool:
        return bool(EXPLICIT)

    @property
    def remembered(self) -> str:
        return REMEMBERED.last("values")


MODES = Modes()
_NONE = (False, False, "values")


def switches() -> tuple[bool, bool, str]:
    """All of them, as a part of a key."""
    if not (IMPLICIT_REPLICATION.held or EXPLICIT.held or REMEMBERED.held):
        return _NONE
    return MODES.implicit_replication, MODES.explicit, MODES.remembered


@entering
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors mixed with DTensors count as replicated: every rank must hold the same value.

    Threads and tasks each enter it for themselves; so for all modes (see docs/architecture.md).

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.implicit_replication():
    ...     (x + torch.arange(4.0)).full_tensor()
    tensor([1., 2., 3., 4.])

    No communication, no errors of its own.
    """
    with IMPLICIT_REPLICATION.entered(None):
        yield


@entering
def explicit() -> Iterator[None]:
    """Inside, an operation that would communicate raises; only ``redistribute`` and ``full_tensor`` may.

    Raises:
        ImplicitCommunicationError: from the operation, naming the redistribution that it needs.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.explicit():
    ...     x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.ImplicitCommunicationError: ...
    """
    with EXPLICIT.entered(None):
        yield


@entering
def remember(what: str) -> Iterator[None]:
    """Inside, of what operators needed in another layout tensors remember this: less memory, or less communication.

    Args:
        what: ``"nothing"``: a value is moved each time. ``"values"``, the default: what operators made is moved once, and held in
            both layouts as long as it lives. ``"parameters"``: parameters too, from forward until their gradient arrives (or they
            are written to), whole if they are gathered: of three transfers of a fully sharded step two are left.

    Raises:
        ArgumentError: another word.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> w = torch.nn.Parameter(dt.ones(64, 64, device_mesh=mesh, placements=[dt.Shard(0)]))
    >>> x = dt.ones(500, 64, device_mesh=mesh, placements=[dt.Shard(0)]).requires_grad_()
    >>> def step():
    ...     (x @ w).square().sum().backward()
    >>> with dt.remember("parameters"):
    ...     once = [m.event.kind for m in dt.explain(step).movements].count("all_gather")
    >>> once, [m.event.kind for m in dt.explain(step).movements].count("all_gather")
    (1, 2)
    """
    if what not in ("nothing", "values", "parameters"):
        raise ArgumentError(f'remember takes "nothing", "values" or "parameters", got {what!r}')
    with REMEMBERED.entered(what):
        yield
