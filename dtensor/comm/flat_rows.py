"""Pieces that travel as rows: a collective of separate tensors is a transfer of blocks of one dim, in which a piece is a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..base.tracing import is_traced
from ..errors import LayoutError
from .local_reduce import dense
from .pack import Box, Route

Shape = Sequence[int]


def flat(x: Tensor) -> Tensor:
    """The data of ``x`` as one row, without history; a copy only where ``x`` is not row-major."""
    x = x.detach()
    return as_row(dense(x) if not x.is_contiguous() or x.is_conj() or x.is_neg() else x)


def as_row(x: Tensor) -> Tensor:
    """Contiguous ``x`` as one row. Of one element any stride is contiguous, and views keep it; as bytes it has none.

    In a graph it is a view of the values, where one is a row: inductor may lay them otherwise in memory.
    """
    if x.ndim == 1 and x.stride() == (1,):
        return x
    if is_traced(x) and x.stride()[-1:] == (1,):
        return x.view(-1)
    return x.as_strided((x.numel(),), (1,))


def flat_bytes(x: Tensor) -> Tensor:
    """The data of ``x`` as one row of bytes; a copy only where ``x`` is not row-major."""
    return flat(x).view(torch.uint8)


def content(x: Tensor) -> bytes:
    """The data of ``x``, row-major."""
    return flat_bytes(x).cpu().numpy().tobytes()


def from_bytes(row: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes are ``row``."""
    return row.view(dtype).view(tuple(shape))


def chunk_lengths(total: int, count: int) -> list[int]:
    """Of a row in ``count`` chunks: the last ones may be shorter, or nothing.

    >>> chunk_lengths(5, 4)
    [2, 2, 1, 0]
    """
    length = -(-total // count)
    return [max(0, min(length, total - k * length)) for k in range(count)]


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The data of all pieces as one row: theirs, where they stand one after the other already."""
    rows = [flat(piece) for piece in pieces]
    filled = [row for row in rows if row.numel()]
    if len(filled) < 2:
        return (filled or rows)[0]
    first = filled[0]
    ends = accumulate((row.numel() for row in filled), initial=first.storage_offset())
    memory = first.untyped_storage()._cdata
    places = ((row.storage_offset(), row.untyped_storage()._cdata) for row in filled)
    if all(place == (end, memory) for place, end in zip(places, ends, strict=False)):
        return first.as_strided((sum(row.numel() for row in filled),), (1,))
    return torch.cat(filled)


def apart(row: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The pieces of these shapes that stand in ``row``, one after the other."""
    pieces = row.split([math.prod(shape) for shape in shapes])
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def runs(shapes: Sequence[Shape]) -> list[Box]:
    """Where pieces of these shapes stand in a row."""
    lengths = [math.prod(shape) for shape in shapes]
    return [Box((end - length,), (length,)) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def exchanged(sends: Sequence[Shape], receives: Sequence[Shape], mine: int) -> Route:
    """One member's part where ``sends[k]`` goes to group position k, whence ``receives[k]`` comes; ``mine`` stays."""
    leaving, arriving = runs(sends), runs(receives)
    kept = (leaving[mine], arriving[mine]) if leaving[mine].numel else None
    return _route(leaving, arriving, mine, kept, sum(box.numel for box in leaving))


def gathered(shapes: Sequence[Shape], mine: int) -> Route:
    """One member's part where every member gets the pieces of all."""
    arriving = runs(shapes)
    length = arriving[mine].numel
    whole = Box((0,), (length,))
    return _route([whole] * len(shapes), arriving, mine, (whole, arriving[mine]) if length else None, length)


def _route(leaving: Sequence[Box], arriving: Sequence[Box], mine: int, kept: tuple[Box, Box] | None, length: int) -> Route:
    sends, receives = (
        tuple(box if k != mine and box.numel else None for k, box in enumerate(boxes)) for boxes in (leaving, arriving)
    )
    return Route((length,), (sum(box.numel for box in arriving),), sends, receives, kept)


def broadcast(shape: Shape, size: int, source: int, mine: int) -> Route:
    """One member's part where position ``source`` of ``size`` sends its block to all."""
    shape = tuple(shape)
    whole, away = Box((0,) * len(shape), shape), mine != source
    sends = tuple(None if away or k == mine else whole for k in range(size))
    receives = tuple(whole if away and k == source else None for k in range(size))
    return Route(shape, shape, sends, receives, None if away else (whole, whole))


def announced(piece: Tensor, shape: Shape, member: int) -> Tensor:
    """``piece``, of the shape that others were told: a wrong one would be read as another. Two empty tensors carry the same."""
    if tuple(piece.shape) != tuple(shape) and (piece.numel() or math.prod(shape)):
        raise LayoutError(
            f"rank {member} of the group has a local tensor of shape {tuple(piece.shape)}, but announced {tuple(shape)}"
        )
    return piece
