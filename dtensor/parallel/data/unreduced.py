"""A unit's gradients that are not reduced yet, and when they are: at once, in order, at the end of backward, or in a later."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...base.recording import Between
from ...comm import shards_of
from ...errors import UnsupportedOperationError
from ...tensor.dtensor import wrap
from .cleared import expect_holders, note_holding
from .gradient_node import Column
from .gradients import Reduction, add, quiet, reductions, to_be_added
from .param_group import Group
from .parameters import Managed
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
        expect_holders()
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
            while not reduction.deliver(given.update):
                pass
        return given

    def receive(self, schedule: Schedule, group: Group, gradients: dict[int, Column], average: bool) -> dict[Tensor, Tensor]:
        """A group's gradients have come: autograd gets none of them."""
        k = self._groups.index(group)
        if self.held:
            gradients = {i: add(self.held.pop((k, i), None), column) for i, column in gradients.items()}
        if not self.sync or self.defers:
            gradients = {i: to_be_added(column, self._dtype) for i, column in gradients.items()}
        if not (self.sync and group.settings.all_reduces):
            note_holding(self)
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

    # --- what waits --------------------------------------------------------------------------------------------------
    def waiting(self) -> dict[nn.Parameter, tuple[Any, Any]]:
        """By parameter: the gradient of the whole that is held, and the block that is not summed over replicas."""
        held, blocks = dict[int, Any](), dict[int, Any]()
        for k, group in enumerate(self._groups):
            for (chosen, _), (flat, _) in group.scattered.items():
                split = group.comm.map(lambda member, x, g=group, c=chosen: g.rows(member).split(c, x), flat)
                blocks |= {id(group.managed[i].parameter): x for i, x in zip(chosen, split[:-1], strict=True)}
            for i, m in enumerate(group.managed):
                column = self.held.get((k, i), ())
                if any(grad is not None for grad in column):
                    held[id(m.parameter)] = _shown(group, m, column)
        parameters = [m.parameter for group in self._groups for m in group.managed]
        found = {p: (held.get(id(p)), blocks.get(id(p))) for p in parameters}
        return {p: pair for p, pair in found.items() if any(x is not None for x in pair)}

    def drop(self, parameters: Container[int], to_none: bool) -> None:
        """Clear what waits for parameters with these ids: it is none, or zeros."""
        for k, group in enumerate(self._groups):
            chosen = [i for i, m in enumerate(group.managed) if id(m.parameter) in parameters]
            for i in chosen:
                column = self.held.pop((k, i), None)
                if column is not None and not to_none:
                    self.held[k, i] = tuple(None if grad is None else torch.zeros_like(grad) for grad in column)
            for key, (flat, missing) in list(group.scattered.items()):
                gone = [at for at, i in enumerate(key[0]) if i in chosen]
                if to_none and len(gone) == len(key[0]):
                    del group.scattered[key]
                elif gone:
                    flat = group.comm.map(
                        lambda member, x, g=group, c=key[0], at=gone: _without(g, member, c, x, at, to_none), flat
                    )
                    group.scattered[key] = flat, missing | {key[0][at] for at in gone} if to_none else missing

    @torch.no_grad()
    def reduce(self, schedule: Schedule) -> None:
        """What waits is reduced, over replicas too, and arrives."""
        average = schedule.distributed is None
        for k, group in enumerate(self._groups):
            settings, nothing = group.settings, (None,) * group.pieces
            waits = {i: column for i in range(len(group.managed)) if (column := self.held.pop((k, i), None)) is not None}
            if self.in_order or self.defers:  # a rank may hold nothing of what others do
                waits = {i: add(waits.get(i), nothing) for i, m in enumerate(group.managed) if m.parameter.requires_grad}
            before, settings.all_reduces = settings.all_reduces, True
            try:
                if waits:
                    schedule.reducing(reductions(group, waits, average, schedule.spare))
                    schedule.settle()
                for (chosen, _), (flat, _) in list(group.scattered.items()):
                    dtype = shards_of(flat)[0].dtype
                    schedule.reducing([Reduction(group, dict.fromkeys(chosen, nothing), dtype, average, schedule.spare)])
                    schedule.settle()
            finally:
                settings.all_reduces = before


def _shown(group: Group, m: Managed, column: Column) -> Any:
    """One parameter's held gradient: a tensor of this rank, or of each; under tensor parallelism a DTensor on its mesh."""
    like = next(grad for grad in column if grad is not None)
    pieces = [torch.zeros_like(like) if grad is None else grad for grad in column]
    local = group.comm.local(pieces)
    return local if m.inside is None else wrap(local, m.inside.replace(dtype=like.dtype, stride=None))


def _without(group: Group, member: int, chosen: Sequence[int], flat: Tensor, gone: Sequence[int], to_none: bool) -> Tensor:
    """A part of reduced gradients in which some are zeros, and with ``to_none`` nobody's."""
    flat = flat.clone()
    *blocks, flags = group.rows(member).split(chosen, flat)
    for at in gone:
        blocks[at].zero_()
        if to_none:
            flags[at] = 0
    return flat
