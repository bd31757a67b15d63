"""Explain: report communication, computation and memory of a program by line and by module, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.group_by import group_by_key
from ..base.late_binding import html_repr
from ..base.text_tables import table_text
from ..base.units import bytes_text, flop_text, seconds_text
from ..base.user_frames import SourceLine
from ..recorders.operator_recorder import RecordedOperation
from ..recorders.run_recorder import RecordedCollective, RunRecorder
from ..redistribute.step import describe_placements as placed
from .explain_choice import reason_lines
from .memory_report import Memory, memory_of


@dataclass(frozen=True, slots=True)
class Line:
    """Source line of a program with its collectives and operators, forward and backward. ``str`` gives the reasons."""

    place: SourceLine
    movements: tuple[RecordedCollective, ...]
    operations: tuple[RecordedOperation, ...] = ()

    @property
    def bytes(self) -> int:
        """Return the bytes that one rank receives in the collectives of this line."""
        return sum(movement.bytes for movement in self.movements)

    @property
    def flops(self) -> int:
        """Return the FLOP of one rank in this line: the most over ranks, for each operator."""
        return sum(operation.flops for operation in self.operations)

    def __str__(self) -> str:
        moved = [collectives_text(len(self.movements)), bytes_text(self.bytes)] if self.movements else []
        computed = [flop_text(self.flops)] if self.flops else []
        head = f"{self.place.line}: {', '.join([*moved, *computed])}"
        return "\n".join([head, *(f"  {text}" for text in _collective_texts(self.movements))])


@dataclass(frozen=True, slots=True)
class Module:
    """Module of a program with its submodules: what it communicates and computes, forward and backward.

    ``name`` begins with the type of the outermost module: ``"MLP.up"``.
    """

    name: str
    collectives: int
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """The collectives and operators of a run, in order, and the result of the function. ``str`` groups them by the user's line.

    Attributes:
        movements: the collectives that ``CommDebugMode`` counts.
        result: the return value of the function.
        exchanges: number of exchanges of small Python values between ranks. They are not collectives of tensors.
        operations: the operators that compute something, in the order in which they ended.
        flops: FLOP of one rank: the maximum over ranks.
        memory: memory of the ranks of this process during the run; None if operators were not recorded.

    A record: reading it communicates nothing and raises nothing.

    >>> import dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> found = dt.explain(x.full_tensor)
    >>> found.bytes, len(found.movements), found.result.shape
    (48, 1, torch.Size([4, 6]))
    """

    movements: tuple[RecordedCollective, ...]
    result: Any
    exchanges: int = 0
    operations: tuple[RecordedOperation, ...] = ()
    flops: int = 0
    memory: Memory | None = None

    @classmethod
    def from_record(cls, record: RunRecorder, result: Any = None) -> Explanation:
        """Return the explanation of a recorded run."""
        collectives, exchanges = tuple(record.movements), record.get_exchange_count()
        if not record.with_operators:
            return cls(collectives, result, exchanges)
        return cls(collectives, result, exchanges, tuple(record.operations), record.flops, memory_of(record.tracker))

    @property
    def bytes(self) -> int:
        """Return the bytes that one rank receives: the largest over ranks, for each collective."""
        return sum(movement.bytes for movement in self.movements)

    @property
    def seconds(self) -> float:
        """Return the estimated time of the collectives in seconds, one after the other."""
        return sum(movement.seconds for movement in self.movements)

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the source lines of the user's program with their collectives and operators, in order of first use."""
        return group_by_line(self.movements, self.operations)

    @property
    def modules(self) -> tuple[Module, ...]:
        """Return the modules that ran, with what each communicates and computes, in order of first use."""
        ran = [*(one.module for one in self.operations), *(one.module for one in self.movements)]
        return tuple(map(self._report_of_module, dict.fromkeys(name for module in ran for name in _module_prefixes(module))))

    def _report_of_module(self, name: str) -> Module:
        """Return the collectives, bytes and FLOP of a module, with those of its submodules."""
        collectives = [one for one in self.movements if name in _module_prefixes(one.module)]
        operations = [one for one in self.operations if name in _module_prefixes(one.module)]
        return Module(name, len(collectives), sum(one.bytes for one in collectives), sum(one.flops for one in operations))

    @property
    def summary(self) -> str:
        """Return one line of text: number of collectives, bytes received, FLOP and peak memory of one rank."""
        implicit = sum(movement.implicit for movement in self.movements)
        counts = collectives_text(len(self.movements)) + (f" ({implicit} implicit)" if implicit else "")
        moved = f"{counts}, {bytes_text(self.bytes)} received per rank, about {seconds_text(self.seconds)}"
        exchanged = f", {self.exchanges} exchanges of small Python values" if self.exchanges else ""
        if self.memory is None:
            return moved + exchanged
        return f"{moved}{exchanged}; {flop_text(self.flops)}, peak memory {bytes_text(self.memory.peak)} per rank"

    @property
    def text_by_line(self) -> str:
        """Return the summary, then text for each source line that communicates or computes, with reasons."""
        return "\n".join([self.summary, *(str(line) for line in self.lines if line.movements or line.flops)])

    @property
    def module_table(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of modules, the head first; [] if no module ran."""
        modules = [module for module in self.modules if module.collectives or module.flops]
        rows = [(module.name, f"{module.collectives}", bytes_text(module.bytes), flop_text(module.flops)) for module in modules]
        return [("module", "collectives", "received", "FLOP"), *rows] if rows else []

    def __str__(self) -> str:
        table = self.module_table
        return "\n".join([self.text_by_line, *([table_text(table, numbers=True)] if table else [])])

    __repr__ = __str__

    _repr_html_ = html_repr


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)`` once and report what it communicates, computes and holds, by line and by module.

    The report has every collective that :class:`dtensor.debug.CommDebugMode` counts, with its bytes: implicit redistributions of
    operators, explicit ``redistribute`` and ``full_tensor``, parallel styles, FSDP and replicated modules, gradients of leaves,
    kernels that communicate, and the program's own ``torch.distributed`` calls. Each has the line of the user's program: the
    innermost frame outside of this library, torch and the standard library. In a backward pass it is the line of the forward
    operator. An implicit redistribution also has the strategies that were considered, with their estimated time, and the
    ``redistribute`` call to write instead.

    Each operator has the layouts of its operands, FLOP, estimated and measured time, line and module. Memory is counted as by
    :func:`dtensor.memory`. On processes the report is that of this rank. During the run torch keeps the stack of every autograd
    node, as its anomaly detection does without the check for NaN: a backward pass that raises says where the node was made.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = dt.ones(4, 6, device_mesh=mesh, placements=[dt.Shard(0)])
    >>> found = dt.explain(lambda: (x @ x.t()).relu())
    >>> [(m.event.kind, m.bytes) for m in found.movements]
    [('all_gather', 48)]

    Costs what ``fn`` does, and raises what it raises.
    """
    with RunRecorder(with_operators=True) as record:
        result = fn(*args, **kwargs)
    return Explanation.from_record(record, result)


def group_by_line(movements: Sequence[RecordedCollective], operations: Sequence[RecordedOperation] = ()) -> tuple[Line, ...]:
    """Return the recorded collectives and operators, grouped by source line of the user's program.

    Lines that communicate come first, then lines that only compute, each in order of first use.
    """
    by_place: dict[SourceLine, tuple[list[RecordedCollective], list[RecordedOperation]]] = {}
    for movement in movements:
        by_place.setdefault(movement.place, ([], []))[0].append(movement)
    for operation in operations:
        by_place.setdefault(operation.place, ([], []))[1].append(operation)
    return tuple(Line(place, tuple(moved), tuple(computed)) for place, (moved, computed) in by_place.items())


def _module_prefixes(module: str) -> tuple[str, ...]:
    """Return the dotted names of a module and of the modules that contain it, outermost first; () for ""."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:k]) for k in range(1, len(parts) + 1))


def collectives_text(count: int | None) -> str:
    """Return the count as text: ``"1 collective"``, ``"2 collectives"``."""
    return f"{count} collective{'' if count == 1 else 's'}"


def _collective_texts(movements: Sequence[RecordedCollective]) -> Iterator[str]:
    """Yield lines of text for each collective, with its reasons; equal ones of several modules share a text."""
    for (origin, collective, *details), same in group_by_key(
        ((*_text_parts(movement),), movement) for movement in movements
    ).items():
        modules = list(dict.fromkeys(movement.module for movement in same if movement.module))
        others = f" and {len(modules) - 1} other module{'s' if len(modules) > 2 else ''}" if len(modules) > 1 else ""
        inside = f" in {modules[0]}{others}" if modules else ""
        yield f"{origin}{inside}: {collective}" + (f"  ({len(same)} times)" if len(same) > 1 else "")
        yield from details


def _text_parts(movement: RecordedCollective) -> Iterator[str]:
    """Yield lines of text about one collective: what caused it, the collective itself, then the reasons."""
    yield movement.origin_text
    yield movement.collective_text
    if movement.cause is not None:
        yield from (f"  {text}" for text in reason_lines(movement.cause, movement.phase == "forward"))
    else:
        for step in movement.steps:
            yield f"  {step.before!r} -> {placed(step.after)}"
