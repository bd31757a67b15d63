"""Budget: limit communication, FLOP and memory of a block or a function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..base.mode_stack import mode_context
from ..base.units import bytes_text, flop_text
from ..errors import ArgumentError, BudgetError
from ..recorders.run_recorder import RunRecorder
from .explain import collectives_text, group_by_line
from .memory_report import lines_at_peak


class Limits(NamedTuple):
    """Limits, or counted values. None means: not limited, or not counted."""

    bytes: int | None = None
    collectives: int | None = None
    flops: float | None = None
    memory: int | None = None

    @property
    def with_operators(self) -> bool:
        """Return True if a limit needs operators to be recorded: FLOP or memory."""
        return self.flops is not None or self.memory is not None


@mode_context
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
    with RunRecorder(with_operators=limits.with_operators) as record:
        yield
    problem = excess_message(record, limits)
    if problem:
        raise BudgetError(problem)


def usage_of(record: RunRecorder) -> Limits:
    """Return the bytes, collectives, FLOP and peak memory of a recorded block, to compare with limits."""
    total, count = sum(movement.bytes for movement in record.movements), len(record.movements)
    if not record.with_operators:
        return Limits(total, count)
    return Limits(total, count, record.flops, max(record.tracker.peak_of(rank)[0] for rank in record.tracker.current_ranks()))


def excess_message(record: RunRecorder, allowed: Limits) -> str:
    """Return an error text about the limits that a recorded block exceeded, by line of the program; "" if none."""
    used = usage_of(record)
    exceeded = {name for name, limit in allowed._asdict().items() if limit is not None and getattr(used, name) > limit}
    if not exceeded:
        return ""
    units = {"bytes": " B received per rank", "collectives": " collectives", "flops": " FLOP per rank"}
    parts = [
        f"{getattr(used, name):,}{units.get(name, ' B of memory per rank')}, limit {getattr(allowed, name):,}"
        for name in Limits._fields
        if name in exceeded
    ]
    lines: list[str] = []
    if exceeded & {"bytes", "collectives"}:
        parts.append(f"{collectives_text(used.collectives)} in all")
        lines += map(str, sorted(group_by_line(record.movements), key=lambda line: -line.bytes))
    if "flops" in exceeded:
        lines += [f"{line.place.line}: {flop_text(line.flops)}" for line in group_by_line((), record.operations) if line.flops]
    if "memory" in exceeded:
        peak_rank = max(record.tracker.current_ranks(), key=lambda rank: record.tracker.peak_of(rank)[0])
        lines += [f"{place.line}: {bytes_text(size)} at the peak" for place, size in lines_at_peak(record.tracker, peak_rank)]
    return "\n".join(["; ".join(parts), *lines])
