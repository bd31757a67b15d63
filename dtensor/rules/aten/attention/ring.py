"""Ring attention: queries stay, blocks of keys and values travel around the ranks until each has met every query.

Each rank combines the parts of its rows as they come, by the logarithms of the rows' sums (online softmax), so that it never
holds more than two blocks of keys: its own share of the sequence and the next one, which arrives while it computes. Backward
sends gradients of keys and values on with their block; the last pass brings them home (Liu et al. 2023, "Ring attention with
blockwise transformers for near-infinite context", arXiv:2310.01889).

Cost: with n ranks n - 1 passes of one block of keys and values, in backward n - 1 more of their gradients: the bytes of an
all-gather (and a reduce-scatter), without its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...blockwise import on_each_rank
from ...call import Call
from ...kernels import At, KernelContext
from .blocks import Meeting, finished, part, part_gradients, share, sums_dtype


def ranks_in_ring(call: Call) -> int:
    """How many ranks cut queries, keys and values alike along sequences of one length; 1: there is no ring."""
    query, key, value = (call.operands[call.names.index(name)] for name in ("query", "key", "value"))
    if query.shape[2] != key.shape[2]:
        return 1
    cuts = [() if layout.splits[2] is None else layout.splits[2].mesh_dims for layout in (query, key, value)]
    return math.prod(call.mesh.shape[dim] for dim in cuts[0] if dim in cuts[1] and dim in cuts[2])


@dataclass(frozen=True, slots=True)
class Ring:
    """Blocks of keys and values on their way; after ``step`` passes a rank holds the block of the rank ``step`` places before."""

    at: KernelContext
    scale: float | None

    @property
    def ranks(self) -> int:
        return len(self.at.sizes)

    def origin(self, member: int, step: int) -> int:
        """Whose block ``member`` holds."""
        group = self.at.call.mesh.members_of(self.at.mesh_dims, member)
        return group[(group.index(member) - step) % len(group)]

    def shapes(self, member: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys and the values that ``member`` holds."""
        coordinate = self.at.call.mesh.coordinates[self.origin(member, step)]
        key, value = (self.at.operands[self.at.call.names.index(name)] for name in ("key", "value"))
        return key.local_shape(coordinate), value.local_shape(coordinate)

    def meeting(self, here: At, step: int, mask: Tensor | None) -> Meeting:
        """The rows of ``here`` and the keys that came to it."""
        at, origin = self.at, self.origin(here.member, step)
        return Meeting(at.held("query", 2, here.member), at.held("key", 2, origin), at.call["is_causal"], self.scale, mask)

    def unpacked(self, member: int, step: int, block: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a block."""
        shapes = self.shapes(member, step)
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])

    def passed_on(self, block: Any, step: int) -> Callable[[], Any]:
        """Every rank's ``block`` under way to the rank behind it; a call waits for the one that comes."""
        ranks, mesh, mesh_dims = self.ranks, self.at.call.mesh, self.at.mesh_dims

        def chunks(here: At, block: Tensor) -> list[Tensor]:
            return [block if k == (here.index + 1) % ranks else block.new_empty(0) for k in range(ranks)]

        def shape_of(source: int, target: int) -> tuple[int, ...]:
            group = mesh.members_of(mesh_dims, source)
            following = group[(group.index(source) + 1) % ranks]
            return (sum(map(math.prod, self.shapes(source, step))) if target == following else 0,)

        pending = self.at.comm.all_to_all(self.at.map(chunks, block), mesh_dims, shape_of)
        return lambda: self.at.map(lambda here, *arrived: arrived[(here.index - 1) % ranks], *pending.wait())


def packed(_: At, key: Tensor, value: Tensor) -> Tensor:
    """A block as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def ring_attention(
    at: KernelContext, query: Any, key: Any, value: Any, *flags: Any, attn_mask: Any = None, scale: Any = None
) -> Any:
    """Output and rows' sums of each rank's queries, as the operator gives them."""
    ring = Ring(at, scale)

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(here: At, mask: Any, query: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            return part(ring.meeting(here, step, mask), query, *ring.unpacked(here.member, step, block))

        return run

    met: tuple[Any, Any] | None = None
    blocks = at.map(packed, key, value)
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        here = at.map(meet(step), attn_mask, query, blocks)
        met = here if met is None else joined(*met, *here)
        if arriving is not None:
            blocks = arriving()
    return finished(query, *met)  # type: ignore[misc]  # a ring has two ranks or more


@on_each_rank
def joined(out: Tensor, sums: Tensor, other: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the rows as one."""
    total = torch.logaddexp(sums, more)
    return out * share(sums, total) + other * share(more, total), total


def ring_gradients(
    at: KernelContext, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *flags: Any, **given: Any
) -> Any:
    """Gradients of each rank's queries, keys and values."""
    ring = Ring(at, given.get("scale"))

    def meet(step: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(here: At, mask: Any, block: Tensor, grad: Tensor, query: Tensor, *rest: Tensor) -> Any:
            key, value = ring.unpacked(here.member, step, block)
            dq, dk, dv = part_gradients(ring.meeting(here, step, mask), grad, query, key, value, *rest)
            return dq, packed(here, dk, dv).to(sums_dtype(query))

        return run

    blocks, total, own, coming = at.map(packed, key, value), None, None, None
    for step in range(ring.ranks):
        arriving = ring.passed_on(blocks, step) if step + 1 < ring.ranks else None
        of_rows, here = at.map(meet(step), given.get("attn_mask"), blocks, grad, query, out, sums)
        total = of_rows.to(here.dtype) if total is None else total + of_rows
        if own is None:
            own = here
        else:
            coming = ring.passed_on(here if coming is None else here + coming(), step)
        if arriving is not None:
            blocks = arriving()

    def at_home(here: At, total: Tensor, query: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = ring.unpacked(here.member, 0, both)
        return total.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)

    assert coming is not None, "a ring has two ranks or more"
    return at.map(at_home, total, query, own + coming())
