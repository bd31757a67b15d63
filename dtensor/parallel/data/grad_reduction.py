"""Gradients of a flat group reduced over the data-parallel mesh: one reduce-scatter (or all-reduce) for all of them.

Ranks whose computation is local, each with its own batch and loss, average: the loss is the mean of the ranks' losses. Where the
batch is a DTensor over the data-parallel mesh the loss is one global value, whose gradient is the sum of the ranks' terms.

Behind the gradients go flags that say which of them this rank has. A rank that misses some learns by them whether anybody has
them; what no rank used keeps its ``.grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...base.recorder_hooks import aside
from ...base.torch_internals import DisableTorchFunctionSubclass
from ...comm import Pending, shards_of
from ...comm.checked_collectives import says
from ...comm.events import because
from ...dispatch.version_counters import stamp
from ...errors import DTensorError
from ...layout.layout import Layout
from ...tensor.dtensor import wrap
from ...tensor.leaf_gradients import is_told_to_nobody
from ...tensor.observers import observed
from .autograd_function import Column
from .comm_hook import Reducer
from .offload import Host
from .param_group import Group
from .tp_replicated_grad_check import check_left_out
from .unsharded_storage import Spare


class Reduction:
    """One reduction under way. Whoever makes it and waits for it records nothing."""

    def __init__(self, group: Group, gradients: dict[int, Column], dtype: torch.dtype, average: bool, spare: Spare) -> None:
        self._spare, self._lent = spare, list[Tensor]()
        self.group, self.chosen = group, list(gradients)
        self.missing = {i for i, column in gradients.items() for grad in column if grad is None}
        self._divisor = group.settings.divisor if average else None
        if average and self._divisor is None and group.settings.sums_only:
            self._divisor = float(group.axes.mesh.size())
        self._hooked: Reducer | None = group.settings.reduces
        if self._hooked is not None:
            self._divisor = None  # it averages by itself
            if not average:
                raise DTensorError(
                    "communication hooks average gradients, but the gradients of a global loss of DTensors are "
                    "summed; remove the hook"
                )
        self._op = "avg" if average and self._divisor is None else "sum"
        if self._divisor is not None:
            says(group.axes.mesh, f"gradients divided by {self._divisor}")
        self._buckets: dict[int, list[Tensor]] | None = None  # of whole gradients: they serve again
        self._stays = False  # the gradients stay in them
        self._dtype = dtype
        self._flat: Any = None  # what has arrived
        self._second: Pending[Any] | None = None  # the second round of a reduction, or a sum over copies of shards
        self._waits: list[Callable[[], Any]] = []  # for copies to host memory
        self._pending = self._issue([gradients[i] for i in self.chosen], dtype)

    @partial(because, "reduce gradients")
    def _issue(self, columns: Sequence[Column], dtype: torch.dtype) -> Pending[Tensor]:
        group, comm, axes = self.group, self.group.comm, self.group.axes
        device, in_process = torch.device(axes.mesh.device_type), comm.holds_all

        bound = comm.bind_all_reduce(axes.reduced, self._op, dtype)
        in_place = None if self._hooked is not None else bound.taking
        views = group.settings.views and axes.host is None
        self._stays = views and not axes.scattered and self._none_there()
        if self._stays or not (axes.scattered or views or in_place is not None):  # fresh pages would cost more than the copy
            self._buckets = group.whole.buckets.pop(self._key(dtype), {})

        def memory_of(numel: int) -> Tensor | None:
            nbytes = numel * dtype.itemsize
            lent = self._spare.take(nbytes, device) if axes.scattered else None
            if lent is None:
                return None
            self._lent.append(lent)
            return (lent if lent.numel() == nbytes else lent[:nbytes]).view(dtype)

        def row(member: int) -> Tensor:
            own = [column[member if in_process else 0] for column in columns]
            if self._buckets is None:
                flags = self._spare.ones(len(own), dtype, device)
                if self.missing:
                    flags = flags.clone()
                    for k, grad in enumerate(own):
                        if grad is None:
                            flags[k] = 0
                return group.rows(member).terms(self.chosen, own, dtype, device, [flags], memory_of)
            bucket = self._buckets.get(member)
            if bucket is None:
                bucket = self._buckets[member] = group.rows(member).bucket(self.chosen, dtype, device, len(own))
            return _filled(bucket, own)

        packed = comm.map(row)
        if axes.scattered:
            return group.scattering(self.chosen, dtype, self._op)(packed)
        if self._hooked is not None:
            return self._hooked(comm, axes.reduced, packed, [group.managed[i].parameter for i in self.chosen])
        return (in_place or bound.run)(packed)

    def _none_there(self) -> bool:
        return all(self.group.managed[i].parameter.grad is None for i in self.chosen)

    def _key(self, dtype: torch.dtype) -> Any:
        return tuple(self.chosen), dtype

    def arrive(self) -> None:
        """Wait for its first round; its results are here, in a second round, or on their way to host memory."""
        axes = self.group.axes
        if self._pending.advance():
            self._second = self._pending
            return
        flat = self._pending.wait()
        there = {shard.untyped_storage()._cdata for shard in shards_of(flat)}  # one rank's result is what it gave
        for lent in self._lent:
            if lent.untyped_storage()._cdata not in there:
                self._spare.give_back(lent)
        self._lent.clear()
        if axes.scattered and axes.reduced:
            self._over_replicas(flat)
        else:
            self._settle(flat)

    @property
    def under_way(self) -> bool:
        """Whether something goes on meanwhile."""
        return self._second is not None or self.group.axes.host is not None

    def deliver(self, to: Callable[[list[tuple[nn.Parameter, Tensor]]], None] | None = None) -> bool:
        """Add its results, which have arrived, to the parameters' gradients. False: they are on their way to host memory now."""
        if self._second is not None:
            flat, self._second = self._second.wait(), None
            self._settle(flat)
            if self.under_way:
                return False
        if self._flat is None:
            return True
        for wait in self._waits:
            wait()
        group = self.group
        with DisableTorchFunctionSubclass():  # an attribute is read in half of the time
            layouts = [group.managed[i].gradient_layout() for i in self.chosen]
        *blocks, flags = group.comm.map(lambda member, flat: self._blocks(member, flat, layouts), self._flat)
        self._flat = None
        used = {}
        if self.missing:
            rows = _read(flags)
            used = {i: any(row[k] for row in rows) for k, i in enumerate(self.chosen)}
        parts = zip(self.chosen, blocks, layouts, strict=True)
        there = [(i, block, layout) for i, block, layout in parts if i not in self.missing or used[i]]
        (to or accumulate)([(group.managed[i].parameter, wrap(block, layout)) for i, block, layout in there])
        return True

    def _settle(self, flat: Any) -> None:
        if self._buckets is not None:
            self.group.whole.buckets[self._key(self._dtype)] = self._buckets
        self._flat = self._finished(flat)
        if self._stays and self._none_there():
            self._flat = self.group.comm.map(self._in_bucket, self._flat)
        if self.group.axes.host is not None:
            self._flat = self.group.comm.map(self._fetched, self._flat, self.group.axes.host)

    def _in_bucket(self, member: int, flat: Tensor) -> Tensor:
        assert self._buckets is not None
        bucket = self._buckets[member][0]
        return bucket if bucket is flat else bucket.copy_(flat)

    def _fetched(self, member: int, flat: Tensor, host: Host) -> Tensor:
        copied, wait = host.fetched(flat)
        self._waits.append(wait)
        return copied

    def _finished(self, flat: Any) -> Any:
        """Divided, and seen by the user's hook: before the division if collectives are to sum only, as its own does then."""
        settings, divisor = self.group.settings, self._divisor
        if divisor is not None and not (settings.sums_only and settings.hook is not None):
            flat, divisor = flat / divisor, None
        if settings.hook is not None:
            gradients = self.group.comm.map(lambda member, x: x[: x.numel() - len(self.chosen)], flat)
            with settings.on_hook_stream(self.group.axes.mesh.device_type):
                settings.hook(gradients)
        return flat if divisor is None else flat / divisor

    def _over_replicas(self, flat: Any) -> None:
        """Sum this rank's part with those of the passes before that were not summed over replicas; or let it wait with them."""
        group, key = self.group, (tuple(self.chosen), self._op)
        before, missing = group.scattered.pop(key, (None, frozenset()))
        flat = flat if before is None else before + flat
        self.missing |= missing
        if group.settings.all_reduces:
            bound = group.comm.bind_all_reduce(group.axes.reduced, self._op, shards_of(flat)[0].dtype)
            self._second = (bound.taking or bound.run)(flat)
        else:
            group.scattered[key] = (flat, frozenset(self.missing))

    def _blocks(self, member: int, flat: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        *blocks, flags = self.group.rows(member).split(self.chosen, flat)
        if any(layout.dtype is not flat.dtype for layout in layouts):
            blocks = [block.to(layout.dtype) for block, layout in zip(blocks, layouts, strict=True)]
        return [*blocks, flags]


@aside
def _read(flags: Any) -> list[list[float]]:
    """Which gradients there are follows from what each rank's program did, so it is the same whenever all do that again."""
    return [shard.tolist() for shard in shards_of(flags)]


def _filled(bucket: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor:
    """The bucket with gradients and flags in it."""
    flat, *parts, flags = bucket
    flags.fill_(1)
    there = [grad for grad in grads if grad is not None]
    if len(there) == len(parts):
        torch._foreach_copy_(parts, there)
        return flat
    for k, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        if grad is None:
            flags[k] = 0
            part.zero_()
        else:
            part.copy_(grad)
    return flat


def reductions(group: Group, gradients: dict[int, Column], average: bool, spare: Spare) -> list[Reduction]:
    """The reductions of a group's gradients, issued: one for each dtype."""
    check_left_out(group, gradients)
    by_dtype: dict[torch.dtype, dict[int, Column]] = {}
    for i, column in gradients.items():
        own, wanted = group.dtypes[i], group.policy.reduce_dtype
        by_dtype.setdefault(wanted if wanted is not None and own.is_floating_point else own, {})[i] = column
    return [Reduction(group, columns, dtype, average, spare) for dtype, columns in by_dtype.items()]


def accumulate(given: Sequence[tuple[Any, Any]]) -> None:
    """What autograd does with gradients of leaves, one after the other: a leaf's hooks, ``.grad``, and the hooks after that."""
    with DisableTorchFunctionSubclass():  # an attribute is read, or written, in half of the time
        if not observed and all(p.grad is None and p._layout is grad._layout and is_told_to_nobody(p) for p, grad in given):
            for parameter, grad in given:
                parameter.grad = grad
            return
    for parameter, grad in given:
        for hook in list(parameter._backward_hooks.values()) if parameter._backward_hooks else ():
            changed = hook(grad)
            grad = grad if changed is None else changed
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


def quiet(parameters: Sequence[nn.Parameter]) -> None:
    """Autograd comes to these leaves next, without gradients, and calls hooks all the same: they wait for :func:`accumulate`."""
    with DisableTorchFunctionSubclass():
        hooked = [p for p in parameters if not is_told_to_nobody(p)]
    for parameter in hooked:
        before: Any = parameter._backward_hooks or {}
        for key, hook in before.items():
            before[key] = hook if isinstance(hook, _IfGiven) or getattr(hook, "expects_none", False) else _IfGiven(hook)
        after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in after.items():
            after[key] = _IfChanged(hook.hook if isinstance(hook, _IfChanged) else hook, parameter)


class _IfGiven:
    """A hook of a leaf, for a gradient only."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


class _IfChanged:
    """A hook after accumulation, for one that has changed ``.grad`` since this was made."""

    def __init__(self, hook: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> None:
        self.hook, self._before = hook, _state(parameter)

    def __call__(self, parameter: nn.Parameter) -> None:
        if _state(parameter) != self._before:
            self.hook(parameter)


def _state(parameter: nn.Parameter) -> Any:
    grad = parameter.grad
    return None if grad is None else stamp(grad)


def add(held: Column | None, new: Column) -> Column:
    """Gradients that are not reduced yet, and more of them."""
    if held is None:
        return new
    return tuple(b if a is None else a if b is None else a + b for a, b in zip(held, new, strict=True))


def to_be_added(column: Column, dtype: torch.dtype | None) -> Column:
    """Gradients that more will join: not in less than the dtype that they are reduced in, where small terms would vanish."""
    if dtype is None:
        return column
    return tuple(None if grad is None else grad.to(torch.promote_types(grad.dtype, dtype)) for grad in column)
