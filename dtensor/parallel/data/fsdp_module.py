"""``FSDPModule``: what a fully sharded module can be told between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...comm import communicator_of
from ...dispatch.version_counters import stamp
from ...errors import DTensorError, UnsupportedOperationError
from ...mesh.create import with_groups_of_its_own
from .custom_collectives import AllGather, GroupMemoryAllGather, GroupMemoryReduceScatter, ReduceScatter, allocating_backend
from .dp_modes import Axes
from .partial_reshard import Neighbours
from .pending_gradients import WaitingGradients, units_of
from .unit import Unit, unit_of


class FSDPModule(WaitingGradients):
    """What a fully sharded module can do besides what it could before.

    Methods without ``recurse`` are about this module's own unit.

    A forward gathers each unit's parameters once (and the backward again, where they were given back), a backward reduces its
    gradients once: one all-gather and one reduce-scatter per unit. Nobody makes one: ``fully_shard`` does.

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
        ValueError: a method is asked of a module that is no unit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the module's own class where it is made of something: parts of a sequence, which indexing it makes, are no units."""
        if not args and not kwargs:  # copying and unpickling
            return super().__new__(cls)
        own = cls.__mro__[cls.__mro__.index(WaitingGradients) + 1]
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)  # Python does not: it is no instance of cls
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``to`` and the like, of the sharded parameters; weights that modules have in common stay one."""
        if (unit := unit_of(self)) is not None:  # type: ignore[arg-type]  # it is a module too
            unit.put_parameters()
        made = super()._apply(fn, recurse)  # type: ignore[misc]  # of the module's own class
        if unit is not None:
            unit.tie()
        return made

    def _get_fsdp_state(self) -> UnitState | None:
        """``fully_shard.state(self)``, under the name that programs written for torch ask for."""
        return state_of(self)  # type: ignore[arg-type]  # it is a module too

    # --- memory ------------------------------------------------------------------------------------------------------
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit now; with ``async_op`` the handle's ``wait()`` ends it. Values that are written to
        them in place (not through ``.data``) are written to the sharded parameters too, by :meth:`reshard` or the next pass.
        """
        unit = _unit(self)
        unit.start_gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters of this unit."""
        unit = _unit(self)
        unit.put_parameters()
        unit.free()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to free after forward and gather again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for unit in units_of(self, recurse):
            unit.keep_after_forward = not reshard_after_forward
            for group in unit.groups:
                group.neighbours = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to free after backward; not doing so saves a gather where gradients are accumulated over several passes."""
        for unit in units_of(self, recurse):
            unit.keep_after_backward = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit's parameters: an embedding's gradient, for one, does not need its weight.

        If not, a backward that does need one raises a DTensorError instead of computing with freed memory.
        """
        _unit(self).gathers_in_backward = unshard_in_backward

    # --- when it communicates ----------------------------------------------------------------------------------------
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not they are held, unsharded, in the wider of ``reduce_dtype`` and the
        dtype they come in, and join those of the next backward that does, or of :meth:`synchronize_gradients`.
        """
        for unit in units_of(self, recurse):
            unit.unreduced.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward, on a 2-d mesh, also sums over the replicas what it has reduce-scattered. If not this rank's part is
        held, and joins that of the next backward that does: gradients accumulate in a part's memory, and cross replicas once.
        """
        for unit in units_of(self, recurse):
            for group in unit.groups:
                group.settings.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: every backward waits for its own reductions, so none has to be told that it is the last."""

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose gather starts when this one's forward does; default the one that ran next in the pass before."""
        _unit(self).before_in_forward = [_unit(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Units whose gather starts when this one's backward does; default the one that ran before it."""
        _unit(self).before_in_backward = [_unit(module) for module in modules]

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units' gradients may be on their way while the next unit's backward runs; default 1. More hides slower
        reductions, for the memory of the buffers.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is a number of units, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers is at least 1, got {max_input_buffers}")
        for unit in units_of(self, recurse):
            unit.reductions_under_way = max_input_buffers

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward wait for ``event``, once: for an optimizer that ran on another stream. (A gather starts behind
        what its own stream has, so without other streams there is nothing to wait for; on CPU there never is.)
        """
        if not hasattr(event, "wait"):
            raise TypeError(f"set_post_optim_event takes a torch.Event, got {event!r}")
        _unit(self).awaited = event

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: what was under way is dropped, gradients held for a later backward among it.

        Call it on all ranks, on the outermost unit. Collectives that only some ranks had issued cannot be taken back.

        Raises:
            RuntimeError: this unit is inside another one.
        """
        unit = _unit(self)
        if unit.schedule is not None and unit.schedule.units[0] is not unit:
            raise RuntimeError("reset_iter_state must be called on the outermost unit, the module that is called first")
        if unit.schedule is not None:
            unit.schedule.reset()

    # --- what the reductions compute ---------------------------------------------------------------------------------
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of data-parallel ranks.

        Where the batch is a DTensor, and the loss so a global one, nothing is divided, with or without this.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a number above 0, got {factor!r}")
        for group in _unit(self).groups:
            group.settings.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated; use set_gradient_divide_factor", FutureWarning, stacklevel=2
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives may only sum, never average: gradients are divided afterwards. Some hardware sums faster."""
        for group in _unit(self).groups:
            group.settings.sums_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """For ranks that do not reach the same units in backward (they would wait for each other for ever): gradients are reduced
        when backward has ended, in one order, and a rank takes part with nothing for what it did not reach. Until then
        parameters stay gathered and gradients whole. What no rank used keeps its ``.grad``.

        (Parameters that a rank does not use, in a unit that it reaches, need nothing: flags travel with the gradients.)
        """
        for unit in units_of(self, recurse):
            unit.unreduced.defers = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object], *, stream: Any = None) -> None:
        """``hook(gradients)`` runs on this unit's reduced gradients, flat, before they are accumulated, and may change them in
        place: after the reduce-scatter on a 1-d mesh, after the all-reduce over replicas on a 2-d one; once for each dtype.

        With ``set_force_sum_reduction_for_comms`` it sees sums that are not divided yet. With all ranks in one process it gets
        a ``PerRank``.

        Args:
            stream: to run it on; on a 1-d mesh only.
        """
        groups = _unit(self).groups
        if stream is not None and any(group.axes.shard and group.axes.replicate for group in groups):
            raise ValueError("stream= needs a mesh of one dim; on two mesh dims the hook runs on the stream of the all-reduce")
        for group in groups:
            group.settings.hook, group.settings.hook_stream = hook, stream

    # --- who communicates --------------------------------------------------------------------------------------------
    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters by ``comm(output_tensor, input_tensor, group, async_op)``, in memory of its ``allocate``.

        Tensors are flat, in the dtype that parameters are gathered in (bytes where there are several). With all ranks in one
        process they are ``PerRank`` and ``group`` is None.
        """
        for group in _unit(self).groups:
            group.settings.gathers = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients by ``comm(output_tensor, input_tensor, group, op, async_op)``, in memory of
        ``comm.allocate``. Behind each rank's gradients stand flags, which are to be reduced alike.
        """
        for group in _unit(self).groups:
            group.settings.scatters = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers come from the backend's own allocator. Backends without one (gloo, ranks in one process) are warned of:
        nothing changes there.

        Raises:
            DTensorError: a custom all-gather or reduce-scatter is set, which has memory of its own.
        """
        for group in _unit(self).groups:
            settings = group.settings
            ours = (None | GroupMemoryAllGather, None | GroupMemoryReduceScatter)
            if not isinstance(settings.gathers, ours[0]) or not isinstance(settings.scatters, ours[1]):
                raise DTensorError("a custom all-gather or reduce-scatter allocates its own memory; remove it first")
            backend = allocating_backend(group.axes) if enable else None
            if enable and backend is None:
                warnings.warn("this backend does not provide memory for buffers, so they stay as they are", stacklevel=2)
            settings.gathers = None if backend is None else GroupMemoryAllGather(backend)
            settings.scatters = None if backend is None else GroupMemoryReduceScatter(backend)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not there: symmetric memory.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(f"buffers in symmetric memory ({backend}) are not supported; remove this call")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reductions have a process group of their own, so that they need not wait for gathers. All ranks call it. With
        all ranks in one process there are no groups, and nothing changes.
        """
        made: dict[Any, Any] = {}
        for group in (group for unit in units_of(self, recurse) for group in unit.groups):
            axes, settings = group.axes, group.settings
            if not enable or axes.mesh.kind != "process_group":
                settings.scatter_comm = None
                continue
            key = axes.mesh, axes.shard
            if key not in made:
                made[key] = settings.scatter_comm or communicator_of(with_groups_of_its_own(axes.mesh, axes.shard))
            settings.scatter_comm = made[key]


class UnshardHandle:
    """A gather under way.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
    >>> handle = model.unshard(async_op=True)
    >>> handle.wait()  # for the all-gather
    >>> model.weight.shape
    torch.Size([4, 3])

    ``wait`` raises what the collective does.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """The parameters are whole, and stand in the module."""
        self._unit.gather()
        self._unit.put_values()
        for m in (m for group in self._unit.groups for m in group.managed):
            m.unsharded = stamp(m.placed)


class UnitState(NamedTuple):
    """What a unit of data parallelism is now; ``fully_shard.state(module)`` gives it.

    Attributes:
        modules: that make it up.
        parameters: that it gathers and reduces: DTensors, also while whole tensors stand in their places.
        gathered: they are whole here.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    gathered: bool


def state_of(module: nn.Module) -> UnitState | None:
    """The state of the unit that a module makes up; None: it is none. No communication."""
    if (unit := unit_of(module)) is None:
        return None
    parameters = tuple(m.parameter for group in unit.groups for m in group.managed)
    return UnitState(tuple(unit.modules), parameters, all(group.whole.gathered for group in unit.groups))


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Nothing to share: outermost units have no streams of their own here.

    Raises:
        ValueError: one of ``modules`` is not fully sharded.

    No communication.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> share_comm_ctx([fully_shard(torch.nn.Linear(3, 4), mesh=mesh) for _ in range(2)])
    """
    for module in modules:
        _unit(module)


def neighbours_of(axes: Axes, reshard_after_forward: Any) -> Neighbours | None:
    """The ranks that keep parts between forward and backward, if it is a number that means some."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool) or not axes.shard:
        return None
    made = Neighbours(axes, reshard_after_forward)
    return made if 1 < made.size < axes.mesh.size_of(axes.shard) else None


def _unit(module: Any) -> Unit:
    if (found := unit_of(module)) is None:
        raise ValueError(f"{type(module).__name__} is not a unit of data parallelism; call fully_shard on it first")
    return found
