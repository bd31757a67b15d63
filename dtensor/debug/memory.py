"""``memory``: what each rank holds while a program runs, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.callers import Place
from .holdings import KINDS, Holdings, told_by_all
from .seen import Record
from .visualize import table

_LINES = 5  # shown, those that hold most


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds: ``seconds`` after the beginning, bytes by kind."""

    seconds: float
    kinds: dict[str, int]

    @property
    def bytes(self) -> int:
        """Of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory of a run, in bytes. ``str`` is a table of the rank that needs most.

    Attributes:
        peaks: by rank the most that it holds at once.
        kinds_of: by rank what that is, by kind: "parameters", "gradients", "optimizer state", "activations" (whatever operators
            make), "communication buffers" (what collectives need and bring) and "other" (what was there before and is no
            parameter: inputs, buffers).
        timeline: by rank every change, in order.
        lines: of the first rank here that needs most, the lines that made what it holds at its peak, and how much of it; what
            was there before has no line.
        result: what the function gave.

    A record: asking it moves nothing and raises nothing.

    >>> import dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("meta", (2,)), placements=[dt.Shard(0)])
    >>> found = dt.memory(x.full_tensor)
    >>> found.peak, found.kinds["communication buffers"]
    (144, 96)
    """

    peaks: dict[int, int]
    kinds_of: dict[int, dict[str, int]]
    timeline: dict[int, tuple[Moment, ...]]
    lines: tuple[tuple[Place, int], ...]
    result: Any = None

    @property
    def peak(self) -> int:
        """The largest over ranks."""
        return max(self.peaks.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Of the first rank that needs most."""
        return self.kinds_of[next(rank for rank, most in self.peaks.items() if most == self.peak)]

    def __str__(self) -> str:
        rank = next(rank for rank, most in self.peaks.items() if most == self.peak)
        others = f", {min(self.peaks.values()):,} B on the one that needs least" if len(set(self.peaks.values())) > 1 else ""
        rows = [("kind", "bytes at the peak"), *((kind, f"{size:,}") for kind, size in self.kinds.items())]
        held = [f"  {size:,} B since {place.line}" for place, size in self.lines[:_LINES]]
        return "\n".join([f"peak {self.peak:,} B on rank {rank} of {len(self.peaks)}{others}", table(rows), *held])

    __repr__ = __str__


def memory(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Memory:
    """Run ``fn(*args, **kwargs)``, once and as it is, and tell how much memory each rank holds meanwhile, and what for.

    Counted is the memory of every tensor that the run makes or uses, each once, from where it is made until nobody has it; what
    was there before counts from the beginning if the run uses it. On a mesh of ``"meta"`` nothing is allocated, and told is what
    one rank would hold; there and with all ranks in one process, collectives need no memory but for what they bring.
    Not counted: what a kernel allocates inside, and what ``torch.compile`` has compiled.

    On processes all ranks call it; what each found is exchanged at the end, in one exchange of Python values. It raises what
    ``fn`` raises.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("meta", (8,))
    >>> w = torch.nn.Parameter(dt.zeros(1024, 512, device_mesh=mesh, placements=[dt.Shard(1)]))
    >>> x = dt.ones(64, 1024, device_mesh=mesh)
    >>> found = dt.memory(lambda: (x @ w).relu().sum().backward())
    >>> found.kinds
    {'parameters': 262144, 'gradients': 262144, 'activations': 16392, 'other': 262144}
    """
    with Record(computing=True) as record:
        result = fn(*args, **kwargs)
    return memory_of(record.holdings, result, gathered=True)


def memory_of(holdings: Holdings, result: Any = None, gathered: bool = False) -> Memory:
    """What was held; ``gathered``: by all ranks, which all ask."""
    found = {}
    for rank in holdings.everyone():
        most, _, kinds = holdings.peak(rank)
        found[rank] = most, kinds, _timeline(holdings, rank)
    lines = lines_at_peak(holdings, max(found, key=lambda rank: found[rank][0]))
    if gathered:
        found = {rank: one for each in told_by_all(holdings, found) for rank, one in each.items()}
    peaks, kinds_of, timeline = (dict(zip(found, column, strict=True)) for column in zip(*found.values(), strict=True))
    return Memory(peaks, kinds_of, timeline, lines, result)


def lines_at_peak(holdings: Holdings, rank: int) -> tuple[tuple[Place, int], ...]:
    """The lines that made what a rank holds at its peak, most bytes first."""
    sizes: Counter[Place] = Counter()
    for store, size in holdings.held_at(rank, holdings.peak(rank)[1]):
        if store.place.file:
            sizes[store.place] += size
    return tuple(sizes.most_common())


def _timeline(holdings: Holdings, rank: int) -> tuple[Moment, ...]:
    times: Sequence[int] = [when for when, _, _ in holdings.log]
    moments = []
    for count, held in holdings.over_time(rank):
        when = (times[count - 1] - times[0]) / 1e9 if count else 0.0
        moments.append(Moment(when, {kind: held[kind] for kind in KINDS if held[kind]}))
    return tuple(moments)
