"""FSDP unit: one or several modules with parameters that are unsharded before the modules run and resharded after.

The file follows a pass in order: forward, unshard and reshard, backward, end of the pass. :class:`UnshardedParams` is the
autograd node in between: its forward returns the unsharded values, its backward gets their gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ....base.torch_internals import engine_will_run, functorch_active, graph_task, keeps_graph
from ....comm import shards_of
from ....errors import DTensorError, UnsupportedOperationError
from ....mesh.device_mesh import DeviceMesh
from ....mesh.submesh import have_same_root
from ....placement import Partial
from ....ranks.per_rank_functorch import unwrap_functorch
from ....state.version_counters import VersionSnapshot
from ....tensor.autograd import redistribute_no_grad
from ....tensor.dtensor import DTensor
from ....tensor.modules.materialize import check_not_on_meta
from ..settings.dp_modes import MeshAxes
from ..settings.policy import MixedPrecisionPolicy
from .gradients.grad_accumulation import GradAccumulation
from .gradients.schedule import Schedule
from .parameters.buffers import ModuleBuffers
from .parameters.fsdp_param import FSDPParam
from .parameters.fsdp_param_init import UNIT_ATTRIBUTE
from .parameters.param_group import NO_GRAPH_TASK, Column, ParamGroup
from .unit_functorch import put_differentiable_values, wrap_ranks_as_one
from .unit_pass import (
    ForwardUse,
    UnitPass,
    UnshardedViews,
    clone_outputs,
    declare_outside_use,
    declare_partial_use,
    tensors_in,
    watch_saved_tensors,
)

_RUN_FIRST = 2**62  # autograd runs nodes with a higher sequence number first: as soon as all gradients of the node are there
_NUM_OTHER_INPUTS = 5  # inputs of UnshardedParams before the parameters
with torch.inference_mode(False), torch.enable_grad():
    ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
    _ANCHOR_NODE: Any = ANCHOR.view_as(ANCHOR).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # kept alive here


def unit_of(module: nn.Module) -> FSDPUnit | None:
    """Return the FSDP unit that ``module`` belongs to as one of its modules, else None."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


class FSDPUnit:
    """Unit of data parallelism: one or several modules and the parameter groups that they need.

    Attributes:
        modules: the modules with forward hooks; parameters are resharded after the last of them has run.
        groups: one parameter group for a fully sharded module, one for each bucket of a replicated one.
        grad_accumulation: gradients that are not reduced yet, and when they are reduced.
        keep_after_forward: do not reshard between forward and backward; None: True for the outermost unit only.
        keep_after_backward: do not reshard after backward.
        unshards_in_backward: backward needs the unsharded values.
        max_reductions_in_flight: number of units with gradients in flight before the oldest results are waited for.
        post_optim_event: an event that the next forward waits for.
        schedule: shared state of the model's units, made at the first forward.
        forward_prefetch, backward_prefetch: units to unshard ahead; None: by the order of the last pass.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        buffers: ModuleBuffers,
        axes: MeshAxes,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules, self.groups, self.buffers = list(modules), list(groups), buffers
        self.axes, self.policy = axes, policy
        self.grad_accumulation = GradAccumulation(self.groups, policy.reduce_dtype)
        self.keep_after_forward: bool | None = None
        self.keep_after_backward, self.unshards_in_backward = False, True
        self.max_reductions_in_flight = 1
        self.post_optim_event: Any = None
        self.schedule: Schedule | None = None
        self.forward_prefetch: list[FSDPUnit] | None = None
        self.backward_prefetch: list[FSDPUnit] | None = None
        self._pass = UnitPass()
        for module in self.modules:
            module.__dict__[UNIT_ATTRIBUTE] = self
            module.register_forward_pre_hook(_run_before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(_run_after_forward, always_call=True)
            module.register_state_dict_pre_hook(_restore_for_state_dict)
            module.register_load_state_dict_pre_hook(_restore_for_state_dict)
            module.register_load_state_dict_post_hook(_tie_after_load)
        declare_outside_use(self.groups, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, without unsharded values and the schedule: a copy starts between passes."""
        return self.__dict__ | {"_pass": UnitPass(), "schedule": None, "post_optim_event": None}

    def _guarded_children(self) -> list[Any]:
        """Return the settings and the pending gradients, which ``capture`` guards."""
        own = self.keep_after_forward, self.keep_after_backward, self.unshards_in_backward, self.post_optim_event
        prefetched = [unit for units in (self.forward_prefetch, self.backward_prefetch) for unit in (units or ())]
        settings = [getattr(group.settings, name) for group in self.groups for name in group.settings.__slots__]
        grads = self.grad_accumulation
        accumulation = grads.requires_sync, grads.in_group_order, grads.defers_to_end
        reshard_groups = [group.reshard_group for group in self.groups]
        pending = [held for group in self.groups for held in (group.accumulated_grads, group.scattered_grads)]
        return [*own, self.max_reductions_in_flight, *prefetched, *reshard_groups, *settings, *accumulation, *pending]

    def fsdp_params(self) -> list[FSDPParam]:
        """Return the parameters of all groups."""
        return [fsdp_param for group in self.groups for fsdp_param in group.fsdp_params]

    def tie_parameters(self) -> None:
        """Make weights that several modules share one parameter object again."""
        for fsdp_param in self.fsdp_params():
            fsdp_param.tie_locations()

    def _get_or_make_schedule(self) -> Schedule:
        """Return the schedule of the model's units; the outermost unit makes it at the first call."""
        if self.schedule is None:
            below = (unit_of(submodule) for module in self.modules for submodule in module.modules())
            units = list(dict.fromkeys(unit for unit in below if unit is not None))
            with_values = [unit for unit in units if unit.axes.mesh.device_type != "meta"]
            locations = {(id(at), name) for unit in with_values for x in unit.fsdp_params() for at, name in x.locations}
            check_not_on_meta(self.modules, locations)
            schedule = Schedule(units, self.axes.mesh)
            for unit in units:
                unit.schedule = schedule
        return self.schedule  # type: ignore[return-value]  # set for this unit by the loop

    # --- forward -----------------------------------------------------------------------------------------------------
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard the parameters, put them into the modules, start prefetching, and return the inputs for forward."""
        schedule = self._get_or_make_schedule()
        is_outermost = schedule.depth == 0 and not schedule.is_in_backward()
        schedule.depth += 1  # before anything that may raise: after_forward is always called
        if is_outermost:
            inputs = map(unwrap_functorch, tensors_in((args, kwargs)))
            schedule.begin_forward([x for x in inputs if isinstance(x, DTensor) and self._is_over_dp_mesh(x)])
            if self.post_optim_event is not None:
                event, self.post_optim_event = self.post_optim_event, None
                event.wait()
        state, has_distributed_batch = self._pass, schedule.batch_mesh is not None
        if functorch_active():
            state.functorch_values = put_differentiable_values(self.groups, has_distributed_batch)
            self.buffers.put_local(has_distributed_batch)
            return self.policy.cast_inputs((args, kwargs))
        if not state.modules_to_run:
            state.modules_to_run = set(self.modules)
        is_recomputation = schedule.is_in_backward() and not is_outermost
        if not is_recomputation:
            schedule.record_forward(self)
        self.unshard()
        prefetched = self.forward_prefetch
        if prefetched is None:
            prefetched = [] if is_recomputation or (after := schedule.next_forward(self)) is None else [after]
        for unit in prefetched:
            unit.start_unshard()
        self.put_unsharded_values(schedule.batch_mesh)
        if torch.is_grad_enabled():
            release = functools.partial(self._release_uses, list(state.pending_uses))
            args, kwargs = state.input_grads.hook_inputs((args, kwargs), release)
        self.buffers.put_local(has_distributed_batch)
        if not self.unshards_in_backward and state.saved_tensor_hooks is None:
            state.saved_tensor_hooks = watch_saved_tensors(self.groups)
        return self.policy.cast_inputs((args, kwargs))

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the sharded parameters back, reshard, hook the outputs' gradients, and return the module's output."""
        schedule = self.schedule
        if schedule is None:  # before_forward has raised
            return output
        state, views = self._pass, self._pass.views
        schedule.depth -= 1
        if not schedule.depth and not schedule.is_in_backward():
            schedule.finish_forward()
        if functorch_active():
            state.functorch_values.close()
            self.buffers.restore_dtensors()
            output = self.policy.cast_output(output)
            return wrap_ranks_as_one(output) if not schedule.depth else output
        state.close_saved_tensor_hooks()
        state.modules_to_run.discard(module)
        output, tensors = clone_outputs(self.policy.cast_output(output), self.groups)
        if schedule.is_in_backward():  # recomputation: backward needs the values next
            return output
        self.buffers.restore_dtensors()
        self.restore_parameters()
        is_hooked = True
        if torch.is_grad_enabled():
            is_hooked = self._hook_outputs(tensors, views)
        else:
            views.drop_unrecorded()
        if not state.modules_to_run and is_hooked:
            self._reshard_after_forward()
        return output

    def _is_over_dp_mesh(self, x: DTensor) -> bool:
        """Return True if the mesh of ``x`` contains all data-parallel mesh dims."""
        mesh = x.device_mesh
        return have_same_root(mesh, self.axes.mesh) and set(self.axes.mesh._dims) <= set(mesh._dims)

    def _hook_outputs(self, outputs: Sequence[Tensor], views: UnshardedViews) -> bool:
        """Register :meth:`before_backward` as a gradient hook of the outputs; return False if backward would never call it.

        Return False if backward needs the values and no output has a gradient to call it.
        """
        uses = [use for use, _ in views.values() if use is not None]
        shards = [shard for x in outputs if x.requires_grad for shard in shards_of(x)]
        for shard in shards:
            # an unsharded value itself: a hook with the views would keep their own node alive
            is_own_value = getattr(shard.grad_fn, "fsdp_unit", None) is self
            shard.register_hook(functools.partial(self.before_backward, uses, UnshardedViews() if is_own_value else views))
        return bool(shards) or not uses

    def _reshard_after_forward(self) -> None:
        """Free the unsharded parameters after forward, or keep them or a part of them for backward, as the settings say."""
        if self.grad_accumulation.defers_to_end and torch.is_grad_enabled():
            keeps_values = True  # ranks may not unshard in the same order in backward
        elif self.keep_after_forward is None:
            keeps_values = self._get_or_make_schedule().depth == 0 and torch.is_grad_enabled()
        else:
            keeps_values = self.keep_after_forward
        used = [(x, x.unsharded.values, x.unsharded.storage) for x in self.groups if x.is_used_by_program()]
        for group in self.groups:
            if not group.live_uses and group.reshard_group is not None and not self.grad_accumulation.defers_to_end:
                group.reshard_to_group()
            elif not group.live_uses and not keeps_values:
                group.reshard()
        for group, values, storage in used:
            group.check_not_registered(values, storage)

    # --- unshard and reshard -----------------------------------------------------------------------------------------
    def start_unshard(self) -> None:
        """Start the all-gathers of all parameter groups."""
        for group in self.groups:
            group.start_unshard()

    def unshard(self, versions: Mapping[ParamGroup, VersionSnapshot] | None = None) -> None:
        """Gather the parameters of all groups. ``versions``: snapshots of groups that the caller has refreshed already."""
        for group in self.groups:
            group.unshard(None if versions is None else versions.get(group))

    def reshard(self) -> None:
        """Free the unsharded parameters of all groups that no running backward needs."""
        self._pass.views.drop_unrecorded()
        for group in self.groups:
            if not group.live_uses:
                group.reshard()

    def put_unsharded_values(self, batch_mesh: DeviceMesh | None = None) -> None:
        """Put the unsharded values into the modules: those that this pass has already, or new ones with an autograd node."""
        views, finished_views = self._pass.views, self._pass.finished_views() or UnshardedViews()
        for k, group in enumerate(self.groups):
            view = views.get(k) or finished_views.get(k)
            if view is None or (torch.is_grad_enabled() and view[0] is None):
                view = views[k] = self._make_view(group, batch_mesh)
                for value in view[1]:
                    value._is_param = True  # for isinstance(value, nn.Parameter) in forward
            group.has_values_in_modules = True
            for fsdp_param, value in zip(group.fsdp_params, view[1], strict=True):
                fsdp_param.put_value(value)

    def _make_view(self, group: ParamGroup, batch_mesh: DeviceMesh | None) -> tuple[ForwardUse | None, list[Any]]:
        """Return the unsharded values of a group, and the :class:`ForwardUse` of their autograd node; None without one."""
        if torch.is_grad_enabled():
            group.unsharded.is_recorded = True
        if not torch.is_grad_enabled() or not any(x.parameter.requires_grad for x in group.fsdp_params):
            return None, group.regroup_values(group.flat_values(batch_mesh), batch_mesh)
        use = ForwardUse(group, group.unsharded.version, self._pass.input_grads)
        self.grad_accumulation.has_recorded_use = True
        self._pass.pending_uses.add(use)
        parameters = [x.parameter for x in group.fsdp_params]
        flat = UnshardedParams.apply(ANCHOR, group, self, use, batch_mesh, *parameters)
        group.unsharded.saved_aliases.add(flat)
        next(x.grad_fn for x in flat if x.grad_fn is not None)._set_sequence_nr(_RUN_FIRST)
        values = group.regroup_values(flat, batch_mesh)
        if batch_mesh is not None:
            declare_partial_use(values, self._get_or_make_schedule().batch_dims & set(group.axes.mesh._dims))
        return use, values

    def restore_parameters(self) -> None:
        """Put the sharded parameters into the modules again."""
        for group in self.groups:
            group.restore_parameters()
        declare_outside_use(self.groups, self.schedule)

    # --- backward ----------------------------------------------------------------------------------------------------
    def before_backward(self, uses: Sequence[ForwardUse], views: UnshardedViews, _: Tensor) -> None:
        """Unshard the parameters that forward used, as a gradient hook of the module's outputs, and prefetch the next unit."""
        schedule = self._get_or_make_schedule()
        self._pass.views = views
        schedule.queue_end()
        versions = {}
        for use in uses:
            versions[use.group] = use.group.check_unchanged(use.version)
            if use not in use.group.live_uses:
                use.group.live_uses[use], use.has_run = graph_task(), False
        if self.unshards_in_backward:
            self.unshard(versions)
            with torch.enable_grad():  # torch.utils.checkpoint may recompute parts of forward
                self.put_unsharded_values(schedule.batch_mesh)
        self.buffers.put_local(schedule.batch_mesh is not None)
        prefetched = self.backward_prefetch
        if prefetched is None:
            after = schedule.next_backward(self)
            prefetched = [after] if after is not None and after._pass.pending_uses and after.unshards_in_backward else []
        for unit in prefetched:
            unit.start_unshard()

    def receive_gradients(
        self,
        group: ParamGroup,
        use: ForwardUse,
        gradients: dict[int, Column],
        batch_mesh: DeviceMesh | None,
        are_requested: bool,
    ) -> dict[Tensor, Tensor]:
        """Reduce or accumulate the gradients of a use, and reshard the group if nothing else needs it.

        Args:
            gradients: unsharded gradients by parameter index.
            batch_mesh: gradients are addends of one global gradient over this mesh; None: each rank has its own loss.
            are_requested: autograd was asked for some gradients (``torch.autograd.grad``), which it gets from here.

        Returns:
            Reduced gradients by parameter if ``are_requested``, else an empty dict.
        """
        schedule = self._get_or_make_schedule()
        schedule.queue_end()
        group.num_pending_uses = max(0, group.num_pending_uses - 1)
        reduced: dict[Tensor, Tensor] = {}
        if are_requested:
            reduced = self.grad_accumulation.reduce_now(schedule, group, gradients, batch_mesh is None)
        else:
            self.grad_accumulation.add_gradients(schedule, group, gradients, batch_mesh is None)
        use.has_run = True
        use.is_complete = group.live_uses.get(use, NO_GRAPH_TASK) in (NO_GRAPH_TASK, graph_task())
        self._pass.pending_uses.discard(use)
        self._release_uses([use])
        return reduced

    def _release_uses(self, uses: Sequence[ForwardUse]) -> None:
        """Free the unsharded parameters of those uses that have run backward and that no recomputation needs."""
        for use in uses:
            group = use.group
            if not use.is_complete or use.input_grads.num_pending:
                continue
            group.live_uses.pop(use, None)
            if not group.live_uses:
                group.restore_parameters()
                if not self.keep_after_backward:
                    group.reshard()

    # --- passes: called by the schedule for all units ----------------------------------------------------------------
    def begin_forward(self) -> None:
        """Start a forward pass of this unit with an empty :class:`UnitPass`."""
        self._pass = UnitPass(modules_to_run=self._pass.modules_to_run)
        self.grad_accumulation.has_recorded_use = False

    def finish_forward(self) -> None:
        """Finish the forward pass: keep only a weak reference to the unsharded values, which output hooks now own."""
        state = self._pass
        state.views, state.finished_views = UnshardedViews(), weakref.ref(state.views)

    def flush_gradients(self) -> None:
        """Start the reductions of this unit's gradients that remain at the end of backward."""
        self.grad_accumulation.flush(self._get_or_make_schedule())

    def finish_backward(self) -> None:
        """Restore and reshard the parameters after backward; uses of a retained graph that have not run stay recorded."""
        self._pass.drop_views()
        self._pass.modules_to_run = set()
        retains_graph = graph_task() != -1 and keeps_graph()
        self.buffers.restore_dtensors()
        for group in self.groups:
            group.live_uses = {
                use: NO_GRAPH_TASK
                for use, task in group.live_uses.items()
                if not use.has_run and (retains_graph or task == NO_GRAPH_TASK)
            }
            group.restore_parameters()
            defers = retains_graph and self.grad_accumulation.defers_to_end
            if not (self.keep_after_backward or group.live_uses or defers):
                group.reshard()

    def reset_pass(self) -> None:
        """Restore the sharded parameters and drop all gradients and uses, after a pass that raised."""
        self._pass.close_saved_tensor_hooks()
        self.buffers.restore_dtensors(synchronize=False)
        self.grad_accumulation.drop_all()
        self._pass.pending_uses = set()
        for group in self.groups:
            group.live_uses.clear()
            group.reshard()
        self.finish_backward()


# --- module hooks ----------------------------------------------------------------------------------------------------
def _run_before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    return None if unit is None else unit.before_forward(module, args, kwargs)


def _run_after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    unit = unit_of(module)
    return output if unit is None else unit.after_forward(module, output)


def _restore_for_state_dict(module: nn.Module, *_: Any) -> None:
    """Put the sharded parameters into the modules before a state dict is saved or loaded, unless forward is running."""
    unit = unit_of(module)
    if unit is not None and (unit.schedule is None or not unit.schedule.depth):
        unit.restore_parameters()


def _tie_after_load(module: nn.Module, keys: Any) -> None:
    """Make weights that the unit's modules share one parameter again, after a state dict was loaded."""
    unit = unit_of(module)
    if unit is not None:
        unit.tie_parameters()


# --- autograd node ---------------------------------------------------------------------------------------------------
class UnshardedParams(torch.autograd.Function):
    """Autograd function from an anchor and the sharded parameters to the unsharded ones, as :meth:`ParamGroup.flat_values`.

    Its node runs when the gradients of *all* outputs are there, however often a module was called: they are reduced once. In a
    backward pass over the full graph it returns no gradients: they arrive in ``.grad`` later, so that reductions overlap the
    rest of backward. A pass that was asked for some gradients only (``torch.autograd.grad``, ``inputs=``) never reaches the
    anchor, for which no program can ask. Such a pass gets the reduced gradients from the node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: ParamGroup,
        unit: FSDPUnit,
        use: ForwardUse,
        batch_mesh: DeviceMesh | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the unsharded values of a group as results of an autograd node, which receives their gradients."""
        ctx.group, ctx.fsdp_unit, ctx.use, ctx.batch_mesh = group, unit, use, batch_mesh
        ctx.set_materialize_grads(False)
        ctx.trainable = [x.parameter.requires_grad for x in group.fsdp_params]
        flat, owners = group.flat_values(batch_mesh), group.owner_indices(batch_mesh)
        ctx.mark_non_differentiable(*(x for x, i in zip(flat, owners, strict=True) if not ctx.trainable[i]))
        return tuple(flat)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Pass the gradients of unsharded parameters to the FSDP unit, which reduces them; return those that are requested."""
        if not issubclass(type(ctx), BackwardCFunction):
            raise UnsupportedOperationError(
                "compiled autograd does not support parameters under fully_shard or replicate, because their "
                "gradients are reduced during a pass of the autograd engine; compile the model, and let autograd "
                "run its backward pass"
            )
        group: ParamGroup = ctx.group
        num_members = group.num_local_members
        by_param: list[list[Tensor | None]] = [[] for _ in group.fsdp_params]
        for grad, i in zip(grads, group.owner_indices(ctx.batch_mesh), strict=True):
            by_param[i].append(grad)
        columns = {
            i: tuple(own)
            if own[0].__class__ is Tensor and len(own) == num_members
            else _column_of(group, fsdp_param, own, ctx.batch_mesh)
            for i, (fsdp_param, own, trainable) in enumerate(zip(group.fsdp_params, by_param, ctx.trainable, strict=True))
            if trainable
        }
        are_requested = not engine_will_run(_ANCHOR_NODE)
        if not are_requested and any(grad is not None and grad.requires_grad for grad in grads):
            raise UnsupportedOperationError(
                "backward(create_graph=True) does not support parameters under fully_shard or replicate: their "
                "gradients are reduced after the pass and have no graph. Gradients of inputs have one: "
                "torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        reduced = ctx.fsdp_unit.receive_gradients(group, ctx.use, columns, ctx.batch_mesh, are_requested)
        returned = [reduced.get(x.parameter) for x in group.fsdp_params] if are_requested else [None] * len(group.fsdp_params)
        return *(None,) * _NUM_OTHER_INPUTS, *returned


def _column_of(group: ParamGroup, fsdp_param: FSDPParam, grads: Sequence[Tensor | None], batch_mesh: DeviceMesh | None) -> Column:
    """Return the unsharded gradients of one parameter, by local member, for the reduction over data-parallel ranks."""
    grad = grads[0]
    if not isinstance(grad, DTensor):
        return (None,) * group.num_local_members if grad is None and len(grads) == 1 else tuple(grads)
    if batch_mesh is not None:
        layout = group.layout_in_use(fsdp_param, batch_mesh)
        assert layout is not None
        dp_dims = {group.axes.mesh._dims[i] for i in group.axes.all_dims}
        pairs = zip(layout.placements, layout.mesh._dims, strict=True)
        placements = [Partial() if dims in dp_dims else placement for placement, dims in pairs]
    else:
        if fsdp_param.tp_layout is None:
            raise DTensorError(
                "a data-parallel parameter was used after its unit had ended: call the modules that are units, "
                "not their submodules directly"
            )
        placements = list(fsdp_param.tp_layout.placements)
    target = grad._layout.replace(placements=placements)
    return shards_of((grad if target is grad._layout else redistribute_no_grad(grad, target))._local)
