"""Shard a model (``shard_model``): shard a module in place by a spec, and collect its state on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.tensor_tree import own_tensors, rebuild_sequence
from ..comm import PerRank, shards_of
from ..comm.map_ranks import communicator_of
from ..errors import MeshError, PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..parallel import ParallelStyle, parallelize_module
from ..placement import Partition, Placement, Placements, Replicate
from ..tensor.dtensor import DTensor
from ..tensor.modules.distribute_module import distribute_at
from ..tensor.modules.materialize import check_initializers
from ..tensor.modules.materialize import materialize as give_values
from ..tensor.modules.stale_params import replacing_params
from .composite import Composite, as_spec, is_prefix_match
from .rank_device import Place, common_device_type, mesh_ranks_of
from .specs import Spec, Whole

Init = Callable[[nn.Module], None]


def shard_model(
    module: nn.Module,
    spec: Any,
    mesh: Any = None,
    *,
    src_rank: int | None = 0,
    materialize: bool = True,
    init_fn: Init | None = None,
) -> nn.Module:
    """Shard the parameters and buffers of ``module`` in place by ``spec``, and return it. It then runs unchanged.

    Tensors that no spec names are replicated on the mesh of the other parameters of their submodule. Plain tensor inputs of the
    module become replicated DTensors. If submodules have different ranks, activations are redistributed to the ranks of the
    submodule that uses them. They are redistributed to all ranks of the model when they leave a module that is not in a
    ``Sequential``.

    Args:
        spec: a sharding spec (for every parameter that it fits), a composite, a mapping from names to specs or placements
            (in any form but text, on ``mesh``), or a plan of parallel styles as for :func:`dtensor.parallel.parallelize_module`
            (on ``mesh``).
        mesh: the mesh of the specs, default one made of their places.
        src_rank: rank with the values, see :func:`dtensor.distribute_tensor`. None: all ranks have the same values.
        materialize: tensors on ``meta`` get memory, shard by shard, and the values that one device would give them: see
            :func:`dtensor.parallel.materialize`. False leaves them on ``meta``, sharded, to be filled from a checkpoint.
        init_fn: called for each submodule with own tensors on ``meta`` instead of ``reset_parameters``.

    Raises:
        PlacementError, MeshError: names that match no parameter, specs that fit no shape or no common mesh.
        DTensorError: before anything is changed: tensors on ``meta`` that no initializer would set, see ``materialize``.

    >>> import dtensor as dt
    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    >>> net = dt.shard_model(net, dt.sharding_spec.composite({"0": dt.sharding_spec.single_split(0, [0, 1])}))
    >>> net[0].weight.placements, net[2].weight.placements, net(torch.ones(3, 4)).shape
    ((Shard(dim=0),), (Replicate(),), torch.Size([3, 2]))
    """
    if isinstance(spec, ParallelStyle) or (isinstance(spec, Mapping) and _has_style(spec)):
        return parallelize_module(module, mesh, spec, src_data_rank=src_rank)
    requested = _resolve_specs(module, spec, None if mesh is None else as_mesh(mesh))
    common_mesh = as_mesh(mesh) if mesh is not None else _common_mesh(requested)
    meshes = {id(sub): _submodule_mesh(requested[name], common_mesh) for name, sub in module.named_modules()}
    if materialize and init_fn is None:
        check_initializers(module)
    unset = {id(sub) for sub in module.modules() if any(x.is_meta for _, _, x in own_tensors(sub))}
    shared: dict[int, Any] = {}
    with replacing_params(module.modules(), "shard_model"):
        for name, sub in module.named_modules():
            _shard_submodule(sub, requested[name], meshes[id(sub)], src_rank, shared)
    if materialize:
        init = None if init_fn is None else lambda sub: init_fn(sub) if id(sub) in unset else None
        give_values(module, init=init)
    _register_hooks(module, meshes, common_mesh)
    return module


def _has_style(plan: Mapping[str, Any]) -> bool:
    return any(isinstance(item, ParallelStyle) or (isinstance(item, Mapping) and _has_style(item)) for item in plan.values())


# --- specs of parameters ---------------------------------------------------------------------------------------------------
SubmoduleSpecs = dict[str, Any]  # name within the submodule -> Spec, Layout or None


def _resolve_specs(module: nn.Module, spec_or_plan: Any, mesh: DeviceMesh | None) -> dict[str, SubmoduleSpecs]:
    """Return by submodule the requested spec or layout of each of its own parameters and buffers; None: replicated."""
    placed: dict[str, Placements] = {}
    if isinstance(spec_or_plan, Mapping):
        placed = {name: item for name, item in spec_or_plan.items() if _is_placements(item)}
        spec_or_plan = {name: item for name, item in spec_or_plan.items() if name not in placed}
        if placed and mesh is None:
            raise MeshError("shard_model: placements need a mesh; pass mesh=")
    requested: dict[str, SubmoduleSpecs] = {}
    spec = as_spec(spec_or_plan) if spec_or_plan else None
    unused = {key for key, _ in spec.specs} if isinstance(spec, Composite) else set()
    unused |= placed.keys()
    for name, sub in module.named_modules():
        requested[name] = {}
        for _, key, x in own_tensors(sub):
            path = f"{name}.{key}" if name else key
            patterns = {pattern for pattern in placed if is_prefix_match(pattern.split("."), path.split("."))}
            if patterns:
                best = max(patterns, key=len)
                requested[name][key] = Layout.of(mesh, placed[best], x.shape, None, x.dtype)  # type: ignore[arg-type]  # given
                unused -= patterns
            elif isinstance(spec, Composite):
                match = spec.find(path)
                requested[name][key] = match if spec.names_parameter(path) else _spec_for_tensor(match, x)
                unused -= spec.matching_keys(path)
            else:
                requested[name][key] = _spec_for_tensor(spec, x)
    if unused:
        names = [name for name, _ in module.named_parameters()]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise PlacementError(f"{sorted(unused)} match no parameter of {type(module).__name__}; its names are {listed}")
    return requested


def _is_placements(item: Any) -> bool:
    """Return True if ``item`` is placements of one or several mesh dims, not a spec; text is a place, so a spec."""
    if isinstance(item, (list, tuple, Mapping)):
        entries = list(item.values()) if isinstance(item, Mapping) else item
        return bool(entries) and all(isinstance(p, Placement) for p in entries)
    return isinstance(item, (Placement, Partition))


def _spec_for_tensor(spec: Spec | None, x: torch.Tensor) -> Spec | None:
    """Return ``spec`` if it fits the shape of ``x``, else a spec that replicates ``x`` on the same places."""
    if spec is None:
        return None
    try:
        spec.cells(x.shape)
    except PlacementError:
        return Whole(spec.places)
    return spec


# --- meshes of submodules --------------------------------------------------------------------------------------------------
def _common_mesh(requested: dict[str, SubmoduleSpecs]) -> DeviceMesh:
    """Return the mesh of the model: the finest of a spec that has all places of all specs, else the 1-d mesh of all places."""
    specs = list(dict.fromkeys(spec for specs_of in requested.values() for spec in specs_of.values() if spec is not None))
    if not specs:
        raise PlacementError(
            "shard_model: the spec matches no parameter of the module; print(dict(module.named_parameters())) lists their names"
        )
    ranks = [set(mesh_ranks_of(spec.places).values()) for spec in specs]
    everywhere = [spec for spec, each in zip(specs, ranks, strict=True) if each == set().union(*ranks)]
    if everywhere:
        return _finest_mesh(everywhere)
    places: list[Place] = sorted({place for spec in specs for place in spec.places})
    return DeviceMesh(common_device_type(places), sorted(set().union(*ranks)))


def _submodule_mesh(own: SubmoduleSpecs, common_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a submodule's own parameters: ``common_mesh`` if it has the same ranks, else one of their specs."""
    specs = [spec for spec in own.values() if isinstance(spec, Spec)]
    if not specs:
        return common_mesh
    ranks = {rank for spec in specs for rank in mesh_ranks_of(spec.places).values()}
    return common_mesh if ranks == set(common_mesh.ranks) else _finest_mesh(own.values())


def _finest_mesh(specs: Iterable[Any]) -> DeviceMesh:
    """Return the mesh with the most dims among the meshes that the specs give."""
    meshes = [layout.mesh for layout in map(_example_layout, specs) if layout is not None]
    if not meshes:
        raise PlacementError(
            "shard_model: a spec gives one device several shards that are not adjacent; a local parameter is one contiguous block"
        )
    return max(meshes, key=lambda mesh: mesh.ndim)


def _example_layout(spec: Any) -> Layout | None:
    """Return the layout that a spec gives a tensor of some shape that it fits; None if no layout describes it."""
    if not isinstance(spec, Spec):
        return spec
    for ndim in range(1, 9):
        try:
            array, sizes = spec.grid(ndim)
            shape = [sum(g) if g is not None else n for g, n in zip(sizes, array.shape, strict=True)]
            return spec.layout(shape)
        except PlacementError:
            continue
    return None


# --- sharding --------------------------------------------------------------------------------------------------------------
def _shard_submodule(sub: nn.Module, own: SubmoduleSpecs, mesh: DeviceMesh, source: int | None, shared: dict[int, Any]) -> None:
    """Replace a submodule's own parameters and buffers by DTensors in the requested layouts; meta ones stay on meta."""
    for tensors, key, old in own_tensors(sub):
        if isinstance(old, DTensor):
            continue
        if id(old) not in shared:
            requested = own.get(key)
            layout = requested.layout(old.shape, old.dtype, mesh) if isinstance(requested, Spec) else requested
            distribute_at(tensors, key, mesh, [Replicate()] * mesh.ndim if layout is None else layout.placements, source)
            shared[id(old)] = old, tensors[key]
        tensors[key] = shared[id(old)][1]


# --- hooks -----------------------------------------------------------------------------------------------------------------
def _register_hooks(module: nn.Module, meshes: dict[int, DeviceMesh], common_mesh: DeviceMesh) -> None:
    """Register hooks that redistribute activations to the mesh of the submodule that uses them, and back at the end."""
    has_several_meshes = any(mesh != common_mesh for mesh in meshes.values())
    in_sequence = {id(child) for sub in module.modules() if isinstance(sub, nn.Sequential) for child in sub.children()}
    for sub in module.modules():
        has_tensors = any(True for _ in own_tensors(sub))
        if sub is module or (has_several_meshes and has_tensors):
            target = meshes[id(sub)] if has_tensors else common_mesh
            sub.register_forward_pre_hook(partial(_redistribute_inputs, target), with_kwargs=True)
        if has_several_meshes and has_tensors and sub is not module and id(sub) not in in_sequence:
            sub.register_forward_hook(lambda mod, args, out: _redistribute_to_mesh(out, common_mesh))
    if has_several_meshes:
        module.register_forward_hook(lambda mod, args, out: _redistribute_to_mesh(out, common_mesh))


def _redistribute_inputs(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _redistribute_to_mesh(args, mesh), _redistribute_to_mesh(kwargs, mesh)


def _redistribute_to_mesh(value: Any, mesh: DeviceMesh) -> Any:
    """Return ``value`` with its tensors replicated on ``mesh``; plain tensors become replicated DTensors."""
    if isinstance(value, DTensor):
        return value if set(value.device_mesh.ranks) == set(mesh.ranks) else value.redistribute(mesh, [Replicate()] * mesh.ndim)
    if isinstance(value, torch.Tensor) and not isinstance(value, PerRank):
        return DTensor.from_local(value, mesh, shape=value.shape, stride=value.stride())
    if isinstance(value, Mapping):
        return type(value)((key, _redistribute_to_mesh(item, mesh)) for key, item in value.items())  # type: ignore[call-arg]  # as of dict
    return (
        rebuild_sequence(value, [_redistribute_to_mesh(item, mesh) for item in value])
        if isinstance(value, (list, tuple))
        else value
    )


# --- state dict ------------------------------------------------------------------------------------------------------------
def collect_state_dict(state_dict: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """Return the state dict with every DTensor as a plain global tensor, on ``rank`` only; an empty dict on other ranks.

    All ranks call it. Tensors are gathered one at a time: ``rank`` needs memory for the complete state, the others for nothing
    more.

    >>> import dtensor as dt
    >>> net = dt.shard_model(torch.nn.Linear(2, 3), dt.sharding_spec.single_split(0, [0, 1]))
    >>> {name: (type(x).__name__, tuple(x.shape)) for name, x in dt.collect_state_dict(net.state_dict()).items()}
    {'weight': ('Tensor', (3, 2)), 'bias': ('Tensor', (3,))}
    """
    here, collected = True, {}
    for key, value in state_dict.items():
        collected[key], here = _collect_value(value, rank)
    return collected if here else {}


def _collect_value(value: Any, rank: int) -> tuple[Any, bool]:
    """Gather all DTensors in a value to ``rank``; return the value there, and True on the process that is that rank."""
    here = not dist.is_initialized() or dist.get_rank() == rank
    match value:
        case DTensor():
            mesh = value.device_mesh
            if communicator_of(mesh).holds_all:
                full = value.detach().full_tensor()
                return shards_of(full)[0], True
            single_rank = DeviceMesh(mesh.device_type, [rank])
            gathered: Any = value.detach().redistribute(single_rank, [Replicate()])
            return (gathered.to_local() if here else None), here
        case Mapping():
            return {key: _collect_value(item, rank)[0] for key, item in value.items()}, here
        case list() | tuple() if not isinstance(value, torch.Size):
            return rebuild_sequence(value, [_collect_value(item, rank)[0] for item in value]), here
        case torch.Tensor():
            return value.detach(), here
    return value, here
