"""``explain``: what a program moves, line by line of the user's code, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.callers import Place
from ..base.extensions import provided
from ..redistribute.step import place as placed
from ..redistribute.step import seconds_of
from .reasons import reasons
from .seen import Movement, Record


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of the program moves, forward and backward; ``str`` says why."""

    place: Place
    movements: tuple[Movement, ...]

    @property
    def bytes(self) -> int:
        """What one rank receives."""
        return sum(movement.bytes for movement in self.movements)

    def __str__(self) -> str:
        source = f"  {self.place.source}" if self.place.source else ""
        head = f"{self.place}{source}: {_collectives(len(self.movements))}, {self.bytes:,} B"
        return "\n".join([head, *(f"  {text}" for text in _alike(self.movements))])


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """All collectives of a run, in order, and what the function gave. ``str`` groups them by the user's line.

    Attributes:
        movements: the collectives that ``CommDebugMode`` counts.
        result: what the function gave.
        exchanges: of small Python values between ranks, which are no collectives of tensors.

    A record: asking it moves nothing and raises nothing.

    >>> import dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> told = dt.explain(x.full_tensor)
    >>> told.bytes, len(told.movements), told.result.shape
    (48, 1, torch.Size([4, 6]))
    """

    movements: tuple[Movement, ...]
    result: Any
    exchanges: int = 0

    @property
    def bytes(self) -> int:
        """What one rank receives, the largest over ranks for each collective."""
        return sum(movement.bytes for movement in self.movements)

    @property
    def seconds(self) -> float:
        """Estimated time of the collectives, one after the other."""
        return sum(movement.seconds for movement in self.movements)

    @property
    def lines(self) -> tuple[Line, ...]:
        """By line of the user's program, in order of first use."""
        return by_line(self.movements)

    def __str__(self) -> str:
        implicit = sum(movement.implicit for movement in self.movements)
        told = f" ({implicit} of them because operators needed them)" if implicit else ""
        asked = f", {self.exchanges} exchanges of small values" if self.exchanges else ""
        head = f"{_collectives(len(self.movements))}{told}, {self.bytes:,} B received per rank, about {seconds_of(self.seconds)}"
        return "\n".join([head + asked, *map(str, self.lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(provided("html_of")(self))


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)``, once and as it is, and tell what it moves: forward, backward, optimizer, whatever it runs.

    Every collective that :class:`dtensor.debug.CommDebugMode` counts is there with its bytes: what operators move, explicit
    ``redistribute`` and ``full_tensor``, styles, fully sharded and replicated modules, gradients of leaves, kernels, the
    program's own ``torch.distributed`` calls. Each has the user's line, the first one outside of this library, torch and
    Python's own; one of a backward pass has the line of its forward operator. For what an operator needed, the rows of its
    rule that were considered, with prices, and the redistribution to write instead.

    What is told are the collectives of this rank. Meanwhile torch keeps the stack of every node of the graph, as its anomaly
    detection does (without the look for NaN): backward passes that raise say where the node was made.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = dt.ones(4, 6, device_mesh=mesh, placements=[dt.Shard(0)])
    >>> told = dt.explain(lambda: (x @ x.t()).relu())
    >>> [(m.operator, m.event.kind, m.bytes) for m in told.movements]
    [('aten::mm', 'all_gather', 48)]

    Costs what ``fn`` does, and raises what it raises.
    """
    with Record() as record:
        result = fn(*args, **kwargs)
    return Explanation(tuple(record.movements), result, record.get_exchange_count())


def by_line(movements: Sequence[Movement]) -> tuple[Line, ...]:
    """Grouped by the user's line, in order of first use."""
    found: dict[Place, list[Movement]] = {}
    for movement in movements:
        found.setdefault(movement.place, []).append(movement)
    return tuple(Line(place, tuple(group)) for place, group in found.items())


def _collectives(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"


def _alike(movements: Sequence[Movement]) -> Iterator[str]:
    """What was moved with its reasons; what a line does many times, as in a loop, is told once."""
    texts: dict[tuple[str, ...], int] = {}
    for movement in movements:
        text = tuple(_told(movement))
        texts[text] = texts.get(text, 0) + 1
    for (head, *rest), count in texts.items():
        yield head + (f"  ({count} times)" if count > 1 else "")
        yield from rest


def _told(movement: Movement) -> Iterator[str]:
    yield str(movement)
    if movement.cause is not None:
        yield from (f"  {text}" for text in reasons(movement.cause, movement.phase == "forward"))
    else:
        for step in movement.steps:
            yield f"  {step.before!r} -> {placed(step.after)}"
