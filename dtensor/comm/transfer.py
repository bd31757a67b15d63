"""Transfers on process groups, bound once to a group and the regions that its members exchange.

Four ways, chosen from facts that all members of the group share:

- *packed*: one all-to-all of rows. Least latency: one call, and packing is one operation or none where splits are even.
- *direct*: messages between those ranks that have something for each other, out of and into the blocks where a region is one
  run of memory. Least copying and memory: for large messages, and where each rank meets few others.
- *gathered*: the backend's own all-gather of equal blocks.
- *relayed*: of a small gather that all wait for: to one rank, and from there to all. Fewest messages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh.process_groups import Group
from .backends import after, all_gather_rows, all_to_all_rows, broadcast, post, row_major, started, traits_of
from .flat_rows import as_row, flat_bytes
from .local_reduce import dense
from .pack import Box, Packing, Route, Traffic, Transfer, region, run_of
from .pending import Pending

Issue = Callable[[Tensor], Pending[Tensor]]

# Rows are packed in one operation or none, so only larger ones are worth sending message by message: steps of a fully sharded
# model on two gloo ranks take 0.7-0.8 of the peer's time with blocks of 131 KB packed, 1.1-1.5 with them sent one by one.
ROWS = 4
EXAMINED = 64  # members whose routes are looked at to choose a way; in larger groups a rank is taken to meet all others


def bind_transfer(group: Group, transfer: Transfer) -> Issue:
    """The way that costs least, by what all members of the group know."""
    member = group.members[group.position]
    joined = _joined_blocks(group, transfer)
    if joined is not None:
        return _joined(group, *joined)
    route = transfer.route_of(member)
    if transfer.kind == "broadcast":
        return _broadcast(group, route)
    if transfer.blocking and _small(group, route, transfer.dtype):
        return _relayed(group, route)
    if _natively(group, transfer, route):
        return _gathered(group, route)
    return (bind_direct if _directly(group, transfer, route) else _packed)(group, route)


def is_packed(group: Group, transfer: Transfer) -> bool:
    """Whether it travels as one all-to-all of rows."""
    if transfer.kind == "broadcast" or _joined_blocks(group, transfer) is not None:
        return False
    route = transfer.route_of(group.members[group.position])
    return not (_natively(group, transfer, route) or _directly(group, transfer, route))


def _known(group: Group, transfer: Transfer) -> Traffic | None:
    """What is found sooner than by all routes."""
    asked = transfer.kind == "all_gather" or group.size <= EXAMINED
    return transfer.traffic_of(group.members[group.position]) if asked and transfer.traffic_of is not None else None


def _joined_blocks(group: Group, transfer: Transfer) -> tuple[tuple[int, ...], int] | None:
    """Of a gather of equal blocks that come one after the other along a dim, by the backend's own."""
    if transfer.kind != "all_gather" or not traits_of(group).reduces:
        return None
    known = _known(group, transfer)
    return None if known is None else known.joined


def _natively(group: Group, transfer: Transfer, route: Route) -> bool:
    """Whether by the backend's own gather of equal blocks."""
    return transfer.kind == "all_gather" and traits_of(group).reduces and Traffic.of_gather(route).alike


def _directly(group: Group, transfer: Transfer, route: Route) -> bool:
    """Whether message by message."""
    known = Traffic.of_gather(route) if transfer.kind == "all_gather" else _known(group, transfer)
    traits, in_rows = traits_of(group), len(route.new) == 1
    if in_rows and traits.sends_lists:  # there is nothing to pack, but to copy the row of a gather for each of the others
        return True
    if known is None:
        if group.size > EXAMINED or traits.direct_bytes == traits.sparse == sys.maxsize:
            return traits.sparse <= 1
        known = Traffic.of([transfer.route_of(member) for member in group.members])
    large = known.largest * transfer.dtype.itemsize >= traits.direct_bytes * (ROWS if in_rows else 1)
    return large or known.partners * traits.sparse <= group.size - 1


def _small(group: Group, route: Route, dtype: torch.dtype) -> bool:
    """Whether one rank may send to all what all have."""
    return group.size > 2 and math.prod(route.new) * dtype.itemsize * group.size <= traits_of(group).relayed_bytes


def packings(group: Group, route: Route) -> tuple[Packing, Packing]:
    """The rows that leave and arrive. Own elements travel with the others', so that a row is regular; the backend copies them."""
    sends, receives = list(route.sends), list(route.receives)
    if route.kept is not None:
        sends[group.position], receives[group.position] = route.kept
    return Packing(tuple(group.to_torch(sends)), route.old), Packing(tuple(group.to_torch(receives)), route.new)


def _packed(group: Group, route: Route) -> Issue:
    leaving, arriving = packings(group, route)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, route.old) if leaving.filled else x.detach()  # else its order in memory is nobody's business
        row = leaving.pack(block)
        if arriving.whole:
            result = block.new_empty(route.new)
            works = all_to_all_rows(group, result.view(-1), row, arriving.lengths, leaving.lengths)
            return started(works, lambda: result)
        buffer = block.new_empty(arriving.total)
        works = all_to_all_rows(group, buffer, row, arriving.lengths, leaving.lengths)
        return started(works, lambda: arriving.unpack(buffer))

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


def turns(group: Group, direction: int) -> list[int]:
    """The other positions in the order in which this one meets them: the next one first, so that not all begin with the same."""
    return [(group.position + direction * step) % group.size for step in range(1, group.size)]


def parts_of(group: Group, boxes: tuple[Box | None, ...], shape: tuple[int, ...], direction: int) -> list[_Part]:
    order = group.order or tuple(range(group.size))
    met = ((order[k], boxes[k]) for k in turns(group, direction))
    return [_Part(rank, box, run_of(box, shape)) for rank, box in met if box is not None and box.numel]


def bind_direct(group: Group, route: Route) -> Issue:
    """Messages between the ranks that have something for each other; ``group`` may be a part of its process group."""
    outgoing = parts_of(group, route.sends, route.old, 1)
    incoming = parts_of(group, route.receives, route.new, -1)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, route.old)
        result = block.new_empty(route.new)
        targets = [part.of(result) if part.run is not None else block.new_empty(part.box.numel) for part in incoming]
        receives = [(part.rank, target) for part, target in zip(incoming, targets, strict=True)]
        works = post(group, receives, [(part.rank, part.of(block)) for part in outgoing], x.device)
        if route.kept is not None:
            old, new = route.kept
            region(result, new).copy_(region(block, old))

        def finish() -> Tensor:
            for part, target in zip(incoming, targets, strict=True):
                if part.run is None:
                    region(result, part.box).copy_(target.view(part.box.size))
            return result

        return started(works, finish)

    return issue


def _broadcast(group: Group, route: Route) -> Issue:
    """The block of the one position from which something comes; of this one if nothing does."""
    source = next((k for k, box in enumerate(route.receives) if box is not None), group.position)
    sender = dist.get_global_rank(group.handle, source if group.order is None else group.order[source])

    def issue(x: Tensor) -> Pending[Tensor]:
        if not math.prod(route.new):  # gloo waits for ever where it has nothing to send
            return Pending.of(dense(x) if source == group.position else x.new_empty(route.new))
        if source != group.position:
            result = torch.empty(route.new, dtype=x.dtype, device=x.device)
            return started(broadcast(group, flat_bytes(result), sender), lambda: result)
        given = x.detach()
        row = row_major(given, route.old)
        works = broadcast(group, flat_bytes(row), sender)
        own = dense(row) if row is given else row  # while it travels
        return started(works, lambda: own)

    return issue


def _joined(group: Group, shape: tuple[int, ...], dim: int) -> Issue:
    """A gather of equal blocks, which come one after the other along ``dim``."""
    whole = math.prod(shape[:dim]) == 1 and group.order is None  # in memory too
    outcome = (*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :]) if whole else (group.size, *shape)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, shape)
        result = block.new_empty(outcome)
        works = all_gather_rows(group, as_row(result), as_row(block))
        return started(works, (lambda: result) if whole else lambda: torch.cat(group.to_mesh(result.unbind(0)), dim))

    return issue


def of_gather(group: Group, route: Route) -> Packing:
    """The row in which the blocks of all arrive, one's own too."""
    boxes = list(route.receives)
    assert route.kept is not None
    boxes[group.position] = route.kept[1]
    return Packing(tuple(group.to_torch(boxes)), route.new)


def _gathered(group: Group, route: Route) -> Issue:
    arriving = of_gather(group, route)

    def issue(x: Tensor) -> Pending[Tensor]:
        block = row_major(x, route.old)
        result = block.new_empty(route.new if arriving.whole else arriving.total)
        works = all_gather_rows(group, as_row(result), as_row(block))
        return started(works, (lambda: result) if arriving.whole else lambda: arriving.unpack(result))

    return issue


def _relayed(group: Group, route: Route) -> Issue:
    """A gather of rows by way of the first position, which sends to all what has come from all."""
    first, *others = group.order or range(group.size)
    incoming = parts_of(group, route.receives, route.new, -1)

    def issue(x: Tensor) -> Pending[Tensor]:
        row = row_major(x, route.old)
        result = row.new_empty(route.new)
        if group.position:
            return started(post(group, [(first, result)], [(first, row)], x.device), lambda: result)
        works = post(group, [(part.rank, part.of(result)) for part in incoming], [], x.device)
        if route.kept is not None:
            region(result, route.kept[1]).copy_(row)
        return started(works, lambda: after(post(group, [], [(rank, result) for rank in others], x.device), lambda: result))

    return issue
