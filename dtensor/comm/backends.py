"""What the backends of ``torch.distributed`` can do, and the transfers that differ between them.

Tensors travel as bytes, so every dtype does. Measured with gloo, 4 ranks on 2 cores, medians: one all-to-all of copies is
2-3 times faster than an all-gather up to 64 KiB and as fast at 4 MiB; reduce-scatter as all-to-all + local fold takes
half the time of gloo's own. So on gloo everything but broadcast is one all-to-all with uneven splits, and reductions
fold here in group order: every dtype, and the same bits as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Group
from .protocol import Pending, Shape
from .reduction import Op, dense

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traits:
    """What to use of a backend.

    Attributes:
        reduces: its own reductions, and its own all-gather.
        sends_lists: all-to-all takes a list of tensors of any sizes, so nothing is copied into one buffer.
    """

    reduces: bool
    sends_lists: bool


_TRAITS = {
    "gloo": Traits(reduces=False, sends_lists=False),
    "mpi": Traits(reduces=False, sends_lists=False),
    "fake": Traits(reduces=True, sends_lists=False),  # no communication: torch's stand-in for host-time measurements
}
_DEFAULT = Traits(reduces=True, sends_lists=True)  # nccl and the other vendors' collectives


def traits_of(group: Group) -> Traits:
    return _TRAITS.get(group.backend, _DEFAULT)


# Renamed in torch 2.13, which warns at the names of 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_REDUCED_NATIVELY = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_LOGICAL = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # on the bytes 0 and 1 of bools


def native_reduction(group: Group, op: Op, dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, torch.dtype] | None:
    """The backend's reduction and the dtype to view the data as; None if the fold is ours."""
    if not traits_of(group).reduces or not isinstance(op, str):
        return None
    if dtype is torch.bool:
        return _REDUCE_OPS[_LOGICAL[op]], torch.uint8
    if dtype in (torch.complex64, torch.complex128) and op in ("sum", "avg"):
        return _REDUCE_OPS[op], torch.float32 if dtype is torch.complex64 else torch.float64
    return (_REDUCE_OPS[op], dtype) if dtype in _REDUCED_NATIVELY else None


def started(work: dist.Work | None, finish: Callable[[], T]) -> Pending[T]:
    """What ``finish`` makes once ``work`` (None: done already) has ended."""

    def wait() -> T:
        if work is not None:
            work.wait()
        return finish()

    return Pending(wait)


def flat_bytes(x: Tensor) -> Tensor:
    """The data of ``x`` as one row of bytes; a copy only where ``x`` is not row-major."""
    x = x.detach()
    return (dense(x) if not x.is_contiguous() or x.is_conj() or x.is_neg() else x).reshape(-1).view(torch.uint8)


def from_bytes(row: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """The tensor whose bytes are ``row``."""
    return row.view(dtype).view(tuple(shape))


def exchange(group: Group, pieces: Sequence[Tensor], shapes: Sequence[Shape], async_op: bool) -> Pending[list[Tensor]]:
    """All-to-all: ``pieces[k]`` goes to group position k; from position k comes a tensor of ``shapes[k]``."""
    dtype, device = pieces[0].dtype, pieces[0].device
    sent = group.to_torch([flat_bytes(piece) for piece in pieces])
    lengths = group.to_torch([math.prod(shape) * dtype.itemsize for shape in shapes])
    if traits_of(group).sends_lists:
        rows = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
        work = dist.all_to_all(rows, sent, group=group.handle, async_op=async_op)
    else:
        buffer, packed = torch.empty(sum(lengths), dtype=torch.uint8, device=device), torch.cat(sent)
        splits = [row.numel() for row in sent]
        work = dist.all_to_all_single(buffer, packed, lengths, splits, group=group.handle, async_op=async_op)
        rows = list(torch.split(buffer, lengths))

    def finish() -> list[Tensor]:
        received = group.to_mesh(rows)
        return [from_bytes(row, shape, dtype) for row, shape in zip(received, shapes, strict=True)]

    return started(work, finish)
