"""The record of what a program moves: each collective with the operator, the layouts, the module and the user's line.

Nothing is recorded by running the program otherwise: when a collective is issued, what it is issued for (``events.CAUSES``) and
the stack say the rest. In a backward pass the line is that of the forward operator: torch keeps with every node of a graph the
stack that made it, while its detection of anomalies is on (here without its look for NaN).
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.anomaly_mode import set_detect_anomaly

from ..base.callers import NOWHERE, Place, is_library, place_of, users_place
from ..base.torch_internals import OpOverload, autograd_node, graph_task
from ..comm import events
from ..comm.events import Event
from ..cost.link import link_of
from ..dispatch.report import Cause
from ..redistribute.step import Step
from .comm_mode import EXCHANGE, CommDebugMode

_RATES = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"}
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
    """

    event: Event
    place: Place
    phase: str
    module: str
    operator: str
    steps: tuple[Step, ...] = ()
    cause: Cause | None = None

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
        rate = getattr(link_of(event.mesh, event.mesh_dims), _RATES.get(event.kind, "exchange"))
        return float(rate.seconds(event.group_size, event.bytes))

    def __str__(self) -> str:
        over = "direct" if self.event.direct else f"over {self.event.over}" if self.event.over else "between meshes"
        within = f" in {self.module}" if self.module else ""
        size = f"{self.event.group_size} ranks, {self.bytes:,} B"
        return f"{self.phase} {self.operator}{within}: {self.event.kind} {over}, {size}"


class Record(CommDebugMode):
    """A :class:`CommDebugMode` that also keeps a :class:`Movement` for each collective it counts, in ``movements``."""

    def __init__(self) -> None:
        super().__init__()
        self.movements: list[Movement] = []

    def __enter__(self) -> Record:
        self.movements.clear()
        _STACKS.enter()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _STACKS.leave()

    def _counted(self, event: Event) -> None:
        super()._counted(event)
        if event.kind != EXCHANGE:
            self.movements.append(self._movement(event, sys._getframe(1)))

    def _movement(self, event: Event, frame: FrameType) -> Movement:
        causes, node = events.CAUSES.values(), autograd_node() if graph_task() != -1 else None
        calls = [cause for cause in causes if isinstance(cause, Cause)]
        steps = next((cause for cause in reversed(causes) if isinstance(cause, tuple)), ())
        place, called = _asked_by(frame, node)
        operator = "torch.distributed" if event.direct else calls[-1].operator.name if calls else called
        module = self._modules.running() or (self._modules.made_in(node) if node is not None else "")
        phase = "forward" if graph_task() == -1 else "backward"
        return Movement(event, place, phase, module, operator, steps, calls[-1] if calls else None)


def _asked_by(frame: FrameType | None, node: Any) -> tuple[Place, str]:
    """The user's line, and what it called. Before autograd's engine, which runs nodes, the frames say it; else the node."""
    called, dispatched, in_engine = "", "", False
    while frame is not None and is_library(frame.f_code.co_filename):
        code = frame.f_code
        in_engine = in_engine or code.co_name == _ENGINE
        if "dtensor" in (module := frame.f_globals.get("__name__", "")).partition("."):
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


class _Stacks:
    """Torch keeps the stacks of nodes while somebody records."""

    def __init__(self) -> None:
        self._lock, self._entered, self._before = threading.Lock(), 0, (False, False)

    def enter(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
                set_detect_anomaly(True, check_nan=all(self._before))

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                set_detect_anomaly(*self._before)


_STACKS = _Stacks()
