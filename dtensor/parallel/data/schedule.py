"""What the units of one model share: the order they run in, what is under way, and the end of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from ...base.recorder_hooks import ACTIVE, current
from ...base.torch_internals import engine, graph_task
from ...comm import communicator_of
from ...errors import DivergenceError, UnitError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Shard
from ...tensor.dtensor import DTensor
from .grad_reduction import Reduction
from .unsharded_storage import Spare


class Unit(Protocol):
    """What takes part in a schedule.

    Attributes:
        reductions_under_way: how many units' gradients may travel before their results are waited for.
    """

    reductions_under_way: int

    def begin(self) -> None:
        """A forward pass starts."""

    def leave(self) -> None:
        """It is over."""

    def flush(self) -> None:
        """A backward pass has ended: what waits is sent."""

    def end(self) -> None:
        """And everything has arrived."""

    def reset(self) -> None:
        """After a pass that raised."""


class Schedule:
    """Shared by the outermost unit that is called and all units below it.

    All ranks run the same program, so they record the same order, and prefetching by it issues the same collectives everywhere.

    Attributes:
        depth: units whose forward is running.
        distributed: the mesh of this iteration's batch, where that is a DTensor over the data-parallel mesh dims.
        cut: the mesh dims that cut it.
        order: units in the order of their forward, in this pass; ``last`` in the pass before.
        spare: memory of gradients on their way.

    Raises:
        UnitError: this rank is not in the mesh of the unit that is called.
    """

    def __init__(self, units: Sequence[Unit], mesh: DeviceMesh) -> None:
        if not communicator_of(mesh).held:
            raise UnitError(
                f"a unit of data parallelism on {mesh!r} was called on a rank that is not in this mesh, which has no part of its "
                f"parameters; call the model on ranks {list(mesh.ranks)} only"
            )
        self.units = list(units)
        self.depth = 0
        self.distributed: DeviceMesh | None = None
        self.cut: set[tuple[int, ...]] = set()
        self.order: list[Any] = []
        self.last: list[Any] = []
        self._reductions: list[list[Reduction]] = []  # under way, a unit's together
        self._arriving: list[Reduction] = []  # their results summed over copies of shards, or copied to host memory meanwhile
        self._queued = False
        self.spare = Spare()

    def begin(self, batch: Sequence[DTensor]) -> None:
        """A forward pass starts; ``batch``: what it is given over the data-parallel mesh dims."""
        if ACTIVE and (recorder := current()) is not None:
            recorder.undo(self.reset)
        self.distributed, self._queued = batch[0].device_mesh if batch else None, False
        placed = [pair for x in batch for pair in zip(x.device_mesh._dims, x._layout.placements, strict=True)]
        self.cut = {dims for dims, placement in placed if isinstance(placement, Shard)}
        self.last, self.order = self.order, []
        for unit in self.units:
            unit.begin()

    def leave(self) -> None:
        """The forward pass is over."""
        for unit in self.units:
            unit.leave()

    def ran(self, unit: Any) -> None:
        """A unit's forward starts."""
        if unit not in self.order:
            self.order.append(unit)

    def next_forward(self, unit: Any) -> Any:
        """The unit that ran after ``unit`` in the pass before."""
        return self._neighbour(self.last, unit, 1)

    def next_backward(self, unit: Any) -> Any:
        """The unit that ran before ``unit`` in this pass: the one whose backward comes next."""
        return self._neighbour(self.order, unit, -1)

    @staticmethod
    def _neighbour(order: list[Any], unit: Any, step: int) -> Any:
        if unit not in order:
            return None
        at = order.index(unit) + step
        return order[at] if 0 <= at < len(order) else None

    # --- backward ------------------------------------------------------------------------------------------------
    def in_backward(self) -> bool:
        return graph_task() != -1

    def expect_end(self) -> None:
        """Have :meth:`end` run when the backward pass under way has ended."""
        if not self._queued:
            self._queued = True
            engine.queue_callback(_End(self))

    def reducing(self, reductions: list[Reduction]) -> None:
        """Gradients are under way; of those sent before, most have to arrive first, so that few groups' are held at a time."""
        self._reductions.append(reductions)
        self._deliver(max(unit.reductions_under_way for unit in self.units))

    def _deliver(self, but: int = 0) -> None:
        while len(self._reductions) > but:
            arriving = self._reductions.pop(0)
            for reduction in arriving:
                reduction.arrive()
            self._take()
            self._arriving += arriving
            if not any(reduction.under_way for reduction in arriving):
                self._take()

    def _take(self) -> None:
        """What has arrived becomes gradients."""
        self._arriving = [reduction for reduction in self._arriving if not reduction.deliver()]

    @torch.no_grad()
    def end(self) -> None:
        """The backward pass has ended: all gradients arrive, in the order they were sent."""
        self._queued = False
        for unit in self.units:
            unit.flush()
        self.settle()
        for unit in self.units:
            unit.end()

    def settle(self) -> None:
        """All that is under way arrives."""
        self._deliver()
        while self._arriving:
            self._take()

    def reset(self) -> None:
        """After a pass that raised: nothing is under way any more."""
        self.depth = 0
        self.drop()

    def drop(self) -> None:
        """A backward pass has raised: its gradients do not join those of the next."""
        self._queued, self._reductions, self._arriving = False, [], []
        for unit in self.units:
            unit.reset()


class _End:
    """What autograd calls when a backward pass has ended, and frees uncalled when the pass has raised."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule: Schedule | None = schedule

    def __call__(self) -> None:
        if self.schedule is not None:
            self.schedule.end()
        self.schedule = None

    def __del__(self) -> None:
        if self.schedule is not None:
            with suppress(DivergenceError):  # the pass has raised it, and Python would only print it here
                self.schedule.drop()
