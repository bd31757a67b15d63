"""Parameter group: parameters that one collective gathers, and the gradients of which one collective reduces.

A rank's row is the concatenation of its shards of all parameters, as bytes, so that dtypes may differ. Gathered rows are copied
into one buffer in which each parameter is contiguous. To reshard frees the storage of the buffer and keeps the tensors in it. So
tensors that autograd saved are valid again when backward fills the buffer (Zhao et al., PyTorch FSDP, arXiv:2304.11277).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .....base.recorder_hooks import ACTIVE_RECORDERS, CrossCallState, current_recorder
from .....base.selective_checkpoint import hides_from_policies
from .....comm import Communicator, Pending, each_shard, shards_of
from .....comm.communicator import BoundCollective
from .....comm.events import issue_for_cause
from .....comm.map_ranks import communicator_of, expect_locals
from .....errors import DTensorError, UnitError
from .....layout.layout import Layout
from .....layout.on_other_mesh import layout_on_smaller_mesh
from .....mesh.device_mesh import DeviceMesh
from .....redistribute.flat_buffer import FlatBuffer
from .....state.version_counters import VersionSnapshot, take_snapshot
from .....tensor.dtensor import wrap
from .....tensor.local_tensors import local_tensors_of
from ...settings.custom_collectives import CommSettings, gather_rows, scatter_row
from ...settings.dp_modes import MeshAxes
from ...settings.policy import HostOffload, MixedPrecisionPolicy
from .all_gather_extensions import AllGatherExtensions
from .fsdp_param import FSDPParam, is_extended
from .partial_reshard import ReshardGroup
from .unsharded_storage import RowViewCache, SavedAliases, UnshardedState, UnshardedStorage

Column = tuple[Tensor | None, ...]  # unsharded gradients of one parameter: one for each member of this process, None if missing
NO_GRAPH_TASK = -1  # of a use: its backward pass has ended and retained the graph; autograd has no pass of this number
_ALIGNMENT = 16  # bytes: rows in a receive buffer are read in the parameters' own dtypes


class ParamGroup:
    """Parameters that are gathered and reduced together.

    Attributes:
        name: name in what ranks compare: blocks of a model have rows of equal length, and could be confused.
        axes, policy: the mesh axes and the dtypes of the computation.
        settings: settings of its collectives.
        fsdp_params: the parameters, wider dtypes first, so that every shard is aligned.
        unsharded: state of the unsharded values.
        needs_no_gather: stored parameters are full and in the dtype of the computation: there is nothing to gather or copy.
        live_uses: uses that still need the unsharded values, because their backward has begun, and the autograd pass of each. A
            reentrant checkpoint runs passes of its own inside. ``NO_GRAPH_TASK``: the pass has ended and retained its graph.
        num_pending_uses: recorded uses for which gradients have not arrived since the last backward.
        has_values_in_modules: the modules have the unsharded values.
        reshard_group: ranks that share the unsharded values between forward and backward instead of freeing them.
        accumulated_grads: gradients that were not reduced, by parameter index; a later pass adds to them.
        scattered_grads: gradients that were reduce-scattered and not all-reduced over replicas, by what was reduced together
            and how; a later pass adds to them.
        declared_use: what was last declared of uses outside of forward, see ``units/unit_pass.py``.
        dtypes: the dtypes in which parameters are gathered.
    """

    def __init__(self, fsdp_params: Sequence[FSDPParam], axes: MeshAxes, policy: MixedPrecisionPolicy, name: str = "") -> None:
        self.name = name or f"unit {axes.mesh._root.count_unit(axes.mesh._dims)}"
        self.axes, self.policy, self.settings = axes, policy, CommSettings()
        self.fsdp_params: list[FSDPParam] = []
        self.live_uses, self.has_values_in_modules, self.num_pending_uses = dict[Any, int](), False, 0
        self.reshard_group: ReshardGroup | None = None
        self.accumulated_grads: dict[int, Any] = CrossCallState()
        self.scattered_grads: dict[Any, Any] = CrossCallState()
        self.unsharded = UnshardedState()
        expect_locals(axes.mesh)
        self.add_params(fsdp_params)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamGroup:
        fsdp_params = [copy.deepcopy(fsdp_param, memo) for fsdp_param in self.fsdp_params]
        made = memo[id(self)] = ParamGroup(fsdp_params, self.axes, self.policy, self.name)
        made.settings, made.reshard_group = copy.copy(self.settings), self.reshard_group
        return made

    def add_params(self, fsdp_params: Sequence[FSDPParam]) -> None:
        """Add parameters to the group, and sort all by item size."""
        self.fsdp_params = sorted([*self.fsdp_params, *fsdp_params], key=lambda x: -self.compute_dtype(x).itemsize)
        for fsdp_param in fsdp_params:
            fsdp_param.param_group = self
        self.clear_derived_state()

    def release_param(self, fsdp_param: FSDPParam, axes: MeshAxes) -> None:
        """Remove a parameter, which a group over ``axes`` takes over.

        Raises:
            UnitError: this group has other axes.
        """
        if axes != self.axes:
            raise UnitError(
                f"a parameter that two modules share is sharded over {self.axes.mesh!r} in the inner unit and "
                f"over {axes.mesh!r} in the outer one; use the same mesh and offload_policy for both"
            )
        self.fsdp_params.remove(fsdp_param)
        fsdp_param.param_group = None
        self.clear_derived_state()

    def clear_derived_state(self) -> None:
        """Drop the unsharded buffer and all caches that depend on the list of parameters, and compute dtypes again."""
        self.unsharded = UnshardedState(version=self.unsharded.version)
        self._param_rows: dict[int, FlatBuffer] = {}
        self._extension_rows: dict[int, FlatBuffer] = {}
        self._extension_inputs: list[Any] = []  # inputs of the all-gather in flight, if a parameter has an extension
        self._row_views = RowViewCache()
        self._bound_collectives: dict[Any, BoundCollective] = {}
        self._layouts_in_use: dict[DeviceMesh | None, list[Layout | None]] = {}
        self._owner_indices: dict[DeviceMesh | None, list[int]] = {}
        self.declared_use: Any = None
        self.dtypes = list(map(self.compute_dtype, self.fsdp_params))
        self._extensions = AllGatherExtensions.make_if_extended(self.fsdp_params, self.axes, self.policy, self.dtypes)
        pairs = zip(self.fsdp_params, self.dtypes, strict=True)
        is_usable = all(x.shard_dim is None and dtype is x.stored_layout.dtype for x, dtype in pairs)
        self.needs_no_gather = is_usable and self.axes.offload is None and self._extensions is None

    @property
    def comm(self) -> Communicator:
        return communicator_of(self.axes.mesh)

    @property
    def num_local_members(self) -> int:
        """Return the number of members of the mesh with tensors in this process, at least 1."""
        return max(1, len(self.comm.held))

    # --- unsharded values as the computation sees them ---------------------------------------------------------------
    def compute_dtype(self, fsdp_param: FSDPParam) -> torch.dtype:
        """Return the dtype in which a parameter is gathered and computed with."""
        dtype, stored_dtype = self.policy.param_dtype, fsdp_param.stored_layout.dtype
        return dtype if dtype is not None and stored_dtype.is_floating_point else stored_dtype

    def layout_in_use(self, fsdp_param: FSDPParam, batch_mesh: DeviceMesh | None) -> Layout | None:
        """Return the layout of a parameter while modules compute with it; None: they see a plain tensor.

        Args:
            batch_mesh: the mesh of a batch that is a DTensor; None: each rank has a plain batch of its own.
        """
        if batch_mesh is None:
            layout = fsdp_param.tp_layout
        elif fsdp_param.tp_layout is not None:
            layout = fsdp_param.unsharded_layout
        else:
            layout = layout_on_smaller_mesh(fsdp_param.unsharded_layout, batch_mesh)
        return None if layout is None else layout.replace(dtype=self.compute_dtype(fsdp_param), stride=None)

    def _get_layouts_in_use(self, batch_mesh: DeviceMesh | None) -> list[Layout | None]:
        """Return the cached result of :meth:`layout_in_use` for each parameter."""
        layouts = self._layouts_in_use.get(batch_mesh)
        if layouts is None:
            layouts = self._layouts_in_use[batch_mesh] = [self.layout_in_use(x, batch_mesh) for x in self.fsdp_params]
        return layouts

    def flat_values(self, batch_mesh: DeviceMesh | None) -> list[Tensor]:
        """Return the unsharded values as a flat list: for each parameter one DTensor, or a plain tensor for each local member."""
        flat: list[Tensor] = []
        for value, layout in zip(self.unsharded.values, self._get_layouts_in_use(batch_mesh), strict=True):
            if layout is not None:
                dtype = shards_of(value)[0].dtype  # an all-gather extension may have changed it
                alias = each_shard(lambda shard: shard.data, value)  # .data, not a view: a version counter of its own
                flat.append(wrap(alias, layout if dtype is layout.dtype else layout.replace(dtype=dtype)))
            else:
                flat.extend([shard.data for shard in shards_of(value)])
        return flat

    def owner_indices(self, batch_mesh: DeviceMesh | None) -> list[int]:
        """Return the index of the parameter to which each entry of :meth:`flat_values` belongs."""
        indices = self._owner_indices.get(batch_mesh)
        if indices is None:
            counts = [self.num_local_members if layout is None else 1 for layout in self._get_layouts_in_use(batch_mesh)]
            indices = self._owner_indices[batch_mesh] = [i for i, count in enumerate(counts) for _ in range(count)]
        return indices

    def regroup_values(self, flat: Sequence[Tensor], batch_mesh: DeviceMesh | None) -> list[Any]:
        """Return entries of :meth:`flat_values` as one value per parameter; plain tensors of all ranks become one."""
        if not self.comm.holds_all:
            return list(flat)
        items, count = iter(flat), self.num_local_members
        layouts = self._get_layouts_in_use(batch_mesh)
        return [self.comm.local([next(items) for _ in range(count)]) if x is None else next(items) for x in layouts]

    def restore_parameters(self) -> None:
        """Put the sharded parameters into the modules in place of the unsharded values."""
        if self.has_values_in_modules:
            for fsdp_param in self.fsdp_params:
                fsdp_param.restore_parameter()
            self.has_values_in_modules = False

    # --- unshard and reshard -----------------------------------------------------------------------------------------
    def _refresh_params(self) -> VersionSnapshot:
        """Adopt what programs did to the parameters, and return a snapshot of their version counters."""
        if sum(map(FSDPParam.refresh, self.fsdp_params)):
            self.declared_use = None
        return take_snapshot(*[x.parameter for x in self.fsdp_params])

    def check_unchanged(self, version: VersionSnapshot | None) -> VersionSnapshot:
        """Raise if parameters changed since forward, which had the snapshot ``version``; return the present snapshot.

        Raises:
            DTensorError: a parameter was written to in between.
        """
        current_version = self._refresh_params()
        if version != current_version:
            raise DTensorError(
                "backward needs the parameters of forward, but one was written to in between (by an optimizer "
                "step?), or replaced (by torch.func.functional_call?). Call backward() before step(), or "
                "recompute the forward pass"
            )
        return current_version

    @hides_from_policies
    def start_unshard(self, version: VersionSnapshot | None = None) -> None:
        """Start the all-gather of the parameters, unless the gathered values, or those in flight, are up to date.

        Args:
            version: the current version snapshot, if the caller has refreshed the parameters already.
        """
        if not self.fsdp_params:
            return
        if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:
            recorder.isolate_state(self, {"unsharded": UnshardedState()})
        version = self._refresh_params() if version is None else version
        state = self.unsharded
        if (state.is_filled or state.pending is not None) and state.version == version:
            return
        if state.version != version:
            state.saved_aliases.invalidate()  # for good: the memory will contain other values
            state.saved_aliases, state.is_recorded = SavedAliases(), False
            # local tensors may have gained or lost an extension
            if AllGatherExtensions.are_needed(self.fsdp_params) is (self._extensions is None):
                self.clear_derived_state()
                state = self.unsharded
            state.resharded_part = None
            # backward of the old values is refused
            self.live_uses = {use: task for use, task in self.live_uses.items() if task != NO_GRAPH_TASK}
        state.version, state.is_filled, state.pending = version, False, None
        locals_ = [x.parameter._local for x in self.fsdp_params]  # type: ignore[attr-defined]  # DTensors
        if self.needs_no_gather:
            state.values, state.is_filled = locals_, True
        elif state.resharded_part is not None:
            reshard_group, parts = state.resharded_part
            sizes = [buffer.numel() for buffer in shards_of(state.buffer)]
            size_of = sizes.__getitem__ if len(sizes) > 1 else lambda member: sizes[0]
            state.pending = self._get_or_bind(reshard_group, lambda: reshard_group.bind_all_gather(size_of))(parts)
        else:
            state.pending = self._issue_all_gather(locals_, version)

    def _issue_all_gather(self, locals_: list[Any], version: VersionSnapshot) -> Pending[Any]:
        """Pack the local shards into one row per rank, and start the all-gather of the rows."""
        device, offload = self.axes.mesh.device_type, self.axes.offload
        concatenate: Callable[[list[Tensor]], Tensor] = torch.cat if offload is None else offload.concatenate
        if self._extensions is not None:
            on_device = locals_ if offload is None else [self._copy_to_device(x, offload) for x in locals_]
            self._extension_inputs, concatenate = self._extensions.make_inputs(on_device), torch.cat
        if not self.axes.shard:
            return Pending.of(None)
        sources = self._extension_inputs or locals_
        make = functools.partial(self.comm.map, lambda member, *own: self._gathered_rows(member).flat_blocks_of(own), *sources)
        parts = make() if self._extension_inputs else self._row_views.get_or_make(locals_, version, make)
        row = self.comm.map(lambda member, *own: self._gathered_rows(member).concat_row(own, device, concatenate), *parts)
        if offload is not None:
            row = self.comm.map(lambda _, x: x.to(device, non_blocking=True), row)
        return self._get_or_bind(self.settings.all_gather, self._bind_all_gather)(row)

    def _bind_all_gather(self) -> BoundCollective:
        """Return the bound collective that gathers one row of every rank: the program's own, or the communicator's."""
        custom, receive_dtype = self.settings.all_gather, self._gathered_rows(self.comm.held[0]).row_dtype
        if custom is not None:
            return functools.partial(gather_rows, self.axes, custom, lambda member: self._gathered_rows(member).lengths)
        return self.comm.bind_row_all_gather(
            self.axes.shard, lambda member: self._gathered_rows(member).lengths, receive_dtype, self.name
        )

    def bind_reduce_scatter(self, indices: Sequence[int], dtype: torch.dtype, op: str) -> BoundCollective:
        """Return the bound collective that reduce-scatters gradients of the parameters at ``indices`` and their flags."""
        custom, comm = self.settings.reduce_scatter, self.settings.reduce_scatter_comm or self.comm

        def part_lengths(member: int) -> list[int]:
            return self.param_rows(member).addend_counts(indices, len(indices))

        def bind_row_scatter() -> BoundCollective:
            """Return the reduce-scatter of one row per member: the program's own, or that of the communicator."""
            if custom is not None:
                return functools.partial(scatter_row, self.axes, custom, op, part_lengths)
            return comm.bind_row_reduce_scatter(self.axes.reduce_scatter, part_lengths, op, dtype, self.name)

        return self._get_or_bind((tuple(indices), dtype, op, custom, comm), bind_row_scatter)

    def _get_or_bind(self, key: Any, bind: Callable[[], BoundCollective]) -> BoundCollective:
        """Return the bound collective under ``key``, made by ``bind()`` at the first call."""
        run = self._bound_collectives.get(key)
        if run is None:
            run = self._bound_collectives[key] = bind()
        return run

    @hides_from_policies
    @functools.partial(issue_for_cause, "gather parameters")
    def unshard(self, version: VersionSnapshot | None = None) -> None:
        """Wait for the all-gather of the parameters, and unpack the received rows into the buffer of unsharded values."""
        self.start_unshard(version)
        state = self.unsharded
        if state.pending is None:
            return
        # the values of an inference pass may serve a training pass later
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            gathered = state.pending.wait()
            self._allocate_unsharded()
            if state.resharded_part is not None:
                state.resharded_part[0].fill_buffer(gathered, state.buffer)
            else:
                sources = self._extension_inputs or [self._copy_source(x) for x in self.fsdp_params]
                self.comm.map(
                    lambda member, *a: self._gathered_rows(member).copy_gathered(*a), gathered, sources, state.copy_targets
                )
            if self._extensions is not None:
                locals_ = [x.parameter._local for x in self.fsdp_params]  # type: ignore[attr-defined]  # DTensors
                state.values = self._extensions.make_values(locals_, state.gathered)
                state.storage.add(self._extensions.inner_tensors)
        state.pending, state.resharded_part, state.is_filled, self._extension_inputs = None, None, True, []
        state.saved_aliases.restore()

    def _copy_source(self, fsdp_param: FSDPParam) -> Any:
        """Return the device copy of an unsharded parameter's local tensor; a sharded one is returned where it is."""
        local, offload = fsdp_param.parameter._local, self.axes.offload  # type: ignore[attr-defined]  # a DTensor
        return local if offload is None or fsdp_param.shard_dim is not None else self._copy_to_device(local, offload)

    def _copy_to_device(self, local: Any, offload: HostOffload) -> Any:
        """Copy the local tensors of an offloaded shard from host memory to the mesh's device."""
        device = self.axes.mesh.device_type
        return self.comm.map(
            lambda _, x: x.to(device, non_blocking=True) if is_extended(x) else offload.copy_to_device(x, device), local
        )

    def _allocate_unsharded(self) -> None:
        """Allocate the buffer of the unsharded parameters, and make its views at the first call."""
        state = self.unsharded
        if state.buffer is None:
            buffers = self.comm.map(lambda member: self._gathered_rows(member).allocate_gathered(self.axes.mesh.device_type))
            state.buffer, state.values = buffers[0], list(buffers[1:])
            state.gathered = state.values
            # writes through .data leave the version counters unchanged, by which autograd checks its saved tensors
            state.copy_targets = self.comm.map(
                lambda member, values: self._gathered_rows(member).gathered_regions([x.data for x in values]), state.values
            )
            state.storage = UnshardedStorage(shards_of(state.buffer))
            state.storage.count_own_uses()
        state.storage.allocate()

    def reshard_to_group(self) -> None:
        """Free the unsharded values except for this rank's part, from which the reshard group restores them."""
        state = self.unsharded
        if self.reshard_group is not None and state.is_filled and not self.needs_no_gather:
            part = self.reshard_group, self.reshard_group.shard_buffer(state.buffer)
            self.reshard()
            state.resharded_part = part

    @hides_from_policies
    def reshard(self) -> None:
        """Free the memory of the unsharded parameters; tensors that the program took from it keep the old memory."""
        state = self.unsharded
        state.resharded_part = None
        if state.pending is not None:
            state.pending.wait()  # all ranks drop it at the same point
            state.pending = None
        if state.is_filled and not self.needs_no_gather:
            if self.is_used_by_program():
                state.buffer = None  # the program's tensors keep the old memory
                self._allocate_unsharded()
            state.storage.free()
            state.saved_aliases.invalidate()
        state.is_filled = False

    def is_used_by_program(self) -> bool:
        """Return True if the program, and not only autograd graphs, has tensors in the memory of the unsharded values.

        A read of freed memory would end the process. Values that a graph has saved are gathered again in backward. Tensors of an
        all-gather extension or of a recorder are not counted: the program has no access to them.
        """
        state = self.unsharded
        if state.is_recorded or self.needs_no_gather or not state.is_filled or self._extensions is not None or ACTIVE_RECORDERS:
            return False
        return state.storage.has_other_uses()

    def check_not_registered(self, values: list[Any], storage: UnshardedStorage) -> None:
        """Raise UnitError if a module of the group has registered an unsharded value, or a view of one, in its forward.

        Args:
            values: the unsharded values.
            storage: their storage, which was left to the program.
        """
        modules = dict.fromkeys(module for x in self.fsdp_params for module, _ in x.locations)
        for fsdp_param, value in zip(self.fsdp_params, values, strict=True):
            addresses = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in shards_of(value)]
            for module in modules:
                for name, x in [*module._parameters.items(), *module._buffers.items()]:
                    shards = [] if x is None else local_tensors_of(x)
                    pairs = zip(shards, addresses, strict=False)
                    if any(shard in storage and shard.data_ptr() in address for shard, address in pairs):
                        raise UnitError(
                            f"{type(module).__name__} registered {name!r} in its forward, which is {fsdp_param.describe()}, "
                            "gathered, or a view of it. The optimizer does not update that: it would keep the values of this "
                            f"forward. Write self.{name} = self.{fsdp_param.locations[0][1]}.clone() for a copy, or tie both "
                            "before fully_shard or replicate"
                        )

    # --- rows --------------------------------------------------------------------------------------------------------
    def _gathered_rows(self, member: int) -> FlatBuffer:
        """Return the flat buffer layout of what a member gathers: parameters, or inputs of all-gather extensions."""
        if self._extensions is None:
            return self.param_rows(member)
        if member not in self._extension_rows:
            self._extension_rows[member] = self._extensions.make_rows(member, _ALIGNMENT)
        return self._extension_rows[member]

    def param_rows(self, member: int) -> FlatBuffer:
        """Return the flat buffer layout of a member's parameters: the offset of each shard."""
        if member not in self._param_rows:
            group = self.axes.mesh.members_of(self.axes.shard, member)
            layouts = [(x.stored_layout, x.unsharded_layout) for x in self.fsdp_params]
            is_sharded = [x.shard_dim is not None for x in self.fsdp_params]
            self._param_rows[member] = FlatBuffer.from_layouts(layouts, self.dtypes, is_sharded, member, group, _ALIGNMENT)
        return self._param_rows[member]
