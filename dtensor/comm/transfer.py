"""Transfers on process groups, bound once to a group and the regions that its members exchange.

Three ways, chosen from facts that all members of the group share:

- *packed*: one all-to-all of rows. Least latency: one call, and packing is one operation or none where splits are even.
- *direct*: messages between those ranks that have something for each other, out of and into the blocks where a region is one
  run of memory. Least copying and memory: for large messages, and where each rank meets few others.
- *gathered*: the backend's own all-gather of equal blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.groups import Group
from ..placement import Monoid
from .backends import (
    all_gather_rows,
    all_to_all_rows,
    as_row,
    native_reduction,
    post,
    reduce_scatter_single,
    row_major,
    started,
    traits_of,
)
from .communicator import Pending
from .fold import Op, fold, fold_stack
from .regions import Box, Packing, Route, region, run_of

T = TypeVar("T")
Issue = Callable[[Tensor, bool], Pending[Tensor]]

EXAMINED = 64  # members whose routes are looked at to choose a way; in larger groups a rank is taken to meet all others


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the members of one group have for each other; all of them know it alike.

    Attributes:
        largest: elements of the largest message.
        partners: most ranks that one rank sends to.
        alike: all blocks before the transfer have one shape.
        joined: that shape and a tensor dim, where along it the blocks, by group position, make up the new one of every member.
    """

    largest: int
    partners: int
    alike: bool
    joined: tuple[tuple[int, ...], int] | None = None

    @staticmethod
    def of(routes: Sequence[Route]) -> Traffic:
        return Traffic(
            max((box.numel for route in routes for box in route.sends if box is not None), default=0),
            max(sum(box is not None for box in route.sends) for route in routes),
            len({route.old for route in routes}) == 1,
        )

    @staticmethod
    def of_gather(route: Route) -> Traffic:
        """What one member's part tells: it gets the blocks of all."""
        others = [box for box in route.receives if box is not None]
        sizes = [math.prod(route.old), *(box.numel for box in others)]
        alike = len(others) == len(route.receives) - 1 and all(box.size == route.old for box in others)
        return Traffic(max(sizes), len(route.receives) - 1 if any(sizes) else 0, alike)


def bind_transfer(
    group: Group,
    route_of: Callable[[int], Route],
    dtype: torch.dtype,
    gathers: bool,
    traffic_of: Callable[[int], Traffic | None] | None = None,
) -> Issue:
    """The way that costs least; ``gathers``: every member ends with the blocks of all; ``traffic_of(member)``: in its group, or
    None where only the routes tell."""
    member, traits = group.members[group.position], traits_of(group)
    if gathers and traits.reduces and traffic_of is not None and (known := traffic_of(member)) is not None and known.joined:
        return _joined(group, *known.joined)
    route = route_of(member)
    if group.size > EXAMINED:  # only facts that all members share
        return bind_direct(group, route) if traits.sparse <= 1 else _packed(group, route)
    if not (gathers and traits.reduces) and traits.direct_bytes == traits.sparse == sys.maxsize:
        return _packed(group, route)
    if gathers:
        traffic = Traffic.of_gather(route)
    else:
        found = None if traffic_of is None else traffic_of(member)
        traffic = Traffic.of([route_of(member) for member in group.members]) if found is None else found
    if gathers and traits.reduces and traffic.alike:
        return _gathered(group, route)
    direct = traffic.largest * dtype.itemsize >= traits.direct_bytes or traffic.partners * traits.sparse <= group.size - 1
    return bind_direct(group, route) if direct else _packed(group, route)


def _packed(group: Group, route: Route) -> Issue:
    """Own elements travel with the others', so that the row is regular; the backend copies them."""
    sends, receives = list(route.sends), list(route.receives)
    if route.kept is not None:
        sends[group.position], receives[group.position] = route.kept
    leaving, arriving = Packing(tuple(group.to_torch(sends)), route.old), Packing(tuple(group.to_torch(receives)), route.new)

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, route.old)
        row = leaving.pack(block)
        if arriving.whole:
            result = block.new_empty(route.new)
            work = all_to_all_rows(group, result.view(-1), row, arriving.lengths, leaving.lengths, async_op)
            return started(work, lambda: result)
        buffer = block.new_empty(arriving.total)
        work = all_to_all_rows(group, buffer, row, arriving.lengths, leaving.lengths, async_op)
        return started(work, lambda: arriving.unpack(buffer))

    return issue


@dataclass(frozen=True, slots=True)
class _Part:
    """A region that one message carries; ``run`` if it is one run of the block's memory."""

    rank: int  # torch's rank in the group
    box: Box
    run: tuple[int, int] | None

    def of(self, block: Tensor) -> Tensor:
        """The region as a row, copied where it is no run."""
        return region(block, self.box).contiguous().view(-1) if self.run is None else block.view(-1).narrow(0, *self.run)


def _turns(group: Group, direction: int) -> list[int]:
    """The other positions in the order in which this one meets them: the next one first, so that not all begin with the same."""
    return [(group.position + direction * step) % group.size for step in range(1, group.size)]


def _after(works: Sequence[dist.Work], then: Callable[[], T]) -> T:
    for work in works:
        work.wait()
    return then()


def _parts(group: Group, boxes: tuple[Box | None, ...], shape: tuple[int, ...], direction: int) -> list[_Part]:
    order = group.order or tuple(range(group.size))
    met = ((order[k], boxes[k]) for k in _turns(group, direction))
    return [_Part(rank, box, run_of(box, shape)) for rank, box in met if box is not None and box.numel]


def bind_direct(group: Group, route: Route) -> Issue:
    """Messages between the ranks that have something for each other; ``group`` may be a part of its process group."""
    outgoing = _parts(group, route.sends, route.old, 1)
    incoming = _parts(group, route.receives, route.new, -1)

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, route.old)
        result = block.new_empty(route.new)
        targets = [part.of(result) if part.run is not None else block.new_empty(part.box.numel) for part in incoming]
        receives = [(part.rank, target) for part, target in zip(incoming, targets, strict=True)]
        works = post(group, receives, [(part.rank, part.of(block)) for part in outgoing])
        if route.kept is not None:
            old, new = route.kept
            region(result, new).copy_(region(block, old))

        def finish() -> Tensor:
            for part, target in zip(incoming, targets, strict=True):
                if part.run is None:
                    region(result, part.box).copy_(target.view(part.box.size))
            return result

        return Pending(lambda: _after(works, finish))

    return issue


def _joined(group: Group, shape: tuple[int, ...], dim: int) -> Issue:
    """A gather of equal blocks, which come one after the other along ``dim``."""
    whole = math.prod(shape[:dim]) == 1 and group.order is None  # in memory too
    outcome = (*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :]) if whole else (group.size, *shape)

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, shape)
        result = block.new_empty(outcome)
        work = all_gather_rows(group, result.view(-1), block.view(-1), async_op)
        return started(work, (lambda: result) if whole else lambda: torch.cat(group.to_mesh(result.unbind(0)), dim))

    return issue


def _gathered(group: Group, route: Route) -> Issue:
    boxes = list(route.receives)
    assert route.kept is not None
    boxes[group.position] = route.kept[1]
    arriving = Packing(tuple(group.to_torch(boxes)), route.new)

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, route.old)
        result = block.new_empty(route.new if arriving.whole else arriving.total)
        work = all_gather_rows(group, result.view(-1), block.view(-1), async_op)
        return started(work, (lambda: result) if arriving.whole else lambda: arriving.unpack(result))

    return issue


# --- reduce-scatter ------------------------------------------------------------------------------------------------------
def bind_scatter(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Op, dtype: torch.dtype) -> Issue:
    """``chunks[k]`` of every member's block, reduced, goes to group position k."""
    native = native_reduction(group, op, dtype)
    if native is not None and len({box.size for box in chunks}) == 1:
        return _scattered_natively(group, old, chunks, *native)
    if max(box.numel for box in chunks) * dtype.itemsize >= traits_of(group).direct_bytes:
        return _scattered_directly(group, old, chunks, op)
    leaving = Packing(tuple(group.to_torch(chunks)), old)
    own = chunks[group.position]
    arriving = [own.numel] * group.size

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, old)
        buffer = block.new_empty((group.size, *own.size))
        work = all_to_all_rows(group, buffer.view(-1), leaving.pack(block), arriving, leaving.lengths, async_op)
        return started(work, lambda: fold(group.to_mesh(buffer.unbind(0)), op))

    return issue


def _scattered_natively(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Any, seen: torch.dtype) -> Issue:
    leaving, own = Packing(tuple(group.to_torch(chunks)), old), chunks[group.position]

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, old)
        result = block.new_empty(own.size)
        row, into = as_row(leaving.pack(block)).view(seen), result.view(-1).view(seen)
        return started(reduce_scatter_single(into, row, op, group=group.handle, async_op=async_op), lambda: result)

    return issue


def _scattered_directly(group: Group, old: tuple[int, ...], chunks: tuple[Box, ...], op: Op) -> Issue:
    own, mine = chunks[group.position], group.position
    outgoing = _parts(group, tuple(chunks), old, 1)
    order = group.order or tuple(range(group.size))
    others = _turns(group, -1) if own.numel else []

    def issue(x: Tensor, async_op: bool) -> Pending[Tensor]:
        block = row_major(x, old)
        terms = [region(block, own) if k == mine else block.new_empty(own.size) for k in range(group.size)]
        receives = [(order[k], terms[k].view(-1)) for k in others]
        works = post(group, receives, [(part.rank, part.of(block)) for part in outgoing])
        return Pending(lambda: _after(works, lambda: fold(terms, op)))

    return issue


# --- all-reduce -----------------------------------------------------------------------------------------------------------
def reduced_by_all(group: Group, x: Tensor, op: Op, async_op: bool) -> Pending[Tensor]:
    """The reduction of the group's ``x``, each sent to all in one round and reduced by all in one order."""
    block = row_major(x, x.shape)
    if isinstance(op, Monoid) and op.combine_all is not None:
        return _stacked(group, block, op, async_op)
    others, mine = group.size - 1, group.torch_rank
    buffer = block.new_empty((others, *block.shape))
    row = block.view(-1) if others == 1 else block.expand(others, *block.shape).contiguous().view(-1)
    lengths = [block.numel()] * group.size
    lengths[mine] = 0
    work = all_to_all_rows(group, buffer.view(-1), row, lengths, lengths, async_op)

    def finish() -> Tensor:
        arrived = list(buffer.unbind(0))
        return fold(group.to_mesh([*arrived[:mine], block, *arrived[mine:]]), op)

    return started(work, finish)


def _stacked(group: Group, block: Tensor, op: Monoid, async_op: bool) -> Pending[Tensor]:
    """Where terms are reduced as a stack they arrive as one, this rank's own among them."""
    size = group.size
    stack = block.new_empty((size, *block.shape))
    lengths = [block.numel()] * size
    work = all_to_all_rows(group, stack.view(-1), block.expand(stack.shape).contiguous().view(-1), lengths, lengths, async_op)
    return started(work, lambda: fold_stack(stack if group.order is None else stack[list(group.order)], op))


def all_reduce_in_place(group: Group, x: Tensor, op: Op) -> Pending[Tensor]:
    """Reduce-scatter, then all-gather, by messages and with no memory but the result: until the other ranks' reduced
    chunks arrive in it, their places hold their terms of this rank's chunk. The second round starts at ``wait()``, which all
    ranks reach in one order.
    """
    size, mine = group.size, group.position
    order = group.order or tuple(range(size))
    block = row_major(x, tuple(x.shape))
    result = torch.empty_like(block)
    if not block.numel():
        return Pending.of(result)
    length = -(-block.numel() // size)
    given, places = block.view(-1).split(length), result.view(-1).split(length)  # the last ones may be shorter, or missing
    own = len(given[mine]) if mine < len(given) else 0
    scratch = [place if len(place) >= own else block.new_empty(own) for place in places]
    scratch += [block.new_empty(own) for _ in range(size - len(places))]
    before, after = _turns(group, -1), _turns(group, 1)
    first = post(
        group,
        [(order[k], scratch[k][:own]) for k in before if own],
        [(order[k], given[k]) for k in after if k < len(given)],
    )

    def finish() -> Tensor:
        if own:
            terms = [given[mine] if k == mine else scratch[k][:own] for k in range(size)]
            _after(first, lambda: fold(terms, op, out=places[mine]))
        second = post(
            group,
            [(order[k], places[k]) for k in before if k < len(places)],
            [(order[k], places[mine]) for k in after if own],
        )
        return _after(second if own else [*first, *second], lambda: result)

    return Pending(finish)
