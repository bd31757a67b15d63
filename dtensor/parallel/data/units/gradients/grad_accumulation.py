"""Gradient accumulation: a unit's gradients that are not reduced yet, and when they are reduced.

Reduction is immediate, in the order of groups, at the end of backward, or in a later backward. In a plain program gradients of
passes without synchronization are in ``.grad``, where the optimizer clears them. Here ``.grad`` is None until the gradients are
reduced, and gradients that the program gave up would be added to the next step. Torch has no hook for
``Optimizer.zero_grad``, so the method is replaced when the first unit is made.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .....base.patches import patch_applied
from .....base.torch_internals import DisableTorchFunctionSubclass
from .....comm import shards_of
from .....errors import UnsupportedOperationError
from .....tensor.dtensor import wrap
from .....tensor.leaf_gradients import has_no_other_hooks
from ..parameters.fsdp_param import FSDPParam
from ..parameters.param_group import Column, ParamGroup
from .grad_reduction import GradReduction, defer_hooks, start_reductions
from .schedule import Schedule


class GradAccumulation:
    """Schedule of a unit's gradient reductions. Each parameter group stores its unreduced gradients.

    Attributes:
        requires_sync: reduce in backward; otherwise unsharded gradients are accumulated for a later backward.
        in_group_order: reduce groups in their order, also those that this rank did not use.
        defers_to_end: reduce at the end of backward, also if this rank did not reach the unit.
        has_recorded_use: unsharded values were recorded in this pass.
    """

    def __init__(self, groups: Sequence[ParamGroup], reduce_dtype: torch.dtype | None) -> None:
        _patch_zero_grad()
        self._groups, self._reduce_dtype = groups, reduce_dtype
        self.requires_sync, self.in_group_order, self.defers_to_end, self.has_recorded_use = True, False, False, False
        self.drop_all()

    def drop_all(self) -> None:
        """Drop all accumulated gradients of the unit's groups, after a pass that raised."""
        for group in self._groups:
            group.accumulated_grads.clear()
            group.scattered_grads.clear()
            group.num_pending_uses = 0
        self._ready: list[list[dict[int, Column]]] = [[] for _ in self._groups]  # by group: gradients before its turn
        self._incomplete: dict[ParamGroup, None] = {}  # groups with gradients of some of their uses in this pass
        self._turn = 0

    # --- in backward -------------------------------------------------------------------------------------------------
    def reduce_now(
        self, schedule: Schedule, group: ParamGroup, gradients: dict[int, Column], average: bool
    ) -> dict[Tensor, Tensor]:
        """Reduce a group's gradients and wait; return them by parameter, for ``torch.autograd.grad``.

        Raises:
            UnsupportedOperationError: they are reduced later, or in turn with other groups, which the pass does not reach.
        """
        has_all_reduce = group.settings.requires_all_reduce
        if not self.requires_sync or self.in_group_order or self.defers_to_end or not has_all_reduce or group.scattered_grads:
            raise UnsupportedOperationError(
                "gradients of these parameters are reduced later, so torch.autograd.grad, backward(inputs=) and "
                "schedules with a split backward (zero bubble, DualPipeV) cannot return them. This is so under "
                "replicate, and under fully_shard with set_requires_gradient_sync(False), "
                "set_requires_all_reduce(False) or set_reduce_scatter_unused_params(True). Call backward() and "
                "read .grad, use fully_shard without these, or ScheduleGPipe, Schedule1F1B or "
                "ScheduleInterleaved1F1B"
            )
        reduced: dict[Tensor, Tensor] = {}
        for reduction in start_reductions(group, gradients, average, schedule.send_buffers):
            reduction.finish_first_round()
            while not reduction.deliver(reduced.update):
                pass
        return reduced

    def add_gradients(self, schedule: Schedule, group: ParamGroup, gradients: dict[int, Column], average: bool) -> None:
        """Start the reduction of a group's new gradients, or accumulate them until a later use or pass, as the settings say."""
        if group.accumulated_grads:
            gradients = {i: _add_member_grads(group.accumulated_grads.pop(i, None), column) for i, column in gradients.items()}
        # hooks are called once, with the sum over all uses
        waits_for_uses = self.requires_sync and group.num_pending_uses > 0 and _has_hooks(group)
        if waits_for_uses or not self.requires_sync or self.defers_to_end:
            gradients = {i: _widen_column(column, self._reduce_dtype) for i, column in gradients.items()}
        if not (self.requires_sync and group.settings.requires_all_reduce):
            _MAY_HOLD_GRADIENTS.add(self)
        self._incomplete.pop(group, None)
        if waits_for_uses:
            group.accumulated_grads.update(gradients)
            self._incomplete[group] = None
        elif self.requires_sync and self.in_group_order:
            self._ready[self._groups.index(group)].append(gradients)
            self._reduce_ready(schedule, average)
        elif not self.requires_sync or self.defers_to_end:
            group.accumulated_grads.update(gradients)
        else:
            schedule.add_reductions(start_reductions(group, gradients, average, schedule.send_buffers))
        defer_hooks([group.fsdp_params[i].parameter for i in gradients])

    def _reduce_ready(self, schedule: Schedule, average: bool) -> None:
        """Start the reductions of groups with gradients, in a group order that is equal on all ranks."""
        while self._ready[self._turn]:
            gradients = self._ready[self._turn].pop(0)
            schedule.add_reductions(start_reductions(self._groups[self._turn], gradients, average, schedule.send_buffers))
            self._turn = (self._turn + 1) % len(self._groups)

    def flush(self, schedule: Schedule) -> None:
        """Start the reductions that remain at the end of backward, also of groups that only other ranks used."""
        average = schedule.batch_mesh is None
        for group in self._groups:
            group.num_pending_uses = 0
        for group in self._incomplete.copy():
            grads = {i: group.accumulated_grads.pop(i) for i in sorted(group.accumulated_grads)}
            self.add_gradients(schedule, group, grads, average)
        if self.requires_sync and self.in_group_order:
            while self._turn or any(self._ready):
                if not self._ready[self._turn]:
                    self._ready[self._turn].append(_pop_accumulated(self._groups[self._turn]))
                self._reduce_ready(schedule, average)
        elif self.requires_sync and self.defers_to_end and self.has_recorded_use:
            for group in self._groups:
                grads = _pop_accumulated(group)
                schedule.add_reductions(start_reductions(group, grads, average, schedule.send_buffers))

    # --- pending gradients -------------------------------------------------------------------------------------------
    def pending_gradients(self) -> dict[nn.Parameter, tuple[Any, Any]]:
        """Return by parameter its accumulated unsharded gradient and its shard that is not all-reduced, None if missing."""
        pending: dict[nn.Parameter, tuple[Any, Any]] = {}
        for group in self._groups:
            columns = group.accumulated_grads.items()
            present = {i: column for i, column in columns if any(grad is not None for grad in column)}
            unsharded = {i: _column_as_tensor(group, group.fsdp_params[i], column) for i, column in present.items()}
            shards = dict[int, Any]()
            for (indices, _), (flat, _) in group.scattered_grads.items():
                split = group.comm.map(lambda member, x, g=group, c=indices: g.param_rows(member).split_reduced(c, x), flat)
                shards |= zip(indices, split[:-1], strict=True)
            pending |= {
                group.fsdp_params[i].parameter: (unsharded.get(i), shards.get(i))
                for i in sorted(unsharded.keys() | shards.keys())
            }
        return pending

    def clear_pending(self, parameter_ids: Container[int], to_none: bool) -> None:
        """Set the pending gradients of the parameters with these ids to None, or to zeros."""
        for group in self._groups:
            cleared = [i for i, x in enumerate(group.fsdp_params) if id(x.parameter) in parameter_ids]
            for i in [i for i in cleared if i in group.accumulated_grads]:
                column = group.accumulated_grads.pop(i)
                if not to_none:
                    group.accumulated_grads[i] = tuple(None if grad is None else torch.zeros_like(grad) for grad in column)
            for key, (flat, missing) in list(group.scattered_grads.items()):
                positions = [k for k, i in enumerate(key[0]) if i in cleared]
                if to_none and len(positions) == len(key[0]):
                    del group.scattered_grads[key]
                elif positions:
                    flat = group.comm.map(
                        lambda member, x, g=group, c=key[0], k=positions: _clear_flat(g, member, c, x, k, to_none), flat
                    )
                    now_missing = missing | {key[0][k] for k in positions} if to_none else missing
                    group.scattered_grads[key] = flat, now_missing

    @torch.no_grad()
    def reduce_pending(self, schedule: Schedule) -> None:
        """Reduce the pending gradients, over replicas too, and wait until they are in ``.grad``."""
        average = schedule.batch_mesh is None
        for group in self._groups:
            if self.in_group_order or self.defers_to_end:  # other ranks may have gradients that this rank has not
                grads = _pop_accumulated(group)
            else:
                grads = {i: group.accumulated_grads.pop(i) for i in sorted(group.accumulated_grads)}
            settings, requires_all_reduce = group.settings, group.settings.requires_all_reduce
            settings.requires_all_reduce = True
            try:
                if grads:
                    schedule.add_reductions(start_reductions(group, grads, average, schedule.send_buffers))
                    schedule.finish_reductions()
                for (indices, _), (flat, _) in list(group.scattered_grads.items()):
                    nothing, dtype = dict.fromkeys(indices, _empty_column(group)), shards_of(flat)[0].dtype
                    schedule.add_reductions([GradReduction(group, nothing, dtype, average, schedule.send_buffers)])
                    schedule.finish_reductions()
            finally:
                settings.requires_all_reduce = requires_all_reduce


def _has_hooks(group: ParamGroup) -> bool:
    with DisableTorchFunctionSubclass():  # attribute reads take half the time
        return not all(has_no_other_hooks(x.parameter) for x in group.fsdp_params)


# --- columns: unsharded gradients of one parameter, by local member --------------------------------------------------
def _empty_column(group: ParamGroup) -> Column:
    return (None,) * group.num_local_members


def _add_member_grads(accumulated: Column | None, new: Column) -> Column:
    """Return the sums of the gradients of each local member; None counts as zero."""
    if accumulated is None:
        return new
    return tuple(b if a is None else a if b is None else a + b for a, b in zip(accumulated, new, strict=True))


def _widen_column(column: Column, dtype: torch.dtype | None) -> Column:
    """Convert gradients to at least ``dtype`` before they are accumulated, because small addends would vanish."""
    if dtype is None:
        return column
    return tuple(None if grad is None else grad.to(torch.promote_types(grad.dtype, dtype)) for grad in column)


def _pop_accumulated(group: ParamGroup) -> dict[int, Column]:
    """Remove and return the accumulated gradients of all trainable parameters of a group; those without have empty columns."""
    trainable = [i for i, x in enumerate(group.fsdp_params) if x.parameter.requires_grad]
    return {i: _add_member_grads(group.accumulated_grads.pop(i, None), _empty_column(group)) for i in trainable}


def _column_as_tensor(group: ParamGroup, fsdp_param: FSDPParam, column: Column) -> Any:
    """Return a column as one tensor (``PerRank`` in process); under tensor parallelism as a DTensor on that mesh."""
    example = next(grad for grad in column if grad is not None)
    local = group.comm.local([torch.zeros_like(example) if grad is None else grad for grad in column])
    layout = fsdp_param.tp_layout
    return local if layout is None else wrap(local, layout.replace(dtype=example.dtype, stride=None))


def _clear_flat(
    group: ParamGroup, member: int, indices: Sequence[int], flat: Tensor, positions: Sequence[int], to_none: bool
) -> Tensor:
    """Return a copy of flat reduce-scattered gradients with those at ``positions`` zero, and with ``to_none`` marked missing."""
    flat = flat.clone()
    *blocks, flags = group.param_rows(member).split_reduced(indices, flat)
    for k in positions:
        blocks[k].zero_()
        if to_none:
            flags[k] = 0
    return flat


# --- Optimizer.zero_grad ---------------------------------------------------------------------------------------------
_MAY_HOLD_GRADIENTS: WeakSet[GradAccumulation] = WeakSet()  # may hold gradients that are not in ``.grad``
_is_patched = False


def _patch_zero_grad() -> None:
    """Patch ``Optimizer.zero_grad`` to clear pending gradients of FSDP units as well.

    Done when the first unit is made: a recording must not see the method change between its start and its end.
    """
    global _is_patched
    if _is_patched:
        return
    _is_patched, torch_zero_grad = True, Optimizer.zero_grad

    @functools.wraps(torch_zero_grad)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer's parameters, also the pending gradients of FSDP units."""
        torch_zero_grad(self, set_to_none)
        if _MAY_HOLD_GRADIENTS:
            clear_pending({id(parameter) for group in self.param_groups for parameter in group["params"]}, set_to_none)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # see interop.patch_catalog
    patch_applied("torch.optim.optimizer.Optimizer.zero_grad")


def clear_pending(parameter_ids: Container[int], to_none: bool) -> None:
    """Set the pending gradients of the parameters with these ids, in any unit, to None or to zeros."""
    for accumulation in list(_MAY_HOLD_GRADIENTS):
        accumulation.clear_pending(parameter_ids, to_none)
