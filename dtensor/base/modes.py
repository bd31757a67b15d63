"""Modes: the switches that change how operations on DTensors behave. All ranks must enter them together."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ArgumentError
from .mode_stack import ModeStack, mode_context

IMPLICIT_REPLICATION: ModeStack[None] = ModeStack("implicit_replication")
EXPLICIT: ModeStack[None] = ModeStack("explicit")
REMEMBER: ModeStack[str] = ModeStack("remember")


class Modes:
    """Values of the modes in the current context. On hot paths test ``ModeStack.held`` of a mode first."""

    __slots__ = ()

    @property
    def implicit_replication(self) -> bool:
        return bool(IMPLICIT_REPLICATION)

    @property
    def explicit(self) -> bool:
        return bool(EXPLICIT)

    @property
    def remembered(self) -> str:
        return REMEMBER.last("values")


MODES = Modes()
_DEFAULTS = (False, False, "values")


def mode_values() -> tuple[bool, bool, str]:
    """Return the values of all modes in this context, as a part of a cache key."""
    if not (IMPLICIT_REPLICATION.held or EXPLICIT.held or REMEMBER.held):
        return _DEFAULTS
    return MODES.implicit_replication, MODES.explicit, MODES.remembered


@mode_context
def implicit_replication() -> Iterator[None]:
    """Treat plain tensors that are mixed with DTensors as replicated inside of a block. Every rank must hold the same value.

    Threads and tasks enter every mode separately (see docs/architecture.md).

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.implicit_replication():
    ...     (x + torch.arange(4.0)).full_tensor()
    tensor([1., 2., 3., 4.])

    Issues no communication and raises no errors.
    """
    with IMPLICIT_REPLICATION.entered(None):
        yield


@mode_context
def explicit() -> Iterator[None]:
    """Raise for operations that would communicate inside of a block. Only ``redistribute`` and ``full_tensor`` may communicate.

    Raises:
        ImplicitCommunicationError: from the operation, with the redistribution that it needs.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.explicit():
    ...     x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.ImplicitCommunicationError: ...
    """
    with EXPLICIT.entered(None):
        yield


@mode_context
def remember(what: str) -> Iterator[None]:
    """Set which redistributed operands are cached inside of a block: more caching needs more memory and less communication.

    Args:
        what: ``"nothing"``: an operand is redistributed at each use. ``"values"``, the default: a result of an operator is
            redistributed once, and both layouts are kept as long as the tensor lives. ``"parameters"``: parameters too, from
            forward until their gradient arrives or they are written to. A parameter is then cached replicated if it is
            gathered: a fully sharded step has two transfers instead of three.

    Raises:
        ArgumentError: for another word.

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
    with REMEMBER.entered(what):
        yield
