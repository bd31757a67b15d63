"""Flat rows: concatenate tensors to one row of memory and split it again, for collectives that send several tensors.

A collective of separate tensors is a transfer of 1-d blocks, in which each tensor is a contiguous range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..base.tracing import is_traced
from ..errors import LayoutError
from .local_reduce import row_major_copy
from .pack import Box, SendRecvPlan

Shape = Sequence[int]


def flatten_to_row(x: Tensor) -> Tensor:
    """Return the data of ``x`` as one row without autograd history. It is a copy only if ``x`` is not row-major."""
    x = x.detach()
    return view_as_row(row_major_copy(x) if not x.is_contiguous() or x.is_conj() or x.is_neg() else x)


def view_as_row(x: Tensor) -> Tensor:
    """Return contiguous ``x`` as one row with stride 1.

    A tensor of one element is contiguous with any stride, which views keep, and which prevents a view as bytes. In a traced
    graph the row is a view of the values if it already has stride 1, since inductor may choose other strides.
    """
    if x.ndim == 1 and x.stride() == (1,):
        return x
    if is_traced(x) and x.stride()[-1:] == (1,):
        return x.view(-1)
    return x.as_strided((x.numel(),), (1,))


def flatten_to_bytes(x: Tensor) -> Tensor:
    """Return the data of ``x`` as one row of bytes. It is a copy only if ``x`` is not row-major."""
    return flatten_to_row(x).view(torch.uint8)


def content_bytes(x: Tensor) -> bytes:
    """Return the data of ``x`` as row-major bytes."""
    return flatten_to_bytes(x).cpu().numpy().tobytes()


def tensor_from_bytes(row: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the tensor with the bytes in ``row``."""
    return row.view(dtype).view(tuple(shape))


def chunk_lengths(total: int, count: int) -> list[int]:
    """Return the lengths of ``count`` chunks of a row, as ``torch.chunk`` makes them: the last ones may be shorter or empty.

    >>> chunk_lengths(5, 4)
    [2, 2, 1, 0]
    """
    length = -(-total // count)
    return [max(0, min(length, total - k * length)) for k in range(count)]


def concat_to_row(tensors: Sequence[Tensor]) -> Tensor:
    """Return the data of all tensors as one row. It is a view if they are adjacent in one storage, in order."""
    rows = [flatten_to_row(x) for x in tensors]
    nonempty = [row for row in rows if row.numel()]
    if len(nonempty) < 2:
        return (nonempty or rows)[0]
    first = nonempty[0]
    expected_offsets = accumulate((row.numel() for row in nonempty), initial=first.storage_offset())
    storage = first.untyped_storage()._cdata
    actual = ((row.storage_offset(), row.untyped_storage()._cdata) for row in nonempty)
    if all(position == (end, storage) for position, end in zip(actual, expected_offsets, strict=False)):
        return first.as_strided((sum(row.numel() for row in nonempty),), (1,))
    return torch.cat(nonempty)


def split_row(row: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return the tensors of these shapes that are concatenated in ``row``."""
    parts = row.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def row_boxes(shapes: Sequence[Shape]) -> list[Box]:
    """Return for each tensor of these shapes its range in the row that concatenates them, as a 1-d box."""
    lengths = [math.prod(shape) for shape in shapes]
    return [Box((end - length,), (length,)) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def row_exchange_route(sends: Sequence[Shape], receives: Sequence[Shape], mine: int) -> SendRecvPlan:
    """Return the send/receive plan of position ``mine``, which sends ``sends[k]`` to position k and gets ``receives[k]``."""
    send_boxes, recv_boxes = row_boxes(sends), row_boxes(receives)
    kept = (send_boxes[mine], recv_boxes[mine]) if send_boxes[mine].numel else None
    return _make_route(send_boxes, recv_boxes, mine, kept, sum(box.numel for box in send_boxes))


def row_gather_route(shapes: Sequence[Shape], mine: int) -> SendRecvPlan:
    """Return the send/receive plan of position ``mine`` for an all-gather of tensors with ``shapes``, by position."""
    recv_boxes = row_boxes(shapes)
    length = recv_boxes[mine].numel
    own_box = Box((0,), (length,))
    return _make_route([own_box] * len(shapes), recv_boxes, mine, (own_box, recv_boxes[mine]) if length else None, length)


def _make_route(
    send_boxes: Sequence[Box], recv_boxes: Sequence[Box], mine: int, kept: tuple[Box, Box] | None, length: int
) -> SendRecvPlan:
    """Return the send/receive plan of a row of ``length`` elements, without messages for empty boxes and position ``mine``."""
    sends, receives = (
        tuple(box if k != mine and box.numel else None for k, box in enumerate(boxes)) for boxes in (send_boxes, recv_boxes)
    )
    return SendRecvPlan((length,), (sum(box.numel for box in recv_boxes),), sends, receives, kept)


def broadcast_route(shape: Shape, size: int, source: int, mine: int) -> SendRecvPlan:
    """Return the send/receive plan of position ``mine`` for a broadcast from position ``source`` of a group of ``size``."""
    shape = tuple(shape)
    box, is_receiver = Box((0,) * len(shape), shape), mine != source
    sends = tuple(None if is_receiver or k == mine else box for k in range(size))
    receives = tuple(box if is_receiver and k == source else None for k in range(size))
    return SendRecvPlan(shape, shape, sends, receives, None if is_receiver else (box, box))


def check_announced_shape(tensor: Tensor, shape: Shape, member: int) -> Tensor:
    """Return ``tensor`` if it has the shape that other ranks expect of ``member``, else raise.

    Another shape would be misread by them, except for two empty tensors.

    Raises:
        LayoutError: it has another shape.
    """
    if tuple(tensor.shape) != tuple(shape) and (tensor.numel() or math.prod(shape)):
        raise LayoutError(
            f"rank {member} of the group has a local tensor of shape {tuple(tensor.shape)}, but announced {tuple(shape)}"
        )
    return tensor
