"""Parameters taken over by data parallelism: DTensors on the data-parallel mesh, on top of what tensor parallelism made.

A weight that tensor parallelism cuts along the same tensor dim is cut by it first, then by data parallelism: each rank's
tensor-parallel block stays in one piece when the data-parallel cut is undone. That order is the ``level`` of the placements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from ...base.group_by import by_key
from ...base.torch_internals import is_traceable_wrapper_subclass
from ...base.wrapper_subclass import part_by_part
from ...comm import Communicator, PerRank, communicator_of
from ...errors import ContradictionError, MeshError, PlacementError
from ...layout.layout import Layout
from ...layout.on_other_mesh import cut_by, spelled_on
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...mesh.submesh import joined, on_one_root, picked, same_root
from ...placement import Shard
from ...tensor.dtensor import DTensor, wrap
from ...tensor.stale_params import Attributes, note_replaced
from ...tensor.views.block_owners import locals_of
from .dp_modes import Axes, cutting
from .managed import Managed, is_extended
from .policy import ShardPlacementResult
from .shared_params import around_units, managed_by, shared_with

T = TypeVar("T", bound=Tensor)
ShardPlacement = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]
Cut = tuple[Layout, Layout, Layout | None, int | None, Axes]  # as a ``Managed`` has them from ``stored`` on


def adopt(
    modules: Sequence[nn.Module], axes: Axes, ignored: set[nn.Parameter], by: str, where: ShardPlacement | None = None
) -> list[Managed]:
    """The parameters of ``modules`` that nobody manages yet, taken over; and those that they share with a unit below, which gives
    them up: what several units use must be gathered while any of them runs.

    Args:
        by: the function that takes them, for messages.

    Raises:
        MeshError: a DTensor parameter whose mesh is not of the same root as the data-parallel mesh.
        UnitError: one that a module elsewhere has in common with these, and that is distributed there already.
    """
    skipped = {id(p) for p in ignored}
    within = list(dict.fromkeys(submodule for module in modules for submodule in module.modules()))
    below = {id(m.parameter): m for submodule in within for m in managed_by(submodule)}
    around = around_units(modules)
    settled = {(id(at), name) for m in below.values() for at, name in m.places if at not in around}
    asked = [
        (at, name, parameter, shared_with(parameter, below, at, name, by))
        for at in within
        for name, parameter in at._parameters.items()
        if parameter is not None and id(parameter) not in skipped and (id(at), name) not in settled
    ]
    taken: dict[int, Managed] = {}
    new = {id(parameter): parameter for _, _, parameter, shared in asked if shared is None}
    cuts = {key: _cut(parameter, axes, where) for key, parameter in new.items()}  # what raises does before anything is done
    by_mesh = by_key((cuts[key][-1].mesh, parameter) for key, parameter in new.items())
    with_values = [p for mesh, own in by_mesh.items() for p in on_first(communicator_of(mesh), range(mesh.ndim), own)]
    filled = set(map(id, with_values))
    for at, name, parameter, shared in asked:
        known = taken.get(id(parameter), shared)
        if known is None:
            known = _take(parameter, cuts[id(parameter)], id(parameter) in filled)
            note_replaced(parameter, by, known)
        elif known.owner is not None:
            known.owner.give_up(known, axes)
        taken[id(parameter)] = known
        if (at, name) not in known.places:
            known.places.append((at, name))
        at._parameters[name] = known.parameter
    return list(dict.fromkeys(taken.values()))


def among(axes: Axes, modules: Sequence[nn.Module]) -> Axes:
    """``axes`` on a mesh of the same root as those that parameters of ``modules`` are distributed over, if there is one."""
    meshes = dict.fromkeys(p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor))
    return dataclasses.replace(axes, mesh=on_one_root([axes.mesh, *meshes])[0])


def _cut(parameter: nn.Parameter, axes: Axes, where: ShardPlacement | None) -> Cut:
    """How a parameter is to be cut."""
    placement, axes = _asked(parameter, where, axes)
    cut = None if not axes.shard or parameter.ndim == 0 else placement
    inside = beside(parameter._layout, axes.mesh) if isinstance(parameter, DTensor) else None
    axes, whole = over_both(axes, parameter, inside)
    dp_dims = [whole.mesh._dims.index(axes.mesh._dims[i]) for i in axes.shard]
    return (whole if cut is None else whole.replace(placements=cut_by(whole, cut, dp_dims))), whole, inside, cut, axes


def over_both(axes: Axes, x: Tensor, inside: Layout | None) -> tuple[Axes, Layout]:
    """The layout of what is whole over the data-parallel mesh and lies as ``inside`` beside it; and the axes on that root."""
    if inside is None:
        return axes, Layout.of(axes.mesh, None, x.shape, None, x.dtype)
    dp, own = on_one_root([axes.mesh, inside.mesh])
    spelled = Layout.of(own, inside.placements, inside.shape, None, inside.dtype)
    return dataclasses.replace(axes, mesh=dp), spelled_on(joined_mesh(dp, own), spelled)


def _take(parameter: nn.Parameter, how: Cut, filled: bool) -> Managed:
    layout, whole, *_, axes = how
    local = _own_part(parameter, axes, whole, layout, filled)
    made = nn.Parameter(wrap(local, layout), requires_grad=parameter.requires_grad)
    Attributes.of(parameter).set_on(made)
    made._data_parallel = axes.kept_on  # type: ignore[attr-defined]  # a mark that survives in the parameter
    return Managed([], made, *how)


def on_first(comm: Communicator, mesh_dims: Sequence[int], tensors: Sequence[T]) -> list[T]:
    """Return those tensors of which the first rank has values, not meta tensors, as the others may. One small broadcast."""
    own = [not x.is_meta for x in tensors]
    if tensors and comm.held and comm.mesh.kind == "process_group" and comm.mesh.device_type != "meta":
        flags = torch.tensor(own, dtype=torch.uint8, device=comm.mesh.device_type)
        first: list[int] = comm.broadcast(flags, mesh_dims).wait().tolist()
        own = [bool(flag) or (mine and _is_composed(x)) for flag, mine, x in zip(first, own, tensors, strict=True)]
    return [x for x, filled in zip(tensors, own, strict=True) if filled]


def _is_composed(x: Tensor) -> bool:
    return any(is_extended(part) or is_traceable_wrapper_subclass(part) for part in locals_of(x))


def of_first(comm: Communicator, local: Any, mesh_dims: Sequence[int]) -> Any:
    """Return the first rank's value on all ranks. Of a tensor made of several, part by part; extended ones stay each rank's."""
    if isinstance(local, Tensor) and local.is_meta:
        local = torch.empty_like(local, device=comm.mesh.device_type)

    def sent(part: Any) -> Any:
        return part if any(map(is_extended, locals_of(part))) else comm.broadcast(part, mesh_dims).wait()

    return part_by_part(sent, local)


def _asked(parameter: nn.Parameter, where: ShardPlacement | None, axes: Axes) -> tuple[int, Axes]:
    """The tensor dim to cut, and over what.

    Raises:
        PlacementError: ``where`` gives something else than None, a ``Shard`` of one of the parameter's dims, or such and a mesh.
    """
    asked: Any = None if where is None else where(parameter)
    if isinstance(asked, ShardPlacementResult):
        if not isinstance(asked.mesh_info, TorchDeviceMesh):
            raise PlacementError(
                f"ShardPlacementResult takes mesh_info=mesh, as fully_shard takes mesh=, got {asked.mesh_info!r}"
            )
        asked, axes = asked.placement, cutting(as_mesh(asked.mesh_info), axes.host)
    if asked is None:
        return 0, axes
    if not isinstance(asked, Shard) or not -parameter.ndim <= asked.dim < parameter.ndim:
        raise (ContradictionError if isinstance(asked, Shard) else PlacementError)(
            f"shard_placement_fn returned {asked!r} for a parameter of shape {tuple(parameter.shape)}; return "
            f"Shard(dim) with a dim below {parameter.ndim}, None for Shard(0), or a ShardPlacementResult"
        )
    return asked.dim % parameter.ndim, axes


def _own_part(parameter: Any, axes: Axes, whole: Layout, layout: Layout, filled: bool) -> Any:
    """Return this rank's block of the value that the first data-parallel rank has; not ``filled``: of a meta tensor."""
    local = parameter._local if isinstance(parameter, DTensor) else parameter.detach()
    comm, mesh = communicator_of(axes.mesh), whole.mesh
    if not communicator_of(mesh).held:
        return torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=local.device)
    if not filled and not _is_composed(parameter):
        return comm.map(
            lambda member: torch.empty(layout.local_shape(mesh.coordinates[member]), dtype=layout.dtype, device="meta")
        )
    if filled:
        local = local if parameter.is_meta else local.to(axes.mesh.device_type)
        if isinstance(local, PerRank) or not comm.holds_all:
            local = of_first(comm, local, axes.both)

    def block(member: int, full: torch.Tensor) -> torch.Tensor:
        at, origin = (x.local_offset(mesh.coordinates[member]) for x in (layout, whole))
        for dim, size in enumerate(layout.local_shape(mesh.coordinates[member])):
            full = full.narrow(dim, min(at[dim] - origin[dim], full.shape[dim]), size)
        part = full.detach().clone(memory_format=torch.contiguous_format)
        return part if axes.host is None else part.cpu()

    return comm.map(block, local)


def onto_one_mesh(managed: Sequence[Managed], dp: DeviceMesh) -> None:
    """Plain parameters beside tensor-parallel ones: replicated over the tensor-parallel mesh dims, with the first rank's value.

    All parameters of a model are on one mesh then, so that norms over them, and operations on lists of them, just work.
    """
    meshes = dict.fromkeys(m.compute.mesh for m in managed if m.inside is not None and same_root(m.compute.mesh, dp))
    together = dp
    for mesh in meshes:
        if apart(together, mesh):
            together = joined_mesh(together, mesh)
    for m in managed:
        if m.inside is None and m.axes.mesh == dp and m.compute.mesh != together:
            _relocate(m, together)


def _relocate(m: Managed, mesh: DeviceMesh) -> None:
    old = m.parameter
    further = tuple(i for i, dims in enumerate(mesh._dims) if dims not in m.stored.mesh._dims)
    local = old._local  # type: ignore[attr-defined]  # a DTensor
    comm = communicator_of(mesh)
    if on_first(comm, further, [old]):
        local = of_first(comm, local, further)
    m.stored, m.compute = spelled_on(mesh, m.stored), spelled_on(mesh, m.compute)
    m.parameter = nn.Parameter(wrap(local, m.stored), requires_grad=old.requires_grad)
    Attributes.of(old).set_on(m.parameter)
    m.parameter._data_parallel = old._data_parallel  # type: ignore[attr-defined]  # as _take does
    m.put(m.parameter)
    note_replaced(old, "fully_shard", m)
    if m.owner is not None:
        m.owner.forget()


# --- meshes ------------------------------------------------------------------------------------------------------------
def apart(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether no dim of one is a part of a dim of the other."""
    used = {d for dims in one._dims for d in dims}
    return all(dims in one._dims or not used & set(dims) for dims in other._dims)


def joined_mesh(dp: DeviceMesh, tp: DeviceMesh) -> DeviceMesh:
    """The mesh over the dims of both, in the order of the mesh that both are parts of."""
    if not same_root(dp, tp):
        raise MeshError(
            f"a parameter is on {tp!r}, which is not a submesh of the same mesh as {dp!r}; slice both from "
            "one: mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=('dp', 'tp')), then mesh['dp'] "
            "and mesh['tp']"
        )
    return dp._derive(*joined(dp, tp))


def beside(layout: Layout, dp: DeviceMesh) -> Layout | None:
    """``layout`` on the mesh dims that are not data-parallel; None if there is no such dim.

    Raises:
        MeshError: it is not replicated over those that are.
    """
    mesh = layout.mesh
    rest = [i for i, dims in enumerate(mesh._dims) if not (same_root(mesh, dp) and dims in dp._dims)]
    if any(not placement.is_replicate() for i, placement in enumerate(layout.placements) if i not in rest):
        raise MeshError(
            f"a parameter is already distributed over the data-parallel mesh {dp!r}: {layout!r}; parallelize "
            "it over another mesh dim"
        )
    if len(rest) == mesh.ndim:
        return layout
    if not rest:
        return None
    smaller = mesh._derive(*picked(mesh, rest))
    return Layout.of(smaller, [layout.placements[i] for i in rest], layout.shape, None, layout.dtype)
