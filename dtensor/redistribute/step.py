"""``Step`` and ``Plan``: what a redistribution does, as values that print themselves.

A step says what changes, never for which rank: it holds the layouts before and after it, and everything that a rank does
follows from them by integer maths. There are six kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..base.units import bytes_text, seconds_text
from ..layout.layout import Layout
from .partial_algebra import Op


@dataclass(frozen=True, slots=True)
class Step:
    """One move from ``before`` to ``after``.

    Attributes:
        mesh_dims: those whose ranks take part together, ascending; empty for local work.
        bytes: received from others by one rank, the most over ranks.
        seconds: estimated time.
    """

    before: Layout
    after: Layout
    mesh_dims: tuple[int, ...]
    bytes: int
    seconds: float
    verb: ClassVar[str]
    sends_parts: ClassVar[bool] = False  # each rank a part of its block, which may have to be copied

    @property
    def communicates(self) -> bool:
        return bool(self.mesh_dims)

    @property
    def buffer_bytes(self) -> int:
        """Most memory besides the two blocks: for what arrives, and for copies of parts that are sent."""
        return self.bytes + (_copied_to_send(self.before, self.after) if self.sends_parts else 0)

    def __str__(self) -> str:
        over = f" over {_names(self.before, self.mesh_dims)}" if self.mesh_dims else ""
        cost = f", {bytes_text(self.bytes)}/rank, {seconds_text(self.seconds)}" if self.mesh_dims else ", local"
        return f"{self._what()}{over}: {place(self.before)} -> {place(self.after)}{cost}"

    def _what(self) -> str:
        return self.verb


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Every rank keeps a part of its block. Gives views."""

    verb = "slice"


@dataclass(frozen=True, slots=True)
class Spread(Step):
    """A value becomes terms of ``op``: a value that many ranks hold is kept by one, a shard is padded by identities.

    Ranks that share a value all keep it, uncopied, where the reduction of equal terms is the term (max, min, avg).
    """

    op: Op
    verb = "spread"

    def _what(self) -> str:
        return f"spread({self.op})"


@dataclass(frozen=True, slots=True)
class Once(Step):
    """Of elements that are repeated along ``dims`` (steps of 0 in memory), one of each. Gives views."""

    dims: tuple[int, ...]
    verb = "once"


@dataclass(frozen=True, slots=True)
class Repeat(Step):
    """The elements of each block again and again, to the sizes that it has. Gives views."""

    verb = "repeat"


@dataclass(frozen=True, slots=True)
class Reducing(Step):
    """Terms are reduced."""

    op: Any  # an Op; what is scattered is no monoid
    divisor: int = 1  # sums merged with averages are divided by the number of ranks averaged over

    def _what(self) -> str:
        return f"{self.verb}({self.op}{f' / {self.divisor}' if self.divisor > 1 else ''})"


@dataclass(frozen=True, slots=True)
class AllReduce(Reducing):
    """Terms are reduced, every rank gets all of the result."""

    finish: bool = False  # apply the monoid's finalize()
    verb = "all_reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Reducing):
    """Terms are reduced, every rank gets one block of the result; blocks may cut several tensor dims, unevenly."""

    verb = "reduce_scatter"
    sends_parts = True


@dataclass(frozen=True, slots=True)
class AllGather(Step):
    """The innermost mesh dims of one or several tensor dims stop splitting them."""

    verb = "all_gather"


@dataclass(frozen=True, slots=True)
class Exchange(Step):
    """One all-to-all: every rank gets from its owner each part of its new block that it does not hold yet."""

    verb = "exchange"
    sends_parts = True


VIEWS = (Slice, Once, Repeat)  # steps of which the result is memory of the block before


def _copied_to_send(before: Layout, after: Layout) -> int:
    """Bytes, 0 where all that one rank has for another is one run of its block's memory."""
    first = next((dim for dim, size in enumerate(before.shape) if size > 1), 0)
    pairs = list(zip(before.splits, after.splits, strict=True))
    strided = any(a != b and b is not None for a, b in pairs[first + 1 :])
    return before.max_local_nbytes if strided else 0


@dataclass(eq=False, repr=False)
class Plan:
    """The steps from ``src`` to ``dst``; none if every rank holds the right block already.

    >>> mesh = dt.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> src, dst = (Layout.of(mesh, p, (6, 4)) for p in ([dt.Shard(0), dt.Partial()], [dt.Shard(0), dt.Shard(1)]))
    >>> print(dt.redistribute.plan(src, dst))
    float32[6, 4] (dp=S(0), tp=P(sum)) -> (dp=S(0), tp=S(1)): 1 collective, 24 B received per rank, peak 144 B, ...
      1. reduce_scatter(sum) over tp: (dp=S(0), tp=P(sum)) -> (dp=S(0), tp=S(1)), 24 B/rank, ...
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    bound: Any = field(default=None, repr=False)  # what this process does: filled in by the executor, once

    @cached_property
    def cost(self) -> float:
        """Estimated seconds."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def bytes(self) -> int:
        """Received by one rank, summed over the steps."""
        return sum(step.bytes for step in self.steps)

    @cached_property
    def communicates(self) -> bool:
        return any(step.communicates for step in self.steps)

    @cached_property
    def collectives(self) -> int:
        return sum(step.communicates for step in self.steps)

    @cached_property
    def peak_bytes(self) -> int:
        """Most memory that one rank holds while ``x.redistribute`` runs this plan, the source included.

        For sharded and replicated layouts that is the source's block, the destination's, and one buffer: for what arrives,
        and for a copy of what is sent where that is not one run of memory.
        """
        source = self.src.max_local_nbytes  # never freed: the plan does not own it
        most, held = source, 0  # held: by the present block, where it is not a view of the source
        for step in self.steps:
            if not isinstance(step, VIEWS):
                most = max(most, source + held + step.after.max_local_nbytes + step.buffer_bytes)
                held = step.after.max_local_nbytes
        if self.steps and not self.communicates:  # local steps give views, of which the result is a copy
            most = max(most, source + self.dst.max_local_nbytes)
        return most

    @cached_property
    def largest_block(self) -> int:
        """Bytes of the largest block under any layout on the way."""
        return max([self.src.max_local_nbytes, *(step.after.max_local_nbytes for step in self.steps)])

    def __str__(self) -> str:
        head = f"{described(self.src)} -> {place(self.dst)}: "
        if not self.steps:
            return head + "nothing to do"
        count = f"{self.collectives} collective{'' if self.collectives == 1 else 's'}"
        head += f"{count}, {bytes_text(self.bytes)} received per rank, "
        head += f"peak {bytes_text(self.peak_bytes)}, {seconds_text(self.cost)}"
        return "\n".join([head, *(f"  {k}. {step}" for k, step in enumerate(self.steps, 1))])

    __repr__ = __str__


def described(layout: Layout) -> str:
    """What is where: dtype, shape and placements."""
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, layout.shape))}] {place(layout)}"


def _names(layout: Layout, mesh_dims: tuple[int, ...]) -> str:
    unnamed = "" if layout.mesh.mesh_dim_names else "mesh dim "
    return ", ".join(f"{unnamed}{name}" for name in layout.mesh.named(mesh_dims))


def place(layout: Layout) -> str:
    """Placements by mesh dim."""
    names = layout.mesh.mesh_dim_names
    return "(" + ", ".join(f"{names[i]}={p}" if names else str(p) for i, p in enumerate(layout.placements)) + ")"
