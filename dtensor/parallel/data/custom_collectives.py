"""How a group's collectives run: over the mesh's communicator, or by primitives of the user's own.

A user's all-gather or reduce-scatter is called as torch calls it: flat tensors, every rank's part of one length (ours are padded
to the longest), in the order of the process group's ranks. With all ranks in one process the tensors are :class:`PerRank`
and the group is None.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Communicator, Pending, communicator_of
from ...comm.backends import all_gather_single, reduce_scatter_single
from ...comm.backend_base import Lengths
from ...comm.events import Event, issuing, listeners, reporting
from ...comm.flat_rows import joined
from ...mesh.process_groups import program_group_of
from .dp_modes import Axes


class Comm(ABC):
    """A primitive of communication, and where the memory of its buffers comes from.

    What it communicates is the user's; it is counted as one collective.

    >>> import torch
    >>> class Own(Comm):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    >>> Own().allocate((3,), dtype=torch.float32, device=torch.device("cpu")).shape
    torch.Size([3])

    What it raises goes to the program.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; called once for each member that is held here."""


class AllGather(Comm):
    """What :meth:`FSDPModule.set_custom_all_gather` takes.

    One all-gather of each unit's row of bytes.

    >>> import torch, torch.distributed as dist
    >>> class Own(AllGather):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
    ...         return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
    >>> isinstance(Own(), Comm)
    True

    What it raises goes to the program.
    """

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        """Every rank's ``input_tensor``, one behind the other, into ``output_tensor``."""


class ReduceScatter(Comm):
    """What :meth:`FSDPModule.set_custom_reduce_scatter` takes.

    One reduce-scatter of each unit's gradients.

    >>> import torch, torch.distributed as dist
    >>> class Own(ReduceScatter):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
    ...         return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    >>> isinstance(Own(), Comm)
    True

    It is counted as one collective; what it raises goes to the program, as for the others here.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """This rank's part of the inputs, reduced by ``op``, into ``output_tensor``."""


@dataclass(eq=False, slots=True)
class Settings:
    """What may be set of a group's communication between steps.

    Attributes:
        divisor: of summed gradients; None: the number of ranks.
        all_reduces: reduce-scattered gradients are summed over replicas too; otherwise they wait.
        sums_only: collectives sum; the division follows by itself.
        hook, hook_stream: called with the reduced gradients, flat, before they are accumulated; and on which stream.
        gathers, scatters: primitives of the user's; None: the communicator's.
        scatter_comm: over groups of their own, for reductions; None: over the mesh's.
        reduces: a :class:`.comm_hook.Reducer` for whole gradients; None: all-reduce.
        views: whole gradients stay where they were reduced, in memory that serves again when nobody has them as ``.grad``.
    """

    divisor: float | None = None
    all_reduces: bool = True
    sums_only: bool = False
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    gathers: AllGather | None = None
    scatters: ReduceScatter | None = None
    scatter_comm: Communicator | None = None
    reduces: Any = None
    views: bool = False

    def on_hook_stream(self, device_type: str) -> AbstractContextManager[Any]:
        """Inside, work goes to the hook's stream, which has waited for this one; who leaves waits for it in turn."""
        return nullcontext() if self.hook_stream is None else _Aside(self.hook_stream, device_type)


class _Aside:
    """Work on another stream, between what this one did before and does after."""

    def __init__(self, stream: Any, device_type: str) -> None:
        self._stream, self._device = stream, torch.get_device_module(device_type)

    def __enter__(self) -> None:
        self._inner = self._device.stream(self._stream)
        self._stream.wait_stream(self._device.current_stream())
        self._inner.__enter__()

    def __exit__(self, *reason: Any) -> None:
        self._inner.__exit__(*reason)
        self._device.current_stream().wait_stream(self._stream)


# --- a user's primitives -----------------------------------------------------------------------------------------------
def gather_rows(axes: Axes, by: AllGather, lengths_of: Lengths, row: Any) -> Pending[Any]:
    """The rows of all group positions, one behind the other; ``lengths_of(member)``: theirs."""
    comm, device, dtype = communicator_of(axes.mesh), torch.device(axes.mesh.device_type), row.dtype
    _, order = _torch_group(axes)

    def sent(member: int, x: Tensor) -> Tensor:
        most = max(lengths_of(member))
        return _filled(by.allocate((most,), dtype=dtype, device=device), [x], most)

    def room(member: int) -> Tensor:
        each = lengths_of(member)
        return by.allocate((len(each) * max(each),), dtype=dtype, device=device)

    def rows(member: int, got: Tensor) -> Tensor:
        each, flat = lengths_of(member), got.view(-1)
        return joined([flat.narrow(0, order[k] * max(each), n) for k, n in enumerate(each)])

    each = max(max(lengths_of(member)) for member in axes.mesh.members) * dtype.itemsize
    return _run("all_gather", axes, by, comm.map(sent, row), comm.map(room), rows, each)


def scatter_row(axes: Axes, by: ReduceScatter, op: str, lengths_of: Lengths, row: Any) -> Pending[Any]:
    """Position k's part of the rows, reduced; ``lengths_of(member)``: of the parts."""
    comm, device, dtype = communicator_of(axes.mesh), torch.device(axes.mesh.device_type), row.dtype
    _, order = _torch_group(axes)

    def sent(member: int, own: Tensor) -> Tensor:
        each = lengths_of(member)
        parts = own.split(list(each))
        placed = [parts[order.index(k)] for k in range(len(parts))]
        return _filled(by.allocate((len(each) * max(each),), dtype=dtype, device=device), placed, max(each))

    def room(member: int) -> Tensor:
        return by.allocate((max(lengths_of(member)),), dtype=dtype, device=device)

    def mine(member: int, got: Tensor) -> Tensor:
        position = axes.mesh.members_of(axes.shard, member).index(member)
        return got.view(-1)[: lengths_of(member)[position]]

    output, reduction = comm.map(room), dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    return _run("reduce_scatter", axes, by, comm.map(sent, row), output, mine, output.nbytes, op=reduction)


def _run(kind: str, axes: Axes, by: Any, source: Any, output: Any, take: Any, nbytes: int, **options: Any) -> Pending[Any]:
    """What ``take(member, output)`` gives when a user's primitive has filled it. It is one collective of ours, of ``nbytes`` from
    each rank, whatever it issues."""
    mesh, size, comm = axes.mesh, axes.mesh.size_of(axes.shard), communicator_of(axes.mesh)

    def issue() -> Pending[Any]:
        handle, _ = _torch_group(axes)
        work = issuing(by)(output_tensor=output, input_tensor=source, group=handle, async_op=True, **options)

        def wait() -> Any:
            if work is not None:
                work.wait()
            return comm.map(take, output)

        return Pending(wait)

    if not listeners:
        return issue()
    groups = dict.fromkeys(tuple(mesh.ranks[k] for k in mesh.members_of(axes.shard, member)) for member in comm.held)
    return reporting(Event(kind, axes.shard, size, (size - 1) * nbytes, mesh, groups=tuple(groups)), issue)


def _filled(buffer: Tensor, parts: Sequence[Tensor], each: int) -> Tensor:
    """``buffer`` with ``parts`` at every ``each`` elements, zeros between."""
    for k, part in enumerate(parts):
        buffer.view(-1)[k * each : k * each + part.numel()].copy_(part)
        buffer.view(-1)[k * each + part.numel() : (k + 1) * each].zero_()
    return buffer


def _torch_group(axes: Axes) -> tuple[Any, list[int]]:
    """The process group that parameters are cut over, None in one process, and torch's rank in it of each group position."""
    if axes.mesh.kind != "process_group":
        return None, list(range(axes.mesh.size_of(axes.shard)))
    group = program_group_of(axes.mesh, axes.shard)
    return group.handle, list(range(group.size)) if group.order is None else list(group.order)


# --- memory of the process group's ---------------------------------------------------------------------------------------
class _GroupMemory:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made: Tensor = self._backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
        return made


class GroupMemoryAllGather(_GroupMemory, AllGather):
    """The backend's all-gather in memory that the backend allocates."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class GroupMemoryReduceScatter(_GroupMemory, ReduceScatter):
    """The backend's reduce-scatter in memory that the backend allocates."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=async_op)


def allocating_backend(axes: Axes) -> Any:
    """The backend of the group that parameters are cut over, if it has memory of its own to give; else None."""
    handle, _ = _torch_group(axes) if axes.shard else (None, [])
    if handle is None:
        return None
    device = torch.device(axes.mesh.device_type)
    backend = handle._get_backend(device)  # as torch's own FSDP asks: there is no public way
    supports = getattr(backend, "supports_tensor_alloc", None)
    return backend if supports is not None and supports(device) else None
