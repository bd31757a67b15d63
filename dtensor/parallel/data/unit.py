"""A unit of data parallelism: a module whose parameters are gathered before it runs and given back after."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...base.torch_internals import functorch_active, graph_stays, graph_task
from ...comm import shards_of
from ...mesh.device_mesh import DeviceMesh
from ...mesh.submesh import same_root
from ...ranks.functorch import seen
from ...tensor.dtensor import DTensor
from ...tensor.materialize import check_values
from .autograd_function import ANCHOR, Column, Gathered
from .buffers import Buffers
from .dp_modes import Axes
from .forward_uses import Pass, Use, Views, nothing_left, tensors_in, used_beside, used_for_parts
from .functorch import as_one_tensor, put_differentiable
from .grad_accumulation import Unreduced
from .param_group import LATER, Group
from .policy import MixedPrecisionPolicy
from .saved_tensors import outlasting, watched
from .schedule import Schedule
from .shared_params import follow_state_dicts

_AT_ONCE = 2**62  # autograd runs later nodes first; this one as soon as its gradients are there, as it does with leaves
_ATTRIBUTE = "_data_parallel_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose module this is."""
    return module.__dict__.get(_ATTRIBUTE)


class Unit:
    """One or several modules and the groups of parameters that they need.

    Attributes:
        modules: what is hooked; parameters are given back after the last of them has run.
        groups: one for a fully sharded module, one per bucket for a replicated one.
        keep_after_forward: do not free between forward and backward; None: as the outermost unit, yes, else no.
        gathers_in_backward: whether backward needs the gathered values.
        unreduced: gradients that have come, and when they are reduced.
        reductions_under_way: how many units' gradients may travel before their results are waited for.
        awaited: an event that the next forward waits for.
    """

    def __init__(
        self, modules: Sequence[nn.Module], groups: Sequence[Group], buffers: Buffers, axes: Axes, policy: MixedPrecisionPolicy
    ) -> None:
        self.modules, self.groups, self.buffers = list(modules), list(groups), buffers
        self.axes, self.policy = axes, policy
        self.unreduced = Unreduced(self.groups, policy.reduce_dtype)
        self.keep_after_forward: bool | None = None
        self.keep_after_backward, self.gathers_in_backward = False, True
        self.reductions_under_way = 1
        self.awaited: Any = None
        self._watch: Any = None  # over what forward saves, where backward shall not need the gathered values
        self.schedule: Schedule | None = None
        self.before_in_forward: list[Unit] | None = None  # explicit prefetching
        self.before_in_backward: list[Unit] | None = None
        self._to_run: set[nn.Module] = set()
        self._standing = ExitStack()  # parameters under transforms
        self._pass, self._expected = Pass(), set[Use]()  # this pass, and its uses whose gradients have not come
        self._views, self._left = Views(), nothing_left  # of this pass; and of one whose forward is over
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(_before, prepend=True, with_kwargs=True)
            module.register_forward_hook(_after, always_call=True)
            follow_state_dicts(module)
        used_beside(self.groups, None)

    # --- forward -------------------------------------------------------------------------------------------------
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Parameters whole and in place; inputs cast."""
        schedule = self._scheduled()
        outermost = schedule.depth == 0 and not schedule.in_backward()
        schedule.depth += 1  # first of all: :meth:`after_forward` is called whatever raises here
        if outermost:
            given = map(seen, tensors_in((args, kwargs)))
            schedule.begin([x for x in given if isinstance(x, DTensor) and self._spans(x)])
            if self.awaited is not None:
                event, self.awaited = self.awaited, None
                event.wait()
        if functorch_active():
            self._standing = put_differentiable(self.groups, schedule.distributed is not None)
            self.buffers.enter(schedule.distributed is not None)
            return self.policy.cast_inputs((args, kwargs))
        if not self._to_run:
            self._to_run = set(self.modules)
        forwards = outermost or not schedule.in_backward()
        if forwards:
            schedule.ran(self)
        self.gather()
        following = self.before_in_forward
        if following is None:
            following = [] if not forwards or (after := schedule.next_forward(self)) is None else [after]
        for unit in following:
            unit.start_gather()
        self.put_values(schedule.distributed)
        if torch.is_grad_enabled():
            then = functools.partial(self._release_all, list(self._expected))
            args, kwargs = self._pass.expect_inputs((args, kwargs), then)
        self.buffers.enter(schedule.distributed is not None)
        if not self.gathers_in_backward and self._watch is None:
            self._watch = watched(self.groups)
        return self.policy.cast_inputs((args, kwargs))

    def after_forward(self, module: nn.Module, output: Any) -> Any:
        """Sharded parameters in place again; gathered ones freed, to be gathered again when the gradient comes."""
        schedule = self.schedule
        if schedule is None:  # forward was refused
            return output
        schedule.depth, views = schedule.depth - 1, self._views
        if not schedule.depth and not schedule.in_backward():
            schedule.leave()
        if functorch_active():
            self._standing.close()
            self.buffers.leave()
            output = self.policy.cast_output(output)
            return as_one_tensor(output) if not schedule.depth else output
        self._end_watch()
        self._to_run.discard(module)
        output, tensors = outlasting(self.policy.cast_output(output), self.groups)
        if schedule.in_backward():  # a forward pass recomputed: backward needs the values next
            return output
        self.buffers.leave()
        self.put_parameters()
        returns = self._expect_gradients(tensors, views) if torch.is_grad_enabled() else True
        if not torch.is_grad_enabled():
            views.drop_unrecorded()
        if not self._to_run and returns:
            self._release_after_forward()
        return output

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _keeps(self) -> bool:
        if self.unreduced.defers and torch.is_grad_enabled():
            return True  # ranks may not gather in the same order in backward
        if self.keep_after_forward is None:
            return self._scheduled().depth == 0 and torch.is_grad_enabled()
        return self.keep_after_forward

    def _expect_gradients(self, outputs: Sequence[Tensor], views: Views) -> bool:
        """Gather again as soon as a gradient of one of these arrives. False: nothing would tell us."""
        uses = [use for use, _ in views.values() if use is not None]
        pieces = [piece for x in outputs if x.requires_grad for piece in shards_of(x)]
        for piece in pieces:
            given = getattr(piece.grad_fn, "receiver", None) is self  # a gathered value itself: its node would hold the views
            piece.register_hook(functools.partial(self.before_backward, uses, Views() if given else views))
        return bool(pieces) or not uses

    def places(self) -> list[tuple[nn.Module, str]]:
        """The modules and names where this unit's parameters stand."""
        return [place for group in self.groups for m in group.managed for place in m.places]

    def _guarded(self) -> list[Any]:
        """What programs may set, and what waits for a later pass, for ``capture``, which guards it."""
        own = self.keep_after_forward, self.keep_after_backward, self.gathers_in_backward, self.awaited
        explicit = [unit for found in (self.before_in_forward, self.before_in_backward) for unit in (found or ())]
        settings = [getattr(group.settings, name) for group in self.groups for name in group.settings.__slots__]
        unreduced = self.unreduced.sync, self.unreduced.in_order, self.unreduced.defers
        neighbours = [group.neighbours for group in self.groups]
        waiting = [kept for group in self.groups for kept in (group.held, group.scattered)]
        return [*own, self.reductions_under_way, *explicit, *neighbours, *settings, *unreduced, *waiting]

    def tie(self) -> None:
        """Weights that modules have in common are one again."""
        for group in self.groups:
            for m in group.managed:
                m.tie()

    def _spans(self, x: DTensor) -> bool:
        mesh = x.device_mesh
        return same_root(mesh, self.axes.mesh) and set(self.axes.mesh._dims) <= set(mesh._dims)

    def _scheduled(self) -> Schedule:
        """The schedule of the outermost unit that was called first."""
        if self.schedule is None:
            below = (unit_of(submodule) for module in self.modules for submodule in module.modules())
            units = list(dict.fromkeys(unit for unit in below if unit is not None))
            managed = {(id(at), name) for u in units if u.axes.mesh.device_type != "meta" for at, name in u.places()}
            check_values(self.modules, managed)
            made = Schedule(units, self.axes.mesh)
            for unit in units:
                unit.schedule = made
        return self.schedule  # type: ignore[return-value]  # there is one now

    # --- gathered and sharded parameters -------------------------------------------------------------------------
    def start_gather(self) -> None:
        for group in self.groups:
            group.start_gather()

    def gather(self, looked: Mapping[Group, Any] | None = None) -> None:
        for group in self.groups:
            group.gather(None if looked is None else looked.get(group))

    def free(self) -> None:
        self._views.drop_unrecorded()
        for group in self.groups:
            if not group.live:
                group.free()

    def _release_after_forward(self) -> None:
        keeps = self._keeps()
        used = [(group, group.whole.full, group.whole.memory) for group in self.groups if group.is_used_by_program()]
        for group in self.groups:
            if not group.live and group.neighbours is not None and not self.unreduced.defers:
                group.keep_part()
            elif not group.live and not keeps:
                group.free()
        for group, whole, memory in used:
            group.check_not_registered(whole, memory)

    def put_values(self, distributed: DeviceMesh | None = None) -> None:
        """Gathered parameters where the module has them."""
        left = self._left() or Views()
        for k, group in enumerate(self.groups):
            found = self._views.get(k) or left.get(k)
            if found is None or (torch.is_grad_enabled() and found[0] is None):
                found = self._views[k] = self._applied(group, distributed)
                for value in found[1]:
                    value._is_param = True  # for isinstance(value, nn.Parameter) in forward
            group.placed = True
            for m, value in zip(group.managed, found[1], strict=True):
                m.put(value)

    def _applied(self, group: Group, distributed: DeviceMesh | None) -> tuple[Use | None, list[Any]]:
        if torch.is_grad_enabled():
            group.whole.recorded = True
        if not torch.is_grad_enabled() or not any(m.parameter.requires_grad for m in group.managed):
            return None, group.regrouped(group.values(distributed), distributed)
        use = Use(group, group.whole.seen, self._pass)
        self.unreduced.expected = True
        self._expected.add(use)
        flat = Gathered.apply(ANCHOR, group, self, use, distributed, *[m.parameter for m in group.managed])
        group.whole.lent.add(flat)
        next(x.grad_fn for x in flat if x.grad_fn is not None)._set_sequence_nr(_AT_ONCE)
        values = group.regrouped(flat, distributed)
        if distributed is not None:
            used_for_parts(values, self._scheduled().cut & set(group.axes.mesh._dims))
        return use, values

    def put_parameters(self) -> None:
        """Sharded parameters where the module has them."""
        for group in self.groups:
            group.put_parameters()
        used_beside(self.groups, self.schedule)

    # --- backward ------------------------------------------------------------------------------------------------
    def before_backward(self, uses: Sequence[Use], views: Views, _: Tensor) -> None:
        """A gradient of this unit's output has arrived: the values that forward saw are needed."""
        schedule, self._views = self._scheduled(), views
        schedule.expect_end()
        looked = {}
        for use in uses:
            looked[use.group] = use.group.check_unchanged(use.stamp)
            if use not in use.group.live:
                use.group.live[use], use.ran = graph_task(), False
        if self.gathers_in_backward:
            self.gather(looked)
            with torch.enable_grad():  # parts of the forward pass may be run again, see torch.utils.checkpoint
                self.put_values(schedule.distributed)
        self.buffers.enter(schedule.distributed is not None)
        following = self.before_in_backward
        if following is None:
            after = schedule.next_backward(self)
            following = [after] if after is not None and after._expected and after.gathers_in_backward else []
        for unit in following:
            unit.start_gather()

    def receive(
        self, group: Group, use: Use, gradients: dict[int, Column], distributed: DeviceMesh | None, asked: bool
    ) -> dict[Tensor, Tensor]:
        """A group's local gradients (see ``Receiver``): reduced, or held for a later backward; the group freed."""
        schedule = self._scheduled()
        schedule.expect_end()
        group.outstanding = max(0, group.outstanding - 1)
        reduced = (self.unreduced.give if asked else self.unreduced.receive)(schedule, group, gradients, distributed is None)
        use.ran, use.through = True, group.live.get(use, LATER) in (LATER, graph_task())
        self._expected.discard(use)
        self._release(use)
        return reduced

    def _release_all(self, uses: Sequence[Use]) -> None:
        for use in uses:
            self._release(use)

    def _release(self, use: Use) -> None:
        """Give the group's values back if neither the graph nor what may be computed again needs them."""
        group = use.group
        if not use.through or use.of.inputs:
            return
        group.live.pop(use, None)
        if not group.live:
            group.put_parameters()
            if not self.keep_after_backward:
                group.free()

    def flush(self) -> None:
        """Backward has ended."""
        self.unreduced.flush(self._scheduled())

    # --- iterations ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A forward pass starts: new graph, new gathered tensors."""
        self._views, self._left, self._expected, self._pass = Views(), nothing_left, set(), Pass()
        self.unreduced.expected = False

    def leave(self) -> None:
        """It is over. From here on what it leads to has its views."""
        self._views, self._left = Views(), weakref.ref(self._views)

    def end(self) -> None:
        """Backward has ended. What it retained a graph for that it did not run is needed by the pass that will."""
        self._views, self._left, self._to_run = Views(), nothing_left, set()
        retains = graph_task() != -1 and graph_stays()
        self.buffers.leave()
        for group in self.groups:
            group.live = {u: LATER for u, began in group.live.items() if not u.ran and (retains or began == LATER)}
            group.put_parameters()
            if not (self.keep_after_backward or group.live or (retains and self.unreduced.defers)):
                group.free()

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts between passes: what a pass has gathered and recorded stays with the original."""
        fresh = {"_views": Views(), "_left": nothing_left, "_to_run": set(), "_expected": set(), "_pass": Pass()}
        return self.__dict__ | fresh | dict.fromkeys(("_watch", "schedule", "awaited"))

    def reset(self) -> None:
        """After a pass that raised: sharded parameters in place, nothing held, nothing awaited."""
        self._end_watch()
        self.buffers.leave(agree=False)
        self.unreduced.forget()
        self._expected = set()
        for group in self.groups:
            group.live.clear()
            group.free()
        self.end()


def _before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    return None if unit is None else unit.before_forward(module, args, kwargs)


def _after(module: nn.Module, args: Any, output: Any) -> Any:
    unit = unit_of(module)
    return output if unit is None else unit.after_forward(module, output)
