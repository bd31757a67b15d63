"""Check of reported bytes: during every test, communication between ranks of one process is reported once, with the right bytes.
All tools (``explain``, ``CommDebugMode``, ``trace``, ``budget``) show the reported events, so none of them can omit communication
or show other bytes. The bytes are counted from the tensors where blocks are copied and partial values reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dtensor.comm import events
from dtensor.comm.in_process import InProcess
from dtensor.placement import Monoid
from dtensor.ranks.per_rank import shards_of

_CountBytes = Callable[[Any, Any], int]  # bytes that came to the rank to which most came: of what was given and what is there


class ReportedBytesCheck:
    """Listener that pairs each reported event with the transfer that follows it; ``wrong`` lists the mismatches."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.reported: events.Event | None = None  # and nothing has arrived yet

    def __call__(self, event: events.Event) -> None:
        if event.mesh is not None and event.mesh.kind == "in_process" and event.bytes:
            self._check_none_missing()
            self.reported = event
        elif event.mesh is None and not (event.direct or dist.is_initialized()):  # from one mesh to another; not in a graph
            self.reported = event

    def check_transfer(self, kind: str, nbytes: int) -> None:
        """Compare a transfer that was counted from tensors with the event that was reported before it."""
        event, self.reported = self.reported, None
        if event is None:
            if nbytes:
                self.wrong.append(f"{kind} of {nbytes} B is not reported")
        elif event.bytes != nbytes or kind not in (event.kind, "transfer"):
            self.wrong.append(f"{event} is reported, a {kind} of {nbytes} B arrives")

    def _check_none_missing(self) -> None:
        if self.reported is not None:
            self.wrong.append(f"{self.reported} is reported, nothing arrives")


@contextmanager
def compare_reported_bytes() -> Iterator[None]:
    """Assert that inside the context each transfer of this thread, its tasks and its backward passes is reported correctly."""
    arrivals = ReportedBytesCheck()
    with events.listening(arrivals):
        yield
    arrivals._check_none_missing()
    assert not arrivals.wrong, "\n".join(arrivals.wrong)


def install_byte_counters() -> None:
    """Patch the in-process communicator, so that collectives that are bound from now on count the bytes that they move."""
    for name, arrived in _BYTE_COUNTERS.items():
        setattr(InProcess, name, _wrap_with_byte_counter(getattr(InProcess, name), arrived))


def _wrap_with_byte_counter(bind: Callable[..., Any], arrived: Callable[..., tuple[str, _CountBytes]]) -> Callable[..., Any]:
    """Return a binding method of the communicator that passes the counted bytes of each call to the active checks."""

    @wraps(bind)
    def counted(self: InProcess, *args: Any) -> Any:
        bound, (kind, nbytes) = bind(self, *args), arrived(self, *args)

        def run(x: Any) -> Any:
            here = [listener for listener in events.LISTENING.values() if isinstance(listener, ReportedBytesCheck)]
            try:
                made = (bound.run if kind == "all_reduce" else bound)(x)
            except Exception:  # refused
                for listener in here:
                    listener.reported = None
                raise
            for listener in here:
                listener.check_transfer(kind, nbytes(x, made.wait()))
            return made

        return type(bound)(run) if kind == "all_reduce" else run

    return counted


def _count_transfer_bytes(comm: InProcess, dims: Any, transfer: Any) -> tuple[str, _CountBytes]:
    return _count_missing_bytes([transfer.route_of(member) for member in comm.held])


def _count_cross_mesh_bytes(comm: InProcess, target: Any, ranks: Any, transfer: Any) -> tuple[str, _CountBytes]:
    return _count_missing_bytes([transfer.route_of(ranks.index(rank)) for rank in target.ranks])


def _count_missing_bytes(routes: list[Any]) -> tuple[str, _CountBytes]:
    """Return a counter of the bytes of each rank's new block that the rank did not have; the largest rank counts."""
    kept = [0 if route.kept is None else route.kept[1].numel for route in routes]
    return "transfer", lambda _, made: max(
        (new.numel() - own) * new.element_size() for new, own in zip(shards_of(made), kept, strict=True)
    )


def _count_all_reduce_bytes(comm: InProcess, dims: Any, op: Any, dtype: Any) -> tuple[str, _CountBytes]:
    others = comm.group_size(dims) - 1
    share = others if isinstance(op, Monoid) else 2 * others / (others + 1)  # a reduce-scatter and an all-gather of n-ths
    return "all_reduce", lambda x, _: max(-int(-_nbytes(term) * share // 1) for term in shards_of(x))


def _count_reduce_scatter_bytes(comm: InProcess, dims: Any, scatter: Any) -> tuple[str, _CountBytes]:
    others = comm.group_size(dims) - 1
    return "reduce_scatter", lambda _, made: max(_nbytes(own) for own in shards_of(made)) * others


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


_BYTE_COUNTERS: dict[str, Callable[..., tuple[str, _CountBytes]]] = {
    "_make_transfer": _count_transfer_bytes,
    "_make_transfer_to": _count_cross_mesh_bytes,
    "_make_all_reduce": _count_all_reduce_bytes,
    "_make_reduce_scatter": _count_reduce_scatter_bytes,
}
