"""``budget``: a limit on what a block or a function communicates, computes and holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..base.scoped import entering
from ..errors import ArgumentError, BudgetError
from .explain import by_line, in_words
from .memory import lines_at_peak
from .seen import Record


class Limits(NamedTuple):
    """What is allowed, and as well what was counted; None: not limited, not counted."""

    bytes: int | None = None
    collectives: int | None = None
    flops: float | None = None
    memory: int | None = None

    @property
    def computing(self) -> bool:
        """Whether operators have to be seen."""
        return self.flops is not None or self.memory is not None


@entering
def budget(
    *, bytes: int | None = None, collectives: int | None = None, flops: float | None = None, memory: int | None = None
) -> Iterator[None]:
    """A ``with`` block, or a decorator of functions, that raises at its end where more was needed than allowed.

    Counted is what :func:`dtensor.explain` and :func:`dtensor.memory` tell. Where the block itself raises, that is raised.

    Args:
        bytes: most bytes that one rank may receive, all collectives together.
        collectives: most collectives.
        flops: most FLOPs of one rank, as torch's ``FlopCounterMode`` counts them.
        memory: most bytes that one rank may hold at once, of tensors that the block makes or uses.

    Raises:
        BudgetError: the limit, what was counted, and the lines of the program that need most.
        ArgumentError: nothing is limited.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.budget(bytes=0):
    ...     _ = x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.BudgetError: 48 bytes received per rank, 0 allowed; 1 collective...
    >>> with dt.budget(flops=90):
    ...     _ = x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.BudgetError: 96 FLOPs per rank, 90 allowed...
    """
    limits = Limits(bytes, collectives, flops, memory)
    if limits == Limits():
        raise ArgumentError("budget limits nothing; give bytes=, collectives=, flops=, memory=, or several")
    with Record(computing=limits.computing) as record:
        yield
    problem = excess(record, limits)
    if problem:
        raise BudgetError(problem)


def counted(record: Record) -> Limits:
    """What a block needed; of one that was not seen computing only what it communicates."""
    total, count = sum(movement.bytes for movement in record.movements), len(record.movements)
    if not record.computing:
        return Limits(total, count)
    return Limits(total, count, record.flops, max(record.holdings.peak(rank)[0] for rank in record.holdings.everyone()))


def excess(record: Record, allowed: Limits) -> str:
    """How a block needed more than allowed, with its lines; "" if it did not."""
    found = counted(record)
    over = {name for name, limit in allowed._asdict().items() if limit is not None and getattr(found, name) > limit}
    if not over:
        return ""
    words = {"bytes": "bytes received per rank", "collectives": "collectives", "flops": "FLOPs per rank"}
    said = [
        f"{getattr(found, name):,} {words.get(name, 'bytes held per rank')}, {getattr(allowed, name):,} allowed"
        for name in Limits._fields
        if name in over
    ]
    lines: list[str] = []
    if over & {"bytes", "collectives"}:
        said.append(f"{in_words(found.collectives)} in all")
        lines += map(str, sorted(by_line(record.movements), key=lambda line: -line.bytes))
    if "flops" in over:
        lines += [f"{line.place.line}: {line.flops:,} FLOPs" for line in by_line((), record.operations) if line.flops]
    if "memory" in over:
        most = max(record.holdings.everyone(), key=lambda rank: record.holdings.peak(rank)[0])
        lines += [f"{place.line}: {size:,} B held at the peak" for place, size in lines_at_peak(record.holdings, most)]
    return "\n".join(["; ".join(said), *lines])
