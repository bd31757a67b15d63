"""Transfers on process groups: each is bound once to a group and to the regions that its members exchange.

There are four ways. All members of a group choose one from facts that they share:

- *packed*: one all-to-all of rows. It has the least latency: one call, and packing takes one operation or none if shards are
  even.
- *direct*: messages between the ranks that exchange something, out of and into the blocks if a region is contiguous. It copies
  least, for large messages, and if each rank has few partners.
- *gathered*: the backend's own all-gather of equal blocks.
- *relayed*: for a small gather for which all ranks wait: to one rank, and from there to all. It has the fewest messages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...mesh.process_groups import Group
from ..flat_rows import flatten_to_bytes, view_as_row
from ..local_reduce import row_major_copy
from ..pack import Box, Packing, SendRecvPlan, Traffic, Transfer, contiguous_run, view_region
from ..pending import Pending
from .torch_backends import (
    all_to_all_rows,
    backend_traits_of,
    broadcast_row,
    exchange_messages,
    make_pending,
    start_all_gather_rows,
    to_row_major,
    wait_then,
)

Issue = Callable[[Tensor], Pending[Tensor]]

# The size at which rows are sent directly, relative to that of other blocks: packing rows takes one operation or none. Steps of
# a fully sharded model on two gloo ranks take 0.7-0.8 of the time of PyTorch's FSDP if blocks of 131 KB are packed, 1.1-1.5 if
# they are sent directly.
ROW_FACTOR = 4
MAX_EXAMINED_MEMBERS = 64  # in larger groups routes are not examined, and each rank is assumed to have all others as partners


def bind_group_transfer(group: Group, transfer: Transfer) -> Issue:
    """Bind a transfer in the cheapest way, chosen from facts that all members of the group know."""
    member = group.members[group.position]
    joined = _concat_gather_layout(group, transfer)
    if joined is not None:
        return _bind_concat_gather(group, *joined)
    route = transfer.route_of(member)
    if transfer.kind == "broadcast":
        return _bind_broadcast(group, route)
    if transfer.blocking and _is_relayed(group, route, transfer.dtype):
        return _bind_relayed(group, route)
    if is_native_gather(group, transfer, route):
        return _bind_native_gather(group, route)
    return (bind_direct_messages if _is_direct(group, transfer, route) else _bind_packed)(group, route)


def is_packed(group: Group, transfer: Transfer) -> bool:
    """Return True if :func:`bind_group_transfer` sends the transfer as one all-to-all of packed rows."""
    if transfer.kind == "broadcast" or _concat_gather_layout(group, transfer) is not None:
        return False
    route = transfer.route_of(group.members[group.position])
    return not (is_native_gather(group, transfer, route) or _is_direct(group, transfer, route))


def _find_traffic(group: Group, transfer: Transfer) -> Traffic | None:
    """Return the traffic of the group if ``transfer`` can give it faster than from all routes, else None."""
    may_ask = transfer.kind == "all_gather" or group.size <= MAX_EXAMINED_MEMBERS
    return transfer.traffic_of(group.members[group.position]) if may_ask and transfer.traffic_of is not None else None


def _concat_gather_layout(group: Group, transfer: Transfer) -> tuple[tuple[int, ...], int] | None:
    """Return block shape and tensor dim if the backend can all-gather equal blocks that concatenate along that dim, else None."""
    if transfer.kind != "all_gather" or not backend_traits_of(group).reduces:
        return None
    traffic = _find_traffic(group, transfer)
    return None if traffic is None else traffic.joined


def is_native_gather(group: Group, transfer: Transfer, route: SendRecvPlan) -> bool:
    """Return True if the transfer is a gather of equal blocks, and the backend has one."""
    return transfer.kind == "all_gather" and backend_traits_of(group).reduces and Traffic.of_gather(route).alike


def _is_direct(group: Group, transfer: Transfer, route: SendRecvPlan) -> bool:
    """Return True if messages between the ranks that exchange something cost less than one all-to-all of rows."""
    traffic = Traffic.of_gather(route) if transfer.kind == "all_gather" else _find_traffic(group, transfer)
    traits, in_rows = backend_traits_of(group), len(route.new) == 1
    if in_rows and traits.sends_lists:  # rows need no packing; packed, a gather would copy the row for each other rank
        return True
    if traffic is None:
        if group.size > MAX_EXAMINED_MEMBERS or traits.direct_bytes == traits.sparse == sys.maxsize:
            return traits.sparse <= 1
        traffic = Traffic.of([transfer.route_of(member) for member in group.members])
    is_large = traffic.largest * transfer.dtype.itemsize >= traits.direct_bytes * (ROW_FACTOR if in_rows else 1)
    return is_large or traffic.partners * traits.sparse <= group.size - 1


def _is_relayed(group: Group, route: SendRecvPlan, dtype: torch.dtype) -> bool:
    """Return True if the gathered result is so small that one rank may collect it and send it to all others."""
    return group.size > 2 and math.prod(route.new) * dtype.itemsize * group.size <= backend_traits_of(group).relayed_bytes


def make_packings(group: Group, route: SendRecvPlan) -> tuple[Packing, Packing]:
    """Return the packings of the rows that a rank sends and receives.

    The rank's own elements are in the rows too, which makes them regular; the backend copies these elements.
    """
    sends, receives = list(route.sends), list(route.receives)
    if route.kept is not None:
        sends[group.position], receives[group.position] = route.kept
    return Packing(tuple(group.to_torch(sends)), route.old), Packing(tuple(group.to_torch(receives)), route.new)


def _bind_packed(group: Group, route: SendRecvPlan) -> Issue:
    """Bind a transfer as one all-to-all of rows."""
    send_packing, recv_packing = make_packings(group, route)

    def issue_all_to_all(x: Tensor) -> Pending[Tensor]:
        """Pack the sent regions into a row, and start the all-to-all; ``wait()`` unpacks the received row."""
        # else nothing of x is read, so its strides do not matter
        block = to_row_major(x, route.old) if send_packing.nonempty_boxes else x.detach()
        row = send_packing.pack(block)
        if recv_packing.is_block:
            result = block.new_empty(route.new)
            works = all_to_all_rows(group, result.view(-1), row, recv_packing.lengths, send_packing.lengths)
            return make_pending(works, lambda: result)
        buffer = block.new_empty(recv_packing.total)
        works = all_to_all_rows(group, buffer, row, recv_packing.lengths, send_packing.lengths)
        return make_pending(works, lambda: recv_packing.unpack(buffer))

    return issue_all_to_all


@dataclass(frozen=True, slots=True)
class _MessageRegion:
    """A region of a block that is one message.

    Attributes:
        rank: rank of the partner in torch's group.
        run: offset and length of the region in the block's memory if it is contiguous, else None.
    """

    rank: int
    box: Box
    run: tuple[int, int] | None

    def of(self, block: Tensor) -> Tensor:
        """Return the region of ``block`` as a row. It is a copy if the region is not contiguous."""
        return view_region(block, self.box).contiguous().view(-1) if self.run is None else block.view(-1).narrow(0, *self.run)


def peer_order(group: Group, direction: int) -> list[int]:
    """Return the other group positions in the order in which this one exchanges messages with them.

    It begins with the next position (``direction`` 1) or the previous one (-1), so that the ranks do not all begin with one.
    """
    return [(group.position + direction * step) % group.size for step in range(1, group.size)]


def list_message_regions(
    group: Group, boxes: tuple[Box | None, ...], shape: tuple[int, ...], direction: int
) -> list[_MessageRegion]:
    """Return the nonempty regions of ``boxes`` (by group position), in the order of :func:`peer_order`."""
    order = group.order or tuple(range(group.size))
    ordered = ((order[k], boxes[k]) for k in peer_order(group, direction))
    return [_MessageRegion(rank, box, contiguous_run(box, shape)) for rank, box in ordered if box is not None and box.numel]


def bind_direct_messages(group: Group, route: SendRecvPlan) -> Issue:
    """Bind a transfer as messages between the ranks that exchange something, which may be some ranks of a process group."""
    send_regions = list_message_regions(group, route.sends, route.old, 1)
    recv_regions = list_message_regions(group, route.receives, route.new, -1)

    def issue_messages(x: Tensor) -> Pending[Tensor]:
        """Start all messages, and copy the region that this rank keeps meanwhile."""
        block = to_row_major(x, route.old)
        result = block.new_empty(route.new)
        targets = [region.of(result) if region.run is not None else block.new_empty(region.box.numel) for region in recv_regions]
        receives = [(region.rank, target) for region, target in zip(recv_regions, targets, strict=True)]
        works = exchange_messages(group, receives, [(region.rank, region.of(block)) for region in send_regions], x.device)
        if route.kept is not None:
            old, new = route.kept
            view_region(result, new).copy_(view_region(block, old))

        def copy_received_regions() -> Tensor:
            """Copy the received regions that are not contiguous into the new block, and return it."""
            for region, target in zip(recv_regions, targets, strict=True):
                if region.run is None:
                    view_region(result, region.box).copy_(target.view(region.box.size))
            return result

        return make_pending(works, copy_received_regions)

    return issue_messages


def _bind_broadcast(group: Group, route: SendRecvPlan) -> Issue:
    """Bind a broadcast from the position that sends something, which is this one if it receives nothing."""
    source = next((k for k, box in enumerate(route.receives) if box is not None), group.position)
    sender = dist.get_global_rank(group.handle, source if group.order is None else group.order[source])

    def issue_broadcast(x: Tensor) -> Pending[Tensor]:
        """Start to send the bytes of ``x``, or to receive into a new tensor."""
        if not math.prod(route.new):  # gloo hangs in a broadcast of no bytes
            return Pending.of(row_major_copy(x) if source == group.position else x.new_empty(route.new))
        if source != group.position:
            result = torch.empty(route.new, dtype=x.dtype, device=x.device)
            return make_pending(broadcast_row(group, flatten_to_bytes(result), sender), lambda: result)
        detached = x.detach()
        row = to_row_major(detached, route.old)
        works = broadcast_row(group, flatten_to_bytes(row), sender)
        result = row_major_copy(row) if row is detached else row  # the copy overlaps with the broadcast
        return make_pending(works, lambda: result)

    return issue_broadcast


def _bind_concat_gather(group: Group, shape: tuple[int, ...], dim: int) -> Issue:
    """Bind the backend's all-gather of equal blocks, which are concatenated along ``dim``."""
    is_contiguous = math.prod(shape[:dim]) == 1 and group.order is None  # then concatenated blocks are adjacent in memory
    result_shape = (*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :]) if is_contiguous else (group.size, *shape)

    def issue_concat_gather(x: Tensor) -> Pending[Tensor]:
        """Start the all-gather; ``wait()`` concatenates the blocks unless they arrive adjacent in memory."""
        block = to_row_major(x, shape)
        result = block.new_empty(result_shape)
        works = start_all_gather_rows(group, view_as_row(result), view_as_row(block))
        return make_pending(works, (lambda: result) if is_contiguous else lambda: torch.cat(group.to_mesh(result.unbind(0)), dim))

    return issue_concat_gather


def make_gather_packing(group: Group, route: SendRecvPlan) -> Packing:
    """Return the packing of the row in which the blocks of all ranks arrive, with the rank's own block."""
    boxes = list(route.receives)
    assert route.kept is not None
    boxes[group.position] = route.kept[1]
    return Packing(tuple(group.to_torch(boxes)), route.new)


def _bind_native_gather(group: Group, route: SendRecvPlan) -> Issue:
    """Bind the backend's all-gather of equal blocks, which are unpacked to any regions of the new block."""
    recv_packing = make_gather_packing(group, route)

    def issue_native_gather(x: Tensor) -> Pending[Tensor]:
        """Start the all-gather; ``wait()`` unpacks the received row unless it is the new block."""
        block = to_row_major(x, route.old)
        result = block.new_empty(route.new if recv_packing.is_block else recv_packing.total)
        works = start_all_gather_rows(group, view_as_row(result), view_as_row(block))
        return make_pending(works, (lambda: result) if recv_packing.is_block else lambda: recv_packing.unpack(result))

    return issue_native_gather


def _bind_relayed(group: Group, route: SendRecvPlan) -> Issue:
    """Bind a gather of rows by way of the first position, which collects all rows and sends them to all others."""
    first, *others = group.order or range(group.size)
    recv_regions = list_message_regions(group, route.receives, route.new, -1)

    def issue_relayed_gather(x: Tensor) -> Pending[Tensor]:
        """Send the row to the first position and receive the result; there, collect the rows, then send the result."""
        row = to_row_major(x, route.old)
        result = row.new_empty(route.new)
        if group.position:
            return make_pending(exchange_messages(group, [(first, result)], [(first, row)], x.device), lambda: result)
        works = exchange_messages(group, [(part.rank, part.of(result)) for part in recv_regions], [], x.device)
        if route.kept is not None:
            view_region(result, route.kept[1]).copy_(row)
        return make_pending(
            works, lambda: wait_then(exchange_messages(group, [], [(rank, result) for rank in others], x.device), lambda: result)
        )

    return issue_relayed_gather
