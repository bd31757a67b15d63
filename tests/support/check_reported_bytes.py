"""A check during every test: communication between ranks of one process is reported exactly once, with the right bytes. All tools
(``explain``, ``CommDebugMode``, ``trace``, ``budget``) show the reported events, so none of them can omit communication or show
other bytes. The bytes are counted from the tensors where blocks are copied and partial values reduced.
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

_Arrived = Callable[[Any, Any], int]  # bytes that came to the rank to which most came: of what was given and what is there


class Arrivals:
    """Arrivals of one block; ``wrong`` lists the problems found so far."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.reported: events.Event | None = None  # and nothing has arrived yet

    def __call__(self, event: events.Event) -> None:
        if event.mesh is not None and event.mesh.kind == "in_process" and event.bytes:
            self._none_missing()
            self.reported = event
        elif event.mesh is None and not (event.direct or dist.is_initialized()):  # from one mesh to another; not in a graph
            self.reported = event

    def arrived(self, kind: str, nbytes: int) -> None:
        event, self.reported = self.reported, None
        if event is None:
            if nbytes:
                self.wrong.append(f"{kind} of {nbytes} B is not reported")
        elif event.bytes != nbytes or kind not in (event.kind, "transfer"):
            self.wrong.append(f"{event} is reported, a {kind} of {nbytes} B arrives")

    def _none_missing(self) -> None:
        if self.reported is not None:
            self.wrong.append(f"{self.reported} is reported, nothing arrives")


@contextmanager
def compared() -> Iterator[None]:
    """Compare reported with counted bytes of this thread, its tasks and its backward passes in this context."""
    arrivals = Arrivals()
    with events.listening(arrivals):
        yield
    arrivals._none_missing()
    assert not arrivals.wrong, "\n".join(arrivals.wrong)


def count() -> None:
    """Count arrivals of collectives bound from now on."""
    for name, arrived in _COUNTED.items():
        setattr(InProcess, name, _counting(getattr(InProcess, name), arrived))


def _counting(bind: Callable[..., Any], arrived: Callable[..., tuple[str, _Arrived]]) -> Callable[..., Any]:
    @wraps(bind)
    def counted(self: InProcess, *args: Any) -> Any:
        bound, (kind, nbytes) = bind(self, *args), arrived(self, *args)

        def run(x: Any) -> Any:
            here = [listener for listener in events.LISTENING.values() if isinstance(listener, Arrivals)]
            try:
                made = (bound.run if kind == "all_reduce" else bound)(x)
            except Exception:  # refused
                for listener in here:
                    listener.reported = None
                raise
            for listener in here:
                listener.arrived(kind, nbytes(x, made.wait()))
            return made

        return type(bound)(run) if kind == "all_reduce" else run

    return counted


def _transferred(comm: InProcess, dims: Any, transfer: Any) -> tuple[str, _Arrived]:
    return _brought([transfer.route_of(member) for member in comm.held])


def _transferred_to(comm: InProcess, target: Any, ranks: Any, transfer: Any) -> tuple[str, _Arrived]:
    return _brought([transfer.route_of(ranks.index(rank)) for rank in target.ranks])


def _brought(routes: list[Any]) -> tuple[str, _Arrived]:
    """Return the bytes of each new block that the rank did not have."""
    kept = [0 if route.kept is None else route.kept[1].numel for route in routes]
    return "transfer", lambda _, made: max(
        (new.numel() - own) * new.element_size() for new, own in zip(shards_of(made), kept, strict=True)
    )


def _reduced(comm: InProcess, dims: Any, op: Any, dtype: Any) -> tuple[str, _Arrived]:
    others = comm.group_size(dims) - 1
    share = others if isinstance(op, Monoid) else 2 * others / (others + 1)  # a reduce-scatter and an all-gather of n-ths
    return "all_reduce", lambda x, _: max(-int(-_nbytes(term) * share // 1) for term in shards_of(x))


def _scattered(comm: InProcess, dims: Any, scatter: Any) -> tuple[str, _Arrived]:
    others = comm.group_size(dims) - 1
    return "reduce_scatter", lambda _, made: max(_nbytes(own) for own in shards_of(made)) * others


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


_COUNTED: dict[str, Callable[..., tuple[str, _Arrived]]] = {
    "_transfer": _transferred,
    "_transfer_to": _transferred_to,
    "_make_all_reduce": _reduced,
    "_make_reduce_scatter": _scattered,
}
