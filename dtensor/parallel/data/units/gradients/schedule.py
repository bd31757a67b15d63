"""Schedule: the state that the FSDP units of one model share (order of units, reductions in flight, end of a backward pass)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from .....base.recorder_hooks import ACTIVE_RECORDERS, current_recorder
from .....base.torch_internals import engine, graph_task
from .....comm.map_ranks import communicator_of
from .....errors import DivergenceError, UnitError
from .....mesh.device_mesh import DeviceMesh
from .....placement import Shard
from .....tensor.dtensor import DTensor
from ..parameters.unsharded_storage import SendBufferPool
from .grad_reduction import GradReduction


class ScheduledUnit(Protocol):
    """Interface of a unit in a schedule.

    Attributes:
        max_reductions_in_flight: number of units with gradients in flight before the oldest results are waited for.
    """

    max_reductions_in_flight: int

    def begin_forward(self) -> None:
        """Start a forward pass."""

    def finish_forward(self) -> None:
        """Finish a forward pass."""

    def flush_gradients(self) -> None:
        """Reduce the gradients that are left at the end of a backward pass."""

    def finish_backward(self) -> None:
        """Finish a backward pass: all gradients have arrived."""

    def reset_pass(self) -> None:
        """Drop the state of a pass that raised."""


class Schedule:
    """Shared state of the outermost unit that is called and of all units below it.

    All ranks run the same program, so they record the same order, and prefetching by it issues the same collectives on all.

    Attributes:
        depth: number of units in which forward runs.
        batch_mesh: mesh of this pass's batch, if it is a DTensor over the data-parallel mesh dims; else None.
        batch_dims: mesh dims that shard the batch.
        order: units in the order of their forward in this pass; ``last_order``: in the pass before.
        send_buffers: host buffers of gradients in flight.

    Raises:
        UnitError: this rank is not in the mesh of the unit that is called.
    """

    def __init__(self, units: Sequence[ScheduledUnit], mesh: DeviceMesh) -> None:
        if not communicator_of(mesh).held:
            raise UnitError(
                f"a unit of data parallelism on {mesh!r} was called on a rank that is not in this mesh, which has no part of its "
                f"parameters; call the model on ranks {list(mesh.ranks)} only"
            )
        self.units = list(units)
        self.depth = 0
        self.batch_mesh: DeviceMesh | None = None
        self.batch_dims: set[tuple[int, ...]] = set()
        self.order: list[Any] = []
        self.last_order: list[Any] = []
        self._in_flight: list[list[GradReduction]] = []  # reductions in their first round, those of a unit together
        self._arriving: list[GradReduction] = []  # reductions in their second round or in a copy to host memory
        self._is_end_queued = False
        self.send_buffers = SendBufferPool()

    def begin_forward(self, batch: Sequence[DTensor]) -> None:
        """Start a forward pass of all units. ``batch``: the inputs that are DTensors over the data-parallel mesh dims."""
        if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:
            recorder.on_refusal(self.reset)
        self.batch_mesh, self._is_end_queued = batch[0].device_mesh if batch else None, False
        pairs = [pair for x in batch for pair in zip(x.device_mesh._dims, x._layout.placements, strict=True)]
        self.batch_dims = {dims for dims, placement in pairs if isinstance(placement, Shard)}
        self.last_order, self.order = self.order, []
        for unit in self.units:
            unit.begin_forward()

    def finish_forward(self) -> None:
        """Finish the forward pass in all units."""
        for unit in self.units:
            unit.finish_forward()

    def record_forward(self, unit: Any) -> None:
        """Append ``unit`` to this pass's order of forward, unless its forward has run in this pass already."""
        if unit not in self.order:
            self.order.append(unit)

    def next_forward(self, unit: Any) -> Any:
        """Return the unit that ran after ``unit`` in the pass before; None if there is none."""
        return self._neighbor_in(self.last_order, unit, 1)

    def next_backward(self, unit: Any) -> Any:
        """Return the unit that ran before ``unit`` in this pass, which is next in backward; None if there is none."""
        return self._neighbor_in(self.order, unit, -1)

    @staticmethod
    def _neighbor_in(order: list[Any], unit: Any, step: int) -> Any:
        """Return the unit ``step`` positions after ``unit`` in ``order``; None if there is none."""
        if unit not in order:
            return None
        index = order.index(unit) + step
        return order[index] if 0 <= index < len(order) else None

    # --- backward ----------------------------------------------------------------------------------------------------
    def is_in_backward(self) -> bool:
        """Return True inside a pass of the autograd engine."""
        return graph_task() != -1

    def queue_end(self) -> None:
        """Have autograd call :meth:`finish_backward` at the end of the running backward pass."""
        if not self._is_end_queued:
            self._is_end_queued = True
            engine.queue_callback(_BackwardEnd(self))

    def add_reductions(self, reductions: list[GradReduction]) -> None:
        """Add a unit's reductions in flight, and wait for the oldest, so that gradients of few units are in memory."""
        self._in_flight.append(reductions)
        self._finish_first_rounds(max(unit.max_reductions_in_flight for unit in self.units))

    def _finish_first_rounds(self, num_kept: int = 0) -> None:
        """Wait for the first collective of all reductions but those of the newest ``num_kept`` units."""
        while len(self._in_flight) > num_kept:
            arriving = self._in_flight.pop(0)
            for reduction in arriving:
                reduction.finish_first_round()
            self._deliver_arrived()
            self._arriving += arriving
            if not any(reduction.is_in_flight for reduction in arriving):
                self._deliver_arrived()

    def _deliver_arrived(self) -> None:
        self._arriving = [reduction for reduction in self._arriving if not reduction.deliver()]

    def finish_reductions(self) -> None:
        """Wait for all reductions, and add their gradients to ``.grad``."""
        self._finish_first_rounds()
        while self._arriving:
            self._deliver_arrived()

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Finish the backward pass: start the remaining reductions, wait for all, and finish the pass in all units."""
        self._is_end_queued = False
        for unit in self.units:
            unit.flush_gradients()
        self.finish_reductions()
        for unit in self.units:
            unit.finish_backward()

    def reset(self) -> None:
        """Drop the state of a forward or backward pass that raised, in all units."""
        self.depth = 0
        self.drop_backward()

    def drop_backward(self) -> None:
        """Drop the reductions of a backward pass that raised, so that the next pass does not add their gradients."""
        self._is_end_queued, self._in_flight, self._arriving = False, [], []
        for unit in self.units:
            unit.reset_pass()


class _BackwardEnd:
    """Callback that autograd calls at the end of a backward pass, and frees without a call if the pass raised."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule: Schedule | None = schedule

    def __call__(self) -> None:
        if self.schedule is not None:
            self.schedule.finish_backward()
        self.schedule = None

    def __del__(self) -> None:
        if self.schedule is not None:
            with suppress(DivergenceError):  # the pass has raised it, and here Python would only print it
                self.schedule.drop_backward()
