"""ZeRO-1: ``ZeroRedundancyOptimizer`` keeps on each rank the optimizer state of its shards of the parameters only.

The optimizer works on ``Shard`` where the model has ``Replicate`` (Rajbhandari et al., ZeRO, arXiv:1910.02054). Gradients are
sliced without communication, and the updated shards are gathered. Shards are DTensors, so the updates equal those of the
plain optimizer for any optimizer: norms and other statistics of full tensors are global.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.group_by import group_by_key
from ...base.recorder_hooks import ACTIVE_RECORDERS, current_recorder
from ...base.tensor_tree import map_tensors
from ...comm import shards_of
from ...comm.flat_rows import split_row
from ...comm.map_ranks import communicator_of
from ...errors import MeshError, UnsupportedOperationError
from ...layout.layout import Layout
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...mesh.submesh import have_same_root
from ...placement import Placement, Replicate, Shard
from ...redistribute import execute_many, plan, redistribute_local
from ...state.version_counters import VersionSnapshot, take_snapshot
from ...tensor.dtensor import DTensor, wrap
from .settings.dp_modes import DP_MODES, MeshAxes


@dataclass(frozen=True, eq=False, slots=True)
class _ShardedParam:
    """A parameter of the model and its shard, which the inner optimizer updates.

    Attributes:
        shard: the DTensor in the inner optimizer.
        stored, state: layouts of the parameter and of the shard.
    """

    parameter: Tensor
    shard: Any
    stored: Layout
    state: Layout


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Optimizer of class ``optimizer_class`` with its state sharded over ``mesh``.

    Args:
        params: parameters or parameter groups: replicated DTensors (see :func:`replicate`), or plain tensors that are equal
            on all ranks.
        optimizer_class: for example ``torch.optim.AdamW``.
        mesh: default the mesh of the first DTensor parameter, else the one entered by ``with mesh:``.
        process_group: a group of ``torch.distributed`` instead of a mesh; it may also be passed in the place of ``mesh``, as
            in torch.
        parameters_as_bucket_view: no effect; accepted for code that is written for torch's optimizer.
        overlap_with_ddp: must be False.
        defaults: options of ``optimizer_class``.

    Cost: per step one all-gather of all parameters. State memory is divided by the number of ranks.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> weight = torch.nn.Parameter(torch.ones(4, 3))
    >>> optimizer = ZeroRedundancyOptimizer([weight], torch.optim.Adam, mesh=mesh, lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight[0], optimizer.inner.state_dict()["state"][0]["exp_avg"].layout
    (tensor([0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>), float32[4, 3] on (0=S(0)))

    Raises:
        TypeError, ValueError, MeshError: not an optimizer class, no parameters, no mesh.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        mesh: Any = None,
        *,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"optimizer_class takes a class such as torch.optim.AdamW, got {optimizer_class!r}")
        if overlap_with_ddp:
            raise UnsupportedOperationError(
                "overlap_with_ddp=True is not supported: step() is called after backward; leave it out"
            )
        groups = _as_param_groups(params)
        if isinstance(mesh, dist.ProcessGroup):
            mesh, process_group = None, mesh
        if process_group is not None:
            mesh = DeviceMesh.from_group(process_group, groups[0]["params"][0].device.type)
        self.mesh = _find_mesh(groups, mesh)
        self._axes = MeshAxes(self.mesh, DP_MODES["ZeRO-1"])
        self._consolidated: dict[str, Any] | None = None
        self._sharded_params: list[_ShardedParam] = []
        self._param_versions: dict[int, VersionSnapshot] = {}  # by index: version of the parameter when its shard was equal
        inner_groups = [{**group, "params": self._shard_params(group["params"])} for group in groups]
        self.inner = optimizer_class(inner_groups, **defaults)
        super().__init__(groups, self.inner.defaults)
        self._set_missing_outer_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and one of its shards to the inner optimizer."""
        super().add_param_group(param_group)
        if hasattr(self, "state") and len(self.inner.param_groups) < len(self.param_groups):
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": self._shard_params(group["params"])})
            self._set_missing_outer_options()

    def _set_missing_outer_options(self) -> None:
        """Copy options that only the inner parameter groups have to the outer ones, which learning-rate schedulers read."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in inner.items():
                if name != "params":
                    outer.setdefault(name, value)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Run a step of the inner optimizer on the shards, then gather the parameters."""
        loss, self._consolidated = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:  # replays do not check versions, and set no options
            recorder.isolate_state(self, {"_param_versions": dict.fromkeys(self._param_versions)})
            recorder.isolate_state(self.inner, {"param_groups": [dict(group) for group in self.inner.param_groups]})
        self._copy_options_to_inner()
        with torch.no_grad():
            for k, x in enumerate(self._sharded_params):
                if self._param_versions[k] != take_snapshot(x.parameter):  # written to or loaded since the last step
                    x.shard._local.copy_(self._own_shard(x.parameter.detach(), x.state))
                grad = x.parameter.grad
                x.shard.grad = None if grad is None else wrap(self._own_shard(grad, x.state), x.state)
            self.inner.step()
            self._gather_params([x for x in self._sharded_params if x.shard.grad is not None])
            for k, x in enumerate(self._sharded_params):
                x.shard.grad = None
                self._param_versions[k] = take_snapshot(x.parameter)
        return loss

    def _copy_options_to_inner(self) -> None:
        """Copy the options of the outer parameter groups, such as ``lr``, to the inner optimizer's."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})

    # --- shards ------------------------------------------------------------------------------------------------------
    def _shard_params(self, parameters: Iterable[Tensor]) -> list[nn.Parameter]:
        """Return shards of ``parameters`` for the inner optimizer, in one buffer per mesh and dtype: one all-gather sends it."""
        made = [self._add_sharded_param(p) for p in parameters]
        added = self._sharded_params[len(self._sharded_params) - len(made) :]
        distributed = [x for x in added if x.state is not x.stored and not x.shard.is_meta]
        sharded = [x for x in distributed if all(local.is_contiguous() for local in shards_of(x.shard._local))]
        for (mesh, _), shards in group_by_key(((x.state.mesh, x.state.dtype), x.shard) for x in sharded).items():
            comm = communicator_of(mesh)
            if comm.held:
                joined = comm.map(_concatenate, *[shard._local for shard in shards])
                for shard, local in zip(shards, joined, strict=True):
                    shard._local = local
        return made

    def _add_sharded_param(self, p: Tensor) -> nn.Parameter:
        """Register ``p``, and return the parameter of the inner optimizer: a copy of this rank's shard."""
        stored = self._stored_layout(p)
        state = self._state_layout(stored)
        with torch.no_grad():
            made = nn.Parameter(wrap(self._own_shard(p.detach(), state), state))
        self._param_versions[len(self._sharded_params)] = take_snapshot(p)
        self._sharded_params.append(_ShardedParam(p, made, stored, state))
        return made

    def _state_layout(self, stored: Layout) -> Layout:
        """Return the layout of a parameter's optimizer state, sharded over the mesh dims of the ZeRO-1 mode.

        One tensor dim is sharded, evenly if possible.
        """
        is_own_root = have_same_root(stored.mesh, self.mesh)
        shard_mesh_dims = {self.mesh._dims[i] for i in self._axes.dims_with(self._axes.mode.state, "S")} if is_own_root else set()
        mesh_dims = [
            i for i, old in enumerate(stored.placements) if old.is_replicate() and stored.mesh._dims[i] in shard_mesh_dims
        ]
        dims = [d for d, split in enumerate(stored.splits) if split is None and stored.shape[d] > 0]
        if not mesh_dims or not dims:
            return stored
        ranks = stored.mesh.size_of(mesh_dims)
        even_dims = [d for d in dims if stored.shape[d] % ranks == 0]
        shard_dim = even_dims[0] if even_dims else max(dims, key=lambda d: stored.shape[d])
        placements: list[Placement] = [Shard(shard_dim) if i in mesh_dims else old for i, old in enumerate(stored.placements)]
        return stored.replace(placements=placements)

    def _stored_layout(self, p: Tensor) -> Layout:
        """Return the layout of a model parameter; a plain parameter is replicated over the mesh."""
        if isinstance(p, DTensor):
            return p._layout
        return Layout.of(self.mesh, None, shards_of(p)[0].shape, None, p.dtype)

    def _own_shard(self, value: Tensor, layout: Layout) -> Any:
        """Return a copy of this rank's shard of ``value`` with the placements of ``layout``."""
        stored = self._stored_layout(value)
        target = layout.replace(dtype=stored.dtype, stride=stored.stride)
        return redistribute_local(self._local_of(value), stored, target).clone()

    def _local_of(self, value: Tensor) -> Any:
        return value._local if isinstance(value, DTensor) else _on_all_ranks(value, self.mesh)

    def _gather_params(self, shards: list[_ShardedParam]) -> None:
        """Gather the updated shards into the parameters: one all-gather for all that are sharded over the same ranks."""
        by_item_size = sorted(shards, key=lambda x: -x.state.dtype.itemsize)
        out = [self._local_of(x.parameter) for x in by_item_size]
        execute_many([plan(x.state, x.stored) for x in by_item_size], [x.shard._local for x in by_item_size], out=out).wait()
        torch.autograd.graph.increment_version([x.parameter for x in by_item_size])

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Return the optimizer state by parameter of the model: the inner optimizer's dicts, with the state of shards."""
        inner_state = self.inner.state
        return defaultdict(dict, {x.parameter: inner_state[x.shard] for x in self._sharded_params if x.shard in inner_state})

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        """Without effect: the base class begins with an empty dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with DTensors, which a distributed checkpoint saves shard by shard.

        After :meth:`consolidate_state_dict`, and until the next step, return the plain optimizer's state dict.
        """
        self._copy_options_to_inner()
        return self.inner.state_dict() if self._consolidated is None else self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict` or :meth:`consolidated_state_dict`, from any mesh."""
        self.inner.load_state_dict(self._distribute_state(state_dict))
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})

    def consolidated_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the plain optimizer, with full plain tensors, on every rank."""
        self._copy_options_to_inner()
        return map_tensors(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, self.inner.state_dict())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Make :meth:`state_dict` return :meth:`consolidated_state_dict` until the next step, on all ranks, not only ``to``."""
        self._consolidated = self.consolidated_state_dict()

    def _distribute_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict`` with the state of each parameter distributed like its shard."""
        saved = (key for group in state_dict["param_groups"] for key in group["params"])  # indices or names of parameters
        shards = dict(zip(saved, (shard for group in self.inner.param_groups for shard in group["params"]), strict=False))
        state = dict(state_dict["state"])  # the inner optimizer rejects state that does not fit
        for k in shards.keys() & state.keys():
            state[k] = {name: self._distribute_value(value, shards[k]._layout) for name, value in state[k].items()}
        return {**state_dict, "state": state}

    def _distribute_value(self, value: Any, layout: Layout) -> Any:
        """Return an optimizer state as a DTensor in ``layout``; values of another shape unchanged."""
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(layout.shape):
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor() if value.device_mesh != layout.mesh else value.redistribute(placements=layout.placements)
        if isinstance(value, DTensor):
            return value
        target = layout.replace(dtype=value.dtype)
        replicated = target.replace(placements=[Replicate()] * layout.mesh.ndim)
        return wrap(redistribute_local(_on_all_ranks(value, layout.mesh), replicated, target).clone(), target)


def _concatenate(member: int, *shards: Tensor) -> list[Tensor]:
    return split_row(torch.cat([shard.reshape(-1) for shard in shards]), [shard.shape for shard in shards])


def _on_all_ranks(value: Tensor, mesh: DeviceMesh) -> Any:
    """Return a plain tensor as the local value of a replicated tensor, for all ranks of this process."""
    return communicator_of(mesh).map(lambda _, x: x, value)


def _as_param_groups(params: Any) -> list[dict[str, Any]]:
    """Return the parameters as a list of groups."""
    listed = list(params)
    if not listed:
        raise ValueError("ZeroRedundancyOptimizer got no parameters; pass model.parameters()")
    if isinstance(listed[0], dict):
        params_of = [group["params"] for group in listed]
        lists = [[params] if isinstance(params, Tensor) else list(params) for params in params_of]
        return [{**group, "params": params} for group, params in zip(listed, lists, strict=True)]
    return [{"params": listed}]


def _find_mesh(groups: list[dict[str, Any]], mesh: Any) -> DeviceMesh:
    """Return the given mesh, else that of a DTensor parameter, else the current one."""
    if mesh is None:
        for group in groups:
            for p in group["params"]:
                if isinstance(p, DTensor):
                    return p.device_mesh
    try:
        return as_mesh(mesh)
    except MeshError as error:
        raise MeshError(f"ZeroRedundancyOptimizer needs mesh=, the data-parallel mesh ({error})") from None
