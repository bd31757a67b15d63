"""A unit's gradients that are not reduced yet, and when they are: at once, in order, at the end of backward, or in a later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.recording import Between
from ...errors import UnsupportedOperationError
from .gradient_node import Column
from .gradients import add, quiet, reductions, to_be_added
from .param_group import Group
from .schedule import Schedule


class Unreduced:
    """Gradients by group and parameter.

    Attributes:
        sync: reduce in backward; otherwise gradients are held, unsharded, for a later one.
        in_order: reduce groups in their order, also those that this rank did not use.
        defers: reduce when backward has ended, also if this rank did not reach the unit.
        expected: gathered values were recorded in this pass.
        held: those of backward passes without sync, by group and parameter.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype | None) -> None:
        self._groups, self._dtype = groups, dtype
        self.sync, self.in_order, self.defers, self.expected = True, False, False, False
        self.held: dict[tuple[int, int], Column] = Between()
        self.forget()

    def forget(self) -> None:
        """Drop them."""
        self.held.clear()
        self._ready: list[list[dict[int, Column]]] = [[] for _ in self._groups]  # what waits for groups before it, or for the end
        self._turn = 0

    def give(self, schedule: Schedule, group: Group, gradients: dict[int, Column], average: bool) -> dict[Tensor, Tensor]:
        """A group's gradients have come in a pass that was asked for them: reduced at once, by parameter.

        Raises:
            UnsupportedOperationError: they are reduced later or in turn with others, which are not asked for.
        """
        if not self.sync or self.in_order or self.defers or not group.settings.all_reduces or group.scattered:
            raise UnsupportedOperationError(
                "torch.autograd.grad, backward(inputs=) and schedules that part backward in two (zero bubble, DualPipeV) ask for "
                "gradients of parameters that replicate, or fully_shard under set_requires_gradient_sync(False), "
                "set_requires_all_reduce(False) or set_reduce_scatter_unused_params(True), reduces later; call backward() and "
                "read .grad, take fully_shard without these, or ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        given: dict[Tensor, Tensor] = {}
        for reduction in reductions(group, gradients, average, schedule.spare):
            reduction.arrive()
            while not reduction.deliver(given.__setitem__):
                pass
        return given

    def receive(self, schedule: Schedule, group: Group, gradients: dict[int, Column], average: bool) -> dict[Tensor, Tensor]:
        """A group's gradients have come: autograd gets none of them."""
        k = self._groups.index(group)
        if self.held:
            gradients = {i: add(self.held.pop((k, i), None), column) for i, column in gradients.items()}
        if not self.sync or self.defers:
            gradients = {i: to_be_added(column, self._dtype) for i, column in gradients.items()}
        if not self.sync:
            self.held.update({(k, i): column for i, column in gradients.items()})
        elif self.in_order or self.defers:
            self._ready[k].append(gradients)
            if self.in_order:
                self._send(schedule, average)
        else:
            schedule.reducing(reductions(group, gradients, average, schedule.spare))
        quiet([group.managed[i].parameter for i in gradients])
        return {}

    def _send(self, schedule: Schedule, average: bool) -> None:
        """Reduce what is ready in the order of groups, which is the same on all ranks, whatever each of them used."""
        while self._ready[self._turn]:
            gradients = self._ready[self._turn].pop(0)
            schedule.reducing(reductions(self._groups[self._turn], gradients, average, schedule.spare))
            self._turn = (self._turn + 1) % len(self._groups)

    def flush(self, schedule: Schedule) -> None:
        """Backward has ended: groups that this rank did not use take part with nothing, since others may have used them."""
        average = schedule.distributed is None
        if self.sync and self.in_order:
            while self._turn or any(self._ready):
                if not self._ready[self._turn]:
                    self._ready[self._turn].append(self._nothing(self._turn))
                self._send(schedule, average)
        elif self.sync and self.defers and self.expected:
            for k, group in enumerate(self._groups):
                gradients = self._nothing(k)
                for found in self._ready[k]:
                    gradients = {i: add(found.get(i), column) for i, column in gradients.items()}
                self._ready[k] = []
                schedule.reducing(reductions(group, gradients, average, schedule.spare))

    def _nothing(self, k: int) -> dict[int, Column]:
        """What this rank has of a group that its backward did not reach: what is held of passes before."""
        group = self._groups[k]
        trainable = [i for i, m in enumerate(group.managed) if m.parameter.requires_grad]
        return {i: add(self.held.pop((k, i), None), (None,) * group.pieces) for i in trainable}
