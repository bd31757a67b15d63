"""Memory report: ``memory(fn, *args)`` runs a function once and reports the peak memory of each rank, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.text_tables import table_text
from ..base.units import bytes_text
from ..base.user_frames import SourceLine
from ..recorders.memory_tracker import KINDS, MemoryTracker, gather_from_processes
from ..recorders.run_recorder import RunRecorder

_SHOWN_LINES = 5  # number of lines in ``str``


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of one rank at one moment: seconds after the start, and bytes by kind."""

    seconds: float
    kinds: dict[str, int]

    @property
    def bytes(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory of a run, in bytes. ``str`` is a table of the rank with the highest peak.

    Attributes:
        peaks: the peak of each rank.
        kinds_of: the bytes of each rank at its peak, by kind: "parameters", "gradients", "optimizer state", "activations"
            (results of operators), "communication buffers" (buffers and results of collectives) and "other" (tensors from before
            the run that are no parameters: inputs, buffers).
        timeline: every change on each rank, in order.
        lines: for the first rank of this process with the highest peak, the lines that allocated the memory of its peak, with
            bytes. Tensors from before the run have no line.
        result: the return value of the function.

    A record: reading it communicates nothing and raises nothing.

    >>> import dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("meta", (2,)), placements=[dt.Shard(0)])
    >>> found = dt.memory(x.full_tensor)
    >>> found.peak, found.kinds["communication buffers"]
    (144, 96)
    """

    peaks: dict[int, int]
    kinds_of: dict[int, dict[str, int]]
    timeline: dict[int, tuple[Moment, ...]]
    lines: tuple[tuple[SourceLine, int], ...]
    result: Any = None

    @property
    def peak(self) -> int:
        """Return the highest peak of all ranks, in bytes."""
        return max(self.peaks.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes by kind at the peak, on the first rank with the highest peak."""
        return self.kinds_of[next(rank for rank, most in self.peaks.items() if most == self.peak)]

    def __str__(self) -> str:
        rank = next(rank for rank, peak in self.peaks.items() if peak == self.peak)
        others = (
            f", {bytes_text(min(self.peaks.values()))} on the rank that needs least" if len(set(self.peaks.values())) > 1 else ""
        )
        rows = [("kind", "at the peak"), *((kind, bytes_text(size)) for kind, size in self.kinds.items() if size)]
        allocations = [f"  {bytes_text(size)} allocated at {place.line}" for place, size in self.lines[:_SHOWN_LINES]]
        head = f"peak memory {bytes_text(self.peak)} on rank {rank} of {len(self.peaks)}{others}"
        return "\n".join([head, table_text(rows, numbers=True), *allocations])

    __repr__ = __str__


def memory(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Memory:
    """Run ``fn(*args, **kwargs)`` once and report the memory of each rank during the run, by kind.

    Counts the storage of every tensor that the run makes or uses, once, from its allocation until it is freed. A tensor from
    before the run counts from the start if the run uses it. On a ``"meta"`` mesh nothing is allocated, and the report is what one
    rank would hold. There, and with all ranks in one process, collectives need no memory except for their results. Not counted:
    what a kernel allocates inside, and what ``torch.compile`` compiled.

    On processes all ranks call it, and exchange their findings at the end in one exchange of Python values. Raises what ``fn``
    raises.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("meta", (8,))
    >>> w = torch.nn.Parameter(dt.zeros(1024, 512, device_mesh=mesh, placements=[dt.Shard(1)]))
    >>> x = dt.ones(64, 1024, device_mesh=mesh)
    >>> found = dt.memory(lambda: (x @ w).relu().sum().backward())
    >>> found.kinds
    {'parameters': 262144, 'gradients': 262144, 'activations': 16392, 'other': 262144}
    """
    with RunRecorder(with_operators=True) as record:
        result = fn(*args, **kwargs)
    return memory_of(record.tracker, result, gathered=True)


def memory_of(tracker: MemoryTracker, result: Any = None, gathered: bool = False) -> Memory:
    """Return the memory report of a recorded run. ``gathered``: include all processes, which all call it."""
    by_rank = {}
    for rank in tracker.current_ranks():
        peak, _, kinds = tracker.peak_of(rank)
        by_rank[rank] = peak, kinds, _timeline_of(tracker, rank)
    lines = lines_at_peak(tracker, max(by_rank, key=lambda rank: by_rank[rank][0]))
    if gathered:
        by_rank = {rank: one for each in gather_from_processes(tracker, by_rank) for rank, one in each.items()}
    peaks, kinds_of, timeline = (dict(zip(by_rank, column, strict=True)) for column in zip(*by_rank.values(), strict=True))
    return Memory(peaks, kinds_of, timeline, lines, result)


def lines_at_peak(tracker: MemoryTracker, rank: int) -> tuple[tuple[SourceLine, int], ...]:
    """Return the source lines that allocated the memory held at the peak of a rank, with bytes, most first."""
    sizes: Counter[SourceLine] = Counter()
    for store, size in tracker.sizes_at(rank, tracker.peak_of(rank)[1]):
        if store.place.file:
            sizes[store.place] += size
    return tuple(sizes.most_common())


def _timeline_of(tracker: MemoryTracker, rank: int) -> tuple[Moment, ...]:
    """Return the memory of one rank by kind, at each moment at which it changes."""
    times: Sequence[int] = [when for when, _, _ in tracker.log]
    moments = []
    for count, sizes in tracker.sizes_over_time(rank):
        when = (times[count - 1] - times[0]) / 1e9 if count else 0.0
        moments.append(Moment(when, {kind: sizes[kind] for kind in KINDS if sizes[kind]}))
    return tuple(moments)
