"""``budget``: a limit on what a block or a function communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base.scoped import entering
from ..errors import ArgumentError, BudgetError
from .explain import by_line
from .seen import Movement, Record


@entering
def budget(
    *, bytes: int | None = None, collectives: int | None = None, flops: float | None = None, memory: int | None = None
) -> Iterator[None]:
    """A ``with`` block, or a decorator of functions, that raises at its end where more was communicated than allowed.

    Counted is what :func:`dtensor.explain` tells: every collective that :class:`dtensor.debug.CommDebugMode` counts, with what
    one rank receives. Where the block itself raises, that is what is raised.

    Args:
        bytes: most bytes that one rank may receive, all collectives together.
        collectives: most collectives.
        flops, memory: not counted yet; an error.

    Raises:
        BudgetError: the limit, what was counted, and the lines of the program that communicate, most bytes first.
        ArgumentError: nothing is limited, or something that is not counted.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with dt.budget(bytes=0):
    ...     _ = x @ x.t()
    Traceback (most recent call last):
    dtensor.errors.BudgetError: 48 bytes received per rank, 0 allowed; 1 collective...
    """
    uncounted = [name for name, limit in (("flops", flops), ("memory", memory)) if limit is not None]
    if uncounted:
        raise ArgumentError(f"budget does not count {' and '.join(uncounted)} yet; limit bytes and collectives")
    if bytes is None and collectives is None:
        raise ArgumentError("budget limits nothing; give bytes=, collectives=, or both")
    with Record() as record:
        yield
    problem = excess(record.movements, bytes, collectives)
    if problem:
        raise BudgetError(problem)


def excess(movements: Sequence[Movement], nbytes: int | None, collectives: int | None) -> str:
    """How these are more than allowed, with their lines; "" if they are not."""
    total, count = sum(movement.bytes for movement in movements), len(movements)
    over = []
    if nbytes is not None and total > nbytes:
        over.append(f"{total:,} bytes received per rank, {nbytes:,} allowed")
    if collectives is not None and count > collectives:
        over.append(f"{count} collectives, {collectives} allowed")
    if not over:
        return ""
    lines = sorted(by_line(movements), key=lambda line: -line.bytes)
    return "\n".join(["; ".join([*over, f"{count} collective{'' if count == 1 else 's'} in all"]), *map(str, lines)])
