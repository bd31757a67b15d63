"""``FSDPModule``: the methods of fully sharded modules, for settings and control between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ....comm.map_ranks import communicator_of
from ....errors import DTensorError, UnsupportedOperationError
from ....mesh.create_mesh import copy_with_new_group
from ....state.version_counters import take_snapshot
from ..settings.custom_collectives import (
    AllGather,
    GroupMemoryAllGather,
    GroupMemoryReduceScatter,
    ReduceScatter,
    allocating_backend,
)
from ..settings.dp_modes import MeshAxes
from .gradients.grad_accumulation import clear_pending
from .parameters.partial_reshard import ReshardGroup
from .unit import FSDPUnit, unit_of

if TYPE_CHECKING:  # a checker then knows that each object with these methods is a module too
    _Module = nn.Module
else:
    _Module = object


class FSDPModule(_Module):
    """Mixin of fully sharded modules, which ``fully_shard`` adds.

    Methods without ``recurse`` concern this module's own unit.

    Forward gathers each unit's parameters once, and backward again if they were resharded. Backward reduces each unit's
    gradients once. ``.grad`` does not show gradients of passes under ``set_requires_gradient_sync(False)`` or
    ``set_requires_all_reduce(False)``: see :meth:`get_pending_gradients`.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
    >>> model.unshard()
    >>> model.weight.shape, isinstance(model, FSDPModule)
    (torch.Size([4, 3]), True)
    >>> model.reshard()
    >>> model.weight.placements
    (Shard(dim=0),)

    Raises:
        ValueError: a method is called on a module that is not a unit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the module's original class if there are arguments: slices of a ``Sequential`` are not units."""
        if not args and not kwargs:  # copying and unpickling
            return super().__new__(cls)
        own = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)  # Python does not: it is no instance of cls
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``to``, ``double`` and the like to the sharded parameters, and keep shared weights shared."""
        if (unit := unit_of(self)) is not None:
            unit.restore_parameters()
        made = super()._apply(fn, recurse)
        if unit is not None:
            unit.tie_parameters()
        return made

    def _get_fsdp_state(self) -> UnitState | None:
        """Return ``fully_shard.state(self)``, under the name that programs for torch use."""
        return state_of(self)

    # --- memory ------------------------------------------------------------------------------------------------------
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit now; with ``async_op`` the returned handle's ``wait()`` finishes it.

        Values that are written to them in place (not through ``.data``) are copied to the sharded parameters by
        :meth:`reshard` or the next pass.
        """
        unit = _unit_or_raise(self)
        unit.start_unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this unit."""
        unit = _unit_or_raise(self)
        unit.restore_parameters()
        unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward and gather again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for unit in units_of(self, recurse):
            unit.keep_after_forward = not reshard_after_forward
            for group in unit.groups:
                group.reshard_group = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after backward. False saves an all-gather if gradients are accumulated over several passes."""
        for unit in units_of(self, recurse):
            unit.keep_after_backward = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards this unit: the gradient of an embedding, for example, does not need its weight.

        If not, a backward that does need a parameter raises a DTensorError instead of reading freed memory.
        """
        _unit_or_raise(self).unshards_in_backward = unshard_in_backward

    # --- pending gradients -------------------------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad``, as any module does, and the pending gradients. No communication.

        ``optimizer.zero_grad()`` clears both too.
        """
        super().zero_grad(set_to_none)
        clear_pending({id(parameter) for parameter in self.parameters()}, set_to_none)

    def get_pending_gradients(self, *, recurse: bool = True) -> dict[nn.Parameter, tuple[Tensor | None, Tensor | None]]:
        """Return by parameter its pending gradients: this rank's unsharded gradient, and its shard that is not all-reduced.

        Either is None if there is none. No communication. The tensors are those that wait: in-place writes to them count.
        With tensor parallelism the first is a DTensor on its mesh; with all ranks in one process both are ``PerRank``.

        >>> import torch, dtensor as dt
        >>> from dtensor.parallel import fully_shard
        >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        >>> model = fully_shard(torch.nn.Linear(3, 1, bias=False), mesh=mesh)
        >>> model.set_requires_gradient_sync(False)
        >>> batch = dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])
        >>> model(batch).sum().backward()
        >>> model.weight.grad, [unreduced.shards for unreduced, _ in model.get_pending_gradients().values()]
        (None, [(tensor([[1., 1., 1.]]), tensor([[0., 0., 0.]]))])
        >>> model.synchronize_gradients()
        >>> model.weight.grad.full_tensor(), model.get_pending_gradients()
        (tensor([[0.5000, 0.5000, 0.5000]]), {})
        """
        return {
            p: pending for unit in units_of(self, recurse) for p, pending in unit.grad_accumulation.pending_gradients().items()
        }

    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduce the pending gradients now, without another backward, and add them to ``.grad``; all ranks call it.

        One reduction for each unit with pending gradients. With ``replicate``, and if ranks may not have reached the same
        units, one for each unit.
        """
        for unit in units_of(self, recurse):
            if unit.schedule is not None:
                unit.grad_accumulation.reduce_pending(unit.schedule)

    # --- when it communicates ----------------------------------------------------------------------------------------
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients.

        If not, unsharded gradients are accumulated, in the wider of ``reduce_dtype`` and their own dtype, until the next
        backward that does, or :meth:`synchronize_gradients`.
        """
        for unit in units_of(self, recurse):
            unit.grad_accumulation.requires_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward, on a 2-d mesh, also all-reduces the reduce-scattered gradients over the replicas.

        If not, this rank's shard is kept until the next backward that does: gradients accumulate in the memory of a shard,
        and cross replicas once.
        """
        for unit in units_of(self, recurse):
            for group in unit.groups:
                group.settings.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: every backward waits for its own reductions."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the units to unshard when this unit's forward starts; default the unit that ran next in the pass before."""
        _unit_or_raise(self).forward_prefetch = [_unit_or_raise(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the units to unshard when this unit's backward starts; default the unit that ran before it."""
        _unit_or_raise(self).backward_prefetch = [_unit_or_raise(module) for module in modules]

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' gradients may be in flight while the next unit's backward runs; default 1.

        A larger number hides slower reductions, and costs the memory of their buffers.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is a number of units, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers is at least 1, got {max_input_buffers}")
        for unit in units_of(self, recurse):
            unit.max_reductions_in_flight = max_input_buffers

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward wait for ``event``, once: for an optimizer that ran on another stream.

        An all-gather starts after the work of its own stream, so without other streams (and on CPU) there is nothing to wait
        for.
        """
        if not hasattr(event, "wait"):
            raise TypeError(f"set_post_optim_event takes a torch.Event, got {event!r}")
        _unit_or_raise(self).post_optim_event = event

    def reset_iter_state(self) -> None:
        """Drop the state of a forward or backward that raised, including gradients that wait for a later backward.

        Call it on all ranks, on the outermost unit. Collectives that only some ranks had issued cannot be undone.

        Raises:
            RuntimeError: this unit is inside another one.
        """
        unit = _unit_or_raise(self)
        if unit.schedule is not None and unit.schedule.units[0] is not unit:
            raise RuntimeError("reset_iter_state must be called on the outermost unit, the module that is called first")
        if unit.schedule is not None:
            unit.schedule.reset()

    # --- what the reductions compute ---------------------------------------------------------------------------------
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of data-parallel ranks.

        If the batch is a DTensor, the loss is global, and nothing is divided in any case.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a number above 0, got {factor!r}")
        for group in _unit_or_raise(self).groups:
            group.settings.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`; deprecated name."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated; use set_gradient_divide_factor", FutureWarning, stacklevel=2
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only sum, never average, and gradients are divided separately. Some hardware sums faster."""
        for group in _unit_or_raise(self).groups:
            group.settings.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether ranks may reach different units in backward, which would otherwise deadlock.

        Gradients are then reduced at the end of backward, in one order, and a rank takes part without gradients for units
        that it did not reach. Until then parameters stay unsharded, and gradients too. A parameter that no rank used keeps
        its ``.grad``. Unused parameters in a unit that a rank reaches need no setting: flags are sent with the gradients.
        """
        for unit in units_of(self, recurse):
            unit.grad_accumulation.defers_to_end = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object], *, stream: Any = None) -> None:
        """Have ``hook(gradients)`` called on this unit's flat reduced gradients, which it may write, before accumulation.

        It is called after the reduce-scatter on a 1-d mesh, and after the all-reduce over replicas on a 2-d one, once for
        each dtype. With ``set_force_sum_reduction_for_comms`` it sees sums that are not divided yet. With all ranks in one
        process it gets a ``PerRank``.

        Args:
            stream: stream to run it on; on a 1-d mesh only.
        """
        groups = _unit_or_raise(self).groups
        if stream is not None and any(group.axes.shard and group.axes.replicate for group in groups):
            raise ValueError("stream= needs a mesh of one dim; on two mesh dims the hook runs on the stream of the all-reduce")
        for group in groups:
            group.settings.hook, group.settings.hook_stream = hook, stream

    # --- communication -----------------------------------------------------------------------------------------------
    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters by ``comm(output_tensor, input_tensor, group, async_op)``.

        Buffers are allocated by ``comm.allocate``. Tensors are flat, in the dtype in which parameters are gathered (bytes if
        there are several). With all ranks in one process they are ``PerRank`` and ``group`` is None.
        """
        for group in _unit_or_raise(self).groups:
            group.settings.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients by ``comm(output_tensor, input_tensor, group, op, async_op)``.

        Buffers are allocated by ``comm.allocate``. Each rank's gradients are followed by flags, which must be reduced in the
        same way.
        """
        for group in _unit_or_raise(self).groups:
            group.settings.reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether buffers come from the backend's own allocator.

        Backends without one (gloo, ranks in one process) give a warning, and nothing changes.

        Raises:
            DTensorError: a custom all-gather or reduce-scatter is set, which has memory of its own.
        """
        for group in _unit_or_raise(self).groups:
            settings = group.settings
            backend_types = (None | GroupMemoryAllGather, None | GroupMemoryReduceScatter)
            if not isinstance(settings.all_gather, backend_types[0]) or not isinstance(settings.reduce_scatter, backend_types[1]):
                raise DTensorError("a custom all-gather or reduce-scatter allocates its own memory; remove it first")
            backend = allocating_backend(group.axes) if enable else None
            if enable and backend is None:
                warnings.warn("this backend does not provide memory for buffers, so they stay as they are", stacklevel=2)
            settings.all_gather = None if backend is None else GroupMemoryAllGather(backend)
            settings.reduce_scatter = None if backend is None else GroupMemoryReduceScatter(backend)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise an error: symmetric memory is not supported.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(f"buffers in symmetric memory ({backend}) are not supported; remove this call")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Set whether reductions use a process group of their own, so that they do not wait for all-gathers.

        All ranks call it. With all ranks in one process there are no groups, and nothing changes.
        """
        comms: dict[Any, Any] = {}
        for group in (group for unit in units_of(self, recurse) for group in unit.groups):
            axes, settings = group.axes, group.settings
            if not enable or axes.mesh.kind != "process_group":
                settings.reduce_scatter_comm = None
                continue
            key = axes.mesh, axes.shard
            if key not in comms:
                comms[key] = settings.reduce_scatter_comm or communicator_of(copy_with_new_group(axes.mesh, axes.shard))
            settings.reduce_scatter_comm = comms[key]


class UnshardHandle:
    """Handle of an all-gather in flight.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
    >>> handle = model.unshard(async_op=True)
    >>> handle.wait()  # for the all-gather
    >>> model.weight.shape
    torch.Size([4, 3])

    ``wait`` raises the errors of the collective.
    """

    def __init__(self, unit: FSDPUnit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather, and put the unsharded parameters into the modules."""
        self._unit.unshard()
        self._unit.put_unsharded_values()
        for fsdp_param in self._unit.fsdp_params():
            fsdp_param.unshard_version = take_snapshot(fsdp_param.module_value)


class UnitState(NamedTuple):
    """Current state of an FSDP unit, as returned by ``fully_shard.state(module)``.

    Attributes:
        modules: the modules of the unit.
        parameters: the DTensors that it gathers and reduces, also while the modules have unsharded tensors.
        gathered: True if the parameters are unsharded now.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    gathered: bool


def state_of(module: nn.Module) -> UnitState | None:
    """Return the state of the unit of ``module``, None if it has none. No communication."""
    if (unit := unit_of(module)) is None:
        return None
    parameters = tuple(x.parameter for x in unit.fsdp_params())
    return UnitState(tuple(unit.modules), parameters, all(group.unsharded.is_filled for group in unit.groups))


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Do nothing but check the arguments: outermost units have no streams of their own to share.

    Raises:
        ValueError: one of ``modules`` is not fully sharded.

    No communication.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> share_comm_ctx([fully_shard(torch.nn.Linear(3, 4), mesh=mesh) for _ in range(2)])
    """
    for module in modules:
        _unit_or_raise(module)


def make_reshard_group(axes: MeshAxes, reshard_after_forward: Any) -> ReshardGroup | None:
    """Return the group that shares unsharded values between forward and backward.

    Return None if ``reshard_after_forward`` is not a number, or means no ranks or all.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool) or not axes.shard:
        return None
    reshard_group = ReshardGroup(axes, reshard_after_forward)
    return reshard_group if 1 < reshard_group.size < axes.mesh.size_of(axes.shard) else None


def _unit_or_raise(module: Any) -> FSDPUnit:
    """Return the unit of ``module``, or raise ValueError."""
    if (unit := unit_of(module)) is None:
        raise ValueError(f"{type(module).__name__} is not a unit of data parallelism; call fully_shard on it first")
    return unit


def units_of(module: Any, recurse: bool) -> list[FSDPUnit]:
    """Return the unit of ``module`` and, with ``recurse``, those of all modules below it."""
    units = (unit_of(submodule) for submodule in (module.modules() if recurse else [module]))
    return list(dict.fromkeys(unit for unit in units if unit is not None))
