"""``ZeroRedundancyOptimizer``: each rank keeps the optimizer's state for its part of the parameters only.

In placements (Rajbhandari et al., ZeRO, arXiv:1910.02054): the optimizer works on ``Shard`` where the model has ``Replicate``.
Gradients are cut, which moves nothing; the updated parts are gathered. Since the parts are DTensors the updates are those of
the plain optimizer, whatever it computes: norms and other statistics of whole tensors are global.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.group_by import by_key
from ...base.recorder_hooks import ACTIVE, current
from ...base.tensor_tree import mapped
from ...comm import communicator_of, shards_of
from ...comm.flat_rows import apart
from ...dispatch.version_counters import Stamp, stamp
from ...errors import MeshError, UnsupportedOperationError
from ...layout.layout import Layout
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...mesh.submesh import same_root
from ...placement import Placement, Replicate, Shard
from ...redistribute import execute_many, plan, redistribute_local
from ...tensor.dtensor import DTensor, wrap
from .dp_modes import WAYS, Axes


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """A parameter of the model and the part that the optimizer here works on.

    Attributes:
        part: the DTensor that the inner optimizer has.
        stored, state: their layouts.
    """

    parameter: Tensor
    part: Any
    stored: Layout
    state: Layout


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` with its state cut over ``mesh``.

    Args:
        params: parameters or groups of such: replicated DTensors (see :func:`replicate`), or plain ones, equal on all ranks.
        optimizer_class: for example ``torch.optim.AdamW``.
        mesh: default that of the first DTensor parameter, else the one entered by ``with mesh:``.
        process_group: a group of ``torch.distributed`` instead of a mesh; also in the place of ``mesh``, where torch has it.
        parameters_as_bucket_view: without effect, taken for the sake of code written for torch's.
        overlap_with_ddp: must be False.
        defaults: options of ``optimizer_class``.

    Cost: per step one all-gather of all parameters; state memory divided by the number of ranks.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> weight = torch.nn.Parameter(torch.ones(4, 3))
    >>> optimizer = ZeroRedundancyOptimizer([weight], torch.optim.Adam, mesh=mesh, lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight[0], optimizer.inner.state_dict()["state"][0]["exp_avg"].layout
    (tensor([0.5000, 0.5000, 0.5000], grad_fn=<SelectBackward0>), float32[4, 3] on (0=S(0)))

    Raises:
        TypeError, ValueError, MeshError: no class of optimizers, no parameters, no mesh.
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
            raise UnsupportedOperationError("overlap_with_ddp=True is not supported: step() is called after backward")
        groups = _as_groups(params)
        if isinstance(mesh, dist.ProcessGroup):
            mesh, process_group = None, mesh
        if process_group is not None:
            mesh = DeviceMesh.from_group(process_group, groups[0]["params"][0].device.type)
        self.mesh = _mesh_of(groups, mesh)
        self._axes = Axes(self.mesh, WAYS["ZeRO-1"])
        self._consolidated: dict[str, Any] | None = None
        self._parts: list[_Part] = []
        self._stamps: dict[int, Stamp] = {}  # by part: the parameter as it was when the part was its
        inner_groups = [{**group, "params": self._parts_of(group["params"])} for group in groups]
        self.inner = optimizer_class(inner_groups, **defaults)
        super().__init__(groups, self.inner.defaults)
        self._share_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "state") and len(self.inner.param_groups) < len(self.param_groups):
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": self._parts_of(group["params"])})
            self._share_options()

    def _share_options(self) -> None:
        """What schedulers set here counts for the inner optimizer: step sizes and the like."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in inner.items():
                if name != "params":
                    outer.setdefault(name, value)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the inner optimizer on the parts, then parameters made whole again."""
        loss, self._consolidated = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if ACTIVE and (recorder := current()) is not None:  # whose replays cannot know who has written since, and set no options
            recorder.apart(self, {"_stamps": dict.fromkeys(self._stamps)})
            recorder.apart(self.inner, {"param_groups": [dict(group) for group in self.inner.param_groups]})
        self._pass_options()
        with torch.no_grad():
            for k, one in enumerate(self._parts):
                if self._stamps[k] != stamp(one.parameter):  # loaded, or written to, since
                    one.part._local.copy_(self._cut(one.parameter.detach(), one.state))
                grad = one.parameter.grad
                one.part.grad = None if grad is None else wrap(self._cut(grad, one.state), one.state)
            self.inner.step()
            self._make_whole([one for one in self._parts if one.part.grad is not None])
            for k, one in enumerate(self._parts):
                one.part.grad = None
                self._stamps[k] = stamp(one.parameter)
        return loss

    def _pass_options(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})

    # --- parts -------------------------------------------------------------------------------------------------------
    def _parts_of(self, parameters: Iterable[Tensor]) -> list[nn.Parameter]:
        """What the inner optimizer works on: one behind the other in memory, as they are sent after a step."""
        made = [self._part(p) for p in parameters]
        cut = [one for one in self._parts[len(self._parts) - len(made) :] if one.state is not one.stored and not one.part.is_meta]
        rows = [one for one in cut if all(shard.is_contiguous() for shard in shards_of(one.part._local))]
        for (mesh, _), parts in by_key(((one.state.mesh, one.state.dtype), one.part) for one in rows).items():
            comm = communicator_of(mesh)
            if comm.held:
                joined = comm.map(_behind_one_another, *[part._local for part in parts])
                for part, local in zip(parts, joined, strict=True):
                    part._local = local
        return made

    def _part(self, p: Tensor) -> nn.Parameter:
        stored = self._stored(p)
        state = self._state(stored)
        with torch.no_grad():
            made = nn.Parameter(wrap(self._cut(p.detach(), state), state))
        self._stamps[len(self._parts)] = stamp(p)
        self._parts.append(_Part(p, made, stored, state))
        return made

    def _state(self, stored: Layout) -> Layout:
        """How the state of a parameter lies: cut along one tensor dim, evenly if one can be, where the table's row says so."""
        ours = same_root(stored.mesh, self.mesh)
        cuts = {self.mesh._dims[i] for i in self._axes.dims(self._axes.way.state, "S")} if ours else set()
        over = [i for i, old in enumerate(stored.placements) if old.is_replicate() and stored.mesh._dims[i] in cuts]
        dims = [d for d, split in enumerate(stored.splits) if split is None and stored.shape[d] > 0]
        if not over or not dims:
            return stored
        ranks = stored.mesh.size_of(over)
        even = [d for d in dims if stored.shape[d] % ranks == 0]
        cut = even[0] if even else max(dims, key=lambda d: stored.shape[d])
        where: list[Placement] = [Shard(cut) if i in over else old for i, old in enumerate(stored.placements)]
        return stored.replace(placements=where)

    def _stored(self, p: Tensor) -> Layout:
        if isinstance(p, DTensor):
            return p._layout
        return Layout.of(self.mesh, None, shards_of(p)[0].shape, None, p.dtype)

    def _cut(self, value: Tensor, layout: Layout) -> Any:
        """The local part of ``value``, in memory of its own."""
        whole = self._stored(value)
        return redistribute_local(self._local(value), whole, layout.replace(dtype=whole.dtype, stride=whole.stride)).clone()

    def _local(self, value: Tensor) -> Any:
        return value._local if isinstance(value, DTensor) else _everywhere(value, self.mesh)

    def _make_whole(self, parts: list[_Part]) -> None:
        """The updated parts gathered into the parameters: one all-gather for all that are cut over the same ranks."""
        some = sorted(parts, key=lambda one: -one.state.dtype.itemsize)
        out = [self._local(one.parameter) for one in some]
        execute_many([plan(one.state, one.stored) for one in some], [one.part._local for one in some], out=out).wait()
        torch.autograd.graph.increment_version([one.parameter for one in some])

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter that has any: the inner optimizer's own dicts, of its parts."""
        held = self.inner.state
        return defaultdict(dict, {one.parameter: held[one.part] for one in self._parts if one.part in held})

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        """Without effect: the base class begins with an empty one."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, its state DTensors: what a distributed checkpoint saves in parts. After
        :meth:`consolidate_state_dict`, and until the next step, the plain optimizer's.
        """
        self._pass_options()
        return self.inner.state_dict() if self._consolidated is None else self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` or :meth:`consolidated_state_dict` gave, on any mesh."""
        self.inner.load_state_dict(self._laid_out(state_dict))
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({name: value for name, value in inner.items() if name != "params"})

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The state dict that the plain optimizer would have: whole plain tensors, on every rank."""
        self._pass_options()
        return mapped(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, self.inner.state_dict())

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Has :meth:`state_dict` give :meth:`consolidated_state_dict` until the next step, on all ranks, ``to`` among them."""
        self._consolidated = self.consolidated_state_dict()

    def _laid_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = (key for group in state_dict["param_groups"] for key in group["params"])  # positions, or the parameters' names
        parts = dict(zip(saved, (part for group in self.inner.param_groups for part in group["params"]), strict=False))
        state = dict(state_dict["state"])  # what belongs to no parameter, or does not fit, is the inner optimizer's to judge
        for k in parts.keys() & state.keys():
            state[k] = {name: self._placed(value, parts[k]._layout) for name, value in state[k].items()}
        return {**state_dict, "state": state}

    def _placed(self, value: Any, layout: Layout) -> Any:
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(layout.shape):
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor() if value.device_mesh != layout.mesh else value.redistribute(placements=layout.placements)
        if isinstance(value, DTensor):
            return value
        target = layout.replace(dtype=value.dtype)
        whole = target.replace(placements=[Replicate()] * layout.mesh.ndim)
        return wrap(redistribute_local(_everywhere(value, layout.mesh), whole, target).clone(), target)


def _behind_one_another(member: int, *parts: Tensor) -> list[Tensor]:
    return apart(torch.cat([part.reshape(-1) for part in parts]), [part.shape for part in parts])


def _everywhere(value: Tensor, mesh: DeviceMesh) -> Any:
    """A plain tensor as the local that it is: one stands for all ranks in this process."""
    return communicator_of(mesh).map(lambda _, x: x, value)


def _as_groups(params: Any) -> list[dict[str, Any]]:
    listed = list(params)
    if not listed:
        raise ValueError("ZeroRedundancyOptimizer got no parameters; pass model.parameters()")
    if isinstance(listed[0], dict):
        return [{**group, "params": _listed(group["params"])} for group in listed]
    return [{"params": listed}]


def _listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _mesh_of(groups: list[dict[str, Any]], mesh: Any) -> DeviceMesh:
    if mesh is None:
        for group in groups:
            for p in group["params"]:
                if isinstance(p, DTensor):
                    return p.device_mesh
    try:
        return as_mesh(mesh)
    except MeshError as error:
        raise MeshError(f"ZeroRedundancyOptimizer needs mesh=, the data-parallel mesh ({error})") from None
