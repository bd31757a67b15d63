"""Gradient reduction: one reduce-scatter (or all-reduce) over the data-parallel mesh for the gradients of a parameter group.

If each rank computes locally, with its own batch and loss, gradients are averaged: the loss is the mean of the ranks' losses. If
the batch is a DTensor over the data-parallel mesh, the loss is one global value, and its gradient is the sum over ranks.

The gradients are followed by flags, which say for each gradient whether this rank has it. From the reduced flags, a rank without
a gradient learns whether any rank has it. A parameter that no rank used keeps its ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .....base.recorder_hooks import untracked
from .....base.torch_internals import DisableTorchFunctionSubclass
from .....comm import Pending, shards_of
from .....comm.compared_operations import compare_text
from .....comm.events import issue_for_cause
from .....errors import DTensorError
from .....layout.layout import Layout
from .....state.version_counters import take_snapshot
from .....tensor.dtensor import wrap
from .....tensor.leaf_gradients import has_no_other_hooks
from .....tensor.observers import ACTIVE_OBSERVERS
from ...settings.custom_collectives import CommHookReducer
from ...settings.policy import HostOffload
from ..parameters.param_group import Column, ParamGroup
from ..parameters.unsharded_storage import SendBufferPool
from .tp_replicated_grad_check import check_tp_replicated_grads

Accumulate = Callable[[list[tuple[nn.Parameter, Tensor]]], None]


class GradReduction:
    """Reduction in flight of some gradients of a parameter group; the constructor starts it.

    The first round is the reduce-scatter or the all-reduce. HSDP has a second one, the all-reduce over replicas, and an
    all-reduce may have two rounds. Recorders do not see the reduction itself.

    Args:
        gradients: unsharded gradients by parameter index.
        average: divide by the number of ranks, because each rank has its own loss.
    """

    def __init__(
        self, group: ParamGroup, gradients: dict[int, Column], dtype: torch.dtype, average: bool, send_buffers: SendBufferPool
    ) -> None:
        self.group, self.indices = group, list(gradients)
        self.missing = {i for i, column in gradients.items() for grad in column if grad is None}
        self._dtype, self._send_buffers, self._borrowed_buffers = dtype, send_buffers, list[Tensor]()
        self._divide_factor = group.settings.divide_factor if average else None
        if average and self._divide_factor is None and group.settings.force_sum:
            self._divide_factor = float(group.axes.mesh.size())
        self._comm_hook: CommHookReducer | None = group.settings.comm_hook
        if self._comm_hook is not None:
            self._divide_factor = None  # the hook averages
            if not average:
                raise DTensorError(
                    "communication hooks average gradients, but the gradients of a global loss of DTensors are "
                    "summed; remove the hook"
                )
        self._op = "avg" if average and self._divide_factor is None else "sum"
        if self._divide_factor is not None:
            compare_text(group.axes.mesh, f"gradients divided by {self._divide_factor}")
        self._buckets: dict[int, list[Tensor]] | None = None  # by member: buffers of unsharded gradients, which are used again
        self._keeps_grads_in_buckets = False
        self._flat: Any = None  # the reduced gradients and flags
        self._second_round: Pending[Any] | None = None
        self._host_copy_waits: list[Callable[[], Any]] = []
        self._first_round = self._issue([gradients[i] for i in self.indices])

    @partial(issue_for_cause, "reduce gradients")
    def _issue(self, columns: Sequence[Column]) -> Pending[Tensor]:
        """Pack the gradients of each local member into one buffer, and start its reduce-scatter or all-reduce."""
        group, comm, axes, dtype = self.group, self.group.comm, self.group.axes, self._dtype
        device, in_process = torch.device(axes.mesh.device_type), comm.holds_all

        bound = comm.bind_all_reduce(axes.all_reduce, self._op, dtype)
        in_place = None if self._comm_hook is not None else bound.run_donated
        as_views = group.settings.grads_as_bucket_views and axes.offload is None
        self._keeps_grads_in_buckets = as_views and not axes.reduce_scatter and self._has_no_grads()
        if self._keeps_grads_in_buckets or not (axes.reduce_scatter or as_views or in_place is not None):
            # new pages would cost more than the copy into a bucket
            self._buckets = group.unsharded.grad_buckets.pop(self._bucket_key(), {})

        def get_send_buffer(numel: int) -> Tensor | None:
            """Return a pooled buffer of ``numel`` elements for a reduce-scatter; None if the caller must allocate."""
            nbytes = numel * dtype.itemsize
            buffer = self._send_buffers.get_or_allocate(nbytes, device) if axes.reduce_scatter else None
            if buffer is None:
                return None
            self._borrowed_buffers.append(buffer)
            return (buffer if buffer.numel() == nbytes else buffer[:nbytes]).view(dtype)

        def pack_member(member: int) -> Tensor:
            """Return the flat tensor of a member's gradients, followed by a flag for each: 0 where it is missing."""
            grads = [column[member if in_process else 0] for column in columns]
            if self._buckets is None:
                flags = self._send_buffers.get_or_make_ones(len(grads), dtype, device)
                if self.missing:
                    flags = flags.clone()
                    for k, grad in enumerate(grads):
                        if grad is None:
                            flags[k] = 0
                return group.param_rows(member).pack_addends(self.indices, grads, dtype, device, [flags], get_send_buffer)
            bucket = self._buckets.get(member)
            if bucket is None:
                rows = group.param_rows(member)
                bucket = self._buckets[member] = rows.allocate_bucket(self.indices, dtype, device, len(grads))
            return _fill_bucket(bucket, grads)

        packed = comm.map(pack_member)
        if axes.reduce_scatter:
            return group.bind_reduce_scatter(self.indices, dtype, self._op)(packed)
        if self._comm_hook is not None:
            return self._comm_hook(comm, axes.all_reduce, packed, [group.fsdp_params[i].parameter for i in self.indices])
        return (in_place or bound.run)(packed)

    def _has_no_grads(self) -> bool:
        return all(self.group.fsdp_params[i].parameter.grad is None for i in self.indices)

    def _bucket_key(self) -> Any:
        return tuple(self.indices), self._dtype

    def finish_first_round(self) -> None:
        """Wait for the first collective, then start the all-reduce over replicas or the copy to host memory, if any."""
        axes = self.group.axes
        if self._first_round.advance():
            self._second_round = self._first_round
            return
        flat = self._first_round.wait()
        used = {shard.untyped_storage()._cdata for shard in shards_of(flat)}  # on one rank the result is the send buffer
        for buffer in self._borrowed_buffers:
            if buffer.untyped_storage()._cdata not in used:
                self._send_buffers.give_back(buffer)
        self._borrowed_buffers.clear()
        if axes.reduce_scatter and axes.all_reduce:
            self._reduce_over_replicas(flat)
        else:
            self._finish_reduced(flat)

    def _reduce_over_replicas(self, flat: Any) -> None:
        """Start the all-reduce of reduce-scattered gradients over replicas, or store them for a later pass."""
        group, key = self.group, (tuple(self.indices), self._op)
        earlier, missing = group.scattered_grads.pop(key, (None, frozenset()))
        flat = flat if earlier is None else earlier + flat
        self.missing |= missing
        if group.settings.requires_all_reduce:
            bound = group.comm.bind_all_reduce(group.axes.all_reduce, self._op, shards_of(flat)[0].dtype)
            self._second_round = (bound.run_donated or bound.run)(flat)
        else:
            group.scattered_grads[key] = (flat, frozenset(self.missing))

    @property
    def is_in_flight(self) -> bool:
        """Return True if a second collective or a copy to host memory is in flight."""
        return self._second_round is not None or self.group.axes.offload is not None

    def deliver(self, accumulate_into: Accumulate | None = None) -> bool:
        """Add the reduced gradients to ``.grad`` of the parameters. Return False if a copy to host memory has only started now.

        Args:
            accumulate_into: receives the pairs of parameter and gradient instead; default :func:`accumulate_grads`.
        """
        if self._second_round is not None:
            flat, self._second_round = self._second_round.wait(), None
            self._finish_reduced(flat)
            if self.is_in_flight:
                return False
        if self._flat is None:
            return True
        for wait in self._host_copy_waits:
            wait()
        group = self.group
        with DisableTorchFunctionSubclass():  # attribute reads take half the time
            layouts = [group.fsdp_params[i].gradient_layout() for i in self.indices]
        *blocks, flags = group.comm.map(lambda member, flat: self._split(member, flat, layouts), self._flat)
        self._flat = None
        is_used = {}
        if self.missing:
            flag_rows = _read_flags(flags)
            is_used = {i: any(row[k] for row in flag_rows) for k, i in enumerate(self.indices)}
        entries = zip(self.indices, blocks, layouts, strict=True)
        present = [(i, block, layout) for i, block, layout in entries if i not in self.missing or is_used[i]]
        grads: list[tuple[nn.Parameter, Tensor]] = [
            (group.fsdp_params[i].parameter, wrap(block, layout)) for i, block, layout in present
        ]
        (accumulate_into or accumulate_grads)(grads)
        return True

    def _finish_reduced(self, flat: Any) -> None:
        """Divide the flat reduced gradients, call the user's hook, and start the copy to host memory or buckets."""
        group = self.group
        if self._buckets is not None:
            group.unsharded.grad_buckets[self._bucket_key()] = self._buckets
        self._flat = self._divide_and_hook(flat)
        if self._keeps_grads_in_buckets and self._has_no_grads():
            self._flat = group.comm.map(self._copy_to_bucket, self._flat)
        if group.axes.offload is not None:
            self._flat = group.comm.map(self._copy_to_host, self._flat, group.axes.offload)

    def _divide_and_hook(self, flat: Any) -> Any:
        """Divide the reduced gradients, then call the user's hook; with ``force_sum`` call it first, as torch's FSDP2 does."""
        settings, factor = self.group.settings, self._divide_factor
        if factor is not None and not (settings.force_sum and settings.hook is not None):
            flat, factor = flat / factor, None
        if settings.hook is not None:
            gradients = self.group.comm.map(lambda member, x: x[: x.numel() - len(self.indices)], flat)
            with settings.on_hook_stream(self.group.axes.mesh.device_type):
                settings.hook(gradients)
        return flat if factor is None else flat / factor

    def _copy_to_bucket(self, member: int, flat: Tensor) -> Tensor:
        """Copy a member's reduced gradients into its bucket, if a hook returned another tensor."""
        assert self._buckets is not None
        bucket = self._buckets[member][0]
        return bucket if bucket is flat else bucket.copy_(flat)

    def _copy_to_host(self, member: int, flat: Tensor, offload: HostOffload) -> Tensor:
        """Start the copy of a member's reduced gradients to host memory, and remember to wait for it."""
        copied, wait = offload.copy_to_host(flat)
        self._host_copy_waits.append(wait)
        return copied

    def _split(self, member: int, flat: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        """Split a member's flat reduced gradients into one tensor per parameter, in its gradient dtype, and the flags."""
        *blocks, flags = self.group.param_rows(member).split_reduced(self.indices, flat)
        if any(layout.dtype is not flat.dtype for layout in layouts):
            blocks = [block.to(layout.dtype) for block, layout in zip(blocks, layouts, strict=True)]
        return [*blocks, flags]


@untracked
def _read_flags(flags: Any) -> list[list[float]]:
    """Return as numbers, for each local member, the reduced flags: non-zero where some rank had a gradient."""
    return [shard.tolist() for shard in shards_of(flags)]


def _fill_bucket(bucket: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """Copy gradients, and flags of those that are missing, into a bucket; return its flat tensor."""
    flat, *parts, flags = bucket
    flags.fill_(1)
    present = [grad for grad in grads if grad is not None]
    if len(present) == len(parts):
        torch._foreach_copy_(parts, present)
        return flat
    for k, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        if grad is None:
            flags[k] = 0
            part.zero_()
        else:
            part.copy_(grad)
    return flat


def start_reductions(
    group: ParamGroup, gradients: dict[int, Column], average: bool, send_buffers: SendBufferPool
) -> list[GradReduction]:
    """Issue the reductions of a group's gradients, one for each dtype, and return them."""
    check_tp_replicated_grads(group, gradients)
    by_dtype: dict[torch.dtype, dict[int, Column]] = {}
    for i, column in gradients.items():
        own_dtype, reduce_dtype = group.dtypes[i], group.policy.reduce_dtype
        dtype = reduce_dtype if reduce_dtype is not None and own_dtype.is_floating_point else own_dtype
        by_dtype.setdefault(dtype, {})[i] = column
    return [GradReduction(group, columns, dtype, average, send_buffers) for dtype, columns in by_dtype.items()]


# --- gradients of leaves ---------------------------------------------------------------------------------------------
def accumulate_grads(grads: Sequence[tuple[Any, Any]]) -> None:
    """Add gradients to ``.grad`` of leaves as autograd does: call gradient hooks, add, call post-accumulation hooks."""
    with DisableTorchFunctionSubclass():  # attribute reads and writes take half the time
        if not ACTIVE_OBSERVERS and all(
            p.grad is None and p._layout is grad._layout and has_no_other_hooks(p) for p, grad in grads
        ):
            for parameter, grad in grads:
                parameter.grad = grad
            return
    for parameter, grad in grads:
        for hook in list(parameter._backward_hooks.values()) if parameter._backward_hooks else ():
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


def defer_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Make gradient hooks of these leaves skip autograd's call without gradient; :func:`accumulate_grads` calls them later."""
    with DisableTorchFunctionSubclass():
        hooked = [p for p in parameters if not has_no_other_hooks(p)]
    for parameter in hooked:
        grad_hooks: Any = parameter._backward_hooks or {}
        for key, hook in grad_hooks.items():
            is_wrapped = isinstance(hook, _SkipWithoutGradient) or getattr(hook, "expects_none", False)
            grad_hooks[key] = hook if is_wrapped else _SkipWithoutGradient(hook)
        post_hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in post_hooks.items():
            post_hooks[key] = _SkipUnchanged(hook.hook if isinstance(hook, _SkipUnchanged) else hook, parameter)


class _SkipWithoutGradient:
    """Wrapper of a leaf's gradient hook that calls the hook only if there is a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


class _SkipUnchanged:
    """Wrapper of a post-accumulation hook that calls the hook only if ``.grad`` has changed since the wrapper was made."""

    def __init__(self, hook: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> None:
        self.hook, self._version = hook, _grad_version(parameter)

    def __call__(self, parameter: nn.Parameter) -> None:
        if _grad_version(parameter) != self._version:
            self.hook(parameter)


def _grad_version(parameter: nn.Parameter) -> Any:
    grad = parameter.grad
    return None if grad is None else take_snapshot(grad)
