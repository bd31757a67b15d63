"""``shard_model``: a module becomes sharded in place, as a spec says; and its state collected on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.tensor_tree import like
from ..comm import PerRank, communicator_of, shards_of
from ..errors import MeshError, PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..parallel import ParallelStyle, parallelize_module
from ..placement import Placement, Replicate
from ..tensor.distribute import distribute_at, own_tensors
from ..tensor.dtensor import DTensor
from ..tensor.materialize import check_initialisers
from ..tensor.materialize import materialize as give_values
from ..tensor.stale_params import replacing
from .composite import Composite, as_spec, fits
from .rank_device import Place, device_type_of, members_of
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
    """``module``, its parameters and buffers cut in place as ``spec`` says; it then runs unchanged.

    What no spec names is replicated beside the other parameters of its submodule. Plain tensors given to the module become
    replicated DTensors. Where submodules live on different ranks, activations are brought to the ranks of the submodule that
    takes them, and back to all ranks of the model where its results leave a module that is not a ``Sequential``.

    Args:
        spec: a sharding spec (for every parameter that it fits), a composite, a mapping from names to specs or lists of
            placements (the latter on ``mesh``), or a plan of parallel styles as for :func:`dtensor.parallel.parallelize_module`
            (on ``mesh``).
        mesh: the mesh to spell specs on, default one made of their places.
        src_rank: whose values count, see :func:`dtensor.distribute_tensor`. None: all ranks have the same.
        materialize: what is on ``meta`` gets memory, shard by shard, and the values that one device would give it: see
            :func:`dtensor.parallel.materialize`. False leaves it on ``meta``, sharded, for a checkpoint to fill.
        init_fn: called for each submodule with tensors of its own on ``meta`` instead of ``reset_parameters``.

    Raises:
        PlacementError, MeshError: names that fit no parameter, specs that fit no shape or no common mesh.
        DTensorError: before anything is done: tensors on ``meta`` that nobody would set, see ``materialize``.

    >>> import dtensor as dt
    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    >>> net = dt.shard_model(net, dt.sharding_spec.composite({"0": dt.sharding_spec.single_split(0, [0, 1])}))
    >>> net[0].weight.placements, net[2].weight.placements, net(torch.ones(3, 4)).shape
    ((Shard(dim=0),), (Replicate(),), torch.Size([3, 2]))
    """
    if isinstance(spec, ParallelStyle) or (isinstance(spec, Mapping) and _has_style(spec)):
        return parallelize_module(module, mesh, spec, src_data_rank=src_rank)
    asked = _asked(module, spec, None if mesh is None else as_mesh(mesh))
    home = as_mesh(mesh) if mesh is not None else _common_mesh(asked)
    meshes = {id(sub): _mesh_of(asked[name], home) for name, sub in module.named_modules()}
    if materialize and init_fn is None:
        check_initialisers(module)
    unset = {id(sub) for sub in module.modules() if any(x.is_meta for _, _, x in own_tensors(sub))}
    shared: dict[int, Any] = {}
    with replacing(module.modules(), "shard_model"):
        for name, sub in module.named_modules():
            _shard(sub, asked[name], meshes[id(sub)], src_rank, shared)
    if materialize:
        init = None if init_fn is None else lambda sub: init_fn(sub) if id(sub) in unset else None
        give_values(module, init=init)
    _connect(module, meshes, home)
    return module


def _has_style(plan: Mapping[str, Any]) -> bool:
    return any(isinstance(item, ParallelStyle) or (isinstance(item, Mapping) and _has_style(item)) for item in plan.values())


# --- which spec for which parameter ----------------------------------------------------------------------------------------
Asked = dict[str, Any]  # name within the submodule -> Spec, Layout or None


def _asked(module: nn.Module, said: Any, mesh: DeviceMesh | None) -> dict[str, Asked]:
    """For each submodule, by name, what is asked for each of its own parameters and buffers."""
    placed: dict[str, Sequence[Placement]] = {}
    if isinstance(said, Mapping):
        placed = {name: item for name, item in said.items() if _is_placements(item)}
        said = {name: item for name, item in said.items() if name not in placed}
        if placed and mesh is None:
            raise MeshError("shard_model: placements need a mesh; pass mesh=")
    found: dict[str, Asked] = {}
    spec = as_spec(said) if said else None
    unused = {key for key, _ in spec.specs} if isinstance(spec, Composite) else set()
    unused |= placed.keys()
    for name, sub in module.named_modules():
        found[name] = {}
        for _, key, x in own_tensors(sub):
            path = f"{name}.{key}" if name else key
            listed = {pattern for pattern in placed if fits(pattern.split("."), path.split("."))}
            if listed:
                best = max(listed, key=len)
                found[name][key] = Layout.of(mesh, placed[best], x.shape, None, x.dtype)  # type: ignore[arg-type]  # given
                unused -= listed
            elif isinstance(spec, Composite):
                given = spec.find(path)
                found[name][key] = given if spec.names_itself(path) else _for_part(given, x)
                unused -= spec.names_that_fit(path)
            else:
                found[name][key] = _for_part(spec, x)
    if unused:
        raise PlacementError(f"{sorted(unused)} match no parameter of {type(module).__name__}; its names are {_names(module)}")
    return found


def _is_placements(item: Any) -> bool:
    return isinstance(item, Placement) or (
        isinstance(item, (list, tuple)) and bool(item) and all(isinstance(p, Placement) for p in item)
    )


def _for_part(spec: Spec | None, x: torch.Tensor) -> Spec | None:
    """A module's spec for one of its tensors: those that have not the dims that it cuts are replicated on the same places."""
    if spec is None:
        return None
    try:
        spec.cells(x.shape)
    except PlacementError:
        return Whole(spec.places)
    return spec


def _names(module: nn.Module) -> str:
    names = [name for name, _ in module.named_parameters()]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# --- which mesh for which submodule ----------------------------------------------------------------------------------------
def _common_mesh(asked: dict[str, Asked]) -> DeviceMesh:
    """The finest mesh of a spec that has all places, else the 1-d mesh of all of them."""
    specs = list(dict.fromkeys(spec for own in asked.values() for spec in own.values() if spec is not None))
    if not specs:
        raise PlacementError("shard_model: the spec matches no parameter of the module")
    ranks = [set(members_of(spec.places).values()) for spec in specs]
    everywhere = [spec for spec, each in zip(specs, ranks, strict=True) if each == set().union(*ranks)]
    if everywhere:
        return _finest(everywhere)
    places: list[Place] = sorted({place for spec in specs for place in spec.places})
    return DeviceMesh(device_type_of(places), sorted(set().union(*ranks)))


def _mesh_of(own: Asked, home: DeviceMesh) -> DeviceMesh:
    """Where a submodule's parameters live: on the home mesh where their ranks are its ranks, else on a mesh of their own."""
    specs = [spec for spec in own.values() if isinstance(spec, Spec)]
    if not specs:
        return home
    ranks = {rank for spec in specs for rank in members_of(spec.places).values()}
    return home if ranks == set(home.ranks) else _finest(own.values())


def _finest(specs: Iterable[Any]) -> DeviceMesh:
    """The mesh with the most dims among those that the specs make themselves: the others can be said on it, or on none."""
    meshes = [layout.mesh for layout in map(_own_layout, specs) if layout is not None]
    if not meshes:
        raise PlacementError(
            "shard_model: a spec gives one device several shards that are not adjacent; a local parameter is one contiguous block"
        )
    return max(meshes, key=lambda mesh: mesh.ndim)


def _own_layout(spec: Any) -> Layout | None:
    """The layout of a spec for some shape that it fits."""
    if not isinstance(spec, Spec):
        return spec
    for ndim in range(1, 9):
        try:
            array, given = spec.grid(ndim)
            shape = [sum(g) if g is not None else n for g, n in zip(given, array.shape, strict=True)]
            return spec.layout(shape)
        except PlacementError:
            continue
    return None


# --- sharding --------------------------------------------------------------------------------------------------------------
def _shard(sub: nn.Module, own: Asked, mesh: DeviceMesh, source: int | None, shared: dict[int, Any]) -> None:
    """Replace the submodule's own tensors; those on meta stay there."""
    for held, key, old in own_tensors(sub):
        if isinstance(old, DTensor):
            continue
        if id(old) not in shared:
            asked = own.get(key)
            layout = asked.layout(old.shape, old.dtype, mesh) if isinstance(asked, Spec) else asked
            distribute_at(held, key, mesh, [Replicate()] * mesh.ndim if layout is None else layout.placements, source)
            shared[id(old)] = old, held[key]
        held[key] = shared[id(old)][1]


# --- running ---------------------------------------------------------------------------------------------------------------
def _connect(module: nn.Module, meshes: dict[int, DeviceMesh], home: DeviceMesh) -> None:
    """Hooks that bring activations to where they are used."""
    apart = any(mesh != home for mesh in meshes.values())
    in_sequence = {id(child) for sub in module.modules() if isinstance(sub, nn.Sequential) for child in sub.children()}
    for sub in module.modules():
        own = any(True for _ in own_tensors(sub))
        if sub is module or (apart and own):
            target = meshes[id(sub)] if own else home
            sub.register_forward_pre_hook(_bringing(target), with_kwargs=True)
        if apart and own and sub is not module and id(sub) not in in_sequence:
            sub.register_forward_hook(lambda mod, args, out: _on(out, home))
    if apart:
        module.register_forward_hook(lambda mod, args, out: _on(out, home))


def _bringing(mesh: DeviceMesh) -> Any:
    return lambda mod, args, kwargs: (_on(args, mesh), _on(kwargs, mesh))


def _on(value: Any, mesh: DeviceMesh) -> Any:
    """All tensors in ``value`` on ``mesh``: those of other meshes moved there, plain ones replicated."""
    if isinstance(value, DTensor):
        return value if set(value.device_mesh.ranks) == set(mesh.ranks) else value.redistribute(mesh, [Replicate()] * mesh.ndim)
    if isinstance(value, torch.Tensor) and not isinstance(value, PerRank):
        return DTensor.from_local(value, mesh, shape=value.shape, stride=value.stride())
    if isinstance(value, Mapping):
        return type(value)((key, _on(item, mesh)) for key, item in value.items())  # type: ignore[call-arg]  # as of dict
    return like(value, [_on(item, mesh) for item in value]) if isinstance(value, (list, tuple)) else value


# --- collecting ------------------------------------------------------------------------------------------------------------
def collect_state_dict(state_dict: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """The state dict with every DTensor whole and plain, on ``rank`` alone; an empty dict on other ranks.

    All ranks call it. Tensors arrive one at a time: ``rank`` needs memory for the whole state, the others for nothing more.

    >>> import dtensor as dt
    >>> net = dt.shard_model(torch.nn.Linear(2, 3), dt.sharding_spec.single_split(0, [0, 1]))
    >>> {name: (type(x).__name__, tuple(x.shape)) for name, x in dt.collect_state_dict(net.state_dict()).items()}
    {'weight': ('Tensor', (3, 2)), 'bias': ('Tensor', (3,))}
    """
    here, collected = True, {}
    for key, value in state_dict.items():
        collected[key], here = _collected(value, rank)
    return collected if here else {}


def _collected(value: Any, rank: int) -> tuple[Any, bool]:
    here = not dist.is_initialized() or dist.get_rank() == rank
    match value:
        case DTensor():
            mesh = value.device_mesh
            if communicator_of(mesh).holds_all:
                whole = value.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
                return shards_of(whole)[0], True
            alone = DeviceMesh(mesh.device_type, [rank])
            moved: Any = value.detach().redistribute(alone, [Replicate()])  # type: ignore[attr-defined]  # a DTensor
            return (moved.to_local() if here else None), here
        case Mapping():
            return {key: _collected(item, rank)[0] for key, item in value.items()}, here
        case list() | tuple() if not isinstance(value, torch.Size):
            return like(value, [_collected(item, rank)[0] for item in value]), here
        case torch.Tensor():
            return value.detach(), here
    return value, here
