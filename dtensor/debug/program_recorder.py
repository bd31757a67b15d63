"""The record of what a program moves, computes and holds: collectives and operators, with layouts, module and the user's line.

Nothing is recorded by running the program otherwise: when a collective is issued, what it is issued for (``events.CAUSES``) and
the stack say the rest; operators are seen as they run (:mod:`.operators`). In a backward pass the line is that of the forward
operator: torch keeps with every node of a graph the stack that made it, while its detection of anomalies is on (here without
its look for NaN).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.anomaly_mode import set_detect_anomaly
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.patches import Together
from ..base.tensor_tree import tensors
from ..base.torch_internals import (
    OpOverload,
    autograd_node,
    current_dispatch_modes,
    graph_task,
    pop_dispatch_mode,
    push_dispatch_mode,
)
from ..base.units import bytes_text
from ..base.user_frames import NOWHERE, Place, is_library, place_of, users_place
from ..comm import Pending, events
from ..comm.events import Around, Event
from ..cost.link import collective_seconds
from ..dispatch.comm_report import Cause
from ..redistribute.step import Step
from ..tensor.leaf_gradients import Departure
from .comm_mode import EXCHANGE, CommDebugMode
from .memory_tracker import STATE, Holdings
from .operators import Operation, Operators

_ENGINE = "_engine_run_backward"  # of torch.autograd.graph: below it runs a backward pass


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """One collective.

    Attributes:
        event: its kind, mesh dims, group and bytes, as ``CommDebugMode`` counts them.
        place: the user's line; in a backward pass that of the forward operator which it belongs to.
        phase: ``"forward"`` or ``"backward"``.
        module: the innermost module that runs, "" outside of modules and where it is not known.
        operator: what asked for it: an operator (``"aten::mm"``), or what the line calls (``"DTensor.redistribute"``).
        steps: the steps of redistributions that it does (several, where they go together); none of a kernel's own collectives.
        cause: the operator call, where no redistribution was asked for.
        spans: when this process was issuing it and ending it, in nanoseconds of ``time.perf_counter_ns``.
    """

    event: Event
    place: Place
    phase: str
    module: str
    operator: str
    steps: tuple[Step, ...] = ()
    cause: Cause | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """Seconds that this process spent in it."""
        return sum(end - start for start, end in self.spans) / 1e9

    @property
    def implicit(self) -> bool:
        """Whether the program did not ask for it: an operator needed it."""
        return self.cause is not None

    @property
    def bytes(self) -> int:
        """What one rank receives."""
        return self.event.bytes

    @property
    def seconds(self) -> float:
        """Estimated by the profile of the machine; 0 where the ranks are those of no mesh."""
        event = self.event
        if event.mesh is None or event.direct:
            return 0.0
        return collective_seconds(event.mesh, event.mesh_dims, event.kind, event.bytes)

    @property
    def asked(self) -> str:
        """The phase, and the operator or the function that issued it."""
        return f"{self.phase} {self.operator}"

    @property
    def what(self) -> str:
        """The collective: its kind, mesh dims, group size and bytes."""
        over = "direct" if self.event.direct else f"over {self.event.over}" if self.event.over else "between meshes"
        return f"{self.event.kind} {over}, {self.event.group_size} ranks, {bytes_text(self.bytes)}"

    def __str__(self) -> str:
        within = f" in {self.module}" if self.module else ""
        return f"{self.asked}{within}: {self.what}"


class Record(CommDebugMode):
    """A :class:`CommDebugMode` that also keeps a :class:`Movement` for each collective it counts, in ``movements``.

    Args:
        computing: also keep operators and what is held: an :class:`.operators.Operation` for each operator of the program, in
            ``operations``, and :class:`.memory_tracker.Holdings`, in ``holdings``.
    """

    def __init__(self, computing: bool = False) -> None:
        super().__init__()
        self.movements: list[Movement] = []
        self.operations: list[Operation] = []
        self.holdings = Holdings()
        self.computing = computing
        self._operators: Operators | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Record:
        self.movements.clear()
        _STACKS.__enter__()
        super().__enter__()
        if self.computing:
            self._see_operators()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._operators is not None:
            _leave(self._operators)
            self._operators = None
            self.holdings.end()
            for hook in self._hooks:
                hook.remove()
        super().__exit__(*exception)
        _STACKS.__exit__()

    @property
    def flops(self) -> int:
        """Of one rank, the most over ranks."""
        totals: Counter[int | None] = Counter()
        for operation in self.operations:
            for call in operation.calls:
                totals[call.rank] += call.flops
        everyone = totals.pop(None, 0)
        return everyone + max(totals.values(), default=0)

    def _see_operators(self) -> None:
        block, self.holdings = self._blocks[-1], Holdings()

        def here() -> bool:
            return events.LISTENING.sees(block)

        def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if here():
                self.holdings.accumulated()

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if here():
                self.holdings.name(tensors(list(optimizer.state.values())), STATE)

        self._operators = Operators(self.holdings, self._asked, here)
        self.operations = self._operators.operations
        self._hooks = [register_optimizer_step_pre_hook(about_to_step), register_optimizer_step_post_hook(stepped)]
        self._operators.__enter__()

    def _counted(self, event: Event) -> Around | None:
        super()._counted(event)
        if event.kind == EXCHANGE:
            return None
        movement = self._movement(event, sys._getframe(1))
        self.movements.append(movement)
        return self._around(movement)

    def _around(self, movement: Movement) -> Around:
        """Measures a collective; its own operators are none of the program's."""
        operators, mesh = self._operators, movement.event.mesh
        here = mesh is not None and mesh.kind == "in_process"

        def run(fn: Callable[[], Any], sent: Any) -> Any:
            before = (0, True) if operators is None else (operators.collectives, operators.counts)
            if operators is not None:
                operators.collectives, operators.counts = before[0] + 1, before[1] and not here
            if here and isinstance(sent, torch.Tensor):
                self.holdings.given(sent)
            start = time.perf_counter_ns()
            try:
                made = fn()
            finally:
                movement.spans.append((start, time.perf_counter_ns()))
                if operators is not None:
                    operators.collectives, operators.counts = before
            if here and before[1]:
                self.holdings.claimed(made.wait() if isinstance(made, Pending) and made.ended else made)
            return made

        return run

    def _asked(self) -> tuple[Place, str, str]:
        """The user's line, the phase and the module of what runs."""
        node = _node()
        place, _ = _asked_by(sys._getframe(1), node)
        return place, *self._phase_and_module(node)

    def _phase_and_module(self, node: Any) -> tuple[str, str]:
        module = self._modules.running() or (self._modules.made_in(node) if node is not None else "")
        return "forward" if graph_task() == -1 else "backward", module

    def _movement(self, event: Event, frame: FrameType) -> Movement:
        node = _node()
        calls = [cause for cause in events.CAUSES.values() if isinstance(cause, Cause)]
        place, called = _asked_by(frame, node)
        operator = "torch.distributed" if event.direct else calls[-1].operator.name if calls else called
        cause = calls[-1] if calls else None
        return Movement(event, place, *self._phase_and_module(node), operator, events.steps_under_way(), cause)


def _leave(mode: Operators) -> None:
    """The end of a mode, wherever it stands: tasks of one thread leave theirs in any order."""
    above: list[Any] = []
    if mode in current_dispatch_modes():
        while current_dispatch_modes()[-1] is not mode:
            above.append(pop_dispatch_mode())
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push_dispatch_mode(other)


def _node() -> Any:
    """Of autograd's, for which something happens; of gradients that travel together the first one's."""
    departure = next((cause for cause in reversed(events.CAUSES.values()) if isinstance(cause, Departure)), None)
    return departure.node if departure is not None else autograd_node() if graph_task() != -1 else None


def _asked_by(frame: FrameType | None, node: Any) -> tuple[Place, str]:
    """The user's line, and what it called. Before autograd's engine, which runs nodes, the frames say it; else the node."""
    called, dispatched, in_engine = "", "", False
    while frame is not None and is_library(frame.f_code.co_filename):
        code = frame.f_code
        in_engine = in_engine or code.co_name == _ENGINE
        if "dtensor" in (module := frame.f_globals.get("__name__", "")).partition(".") and not module.startswith(__package__):
            called = _public(code.co_qualname, module)
            func = frame.f_locals.get("func") if module == "dtensor.dispatch.dispatcher" else None
            dispatched = func._schema.name if isinstance(func, OpOverload) else dispatched
        frame = frame.f_back
    if node is not None and (in_engine or frame is None):
        made = _made_at(node)
        return (place_of(frame) if made is NOWHERE else made), dispatched or f"gradient ({_name(node)})"
    return place_of(frame), dispatched or called or "torch.distributed"


def _public(name: str, module: str) -> str:
    """A function of the library by the name that programs know, or the module that it is in."""
    return name if hasattr(sys.modules["dtensor"], name.partition(".")[0]) else module


def _made_at(node: Any) -> Place:
    """The user's line that made a node of a graph; of one made by a backward pass, that of the node which it belongs to."""
    place = NOWHERE
    while node is not None:
        metadata = node.metadata
        parent = metadata.get("parent_")
        place = place if parent is not None else users_place(metadata.get("traceback_", ()))
        node = parent
    return place


def _name(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]


@contextmanager
def _stacks_kept() -> Iterator[None]:
    """Torch keeps the stacks of nodes."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    set_detect_anomaly(True, check_nan=all(before))
    yield
    set_detect_anomaly(*before)


_STACKS = Together(_stacks_kept)
