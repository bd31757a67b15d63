"""``budget``: a limit on communication, FLOP and memory of a block or a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..base.mode_stack import entering
from ..base.units import bytes_text, flop_text
from ..errors import ArgumentError, BudgetError
from .explain import by_line, collectives_text
from .memory import lines_at_peak
from .program_recorder import Record


class Limits(NamedTuple):
    """Limits, or what was counted; None: not limited, not counted."""

    bytes: int | None = None
    collectives: int | None = None
    flops: float | None = None
    memory: int | None = None

    @property
    def computing(self) -> bool:
        """Whether operators have to be recorded."""
        return self.flops is not None or self.memory is not None


@entering
def budget(
    *, bytes: int | None = None, collectives: int | None = None, flops: float | None = None, memory: int | None = None
) -> Iterator[None]:
    """Raise at the end of a ``with`` block, or of each call of a decorated function, if it exceeded a limit.

    Counts as :func:`dtensor.explain` and :func:`dtensor.memory` do. An error of the block itself is raised unchanged.

    Args:
        bytes: most bytes that one rank may receive, all collectives together.
        collectives: most collectives.
        flops: most FLOP of one rank, as torch's ``FlopCounterMode`` counts them.
        memory: most bytes that one rank may hold at once, of tensors that the block makes or uses.

    Raises:
        BudgetError: a limit was exceeded; the message has the counts and the lines of the program that need most.
        ArgumentError: no limit was given.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.budget(bytes=0):
    ...     _ = x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.BudgetError: 48 B received per rank, limit 0; 1 collective...
    >>> with dt.budget(flops=90):
    ...     _ = x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.BudgetError: 96 FLOP per rank, limit 90...
    """
    limits = Limits(bytes, collectives, flops, memory)
    if limits == Limits():
        raise ArgumentError("budget() needs at least one limit: bytes=, collectives=, flops= or memory=")
    with Record(computing=limits.computing) as record:
        yield
    problem = excess(record, limits)
    if problem:
        raise BudgetError(problem)


def counted(record: Record) -> Limits:
    """Return what a block used; without recorded operators, only its communication."""
    total, count = sum(movement.bytes for movement in record.movements), len(record.movements)
    if not record.computing:
        return Limits(total, count)
    return Limits(total, count, record.flops, max(record.holdings.peak(rank)[0] for rank in record.holdings.everyone()))


def excess(record: Record, allowed: Limits) -> str:
    """Return a message about the exceeded limits, with the lines of the program; "" if none was exceeded."""
    found = counted(record)
    over = {name for name, limit in allowed._asdict().items() if limit is not None and getattr(found, name) > limit}
    if not over:
        return ""
    units = {"bytes": " B received per rank", "collectives": " collectives", "flops": " FLOP per rank"}
    said = [
        f"{getattr(found, name):,}{units.get(name, ' B of memory per rank')}, limit {getattr(allowed, name):,}"
        for name in Limits._fields
        if name in over
    ]
    lines: list[str] = []
    if over & {"bytes", "collectives"}:
        said.append(f"{collectives_text(found.collectives)} in all")
        lines += map(str, sorted(by_line(record.movements), key=lambda line: -line.bytes))
    if "flops" in over:
        lines += [f"{line.place.line}: {flop_text(line.flops)}" for line in by_line((), record.operations) if line.flops]
    if "memory" in over:
        most = max(record.holdings.everyone(), key=lambda rank: record.holdings.peak(rank)[0])
        lines += [f"{place.line}: {bytes_text(size)} at the peak" for place, size in lines_at_peak(record.holdings, most)]
    return "\n".join(["; ".join(said), *lines])
