"""What the backends of ``torch.distributed`` can do, and the transfers that differ between them.

Tensors travel as bytes, so every dtype does. Measured with gloo, 4 ranks on 2 cores, medians: one all-to-all of copies is
2-3 times faster than an all-gather up to 64 KiB and as fast at 4 MiB; reduce-scatter as all-to-all + local fold takes
half the time of gloo's own. So on gloo everything but broadcast is one all-to-all with uneven splits, and reductions
fold here in group order: every dtype, and the same bits as in one process.
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

from ..errors import LayoutError
from ..mesh.process_groups import Group
from ..watchdog.collective_hooks import wait_abandonably
from .events import issuing, listeners
from .flat_rows import as_row
from .local_reduce import Op, dense
from .pending import Pending

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traits:
    """What to use of a backend.

    Attributes:
        reduces: its own reductions, and its own all-gather.
        sends_lists: all-to-all takes a list of tensors of any sizes, so nothing is copied into one buffer.
        direct_bytes: messages of this size are worth sending one by one, out of and into the tensors they are parts of.
        sparse: so are messages of any size where each rank sends to one in ``sparse`` of the others at most.
        one_round_bytes: up to this many bytes from all ranks together, an all-reduce that sends everything to everybody in one
            round beats two rounds.
        exchanged_bytes: up to this many bytes from each rank, the two rounds are two all-to-alls instead of messages.
        relayed_bytes: up to this many bytes from one rank, a gather by way of it (two rounds of messages) beats one all-to-all.
        adds_pairs: its own sum of two ranks' terms, which has one order only, where folds are ours otherwise.
    """

    reduces: bool
    sends_lists: bool
    direct_bytes: int = sys.maxsize
    sparse: int = sys.maxsize
    one_round_bytes: int = 0
    exchanged_bytes: int = 0
    relayed_bytes: int = 0
    adds_pairs: bool = False


# Measured on gloo, 2 to 8 ranks on 2 cores. Message by message, gathers and exchanges of large blocks take half the CPU time of
# packed ones; an all-reduce in one round takes half the time of two rounds (of gloo's own too) up to 2 MiB in all. Of two ranks
# gloo's own takes 0.6 to 0.85 of either's time. Two all-to-alls of 0.75 MiB take 0.6 of the time of messages, of 3 MiB 1.15. A
# gather of 0.5 to 5 KiB on 4 ranks by way of one takes 0.3 to 0.5 of the time of an all-to-all.
_TRAITS = {
    "gloo": Traits(
        reduces=False,
        sends_lists=False,
        direct_bytes=1 << 17,
        sparse=3,
        one_round_bytes=1 << 21,
        exchanged_bytes=1 << 20,
        relayed_bytes=1 << 20,
        adds_pairs=True,
    ),
    "mpi": Traits(reduces=False, sends_lists=False, one_round_bytes=1 << 16),
    "fake": Traits(reduces=True, sends_lists=False),  # no communication: torch's stand-in for host-time measurements
}
_DEFAULT = Traits(
    reduces=True, sends_lists=True, direct_bytes=1 << 22, one_round_bytes=1 << 16
)  # nccl and the other vendors' collectives


def traits_of(group: Group) -> Traits:
    return _TRAITS.get(group.backend, _DEFAULT)


# Renamed in torch 2.13, which warns at the names of 2.11.
all_gather_single = issuing(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
reduce_scatter_single = issuing(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
_BROADCAST = issuing(dist.broadcast)

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
LOGICAL = {"sum": "max", "max": "max", "product": "min", "min": "min"}  # on the bytes 0 and 1 of bools


def native_reduction(group: Group, op: Op, dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, torch.dtype] | None:
    """The backend's reduction and the dtype to view the data as; None if the fold is ours."""
    if not traits_of(group).reduces or not isinstance(op, str):
        return None
    if dtype is torch.bool:
        return _REDUCE_OPS[LOGICAL[op]], torch.uint8
    if dtype in (torch.complex64, torch.complex128) and op in ("sum", "avg"):
        return _REDUCE_OPS[op], torch.float32 if dtype is torch.complex64 else torch.float64
    return (_REDUCE_OPS[op], dtype) if dtype in _REDUCED_NATIVELY else None


class Ending(Protocol):
    """A work of the backend, or several."""

    def wait(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Large:
    """Works whose messages do not fit a socket's buffer."""

    works: list[dist.Work]
    handle: Any

    def wait(self) -> None:
        wait_abandonably(self.works, self.handle)


_LARGE = 1 << 16  # bytes; less is in a socket's buffer whole


def endable(group: Group, nbytes: int, works: list[dist.Work]) -> list[Ending]:
    """Works of messages of so many bytes: of large ones a part may be there when a connection breaks."""
    return [_Large(works, group.handle)] if nbytes >= _LARGE and group.backend == "gloo" else [*works]


def started(works: list[Ending], finish: Callable[[], T]) -> Pending[T]:
    """What ``finish`` makes once all ``works`` have ended."""
    return Pending(partial(after, works, finish))


def after(works: list[Ending], finish: Callable[[], T]) -> T:
    """What ``finish`` makes after them; works hold what they send, so they go first."""
    while works:
        works.pop(0).wait()
    return finish()


# --- rows and messages of one dtype -------------------------------------------------------------------------------------
_CARRIED = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8})
_TAG = 3570  # messages between two ranks arrive in the order sent, so one tag serves all


def row_major(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` without history, its memory being its elements in order; a copy only where it is not."""
    if x.shape != shape:
        raise LayoutError(f"a local tensor has shape {tuple(x.shape)}, but its layout says {tuple(shape)}")
    x = x.detach() if x.requires_grad else x
    return dense(x) if not x.is_contiguous() or x.is_conj() or x.is_neg() else x


def _with(options: T, **values: Any) -> T:
    for name, value in {"asyncOp": True, **values}.items():
        setattr(options, name, value)
    return options


# The group's own methods are called: torch.distributed's check what is known here, and take longer than a small collective.
_ALL_GATHER_NAME = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"  # of torch 2.11
_REDUCE_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_ALL_GATHER, _ALL_TO_ALL = _with(AllgatherOptions()), _with(dist.AllToAllOptions())


def message(row: Tensor) -> Tensor:
    """A row as the backend takes it: every dtype can travel as bytes."""
    return row if row.dtype in _CARRIED else as_row(row).view(torch.uint8)


@issuing
def all_to_all_rows(group: Group, into: Tensor, row: Tensor, arriving: list[int], leaving: list[int]) -> list[Ending]:
    """One all-to-all of the parts of ``row``, ``leaving`` elements each; what comes stands in ``into``."""
    travels = max(into.nbytes, row.nbytes) - arriving[group.torch_rank] * row.dtype.itemsize  # its own part stays here
    if row.dtype not in _CARRIED:
        unit = row.dtype.itemsize
        arriving, leaving = ([length * unit for length in side] for side in (arriving, leaving))
    # Always with lengths: one rank's may be equal where another's are not, and without them gloo runs another algorithm.
    work = group.handle.alltoall_base(message(into), message(row), arriving, leaving, _ALL_TO_ALL)
    return endable(group, travels, [work])


@issuing
def all_gather_rows(group: Group, into: Tensor, row: Tensor) -> list[Ending]:
    """Every rank's ``row``, of one length, one after the other."""
    return endable(group, into.nbytes, [getattr(group.handle, _ALL_GATHER_NAME)(message(into), message(row), _ALL_GATHER)])


def all_reduction(group: Group, op: dist.ReduceOp.RedOpType) -> Callable[[Tensor], list[Ending]]:
    """The backend's own all-reduce, in place."""
    issue, options = group.handle.allreduce, _with(dist.AllreduceOptions(), reduceOp=op)
    told = issuing(issue)
    return lambda x: endable(group, x.nbytes, [told([x], options) if listeners else issue([x], options)])


def scattered_reduction(group: Group, op: dist.ReduceOp.RedOpType) -> Callable[[Tensor, Tensor], list[Ending]]:
    """The backend's own reduce-scatter: of a row, to this rank's part of it."""
    issue, options = getattr(group.handle, _REDUCE_SCATTER_NAME), _with(ReduceScatterOptions(), reduceOp=op)
    told = issuing(issue)
    return lambda into, row: endable(group, row.nbytes, [(told if listeners else issue)(into, row, options)])


def broadcast(group: Group, row: Tensor, sender: int) -> list[Ending]:
    """In ``row``, what stands there on the rank ``sender``."""
    return endable(group, row.nbytes, [_BROADCAST(row, sender, group=group.handle, async_op=True)])


Message = tuple[int, Tensor]  # torch's rank in the group, and a row


@issuing
def post(group: Group, receives: Sequence[Message], sends: Sequence[Message], device: torch.device) -> list[Ending]:
    """Starts these messages, at most one from and to each rank; waiting for all of the works ends them."""
    if not traits_of(group).sends_lists:
        works = [group.handle.recv([message(row)], rank, _TAG) for rank, row in receives]
        works += [group.handle.send([message(row)], rank, _TAG) for rank, row in sends]
        return endable(group, max((row.nbytes for _, row in (*receives, *sends)), default=0), works)
    if group.handle.size() > group.size:  # not all of the process group take part
        ops = [dist.P2POp(dist.irecv, row, group=group.handle, group_peer=rank) for rank, row in receives]
        ops += [dist.P2POp(dist.isend, row, group=group.handle, group_peer=rank) for rank, row in sends]
        return [*dist.batch_isend_irecv(ops)] if ops else []
    into, rows = ([torch.empty(0, dtype=torch.uint8, device=device) for _ in group.members] for _ in range(2))
    for side, given in ((into, receives), (rows, sends)):
        for rank, row in given:
            side[rank] = as_row(row).view(torch.uint8)
    return [dist.all_to_all(into, rows, group=group.handle, async_op=True)]
