"""Operator recorder: records operands, results, FLOP and time of every operator on each rank.

Each operator runs unchanged: one on DTensors through their ``__torch_dispatch__``, one on local tensors by redispatch. Planning
runs operators without data and is not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..base.group_by import group_by_key
from ..base.tensor_text import tensor_text
from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import FakeTensor, graph_task, has_kernel
from ..base.tracing import is_tracing
from ..base.user_frames import SourceLine
from ..comm import events
from ..cost.device import DEFAULT_DEVICE, DEVICES, Device
from ..cost.link import get_device
from ..dispatch import Cause
from ..mesh.current_rank import RUNNING_RANK
from ..mesh.device_mesh import DeviceMesh
from ..ranks.per_rank import PerRank
from ..rules.op_traits import returns_view, traits_of
from ..tensor.call_listener import CallListener, OperatorCall
from ..tensor.dtensor import DTensor
from .memory_tracker import ACTIVATIONS, BUFFERS, AllocationOrigin, MemoryTracker

_ATTENTION = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {
    getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{way}"): getattr(torch.ops.aten, _ATTENTION + way) for way in ("", "_backward")
}
_IGNORED_NAMESPACES = ("profiler", "prim")  # namespaces of operators that compute nothing
Origin = Callable[[], tuple[SourceLine, str, str]]  # the user's line, the phase, the module


@dataclass(slots=True, eq=False)
class RecordedLocalCall:
    """Operator call on the local tensors of one rank.

    Attributes:
        rank: the rank; None if this process is one rank.
        start, end: nanoseconds of ``time.perf_counter_ns``.
        flops: as torch's ``FlopCounterMode`` counts them. It does not know CPU attention, which counts as flash attention.
        bytes: bytes read and written.
        rate: the rate of its matrix products, relative to large matrix products.
        reads, writes: for each tensor, the number of its storage in the memory tracker, and bytes.
    """

    rank: int | None
    operator: str
    start: int
    end: int
    flops: int
    bytes: int
    dtype: torch.dtype
    rate: float = 1.0
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()

    def seconds(self, device: Device) -> float:
        """Return the seconds that the call takes on ``device``, estimated from its FLOP and bytes."""
        return device.seconds(self.flops / self.rate, self.bytes, self.dtype)


@dataclass(slots=True, eq=False)
class RecordedOperation:
    """Operator of the program, with the local operators that it runs on each rank.

    Attributes:
        operator: its name, such as ``"aten::mm"``.
        operands, results: dtype, global shape and placements; for plain tensors, dtype and shape.
        place, phase, module: as in :class:`.run_recorder.RecordedCollective`.
    """

    operator: str
    operands: tuple[str, ...]
    place: SourceLine
    phase: str
    module: str
    mesh: DeviceMesh | None
    results: tuple[str, ...] = ()
    calls: list[RecordedLocalCall] = field(default_factory=list)

    def by_rank(self) -> dict[int | None, list[RecordedLocalCall]]:
        return group_by_key((call.rank, call) for call in self.calls)

    @property
    def flops(self) -> int:
        """Return the FLOP of one rank: the maximum over ranks."""
        return max((sum(call.flops for call in calls) for calls in self.by_rank().values()), default=0)

    @property
    def measured(self) -> float:
        """Return the seconds that the slowest rank took on the host, one operator after another."""
        return max((sum(call.end - call.start for call in calls) for calls in self.by_rank().values()), default=0) / 1e9

    @property
    def seconds(self) -> float:
        """Return the seconds estimated for the slowest rank, by the machine profile."""
        return max((sum(map(self.estimated, calls)) for calls in self.by_rank().values()), default=0.0)

    def estimated(self, call: RecordedLocalCall) -> float:
        """Return the seconds estimated for one of its local calls, by the machine profile."""
        return call.seconds(DEVICES[DEFAULT_DEVICE["cpu"]] if self.mesh is None else get_device(self.mesh))


class OperatorRecorder(CallListener):
    """Record every operator of this thread and of its backward passes in ``operations``.

    Attributes:
        origin: returns the user's line, the phase and the module of the code that runs now.
        is_recording: returns True in the threads and tasks that must be recorded.
        collective_depth: number of collectives that are being issued or ended. Operators inside them are not recorded.
        counts_memory: False while a collective of an in-process mesh runs, because no rank would allocate its buffers.
    """

    supports_higher_order_operators = True
    looks_on = True

    def __init__(self, tracker: MemoryTracker, origin: Origin, is_recording: Callable[[], bool]) -> None:
        super().__init__()
        self.operations: list[RecordedOperation] = []
        self.tracker, self.origin, self.is_recording = tracker, origin, is_recording
        self.collective_depth, self.counts_memory = 0, True
        self._running: list[RecordedOperation] = []
        self._in_backward = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile may run inside this mode."""
        return True

    def is_listening(self, call: OperatorCall) -> bool:
        is_ignored = call.func.namespace in _IGNORED_NAMESPACES or is_tracing() or FakeTensor in call.types
        return not is_ignored and self.is_recording()

    # --- operators ------------------------------------------------------------------------------------------------------
    def on_dtensor_call(self, call: OperatorCall) -> Any:
        """Run a call on DTensors as a recorded operation, with its operands, results and their memory."""
        if not all(issubclass(kind, (DTensor, PerRank)) for kind in call.types):
            return NotImplemented  # torch calls the other class; this mode sees the operators that it runs
        operands = tensor_leaves((call.args, call.kwargs))
        for x in operands:
            self.tracker.record_operand(x)
        with self._run_as_operation(call.func, operands) as operation:
            result = call.run_under(self)
        values = tensor_leaves(result)
        self.tracker.record_results(values, None, self._allocation_origin())
        return self._finish_operation(operation, values, result)

    def on_plain_call(self, call: OperatorCall) -> Any:
        """Run a call on plain tensors, and record its memory, flops and bytes as a local call of the running operation."""
        func, args, kwargs = call.func, call.args, call.kwargs
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in call.types):
            return NotImplemented
        if torch.is_inference_mode_enabled() and has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        operands = tensor_leaves((args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:  # its operand was just made from Python numbers
            self.tracker.record_results(operands, None, self._allocation_origin())
        rank = self._rank_of_operands(operands)
        operation = self._running[-1] if self._running else None
        own = operation is None and not self.collective_depth
        with self._run_as_operation(func, operands) if own else nullcontext(operation) as operation:
            start = time.perf_counter_ns()
            result = call.run()
            end = time.perf_counter_ns()
        values = tensor_leaves(result)
        self.tracker.check_resized()
        self.tracker.record_results(values, rank, self._allocation_origin(operation))
        if operation is not None and not self.collective_depth and not returns_view(func):
            touches = traits_of(func).memory_use
            read, written = operands if touches == "all" else [], values if touches != "nothing" else []
            reads, writes = self.tracker.touched_storages(read), self.tracker.touched_storages(written)
            nbytes = sum(x.numel() * x.element_size() for x in (*read, *written))
            dtype = (values or operands)[0].dtype if values or operands else torch.float32
            flops, rate = _count_flops(func, args, kwargs, result), _relative_rate(func, args, kwargs)
            operation.calls.append(RecordedLocalCall(rank, func.name(), start, end, flops, nbytes, dtype, rate, reads, writes))
        return self._finish_operation(operation, values, result) if own and operation is not None else result

    @contextmanager
    def _run_as_operation(self, func: Any, operands: Sequence[Tensor]) -> Iterator[RecordedOperation]:
        """Make a recorded operation that is the innermost running one inside the ``with`` block."""
        self._mark_gradients_after_backward()
        mesh = next((x._layout.mesh for x in operands if isinstance(x, DTensor)), None)
        operation = RecordedOperation(func._schema.name, tuple(map(describe_tensor, operands)), *self.origin(), mesh)
        self._running.append(operation)
        try:
            yield operation
        finally:
            self._running.remove(operation)

    def _finish_operation(self, operation: RecordedOperation, values: Sequence[Tensor], result: Any) -> Any:
        """Set an operation's results, and store it, or add its local calls to the operation around it; return ``result``."""
        operation.results = tuple(map(describe_tensor, values))
        if operation.calls and not self._running:
            self.operations.append(operation)
        elif self._running:
            self._running[-1].calls += operation.calls
        return result

    def _mark_gradients_after_backward(self) -> None:
        """Mark the gradients of leaves at the first operation after a backward pass."""
        in_backward = graph_task() != -1
        if self._in_backward and not in_backward:
            self.tracker.mark_gradients()
        self._in_backward = in_backward

    # --- memory ---------------------------------------------------------------------------------------------------------
    def _allocation_origin(self, operation: RecordedOperation | None = None) -> AllocationOrigin:
        """Return the line, the operator and the kind of memory that is allocated now."""
        running = operation or (self._running[-1] if self._running else None)
        place, name = self.origin()[0] if running is None else running.place, "" if running is None else running.operator
        moving = self.collective_depth or any(not isinstance(cause, Cause) for cause in events.CAUSES.values())
        return AllocationOrigin(place, name, BUFFERS if moving else ACTIVATIONS, self.counts_memory)

    def _rank_of_operands(self, operands: Sequence[Tensor]) -> int | None:
        """Track the operands' memory, and return the rank that a per-rank function runs for, or the operands' rank, or None."""
        ranks = [self.tracker.record_operand(x) for x in operands]
        if RUNNING_RANK.at is not None and RUNNING_RANK.at[0].kind == "in_process":
            root, member = RUNNING_RANK.at
            return root.ranks[member]
        return next((rank for rank in ranks if rank is not None), None)


def describe_tensor(x: Tensor) -> str:
    """Return the dtype and shape of a tensor, with the placements of a DTensor."""
    if isinstance(x, DTensor):
        return repr(x._layout)
    return tensor_text(x.dtype, x.shape)


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of one aten call by torch's formulas; 0 if torch has none."""
    packet = func._overloadpacket
    count = flop_registry.get(_COUNTED_AS.get(packet, packet))
    return 0 if count is None else int(count(*_with_expanded_heads(func, args), **kwargs, out_val=result))


def _with_expanded_heads(func: Any, args: tuple[Any, ...]) -> Sequence[Any]:
    """Return attention's arguments with as many key and value heads as query heads, as torch 2.11 counts FLOP.

    In grouped-query attention several query heads share one head of the key and value.

    It expects the same number of heads in query, key and value. In grouped-query attention several query heads share one head of
    the key and value.
    """
    if not func.__name__.startswith("_scaled_dot_product"):
        return args
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    for name in {"key", "value"} & named.keys():
        batch, _, *rest = named[name].shape
        named[name] = (batch, named["query"].shape[1], *rest)
    return list(named.values())


def _relative_rate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the rate of an operator's products relative to large matrix products: 0.5 for attention that is not causal.

    Fused attention reaches about half of that rate (FlashAttention-2 on an H100). FLOP of causal attention are counted as if
    every query saw every key, but the kernel skips about half of them, so its rate is 1.
    """
    places = {argument.name: k for k, argument in enumerate(func._schema.arguments)}
    place = places.get("is_causal")
    if place is None:
        return 1.0
    return 1.0 if (args[place] if place < len(args) else kwargs.get("is_causal", False)) else 0.5
