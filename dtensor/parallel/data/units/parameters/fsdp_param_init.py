"""FSDP parameter initialization: makes the parameters of modules DTensors on the data-parallel mesh.

If tensor parallelism and data parallelism shard the same tensor dim, tensor parallelism splits first. So the tensor-parallel
shard of a rank is contiguous when the data-parallel sharding is undone. This order is the ``level`` of the placements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from .....base.group_by import group_by_key
from .....base.tensor_tree import map_inner_tensors
from .....base.torch_internals import is_traceable_wrapper_subclass
from .....comm import Communicator, PerRank
from .....comm.map_ranks import communicator_of
from .....errors import ContradictionError, MeshError, PlacementError, UnitError
from .....layout.layout import Layout
from .....layout.on_other_mesh import layout_on_larger_mesh, shard_further
from .....layout.placement_forms import read_placements
from .....mesh.device_mesh import DeviceMesh, as_mesh
from .....mesh.submesh import have_same_root, join_dims, select_dims, unify_roots
from .....placement import NamedPlacements, Partition, Shard
from .....tensor.dtensor import DTensor, wrap
from .....tensor.local_tensors import local_tensors_of
from .....tensor.modules.stale_params import ParamAttributes, note_replaced, replacement_of, shared_param_error
from ...settings.dp_modes import MeshAxes, make_axes_of_mesh
from ...settings.policy import ShardPlacementResult
from .fsdp_param import FSDPParam, is_extended

T = TypeVar("T", bound=Tensor)
ShardPlacementFn = Callable[[nn.Parameter], Shard | NamedPlacements | ShardPlacementResult | None]
ParamLayouts = tuple[Layout, Layout, Layout | None, int | None, MeshAxes]  # the fields of FSDPParam from ``stored_layout`` on
UNIT_ATTRIBUTE = "_data_parallel_unit"  # of a module: its FSDP unit


def make_fsdp_params(
    modules: Sequence[nn.Module],
    axes: MeshAxes,
    ignored: set[nn.Parameter],
    by: str,
    placement_fn: ShardPlacementFn | None = None,
) -> list[FSDPParam]:
    """Make DTensors of the parameters of ``modules`` that are in no FSDP unit yet.

    Parameters that these modules share with an inner unit are taken from it: what several units use must be unsharded while any
    of them runs.

    Args:
        by: the name of the public function, for messages.

    Raises:
        MeshError: the mesh of a DTensor parameter does not have the root of the data-parallel mesh.
        UnitError: a parameter is shared with a module elsewhere, and was distributed there already.
    """
    ignored_ids = {id(p) for p in ignored}
    submodules = list(dict.fromkeys(submodule for module in modules for submodule in module.modules()))
    inner_params = {id(x.parameter): x for submodule in submodules for x in _fsdp_params_of(submodule)}
    own_modules = _modules_outside_units(modules)
    done = {(id(at), name) for x in inner_params.values() for at, name in x.locations if at not in own_modules}
    found = [
        (at, name, parameter, _find_shared_param(parameter, inner_params, at, name, by))
        for at in submodules
        for name, parameter in at._parameters.items()
        if parameter is not None and id(parameter) not in ignored_ids and (id(at), name) not in done
    ]
    new = {id(parameter): parameter for _, _, parameter, shared in found if shared is None}
    layouts = {key: _param_layouts(parameter, axes, placement_fn) for key, parameter in new.items()}  # raises before any change
    by_mesh = group_by_key((layouts[key][-1].mesh, parameter) for key, parameter in new.items())
    with_values = [p for mesh, own in by_mesh.items() for p in tensors_with_values(communicator_of(mesh), range(mesh.ndim), own)]
    ids_with_values = set(map(id, with_values))
    made: dict[int, FSDPParam] = {}
    for at, name, parameter, shared in found:
        fsdp_param = made.get(id(parameter), shared)
        if fsdp_param is None:
            fsdp_param = _make_fsdp_param(parameter, layouts[id(parameter)], id(parameter) in ids_with_values)
            note_replaced(parameter, by, fsdp_param)
        elif fsdp_param.param_group is not None:
            fsdp_param.param_group.release_param(fsdp_param, axes)
        made[id(parameter)] = fsdp_param
        if (at, name) not in fsdp_param.locations:
            fsdp_param.locations.append((at, name))
        at._parameters[name] = fsdp_param.parameter
    return list(dict.fromkeys(made.values()))


# --- parameters that modules share -----------------------------------------------------------------------------------
def _modules_outside_units(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Return ``modules`` and those below them that are reached without passing an inner FSDP unit."""
    found: set[nn.Module] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [child for child in module.children() if UNIT_ATTRIBUTE not in child.__dict__]
    return found


def _fsdp_params_of(module: nn.Module) -> list[FSDPParam]:
    """Return the refreshed parameters of the FSDP unit of ``module``, an empty list if it has none."""
    unit: Any = module.__dict__.get(UNIT_ATTRIBUTE)
    fsdp_params: list[FSDPParam] = [] if unit is None else [x for group in unit.groups for x in group.fsdp_params]
    for fsdp_param in fsdp_params:
        fsdp_param.refresh()
    return fsdp_params


def _find_shared_param(
    parameter: nn.Parameter, inner_params: Mapping[int, FSDPParam], module: nn.Module, name: str, by: str
) -> FSDPParam | None:
    """Return the entry of ``inner_params`` that ``parameter`` is, or that replaced it; None if ``parameter`` is new.

    Raises:
        UnitError: it was distributed, but not in an inner unit.
    """
    replacement = replacement_of(parameter)
    shared = inner_params.get(id(parameter)) if replacement is None else replacement.what
    if isinstance(shared, FSDPParam) and inner_params.get(id(shared.parameter)) is shared:
        return shared
    if replacement is None and not getattr(parameter, "_data_parallel", False):
        return None
    raise UnitError(shared_param_error(module, name, by, replacement))


# --- layouts ---------------------------------------------------------------------------------------------------------
def axes_on_common_root(axes: MeshAxes, modules: Sequence[nn.Module]) -> MeshAxes:
    """Return ``axes`` on a mesh that has the root of the meshes of the modules' DTensor parameters, if there is one."""
    meshes = dict.fromkeys(p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor))
    return dataclasses.replace(axes, mesh=unify_roots([axes.mesh, *meshes])[0])


def _param_layouts(parameter: nn.Parameter, axes: MeshAxes, placement_fn: ShardPlacementFn | None) -> ParamLayouts:
    """Return the stored, unsharded and tensor-parallel layout of ``parameter``, its sharded dim, and its mesh axes."""
    dim, axes = _requested_shard_dim(parameter, placement_fn, axes)
    shard_dim = None if not axes.shard or parameter.ndim == 0 else dim
    tp_layout = _layout_off_dp_mesh(parameter._layout, axes.mesh) if isinstance(parameter, DTensor) else None
    axes, unsharded = make_unsharded_layout(axes, parameter, tp_layout)
    if shard_dim is None:
        return unsharded, unsharded, tp_layout, None, axes
    dp_dims = [unsharded.mesh._dims.index(axes.mesh._dims[i]) for i in axes.shard]
    stored = unsharded.replace(placements=shard_further(unsharded, shard_dim, dp_dims))
    return stored, unsharded, tp_layout, shard_dim, axes


def _requested_shard_dim(parameter: nn.Parameter, placement_fn: ShardPlacementFn | None, axes: MeshAxes) -> tuple[int, MeshAxes]:
    """Return the tensor dim and the mesh axes that ``placement_fn`` requests for a parameter; default dim 0.

    Raises:
        PlacementError: ``placement_fn`` returns no placement, or names mesh dims that do not shard parameters.
        ContradictionError: it returns a ``Shard`` of a dim that the parameter does not have.
    """
    requested: Any = None if placement_fn is None else placement_fn(parameter)
    if isinstance(requested, ShardPlacementResult):
        if not isinstance(requested.mesh_info, TorchDeviceMesh):
            raise PlacementError(
                f"ShardPlacementResult takes mesh_info=mesh, as fully_shard takes mesh=, got {requested.mesh_info!r}"
            )
        requested, axes = requested.placement, make_axes_of_mesh(as_mesh(requested.mesh_info), axes.offload)
    if requested is None:
        return 0, axes
    if isinstance(requested, (str, Mapping, Partition)):
        requested = _shard_over_axes(requested, axes, parameter.ndim)
    if not isinstance(requested, Shard) or not -parameter.ndim <= requested.dim < parameter.ndim:
        raise (ContradictionError if isinstance(requested, Shard) else PlacementError)(
            f"shard_placement_fn returned {requested!r} for a parameter of shape {tuple(parameter.shape)}; return "
            f"Shard(dim) with a dim below {parameter.ndim}, None for Shard(0), or a ShardPlacementResult"
        )
    return requested.dim % parameter.ndim, axes


def _shard_over_axes(form: Any, axes: MeshAxes, ndim: int) -> Any:
    """Return the one placement that ``form`` (text, mapping, partition) gives for the mesh dims that shard parameters.

    Raises:
        PlacementError: the form names other mesh dims, or gives them different placements.
    """
    mesh = axes.mesh._derive(*select_dims(axes.mesh, axes.shard))
    placements = read_placements(form, mesh, ndim)
    if not placements or any(placement != placements[0] for placement in placements):
        raise PlacementError(f"shard_placement_fn returned {form!r}, which is not one placement along all mesh dims of {mesh!r}")
    return placements[0]


def make_unsharded_layout(axes: MeshAxes, x: Tensor, tp_layout: Layout | None) -> tuple[MeshAxes, Layout]:
    """Return the axes, and the layout of ``x`` unsharded: replicated over data-parallel mesh dims, else ``tp_layout``.

    On other mesh dims the placements are those of ``tp_layout``.
    """
    if tp_layout is None:
        return axes, Layout.of(axes.mesh, None, x.shape, None, x.dtype)
    dp_mesh, tp_mesh = unify_roots([axes.mesh, tp_layout.mesh])
    on_root = Layout.of(tp_mesh, tp_layout.placements, tp_layout.shape, None, tp_layout.dtype)
    return dataclasses.replace(axes, mesh=dp_mesh), layout_on_larger_mesh(_join_meshes(dp_mesh, tp_mesh), on_root)


def _layout_off_dp_mesh(layout: Layout, dp_mesh: DeviceMesh) -> Layout | None:
    """Return ``layout`` restricted to its mesh dims that are not data-parallel; None if it has no others.

    Raises:
        MeshError: it is not replicated over the data-parallel dims.
    """
    mesh = layout.mesh
    rest = [i for i, dims in enumerate(mesh._dims) if not (have_same_root(mesh, dp_mesh) and dims in dp_mesh._dims)]
    if any(not placement.is_replicate() for i, placement in enumerate(layout.placements) if i not in rest):
        raise MeshError(
            f"a parameter is already distributed over the data-parallel mesh {dp_mesh!r}: {layout!r}; parallelize "
            "it over another mesh dim"
        )
    if len(rest) == mesh.ndim:
        return layout
    if not rest:
        return None
    submesh = mesh._derive(*select_dims(mesh, rest))
    return Layout.of(submesh, [layout.placements[i] for i in rest], layout.shape, None, layout.dtype)


def _join_meshes(dp_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over the dims of both meshes, in the order of their root mesh."""
    if not have_same_root(dp_mesh, tp_mesh):
        raise MeshError(
            f"a parameter is on {tp_mesh!r}, which is not a submesh of the same mesh as {dp_mesh!r}; slice both from "
            "one: mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=('dp', 'tp')), then mesh['dp'] "
            "and mesh['tp']"
        )
    return dp_mesh._derive(*join_dims(dp_mesh, tp_mesh))


# --- values ----------------------------------------------------------------------------------------------------------
def _make_fsdp_param(parameter: nn.Parameter, layouts: ParamLayouts, has_values: bool) -> FSDPParam:
    """Make the sharded parameter, with the attributes of the original, and its record."""
    stored, unsharded, *_, axes = layouts
    local = _own_shard(parameter, axes, unsharded, stored, has_values)
    made = nn.Parameter(wrap(local, stored), requires_grad=parameter.requires_grad)
    ParamAttributes.of(parameter).set_on(made)
    made._data_parallel = axes.storage_device  # type: ignore[attr-defined]  # a mark on the tensor, which copies keep
    return FSDPParam([], made, *layouts)


def tensors_with_values(comm: Communicator, mesh_dims: Sequence[int], tensors: Sequence[T]) -> list[T]:
    """Return those tensors that are not meta tensors on the first rank, which other ranks then receive. One small broadcast."""
    has_values = [not x.is_meta for x in tensors]
    if tensors and comm.held and comm.mesh.kind == "process_group" and comm.mesh.device_type != "meta":
        flags = torch.tensor(has_values, dtype=torch.uint8, device=comm.mesh.device_type)
        first: list[int] = comm.broadcast(flags, mesh_dims).wait().tolist()
        has_values = [bool(flag) or (own and _is_composed(x)) for flag, own, x in zip(first, has_values, tensors, strict=True)]
    return [x for x, has_value in zip(tensors, has_values, strict=True) if has_value]


def _is_composed(x: Tensor) -> bool:
    """Return True if ``x`` has an all-gather extension or is made of several tensors: each rank keeps its own value."""
    return any(is_extended(part) or is_traceable_wrapper_subclass(part) for part in local_tensors_of(x))


def broadcast_from_first(comm: Communicator, local: Any, mesh_dims: Sequence[int]) -> Any:
    """Broadcast the first rank's local tensor; tensors with an all-gather extension keep each rank's own value."""
    if isinstance(local, Tensor) and local.is_meta:
        local = torch.empty_like(local, device=comm.mesh.device_type)

    def send(part: Any) -> Any:
        return part if any(map(is_extended, local_tensors_of(part))) else comm.broadcast(part, mesh_dims).wait()

    return map_inner_tensors(send, local)


def _own_shard(parameter: Any, axes: MeshAxes, unsharded: Layout, stored: Layout, has_values: bool) -> Any:
    """Return this rank's shard of the first data-parallel rank's value. It is a meta tensor if not ``has_values``."""
    local = parameter._local if isinstance(parameter, DTensor) else parameter.detach()
    comm, mesh = communicator_of(axes.mesh), unsharded.mesh
    if not communicator_of(mesh).held:
        return torch.zeros(stored.local_shape(None), dtype=stored.dtype, device=local.device)
    if not has_values and not _is_composed(parameter):
        return comm.map(
            lambda member: torch.empty(stored.local_shape(mesh.coordinates[member]), dtype=stored.dtype, device="meta")
        )
    if has_values:
        local = local if parameter.is_meta else local.to(axes.mesh.device_type)
        if isinstance(local, PerRank) or not comm.holds_all:
            local = broadcast_from_first(comm, local, axes.all_dims)

    def slice_shard(member: int, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of a member's shard of the unsharded local tensor, in host memory if it is offloaded."""
        offset, origin = (x.local_offset(mesh.coordinates[member]) for x in (stored, unsharded))
        for dim, size in enumerate(stored.local_shape(mesh.coordinates[member])):
            full = full.narrow(dim, min(offset[dim] - origin[dim], full.shape[dim]), size)
        shard = full.detach().clone(memory_format=torch.contiguous_format)
        return shard if axes.offload is None else shard.cpu()

    return comm.map(slice_shard, local)


# --- one mesh for all parameters -------------------------------------------------------------------------------------
def move_to_common_mesh(fsdp_params: Sequence[FSDPParam], dp_mesh: DeviceMesh) -> None:
    """Replicate parameters without tensor parallelism over the tensor-parallel mesh dims, with the first rank's values.

    Then all parameters of a model are on one mesh, and norms over them and operations on lists of them need no other layout.
    """
    meshes = dict.fromkeys(
        x.unsharded_layout.mesh
        for x in fsdp_params
        if x.tp_layout is not None and have_same_root(x.unsharded_layout.mesh, dp_mesh)
    )
    common = dp_mesh
    for mesh in meshes:
        if _dims_are_disjoint(common, mesh):
            common = _join_meshes(common, mesh)
    for x in fsdp_params:
        if x.tp_layout is None and x.axes.mesh == dp_mesh and x.unsharded_layout.mesh != common:
            _replicate_on(x, common)


def _dims_are_disjoint(first: DeviceMesh, second: DeviceMesh) -> bool:
    """Return True if each mesh dim of ``second`` is one of ``first``, or shares no part with those."""
    used = {d for dims in first._dims for d in dims}
    return all(dims in first._dims or not used & set(dims) for dims in second._dims)


def _replicate_on(fsdp_param: FSDPParam, mesh: DeviceMesh) -> None:
    """Move the parameter to a larger mesh, replicated over the additional mesh dims with the first rank's values."""
    old, layout = fsdp_param.parameter, fsdp_param.stored_layout
    new_dims = tuple(i for i, dims in enumerate(mesh._dims) if dims not in layout.mesh._dims)
    local = old._local  # type: ignore[attr-defined]  # a DTensor
    comm = communicator_of(mesh)
    if tensors_with_values(comm, new_dims, [old]):
        local = broadcast_from_first(comm, local, new_dims)
    fsdp_param.stored_layout = layout_on_larger_mesh(mesh, layout)
    fsdp_param.unsharded_layout = layout_on_larger_mesh(mesh, fsdp_param.unsharded_layout)
    fsdp_param.parameter = nn.Parameter(wrap(local, fsdp_param.stored_layout), requires_grad=old.requires_grad)
    ParamAttributes.of(old).set_on(fsdp_param.parameter)
    fsdp_param.parameter._data_parallel = old._data_parallel  # type: ignore[attr-defined]
    fsdp_param.put_value(fsdp_param.parameter)
    note_replaced(old, "fully_shard", fsdp_param)
    if fsdp_param.param_group is not None:
        fsdp_param.param_group.clear_derived_state()
