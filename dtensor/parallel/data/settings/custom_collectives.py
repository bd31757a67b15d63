"""Custom collectives: the settings of a group's collectives, and collectives that a program defines.

A custom all-gather or reduce-scatter is called as torch calls it: with flat tensors, parts of equal length for all ranks
(padded to the longest), in the rank order of the process group. With all ranks in one process the tensors are
:class:`PerRank` and the group is None.
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
from torch import Tensor, nn

from ....comm import Communicator, Pending, shards_of
from ....comm.communicator import Lengths
from ....comm.events import Event, issue_reported, listeners, mark_reported
from ....comm.flat_rows import concat_to_row
from ....comm.map_ranks import communicator_of
from ....mesh.process_groups import get_program_group
from .dp_modes import MeshAxes

# Renamed in torch 2.13, which warns at the names of 2.11.
_ALL_GATHER = mark_reported(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
_REDUCE_SCATTER = mark_reported(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)


class Comm(ABC):
    """Abstract base class of custom collectives: allocates the memory of their buffers.

    The communication is that of the subclass; it is counted as one collective.

    >>> import torch
    >>> class Own(Comm):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    >>> Own().allocate((3,), dtype=torch.float32, device=torch.device("cpu")).shape
    torch.Size([3])

    Errors are passed on to the program.
    """

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer; called once for each member of this process."""


class AllGather(Comm):
    """Abstract base class of an all-gather for :meth:`FSDPModule.set_custom_all_gather`.

    Called once for each unit's row of bytes.

    >>> import torch, torch.distributed as dist
    >>> class Own(AllGather):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
    ...         return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
    >>> isinstance(Own(), Comm)
    True

    Errors are passed on to the program.
    """

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        """Write the ``input_tensor`` of all ranks, concatenated, into ``output_tensor``."""


class ReduceScatter(Comm):
    """Abstract base class of a reduce-scatter for :meth:`FSDPModule.set_custom_reduce_scatter`.

    Called once for the gradients of each unit.

    >>> import torch, torch.distributed as dist
    >>> class Own(ReduceScatter):
    ...     def allocate(self, size, *, dtype, device):
    ...         return torch.empty(*size, dtype=dtype, device=device)
    ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
    ...         return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    >>> isinstance(Own(), Comm)
    True

    It is counted as one collective. Errors are passed on to the program.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's part of the inputs, reduced by ``op``, into ``output_tensor``."""


@dataclass(eq=False, slots=True)
class CommSettings:
    """Settings of a parameter group's communication, which a program may change between steps.

    Attributes:
        divide_factor: divisor of summed gradients; None: the number of ranks.
        requires_all_reduce: all-reduce reduce-scattered gradients over replicas; otherwise they wait for a later pass.
        force_sum: collectives sum, and the division is separate.
        hook, hook_stream: called with the flat reduced gradients before they are accumulated; the stream to call it on.
        all_gather, reduce_scatter: custom collectives; None: those of the communicator.
        reduce_scatter_comm: communicator over separate process groups for reductions; None: that of the mesh.
        comm_hook: reduces unsharded gradients; None: all-reduce.
        grads_as_bucket_views: ``.grad`` are views of the buckets in which gradients are reduced.
    """

    divide_factor: float | None = None
    requires_all_reduce: bool = True
    force_sum: bool = False
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_scatter_comm: Communicator | None = None
    comm_hook: CommHookReducer | None = None
    grads_as_bucket_views: bool = False

    def on_hook_stream(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context in which work is issued on the hook's stream.

        On entry that stream waits for the current stream, and on exit the current stream waits for it.
        """
        return nullcontext() if self.hook_stream is None else _StreamScope(self.hook_stream, device_type)


class _StreamScope:
    """Context that issues work on another stream, after earlier and before later work of the current stream."""

    def __init__(self, stream: Any, device_type: str) -> None:
        self._stream, self._device = stream, torch.get_device_module(device_type)

    def __enter__(self) -> None:
        self._inner = self._device.stream(self._stream)
        self._stream.wait_stream(self._device.current_stream())
        self._inner.__enter__()

    def __exit__(self, *reason: Any) -> None:
        self._inner.__exit__(*reason)
        self._device.current_stream().wait_stream(self._stream)


# --- a user's primitives ---------------------------------------------------------------------------------------------
def gather_rows(axes: MeshAxes, custom: AllGather, lengths_of: Lengths, row: Any) -> Pending[Any]:
    """Gather the rows of all ranks by the program's own all-gather; ranks may send rows of different length."""
    comm, device, dtype = communicator_of(axes.mesh), torch.device(axes.mesh.device_type), row.dtype
    _, order = _process_group_of(axes)

    def fill_input(member: int, x: Tensor) -> Tensor:
        most = max(lengths_of(member))
        return _fill_padded(custom.allocate((most,), dtype=dtype, device=device), [x], most)

    def allocate_output(member: int) -> Tensor:
        lengths = lengths_of(member)
        return custom.allocate((len(lengths) * max(lengths),), dtype=dtype, device=device)

    def take_rows(member: int, got: Tensor) -> Tensor:
        lengths, flat = lengths_of(member), got.view(-1)
        return concat_to_row([flat.narrow(0, order[k] * max(lengths), n) for k, n in enumerate(lengths)])

    nbytes = max(max(lengths_of(member)) for member in axes.mesh.members) * dtype.itemsize
    return _run_custom("all_gather", axes, custom, comm.map(fill_input, row), comm.map(allocate_output), take_rows, nbytes)


def scatter_row(axes: MeshAxes, custom: ReduceScatter, op: str, lengths_of: Lengths, row: Any) -> Pending[Any]:
    """Reduce-scatter the rows of all ranks by the program's own reduce-scatter; parts may have different length."""
    comm, device, dtype = communicator_of(axes.mesh), torch.device(axes.mesh.device_type), row.dtype
    _, order = _process_group_of(axes)

    def fill_input(member: int, own: Tensor) -> Tensor:
        """Return a member's parts, in the order of group ranks and padded to equal size, in the custom buffer."""
        lengths = lengths_of(member)
        parts = own.split(list(lengths))
        placed = [parts[order.index(k)] for k in range(len(parts))]
        return _fill_padded(custom.allocate((len(lengths) * max(lengths),), dtype=dtype, device=device), placed, max(lengths))

    def allocate_output(member: int) -> Tensor:
        return custom.allocate((max(lengths_of(member)),), dtype=dtype, device=device)

    def take_own_part(member: int, got: Tensor) -> Tensor:
        position = axes.mesh.members_of(axes.shard, member).index(member)
        return got.view(-1)[: lengths_of(member)[position]]

    output, reduction = comm.map(allocate_output), dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    return _run_custom(
        "reduce_scatter", axes, custom, comm.map(fill_input, row), output, take_own_part, output.nbytes, op=reduction
    )


def _run_custom(
    kind: str, axes: MeshAxes, custom: Any, source: Any, output: Any, take: Any, nbytes: int, **options: Any
) -> Pending[Any]:
    """Start a program's own collective; the pending result is ``take(member, output)`` for each member.

    It is reported as one collective with ``nbytes`` from each other rank, whatever it issues.
    """
    mesh, size, comm = axes.mesh, axes.mesh.size_of(axes.shard), communicator_of(axes.mesh)

    def start_collective() -> Pending[Any]:
        """Start the program's collective; the pending result takes each member's part from ``output``."""
        group_handle, _ = _process_group_of(axes)
        work = mark_reported(custom)(output_tensor=output, input_tensor=source, group=group_handle, async_op=True, **options)

        def take_results() -> Any:
            """Wait for the collective, and take the result of each member from its output."""
            if work is not None:
                work.wait()
            return comm.map(take, output)

        return Pending(take_results)

    if not listeners:
        return start_collective()
    groups = dict.fromkeys(tuple(mesh.ranks[k] for k in mesh.members_of(axes.shard, member)) for member in comm.held)
    return issue_reported(Event(kind, axes.shard, size, (size - 1) * nbytes, mesh, groups=tuple(groups)), start_collective)


def _fill_padded(buffer: Tensor, parts: Sequence[Tensor], part_size: int) -> Tensor:
    """Copy ``parts`` into ``buffer`` at multiples of ``part_size``, and fill the rest with zeros."""
    for k, part in enumerate(parts):
        buffer.view(-1)[k * part_size : k * part_size + part.numel()].copy_(part)
        buffer.view(-1)[k * part_size + part.numel() : (k + 1) * part_size].zero_()
    return buffer


def _process_group_of(axes: MeshAxes) -> tuple[Any, list[int]]:
    """Return the process group that shards parameters (None in process), and torch's rank in it of each group position."""
    if axes.mesh.kind != "process_group":
        return None, list(range(axes.mesh.size_of(axes.shard)))
    group = get_program_group(axes.mesh, axes.shard)
    return group.handle, list(range(group.size)) if group.order is None else list(group.order)


# --- memory of the process group's -----------------------------------------------------------------------------------
class _BackendMemory:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer: Tensor = self._backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
        return buffer


class GroupMemoryAllGather(_BackendMemory, AllGather):
    """All-gather of the backend in memory that the backend allocates."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class GroupMemoryReduceScatter(_BackendMemory, ReduceScatter):
    """Reduce-scatter of the backend in memory that the backend allocates."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return _REDUCE_SCATTER(output_tensor, input_tensor, op, group=group, async_op=async_op)


def allocating_backend(axes: MeshAxes) -> Any:
    """Return the backend of the group that shards parameters, if it has an allocator of its own; else None."""
    group_handle, _ = _process_group_of(axes) if axes.shard else (None, [])
    if group_handle is None:
        return None
    device = torch.device(axes.mesh.device_type)
    backend = group_handle._get_backend(device)  # torch's FSDP2 reads it this way; there is no public function
    supports = getattr(backend, "supports_tensor_alloc", None)
    return backend if supports is not None and supports(device) else None


# --- communication hooks of replicate --------------------------------------------------------------------------------
CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class GradBucket:
    """Argument of a communication hook, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter], index: int, last: bool) -> None:
        self._flat, self._parameters, self._index, self._last = flat, list(parameters), index, last

    def buffer(self) -> Tensor:
        """Return the flat gradients of this rank, which a hook may write to."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that :meth:`buffer` returns."""
        self._flat = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of :meth:`buffer`, in the shapes of this rank's parameters."""
        locals_: list[Any] = [p._local for p in self._parameters]  # type: ignore[attr-defined]  # DTensors
        shapes = [shards_of(x)[0].shape for x in locals_]
        pieces = self._flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, which are DTensors."""
        return self._parameters

    def index(self) -> int:
        """Return the index of the bucket in the order of reduction."""
        return self._index

    def is_last(self) -> bool:
        """Return True if it is the last bucket of a backward pass."""
        return self._last


@dataclass(frozen=True, eq=False, slots=True)
class CommHookReducer:
    """Reduction of one bucket by a communication hook, as of ``DistributedDataParallel.register_comm_hook``."""

    hook: CommHook
    state: Any
    index: int
    last: bool

    def _guarded_children(self) -> list[Any]:
        """Return what ``capture`` guards."""
        return [self.hook, self.state]

    def __call__(
        self, comm: Communicator, mesh_dims: Sequence[int], flat: Any, parameters: Sequence[nn.Parameter]
    ) -> Pending[Any]:
        """Return the gradients reduced by the hook, followed by the flags, which are all-reduced separately."""
        count = len(parameters)
        flags = comm.all_reduce(comm.map(lambda member, x: x[x.numel() - count :].clone(), flat), mesh_dims, "avg")
        own = comm.map(lambda member, x: x[: x.numel() - count].clone(), flat)
        future = self.hook(self.state, GradBucket(own, parameters, self.index, self.last))

        def finish() -> Any:
            """Wait for the result of the hook, and append the flags."""
            reduced = future.wait() if hasattr(future, "wait") else future  # torch's futures have no common base class
            reduced = reduced[0] if isinstance(reduced, (list, tuple)) else reduced
            return comm.map(
                lambda member, x, flag_values: torch.cat([x.view(-1).to(flag_values.dtype), flag_values]), reduced, flags.wait()
            )

        return Pending(finish)
