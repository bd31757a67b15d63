"""Run recorder: records the collectives, operators and memory of one run of a program, with module and the user's line.

Recording does not change how the program runs. A collective is attributed by ``events.CAUSES`` and by the Python stack at the
moment when it is issued. :mod:`.operator_recorder` records operators as they run. In a backward pass the line is that of the
forward operator. For this, anomaly detection is on during the recording, without its check for NaN: torch then stores with every
autograd node the stack that created it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.autograd.anomaly_mode import set_detect_anomaly
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.patches import RefCountedPatch
from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import (
    OpOverload,
    autograd_node,
    current_dispatch_modes,
    graph_task,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from ..base.units import bytes_text
from ..base.user_frames import NO_SOURCE_LINE, SourceLine, is_library_file, source_line_of, user_line_of_stack
from ..comm import Pending, events
from ..comm.events import CollectiveWrapper, Event
from ..cost.link import collective_seconds
from ..dispatch import Cause
from ..redistribute.step import Step
from ..tensor.leaf_gradients import GradBatchCause
from .comm_mode import EXCHANGE_KIND, CommDebugMode
from .memory_tracker import OPTIMIZER_STATE, MemoryTracker
from .operator_recorder import OperatorRecorder, RecordedOperation

_ENGINE_FUNCTION = "_engine_run_backward"  # of torch.autograd.graph; frames below it belong to a backward pass


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCollective:
    """Collective of a run, with the line, module and operator that issued it.

    Attributes:
        event: its kind, mesh dims, group and bytes, as ``CommDebugMode`` counts them.
        place: the user's line; in a backward pass, the line of the forward operator.
        phase: ``"forward"`` or ``"backward"``.
        module: the innermost module that ran; "" outside of modules, or if it is unknown.
        operator: the operator that needed it (``"aten::mm"``), or the function that the line calls (``"DTensor.redistribute"``).
        steps: the redistribution steps that it executes; several if they were coalesced, none for a kernel's own collectives.
        cause: the operator call that needed it; None if the program requested the redistribution.
        spans: when this process issued it and waited for it: pairs (start, end) in nanoseconds of ``time.perf_counter_ns``.
    """

    event: Event
    place: SourceLine
    phase: str
    module: str
    operator: str
    steps: tuple[Step, ...] = ()
    cause: Cause | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """Return the seconds that this process spent in the collective."""
        return sum(end - start for start, end in self.spans) / 1e9

    @property
    def implicit(self) -> bool:
        """Return True if an operator needed the collective and the program did not request it."""
        return self.cause is not None

    @property
    def bytes(self) -> int:
        """Return the bytes that one rank receives."""
        return self.event.bytes

    @property
    def seconds(self) -> float:
        """Return the seconds estimated by the machine profile; 0 for a direct call and for a group without a mesh."""
        event = self.event
        if event.mesh is None or event.direct:
            return 0.0
        return collective_seconds(event.mesh, event.mesh_dims, event.kind, event.bytes)

    @property
    def origin_text(self) -> str:
        """Return the phase, and the operator or function that issued the collective, as text."""
        return f"{self.phase} {self.operator}"

    @property
    def collective_text(self) -> str:
        """Return the kind, mesh dims, group size and bytes of the collective as text."""
        over = "direct" if self.event.direct else f"over {self.event.dims_text}" if self.event.dims_text else "between meshes"
        return f"{self.event.kind} {over}, {self.event.group_size} ranks, {bytes_text(self.bytes)}"

    def __str__(self) -> str:
        within = f" in {self.module}" if self.module else ""
        return f"{self.origin_text}{within}: {self.collective_text}"


class RunRecorder(CommDebugMode):
    """A :class:`CommDebugMode` that also stores a :class:`RecordedCollective` for each collective, in ``movements``.

    Args:
        with_operators: also record operators and memory. ``operations`` gets an
            :class:`.operator_recorder.RecordedOperation` for each operator of the program, and ``tracker`` tracks the memory.
    """

    def __init__(self, with_operators: bool = False) -> None:
        super().__init__()
        self.movements: list[RecordedCollective] = []
        self.operations: list[RecordedOperation] = []
        self.tracker = MemoryTracker()
        self.with_operators = with_operators
        self._operator_recorder: OperatorRecorder | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> RunRecorder:
        """Start to record collectives with stacks of autograd nodes, and operators and memory if asked for."""
        self.movements.clear()
        _NODE_STACKS.__enter__()
        super().__enter__()
        if self.with_operators:
            self._start_operator_recorder()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop all that :meth:`__enter__` started; the records stay."""
        if self._operator_recorder is not None:
            _exit_mode_anywhere(self._operator_recorder)
            self._operator_recorder = None
            self.tracker.stop_tracking()
            for hook in self._hooks:
                hook.remove()
        super().__exit__(*exception)
        _NODE_STACKS.__exit__()

    @property
    def flops(self) -> int:
        """Return the FLOP of one rank: the maximum over ranks."""
        totals: Counter[int | None] = Counter()
        for operation in self.operations:
            for call in operation.calls:
                totals[call.rank] += call.flops
        all_ranks = totals.pop(None, 0)
        return all_ranks + max(totals.values(), default=0)

    def _start_operator_recorder(self) -> None:
        """Start to record operators and memory, with hooks on optimizer steps that tag gradients and states."""
        block, self.tracker = self._blocks[-1], MemoryTracker()

        def is_recorded_here() -> bool:
            return events.LISTENING.is_entered(block)

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_recorded_here():
                self.tracker.mark_gradients()

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_recorded_here():
                self.tracker.set_kind(tensor_leaves(list(optimizer.state.values())), OPTIMIZER_STATE)

        self._operator_recorder = OperatorRecorder(self.tracker, self._current_origin, is_recorded_here)
        self.operations = self._operator_recorder.operations
        self._hooks = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
        self._operator_recorder.__enter__()

    def _handle_event(self, event: Event) -> CollectiveWrapper | None:
        """Record a collective with its line and module, and return the function that measures its execution."""
        super()._handle_event(event)
        if event.kind == EXCHANGE_KIND:
            return None
        collective = self._record_of_event(event, sys._getframe(1))
        self.movements.append(collective)
        return self._make_measuring_wrapper(collective)

    def _make_measuring_wrapper(self, collective: RecordedCollective) -> CollectiveWrapper:
        """Return a function that runs a collective and measures it; operators inside it are not recorded."""
        operators, mesh = self._operator_recorder, collective.event.mesh
        in_process = mesh is not None and mesh.kind == "in_process"

        def run_measured(fn: Callable[[], Any], sent: Any) -> Any:
            """Run a collective, store when it ran, and count the memory of what it sends and returns."""
            outer = (0, True) if operators is None else (operators.collective_depth, operators.counts_memory)
            if operators is not None:
                operators.collective_depth, operators.counts_memory = outer[0] + 1, outer[1] and not in_process
            if in_process and isinstance(sent, torch.Tensor):
                self.tracker.record_operand(sent)
            start = time.perf_counter_ns()
            try:
                result = fn()
            finally:
                collective.spans.append((start, time.perf_counter_ns()))
                if operators is not None:
                    operators.collective_depth, operators.counts_memory = outer
            if in_process and outer[1]:
                self.tracker.mark_collective_result(result.wait() if isinstance(result, Pending) and result.ended else result)
            return result

        return run_measured

    def _current_origin(self) -> tuple[SourceLine, str, str]:
        """Return the user's line, the phase and the module of the code that runs now."""
        node = _current_node()
        place, _ = _line_and_caller(sys._getframe(1), node)
        return place, *self._phase_and_module(node)

    def _phase_and_module(self, node: Any) -> tuple[str, str]:
        module = self._modules.running_module() or (self._modules.module_of_node(node) if node is not None else "")
        return "forward" if graph_task() == -1 else "backward", module

    def _record_of_event(self, event: Event, frame: FrameType) -> RecordedCollective:
        """Return the record of a reported collective: its source line, phase, module, operator and cause."""
        node = _current_node()
        calls = [cause for cause in events.CAUSES.values() if isinstance(cause, Cause)]
        place, caller = _line_and_caller(frame, node)
        operator = "torch.distributed" if event.direct else calls[-1].operator.name if calls else caller
        cause = calls[-1] if calls else None
        return RecordedCollective(
            event, place, *self._phase_and_module(node), operator, events.current_redistribution_steps(), cause
        )


def _exit_mode_anywhere(mode: OperatorRecorder) -> None:
    """Exit a dispatch mode at any position of the mode stack: asyncio tasks of one thread exit modes in any order."""
    above: list[Any] = []
    if mode in current_dispatch_modes():
        while current_dispatch_modes()[-1] is not mode:
            above.append(pop_dispatch_mode())
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push_dispatch_mode(other)


def _current_node() -> Any:
    """Return the autograd node that causes the current work, or None outside of a backward pass.

    Gradients that are redistributed in one batch are attributed to the node of the first.
    """
    batch = next((cause for cause in reversed(events.CAUSES.values()) if isinstance(cause, GradBatchCause)), None)
    return batch.node if batch is not None else autograd_node() if graph_task() != -1 else None


def _line_and_caller(frame: FrameType | None, node: Any) -> tuple[SourceLine, str]:
    """Return the user's line that causes the current work, and the name of the function or operator that it calls.

    Outside of the autograd engine the Python frames determine both. Inside, or if no user frame is on the stack, the stored stack
    of ``node`` determines the line.
    """
    caller, operator, in_engine = "", "", False
    while frame is not None and is_library_file(frame.f_code.co_filename):
        code = frame.f_code
        in_engine = in_engine or code.co_name == _ENGINE_FUNCTION
        if "dtensor" in (module := frame.f_globals.get("__name__", "")).partition(".") and not module.startswith(__package__):
            caller = code.co_qualname if code.co_qualname.partition(".")[0] in _root_names() else module
            func = frame.f_locals.get("func") if module == "dtensor.dispatch.dispatcher" else None
            operator = func._schema.name if isinstance(func, OpOverload) else operator
        frame = frame.f_back
    if node is not None and (in_engine or frame is None):
        line = _line_of_node(node)
        return (
            source_line_of(frame) if line is NO_SOURCE_LINE else line
        ), operator or f"gradient ({str(node.name()).rpartition('::')[2]})"
    return source_line_of(frame), operator or caller or "torch.distributed"


@cache
def _root_names() -> frozenset[str]:
    """Return all names of the package root, also those that are imported at their first use."""
    return frozenset(dir(sys.modules["dtensor"]))


def _line_of_node(node: Any) -> SourceLine:
    """Return the source line of the user's program that created an autograd node.

    For a node that a backward pass created (double backward), return the line of its outermost parent node.
    """
    line = NO_SOURCE_LINE
    while node is not None:
        metadata = node.metadata
        parent = metadata.get("parent_")
        line = line if parent is not None else user_line_of_stack(metadata.get("traceback_", ()))
        node = parent
    return line


@contextmanager
def _recorded_node_stacks() -> Iterator[None]:
    """Turn on anomaly detection in the ``with`` block, so that torch stores the stack of each autograd node."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    set_detect_anomaly(True, check_nan=all(before))
    yield
    set_detect_anomaly(*before)


_NODE_STACKS = RefCountedPatch(_recorded_node_stacks)
