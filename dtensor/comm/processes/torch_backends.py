"""Backends of ``torch.distributed``: what each of them can do well, and the transfers that differ between them.

Tensors of dtypes that a backend does not know are sent as bytes. Measured with gloo, 4 ranks on 2 cores, medians: one
all-to-all of copies is 2-3 times faster than an all-gather up to 64 KiB and as fast at 4 MiB. A reduce-scatter as all-to-all
and local reduction takes half the time of gloo's own. So on gloo all collectives but broadcast are all-to-alls with uneven
splits, and addends are reduced locally in group order. This works for all dtypes, and gives the same bits as in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions  # type: ignore[attr-defined]  # as torch has it

from ...errors import LayoutError
from ...mesh.process_groups import Group
from ...watchdog.collective_hooks import wait_abandonably
from ..events import listeners, mark_reported
from ..flat_rows import view_as_row
from ..local_reduce import Op, row_major_copy
from ..pending import Pending

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """Capabilities of a backend that this library uses.

    Attributes:
        reduces: use its own reductions and its own all-gather.
        sends_lists: its all-to-all takes a list of tensors of any sizes, so that nothing is copied into one buffer.
        direct_bytes: send messages of at least this size one by one, out of and into the tensors of which they are parts.
        sparse: do the same for messages of any size if each rank sends to at most one in ``sparse`` of the others.
        one_round_bytes: up to this many bytes from all ranks together, an all-reduce in one round, in which each rank sends
            everything to all others, is faster than two rounds.
        exchanged_bytes: up to this many bytes from each rank, the two rounds are two all-to-alls instead of messages.
        relayed_bytes: up to this many bytes from one rank, a gather by way of one rank (two rounds of messages) is faster than
            one all-to-all.
        adds_pairs: use its own sum for two ranks, which has only one order, although other reductions are local.
    """

    reduces: bool
    sends_lists: bool
    direct_bytes: int = sys.maxsize
    sparse: int = sys.maxsize
    one_round_bytes: int = 0
    exchanged_bytes: int = 0
    relayed_bytes: int = 0
    adds_pairs: bool = False


# Measured on gloo, 2 to 8 ranks on 2 cores. In single messages, gathers and exchanges of large blocks take half the CPU time of
# packed ones; an all-reduce in one round takes half the time of two rounds (of gloo's own too) up to 2 MiB in all. Of two ranks
# gloo's own takes 0.6 to 0.85 of either's time. Two all-to-alls of 0.75 MiB take 0.6 of the time of messages, of 3 MiB 1.15. A
# gather of 0.5 to 5 KiB on 4 ranks by way of one takes 0.3 to 0.5 of the time of an all-to-all.
_TRAITS = {
    "gloo": BackendTraits(
        reduces=False,
        sends_lists=False,
        direct_bytes=1 << 17,
        sparse=3,
        one_round_bytes=1 << 21,
        exchanged_bytes=1 << 20,
        relayed_bytes=1 << 20,
        adds_pairs=True,
    ),
    "mpi": BackendTraits(reduces=False, sends_lists=False, one_round_bytes=1 << 16),
    "fake": BackendTraits(reduces=True, sends_lists=False),  # no communication; torch has it for measurements of host time
}
# nccl and the collectives of other vendors
_DEFAULT_TRAITS = BackendTraits(reduces=True, sends_lists=True, direct_bytes=1 << 22, one_round_bytes=1 << 16)


def backend_traits_of(group: Group) -> BackendTraits:
    return _TRAITS.get(group.backend, _DEFAULT_TRAITS)


_BROADCAST = mark_reported(dist.broadcast)

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_NATIVELY_REDUCED_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_BOOL_REDUCTIONS = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # on the bytes 0 and 1 of bools


def native_reduction(group: Group, op: Op, dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, torch.dtype] | None:
    """Return the backend's reduction and the dtype as which it reads the data; None if addends are reduced locally."""
    if not backend_traits_of(group).reduces or not isinstance(op, str):
        return None
    if dtype is torch.bool:
        return _REDUCE_OPS[_BOOL_REDUCTIONS[op]], torch.uint8
    if dtype in (torch.complex64, torch.complex128) and op in ("sum", "avg"):
        return _REDUCE_OPS[op], torch.float32 if dtype is torch.complex64 else torch.float64
    return (_REDUCE_OPS[op], dtype) if dtype in _NATIVELY_REDUCED_DTYPES else None


class Waitable(Protocol):
    """Something to wait for: a work handle of the backend, or several."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _AbandonableWork:
    """Work handles of messages that do not fit into the buffer of a socket. A helper thread waits for them."""

    works: list[dist.Work]
    handle: Any

    def wait(self) -> None:
        wait_abandonably(self.works, self.handle)


_LARGE_BYTES = 1 << 16  # smaller messages fit into the buffer of a socket


def make_abandonable(group: Group, nbytes: int, works: list[dist.Work]) -> list[Waitable]:
    """Return work handles of messages of ``nbytes``, wrapped on gloo if large, so that their wait can be abandoned.

    If a connection breaks, a part of a large message may have arrived, and gloo does not end the wait for the rest.
    """
    return [_AbandonableWork(works, group.handle)] if nbytes >= _LARGE_BYTES and group.backend == "gloo" else [*works]


def make_pending(works: list[Waitable], finish: Callable[[], T]) -> Pending[T]:
    """Return a pending result: that of ``finish``, after all ``works`` are completed."""
    return Pending(partial(wait_then, works, finish))


def wait_then(works: list[Waitable], finish: Callable[[], T]) -> T:
    """Wait for all ``works``, releasing each with the tensors that it sends, then return ``finish()``."""
    while works:
        works.pop(0).wait()
    return finish()


# --- rows and messages of one dtype -------------------------------------------------------------------------------------
_NATIVE_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8})
_TAG = 3570  # messages between two ranks arrive in order, so one tag is enough


def to_row_major(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``x`` detached, with its elements in order in memory. It is a copy only if they are not.

    Raises:
        LayoutError: ``x`` does not have the shape that its layout gives.
    """
    if x.shape != shape:
        raise LayoutError(
            f"a local tensor has shape {tuple(x.shape)}, but its layout says {tuple(shape)}; "
            "do not resize a local tensor in place"
        )
    x = x.detach() if x.requires_grad else x
    return row_major_copy(x) if not x.is_contiguous() or x.is_conj() or x.is_neg() else x


def _async_options(options: T, **values: Any) -> T:
    """Set the c10d ``options`` to an asynchronous operation, and to ``values``, and return them."""
    for name, value in {"asyncOp": True, **values}.items():
        setattr(options, name, value)
    return options


# These are methods of the process group. The functions of torch.distributed repeat checks that take longer than a small
# collective.
_ALL_GATHER_NAME = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"  # of torch 2.11
_REDUCE_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_ALL_GATHER, _ALL_TO_ALL = _async_options(AllgatherOptions()), _async_options(dist.AllToAllOptions())


def view_as_message(row: Tensor) -> Tensor:
    """Return a row as the backend takes it: as bytes if the backend does not know the dtype."""
    return row if row.dtype in _NATIVE_DTYPES else view_as_row(row).view(torch.uint8)


@mark_reported
def all_to_all_rows(group: Group, into: Tensor, row: Tensor, recv_lengths: list[int], send_lengths: list[int]) -> list[Waitable]:
    """Start an all-to-all of the parts of ``row`` (``send_lengths`` elements) into ``into`` (``recv_lengths`` elements)."""
    nbytes = max(into.nbytes, row.nbytes) - recv_lengths[group.torch_rank] * row.dtype.itemsize  # without the rank's own part
    if row.dtype not in _NATIVE_DTYPES:
        unit = row.dtype.itemsize
        recv_lengths, send_lengths = ([length * unit for length in side] for side in (recv_lengths, send_lengths))
    # Lengths are always passed: without them (if all are equal on this rank only) gloo would run another algorithm than on other
    # ranks.
    work = group.handle.alltoall_base(view_as_message(into), view_as_message(row), recv_lengths, send_lengths, _ALL_TO_ALL)
    return make_abandonable(group, nbytes, [work])


@mark_reported
def start_all_gather_rows(group: Group, into: Tensor, row: Tensor) -> list[Waitable]:
    """Start an all-gather of rows of one length into ``into``, one after the other."""
    return make_abandonable(
        group, into.nbytes, [getattr(group.handle, _ALL_GATHER_NAME)(view_as_message(into), view_as_message(row), _ALL_GATHER)]
    )


def bind_native_all_reduce(group: Group, op: dist.ReduceOp.RedOpType) -> Callable[[Tensor], list[Waitable]]:
    """Bind the backend's own all-reduce, in place."""
    issue, options = group.handle.allreduce, _async_options(dist.AllreduceOptions(), reduceOp=op)
    issue_reported = mark_reported(issue)
    return lambda x: make_abandonable(group, x.nbytes, [issue_reported([x], options) if listeners else issue([x], options)])


def bind_native_reduce_scatter(group: Group, op: dist.ReduceOp.RedOpType) -> Callable[[Tensor, Tensor], list[Waitable]]:
    """Bind the backend's own reduce-scatter, of a row, into this rank's part of it."""
    issue, options = getattr(group.handle, _REDUCE_SCATTER_NAME), _async_options(ReduceScatterOptions(), reduceOp=op)
    issue_reported = mark_reported(issue)
    return lambda into, row: make_abandonable(group, row.nbytes, [(issue_reported if listeners else issue)(into, row, options)])


def broadcast_row(group: Group, row: Tensor, sender: int) -> list[Waitable]:
    """Start a broadcast of ``row`` from the global rank ``sender``."""
    return make_abandonable(group, row.nbytes, [_BROADCAST(row, sender, group=group.handle, async_op=True)])


Message = tuple[int, Tensor]  # rank of the partner in torch's group, and a row


@mark_reported
def exchange_messages(
    group: Group, receives: Sequence[Message], sends: Sequence[Message], device: torch.device
) -> list[Waitable]:
    """Start to receive and send these rows, at most one from and to each rank, and return the work handles."""
    if not backend_traits_of(group).sends_lists:
        works = [group.handle.recv([view_as_message(row)], rank, _TAG) for rank, row in receives]
        works += [group.handle.send([view_as_message(row)], rank, _TAG) for rank, row in sends]
        return make_abandonable(group, max((row.nbytes for _, row in (*receives, *sends)), default=0), works)
    if group.handle.size() > group.size:  # only some ranks of the process group take part
        ops = [dist.P2POp(dist.irecv, row, group=group.handle, group_peer=rank) for rank, row in receives]
        ops += [dist.P2POp(dist.isend, row, group=group.handle, group_peer=rank) for rank, row in sends]
        return [*dist.batch_isend_irecv(ops)] if ops else []
    into, rows = ([torch.empty(0, dtype=torch.uint8, device=device) for _ in group.members] for _ in range(2))
    for side, given in ((into, receives), (rows, sends)):
        for rank, row in given:
            side[rank] = view_as_row(row).view(torch.uint8)
    return [dist.all_to_all(into, rows, group=group.handle, async_op=True)]
