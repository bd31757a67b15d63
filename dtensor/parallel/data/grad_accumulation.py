"""A unit's gradients that are not reduced yet, and when they are: at once, in order, at the end of backward, or in a later.

A plain program has what its passes without synchronisation have come to in ``.grad``, where the optimizer finds it. Here that
is none until gradients are reduced: an accumulation that was given up would join the next step. Torch asks nobody when an
optimizer clears gradients, so its method is replaced once there may be something held.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...base.patches import changed
from ...base.torch_internals import DisableTorchFunctionSubclass
from ...comm import shards_of
from ...errors import UnsupportedOperationError
from ...tensor.dtensor import wrap
from ...tensor.leaf_gradients import is_told_to_nobody
from .autograd_function import Column
from .grad_reduction import Reduction, add, quiet, reductions, to_be_added
from .managed import Managed
from .param_group import Group
from .schedule import Schedule


class Unreduced:
    """When the gradients of a unit's groups are reduced; what waits stands with each group, by parameter.

    Attributes:
        sync: reduce in backward; otherwise gradients are held, unsharded, for a later one.
        in_order: reduce groups in their order, also those that this rank did not use.
        defers: reduce when backward has ended, also if this rank did not reach the unit.
        expected: gathered values were recorded in this pass.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype | None) -> None:
        _expect_holders()
        self._groups, self._dtype = groups, dtype
        self.sync, self.in_order, self.defers, self.expected = True, False, False, False
        self.forget()

    def forget(self) -> None:
        """Drop what waits."""
        for group in self._groups:
            group.held.clear()
            group.scattered.clear()
            group.outstanding = 0
        self._ready: list[list[dict[int, Column]]] = [[] for _ in self._groups]  # what waits for groups before it
        self._partial: dict[Group, None] = {}  # groups that hold gradients of some of their uses in this pass
        self._turn = 0

    def give(self, schedule: Schedule, group: Group, gradients: dict[int, Column], average: bool) -> dict[Tensor, Tensor]:
        """A group's gradients have come in a pass that was asked for them: reduced at once, by parameter.

        Raises:
            UnsupportedOperationError: they are reduced later or in turn with others, which are not asked for.
        """
        if not self.sync or self.in_order or self.defers or not group.settings.all_reduces or group.scattered:
            raise UnsupportedOperationError(
                "gradients of these parameters are reduced later, so torch.autograd.grad, backward(inputs=) and "
                "schedules with a split backward (zero bubble, DualPipeV) cannot return them. This is so under "
                "replicate, and under fully_shard with set_requires_gradient_sync(False), "
                "set_requires_all_reduce(False) or set_reduce_scatter_unused_params(True). Call backward() and "
                "read .grad, use fully_shard without these, or ScheduleGPipe, Schedule1F1B or "
                "ScheduleInterleaved1F1B"
            )
        given: dict[Tensor, Tensor] = {}
        for reduction in reductions(group, gradients, average, schedule.spare):
            reduction.arrive()
            while not reduction.deliver(given.update):
                pass
        return given

    def receive(self, schedule: Schedule, group: Group, gradients: dict[int, Column], average: bool) -> dict[Tensor, Tensor]:
        """A group's gradients have come: autograd gets none of them."""
        if group.held:
            gradients = {i: add(group.held.pop(i, None), column) for i, column in gradients.items()}
        waits = self.sync and group.outstanding > 0 and _hooked(group)  # hooks are called once, with the sum of all uses
        if waits or not self.sync or self.defers:
            gradients = {i: to_be_added(column, self._dtype) for i, column in gradients.items()}
        if not (self.sync and group.settings.all_reduces):
            _HOLDING.add(self)
        self._partial.pop(group, None)
        if waits:
            group.held.update(gradients)
            self._partial[group] = None
        elif self.sync and self.in_order:
            self._ready[self._groups.index(group)].append(gradients)
            self._send(schedule, average)
        elif not self.sync or self.defers:
            group.held.update(gradients)
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
        for group in self._groups:
            group.outstanding = 0
        for group in self._partial.copy():
            self.receive(schedule, group, {i: group.held.pop(i) for i in sorted(group.held)}, average)
        if self.sync and self.in_order:
            while self._turn or any(self._ready):
                if not self._ready[self._turn]:
                    self._ready[self._turn].append(_all_of(self._groups[self._turn]))
                self._send(schedule, average)
        elif self.sync and self.defers and self.expected:
            for group in self._groups:
                schedule.reducing(reductions(group, _all_of(group), average, schedule.spare))

    # --- what waits --------------------------------------------------------------------------------------------------
    def waiting(self) -> dict[nn.Parameter, tuple[Any, Any]]:
        """By parameter: the gradient of the whole that is held, and the block that is not summed over replicas."""
        found: dict[nn.Parameter, tuple[Any, Any]] = {}
        for group in self._groups:
            some = {i: column for i, column in group.held.items() if any(grad is not None for grad in column)}
            held = {i: _shown(group, group.managed[i], column) for i, column in some.items()}
            blocks = dict[int, Any]()
            for (chosen, _), (flat, _) in group.scattered.items():
                split = group.comm.map(lambda member, x, g=group, c=chosen: g.rows(member).split(c, x), flat)
                blocks |= zip(chosen, split[:-1], strict=True)
            waits = sorted(held.keys() | blocks.keys())
            found |= {group.managed[i].parameter: (held.get(i), blocks.get(i)) for i in waits}
        return found

    def drop(self, parameters: Container[int], to_none: bool) -> None:
        """Clear what waits for parameters with these ids: it is none, or zeros."""
        for group in self._groups:
            chosen = [i for i, m in enumerate(group.managed) if id(m.parameter) in parameters]
            for i in [i for i in chosen if i in group.held]:
                column = group.held.pop(i)
                if not to_none:
                    group.held[i] = tuple(None if grad is None else torch.zeros_like(grad) for grad in column)
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
        for group in self._groups:
            some_may_not = self.in_order or self.defers  # a rank may hold nothing of what others do
            waits = _all_of(group) if some_may_not else {i: group.held.pop(i) for i in sorted(group.held)}
            settings, before = group.settings, group.settings.all_reduces
            settings.all_reduces = True
            try:
                if waits:
                    schedule.reducing(reductions(group, waits, average, schedule.spare))
                    schedule.settle()
                for (chosen, _), (flat, _) in list(group.scattered.items()):
                    nothing, dtype = dict.fromkeys(chosen, _none_of(group)), shards_of(flat)[0].dtype
                    schedule.reducing([Reduction(group, nothing, dtype, average, schedule.spare)])
                    schedule.settle()
            finally:
                settings.all_reduces = before


def _hooked(group: Group) -> bool:
    with DisableTorchFunctionSubclass():  # an attribute is read in half of the time
        return not all(is_told_to_nobody(m.parameter) for m in group.managed)


def _none_of(group: Group) -> Column:
    """A gradient that no member here has."""
    return (None,) * group.pieces


def _all_of(group: Group) -> dict[int, Column]:
    """What is held of all trainable parameters of a group, from now on here alone; of many of them nothing may be."""
    trainable = [i for i, m in enumerate(group.managed) if m.parameter.requires_grad]
    return {i: add(group.held.pop(i, None), _none_of(group)) for i in trainable}


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


# --- cleared with ``.grad`` ---------------------------------------------------------------------------------------------
_HOLDING: WeakSet[Unreduced] = WeakSet()  # what may hold gradients that ``.grad`` does not show yet
_told = False


def _expect_holders() -> None:
    """There may be some. From the first unit on: a recording shall end with the method that it began with."""
    global _told
    if _told:
        return
    _told, of_torch = True, Optimizer.zero_grad

    @functools.wraps(of_torch)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        of_torch(self, set_to_none)
        if _HOLDING:
            clear({id(parameter) for group in self.param_groups for parameter in group["params"]}, set_to_none)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # see interop.changes
    changed("torch.optim.optimizer.Optimizer.zero_grad")


def clear(parameters: Container[int], to_none: bool) -> None:
    """What anybody holds for parameters with these ids is none, or zeros."""
    for unreduced in list(_HOLDING):
        unreduced.drop(parameters, to_none)
