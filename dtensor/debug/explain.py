"""``explain``: what a program moves, computes and holds, by line of the user's code and by module, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.callers import Place
from ..base.extensions import pictured
from ..redistribute.step import place as placed
from ..redistribute.step import seconds_of
from .memory import Memory, memory_of
from .operators import Operation
from .reasons import reasons
from .seen import Movement, Record
from .visualize import table


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of the program moves and computes, forward and backward; ``str`` says why."""

    place: Place
    movements: tuple[Movement, ...]
    operations: tuple[Operation, ...] = ()

    @property
    def bytes(self) -> int:
        """What one rank receives."""
        return sum(movement.bytes for movement in self.movements)

    @property
    def flops(self) -> int:
        """Of one rank, the most over ranks for each operator."""
        return sum(operation.flops for operation in self.operations)

    def __str__(self) -> str:
        moved = [f"{in_words(len(self.movements))}, {self.bytes:,} B"] if self.movements else []
        computed = [f"{self.flops:,} FLOPs"] if self.flops else []
        head = f"{self.place.line}: {', '.join([*moved, *computed])}"
        return "\n".join([head, *(f"  {text}" for text in _alike(self.movements))])


@dataclass(frozen=True, slots=True)
class Module:
    """What a module moves and computes, with its parts, forward and backward; ``name`` begins with the type of the outermost."""

    name: str
    collectives: int
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """All collectives and operators of a run, in order, and what the function gave. ``str`` groups them by the user's line.

    Attributes:
        movements: the collectives that ``CommDebugMode`` counts.
        result: what the function gave.
        exchanges: of small Python values between ranks, which are no collectives of tensors.
        operations: the operators that compute something, in the order in which they ended.
        flops: of one rank, the most over ranks.
        memory: what is held meanwhile, on the ranks that are here; None where operators were not seen.

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
    operations: tuple[Operation, ...] = ()
    flops: int = 0
    memory: Memory | None = None

    @classmethod
    def of(cls, record: Record, result: Any = None) -> Explanation:
        """What was recorded."""
        moved, exchanges = tuple(record.movements), record.get_exchange_count()
        if not record.computing:
            return cls(moved, result, exchanges)
        return cls(moved, result, exchanges, tuple(record.operations), record.flops, memory_of(record.holdings))

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
        return by_line(self.movements, self.operations)

    @property
    def modules(self) -> tuple[Module, ...]:
        """By module, in order of first use; what runs outside of modules is in none."""
        ran = [*(one.module for one in self.operations), *(one.module for one in self.movements)]
        return tuple(map(self._module, dict.fromkeys(name for module in ran for name in _prefixes(module))))

    def _module(self, name: str) -> Module:
        moved = [one for one in self.movements if name in _prefixes(one.module)]
        computed = [one for one in self.operations if name in _prefixes(one.module)]
        return Module(name, len(moved), sum(one.bytes for one in moved), sum(one.flops for one in computed))

    def __str__(self) -> str:
        implicit = sum(movement.implicit for movement in self.movements)
        told = f" ({implicit} of them because operators needed them)" if implicit else ""
        asked = f", {self.exchanges} exchanges of small values" if self.exchanges else ""
        head = f"{in_words(len(self.movements))}{told}, {self.bytes:,} B received per rank, about {seconds_of(self.seconds)}"
        held = "" if self.memory is None else f"; {self.flops:,} FLOPs, {self.memory.peak:,} B held at most"
        rows = [(one.name, f"{one.collectives}", f"{one.bytes:,}", f"{one.flops:,}") for one in self.modules]
        modules = [table([("module", "collectives", "bytes", "FLOPs"), *rows])] if rows else []
        told_lines = [str(line) for line in self.lines if line.movements or line.flops]
        return "\n".join([head + asked + held, *told_lines, *modules])

    __repr__ = __str__

    _repr_html_ = pictured


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)``, once and as it is, and tell what it moves, computes and holds, by line and by module.

    Every collective that :class:`dtensor.debug.CommDebugMode` counts is there with its bytes: what operators move, explicit
    ``redistribute`` and ``full_tensor``, styles, fully sharded and replicated modules, gradients of leaves, kernels, the
    program's own ``torch.distributed`` calls. Each has the user's line, the first one outside of this library, torch and
    Python's own; one of a backward pass has the line of its forward operator. For what an operator needed, the rows of its
    rule that were considered, with prices, and the redistribution to write instead.

    Operators have the layouts of their operands, FLOPs, estimated and measured time, line and module as well; how much each rank
    holds is told as by :func:`dtensor.memory`. What is told is of this rank. Meanwhile torch keeps the stack of every node of
    the graph, as its anomaly detection does (without the look for NaN): backward passes that raise say where the node was made.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = dt.ones(4, 6, device_mesh=mesh, placements=[dt.Shard(0)])
    >>> told = dt.explain(lambda: (x @ x.t()).relu())
    >>> [(m.event.kind, m.bytes) for m in told.movements]
    [('all_gather', 48)]

    Costs what ``fn`` does, and raises what it raises.
    """
    with Record(computing=True) as record:
        result = fn(*args, **kwargs)
    return Explanation.of(record, result)


def by_line(movements: Sequence[Movement], operations: Sequence[Operation] = ()) -> tuple[Line, ...]:
    """Grouped by the user's line: those that move something, then those that compute, each in order of first use."""
    found: dict[Place, tuple[list[Movement], list[Operation]]] = {}
    for movement in movements:
        found.setdefault(movement.place, ([], []))[0].append(movement)
    for operation in operations:
        found.setdefault(operation.place, ([], []))[1].append(operation)
    return tuple(Line(place, tuple(moved), tuple(computed)) for place, (moved, computed) in found.items())


def _prefixes(module: str) -> tuple[str, ...]:
    """A module and those that it is part of; () outside of modules."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:k]) for k in range(1, len(parts) + 1))


def in_words(count: int | None) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"


def _alike(movements: Sequence[Movement]) -> Iterator[str]:
    """What was moved with its reasons; what a line does many times, as in a loop, is told once."""
    for (head, *rest), count in Counter(tuple(_told(movement)) for movement in movements).items():
        yield head + (f"  ({count} times)" if count > 1 else "")
        yield from rest


def _told(movement: Movement) -> Iterator[str]:
    yield str(movement)
    if movement.cause is not None:
        yield from (f"  {text}" for text in reasons(movement.cause, movement.phase == "forward"))
    else:
        for step in movement.steps:
            yield f"  {step.before!r} -> {placed(step.after)}"
