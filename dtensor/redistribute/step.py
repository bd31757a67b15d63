"""Steps and plans of a redistribution, as values that print themselves.

A step describes the change for all ranks: it has the layouts before and after it. The work of each rank follows from them by
integer arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from ..base.tensor_text import tensor_text
from ..base.units import bytes_text, seconds_text
from ..layout.layout import Layout
from .partial_algebra import ReduceOp


@dataclass(frozen=True, slots=True)
class Step:
    """Step from layout ``before`` to layout ``after``.

    Attributes:
        mesh_dims: mesh dims with communicating ranks, ascending; empty for local work.
        bytes: received from other ranks by one rank, the most over ranks.
        seconds: estimated time.
    """

    before: Layout
    after: Layout
    mesh_dims: tuple[int, ...]
    bytes: int
    seconds: float
    verb: ClassVar[str]
    sends_parts: ClassVar[bool] = False  # True if each rank sends parts of its block, which may have to be copied

    @property
    def communicates(self) -> bool:
        return bool(self.mesh_dims)

    @property
    def buffer_bytes(self) -> int:
        """Return the most memory in addition to the two blocks: for received data, and for copies of parts that are sent."""
        return self.bytes + (_copied_to_send(self.before, self.after) if self.sends_parts else 0)

    def __str__(self) -> str:
        over = f" over {_mesh_dim_names(self.before, self.mesh_dims)}" if self.mesh_dims else ""
        cost = f", {bytes_text(self.bytes)}/rank, {seconds_text(self.seconds)}" if self.mesh_dims else ", local"
        return f"{self._verb_text()}{over}: {describe_placements(self.before)} -> {describe_placements(self.after)}{cost}"

    def _verb_text(self) -> str:
        return self.verb


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Keep a part of each block. Returns views."""

    verb = "slice"


@dataclass(frozen=True, slots=True)
class Spread(Step):
    """A value becomes partial under ``op``: one of its replicas keeps it, or a shard is padded with identities.

    All replicas keep the value without a copy if the reduction of equal addends is the addend (max, min, avg).
    """

    op: ReduceOp
    verb = "spread"

    def _verb_text(self) -> str:
        return f"spread({self.op})"


@dataclass(frozen=True, slots=True)
class Once(Step):
    """Elements that are repeated along ``dims`` (stride 0) are reduced to one. Returns views."""

    dims: tuple[int, ...]
    verb = "once"


@dataclass(frozen=True, slots=True)
class Repeat(Step):
    """The elements of each block are repeated to its full size. Returns views."""

    verb = "repeat"


@dataclass(frozen=True, slots=True)
class Reducing(Step):
    """Partial values are reduced."""

    op: Any  # a ReduceOp; not a monoid in a ReduceScatter
    divisor: int = 1  # sums merged with averages are divided by the number of ranks averaged over

    def _verb_text(self) -> str:
        return f"{self.verb}({self.op}{f' / {self.divisor}' if self.divisor > 1 else ''})"


@dataclass(frozen=True, slots=True)
class AllReduce(Reducing):
    """Partial values are reduced and every rank gets the complete result."""

    finish: bool = False  # apply the monoid's finalize()
    verb = "all_reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Reducing):
    """Partial values are reduced and every rank gets one block of the result. Blocks may shard several tensor dims, unevenly."""

    verb = "reduce_scatter"
    sends_parts = True


@dataclass(frozen=True, slots=True)
class AllGather(Step):
    """The innermost mesh dims of one or several tensor dims stop sharding them."""

    verb = "all_gather"


@dataclass(frozen=True, slots=True)
class Exchange(Step):
    """Transfer by one all-to-all: every rank receives each part of its new block that it lacks from the owner of the part."""

    verb = "exchange"
    sends_parts = True


VIEWS = (Slice, Once, Repeat)  # steps with a result that is a view of the block before


def _copied_to_send(before: Layout, after: Layout) -> int:
    """Return the bytes that a rank copies to send, 0 if each part that it sends is contiguous in its block."""
    first = next((dim for dim, size in enumerate(before.shape) if size > 1), 0)
    pairs = list(zip(before.splits, after.splits, strict=True))
    strided = any(a != b and b is not None for a, b in pairs[first + 1 :])
    return before.max_local_nbytes if strided else 0


@dataclass(eq=False, repr=False)
class Plan:
    """Steps from ``src`` to ``dst``; none if every rank already has the right block.

    >>> mesh = dt.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> src, dst = (Layout.of(mesh, p, (6, 4)) for p in ([dt.Shard(0), dt.Partial()], [dt.Shard(0), dt.Shard(1)]))
    >>> print(dt.redistribute.plan(src, dst))
    float32[6, 4] (dp=S(0), tp=P(sum)) -> (dp=S(0), tp=S(1)): 1 collective, 24 B received per rank, peak 144 B, ...
      1. reduce_scatter(sum) over tp: (dp=S(0), tp=P(sum)) -> (dp=S(0), tp=S(1)), 24 B/rank, ...
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    bound: Any = field(default=None, repr=False)  # steps bound for this process, set by the executor at first use

    @cached_property
    def cost(self) -> float:
        """Return the estimated seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    @cached_property
    def bytes(self) -> int:
        """Return the bytes that one rank receives, summed over the steps."""
        return sum(step.bytes for step in self.steps)

    @cached_property
    def communicates(self) -> bool:
        return any(step.communicates for step in self.steps)

    @cached_property
    def collectives(self) -> int:
        return sum(step.communicates for step in self.steps)

    @cached_property
    def peak_bytes(self) -> int:
        """Return the greatest memory of one rank while ``x.redistribute`` runs this plan, the source included.

        For sharded and replicated layouts this is the source's block, the destination's, and one buffer: for received data, and
        for a copy of data to send that is not contiguous.
        """
        source = self.src.max_local_nbytes  # never freed: the plan does not own it
        most, held = source, 0  # held: bytes of the present block if it is not a view of the source
        for step in self.steps:
            if not isinstance(step, VIEWS):
                most = max(most, source + held + step.after.max_local_nbytes + step.buffer_bytes)
                held = step.after.max_local_nbytes
        if self.steps and not self.communicates:  # local steps return views, and the result is a copy of them
            most = max(most, source + self.dst.max_local_nbytes)
        return most

    @cached_property
    def largest_block(self) -> int:
        """Return the bytes of the largest block under any layout of the plan."""
        return max([self.src.max_local_nbytes, *(step.after.max_local_nbytes for step in self.steps)])

    def __str__(self) -> str:
        head = f"{layout_text(self.src)} -> {describe_placements(self.dst)}: "
        if not self.steps:
            return head + "nothing to do"
        count = f"{self.collectives} collective{'' if self.collectives == 1 else 's'}"
        head += f"{count}, {bytes_text(self.bytes)} received per rank, "
        head += f"peak {bytes_text(self.peak_bytes)}, {seconds_text(self.cost)}"
        return "\n".join([head, *(f"  {k}. {step}" for k, step in enumerate(self.steps, 1))])

    __repr__ = __str__


def layout_text(layout: Layout) -> str:
    """Return dtype, shape and placements of a layout as text."""
    return f"{tensor_text(layout.dtype, layout.shape)} {describe_placements(layout)}"


def _mesh_dim_names(layout: Layout, mesh_dims: tuple[int, ...]) -> str:
    unnamed = "" if layout.mesh.mesh_dim_names else "mesh dim "
    return ", ".join(f"{unnamed}{name}" for name in layout.mesh.named(mesh_dims))


def describe_placements(layout: Layout) -> str:
    """Return the placements of a layout by mesh dim as text."""
    names = layout.mesh.mesh_dim_names
    return "(" + ", ".join(f"{names[i]}={p}" if names else str(p) for i, p in enumerate(layout.placements)) + ")"
