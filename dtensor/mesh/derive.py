"""The dims of meshes made of other meshes: slices, dims joined into one, one dim split into several, slices put together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MeshDimError, MeshError
from .geometry import Dims, Geometry, Names
from .root import Backend, backends_of


def sliced(mesh: Geometry, names: str | tuple[str, ...]) -> tuple[Dims, Names]:
    """See ``DeviceMesh.__getitem__``."""
    known, root = mesh.mesh_dim_names, mesh._root
    wanted = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, (tuple, list)) else ()
    if not wanted or not all(isinstance(name, str) for name in wanted) or len(set(wanted)) != len(wanted):
        raise MeshError(f"mesh[{names!r}]: name one or several different mesh dims of {known}")
    dims = []
    for name in wanted:
        if known is not None and name in known:
            dims.append(mesh._dims[known.index(name)])
        elif name in root.flattened and mesh._is_root:
            dims.append(root.flattened[name])
        elif known is None:
            raise MeshDimError(f"{mesh!r} has no mesh dim {name!r}: it was made without mesh_dim_names, by which dims are picked")
        else:
            raise MeshDimError(f"Invalid mesh_dim_name: {mesh!r} has no mesh dim {name!r}; its dims are {known}")
    used = [d for group in dims for d in group]
    if len(set(used)) != len(used):
        raise MeshError(f"mesh[{names!r}]: the dims overlap; name each underlying dim once")
    return tuple(dims), wanted


def flattened(mesh: Geometry, name: str | None, backend_override: Any = None) -> tuple[Dims, Names]:
    """See ``DeviceMesh.flatten``. The root keeps the name, and what the group is made with."""
    if not isinstance(name, str | None):
        raise MeshError(f"flatten(mesh_dim_name) takes a string, got {name!r}")
    if name is None and mesh.mesh_dim_names is not None:
        name = "_".join(mesh.mesh_dim_names)
    root, dims = mesh._root, tuple(d for group in mesh._dims for d in group)
    asked = backends_of({0: backend_override}, (1,), None)
    if asked and name is None:
        raise MeshError(
            f"flatten(backend_override=...) of {mesh!r}, whose dims have no names: give mesh_dim_name, to be known by"
        )
    if name is None:
        return (dims,), None
    if asked and name not in root.named and name not in root.flattened:
        root.backends[root.wide(dims)] = asked[0,]
        root.groups.pop(root.wide(dims), None)  # who has it keeps it
    known = root.named.get(name) or root.flattened.setdefault(name, dims)
    if known != dims:
        raise MeshError(f"a mesh dim named {name!r} exists already; give flatten() another name")
    return (dims,), (name,)


def unflattened(
    mesh: Geometry, dim: int | str, sizes: Sequence[int], names: Sequence[str] | None, backend_override: Any
) -> tuple[Any, Dims, Names, dict[tuple[int, ...], Backend]]:
    """See ``DeviceMesh.unflatten``. The new mesh is a root of its own: the old one has no dims to pick the new ones from."""
    at, sizes, root = mesh.dim_index(dim), tuple(sizes), mesh._root
    if math.prod(sizes) != mesh.shape[at] or any(size < 1 for size in sizes):
        raise MeshError(f"mesh dim {dim!r} of {mesh!r} has {mesh.shape[at]} ranks, which are not split into {sizes}")
    if (mesh.mesh_dim_names is None) != (names is None) or (names is not None and len(names) != len(sizes)):
        raise MeshError(f"dims of {mesh!r} are named {mesh.mesh_dim_names}, the {len(sizes)} new ones {names}: name all or none")
    group = mesh._dims[at]
    rest = [d for d in range(len(root.shape)) if d not in group]
    before = len([d for d in rest if d < min(group)])
    kept = [root.shape[d] for d in rest]
    ranks = np.asarray(root.ranks).reshape(root.shape).transpose(*rest[:before], *group, *rest[before:])
    now = {d: k if k < before else k + len(sizes) for k, d in enumerate(rest)}
    dims = [tuple(now[d] for d in old) for k, old in enumerate(mesh._dims) if k != at]
    dims[at:at] = [(before + k,) for k in range(len(sizes))]
    known = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    if known is not None and names is not None:
        known[at : at + 1] = names
        if len(set(known)) != len(known):
            raise MeshError(f"mesh dims need different names, got {tuple(known)}")
    array = ranks.reshape(*kept[:before], *sizes, *kept[before:])
    split, made = set(root.wide(group)), [before + k for k, size in enumerate(sizes) if size > 1]
    backends = {}
    for key, asked in root.backends.items():
        if not (met := split & set(key)) or met == split:  # else its group is over ranks that no dims of the new mesh have
            backends[tuple(sorted([now[d] for d in key if d in now] + (made if met else [])))] = asked
    backends |= {(before + k,): asked for (k,), asked in backends_of(backend_override, sizes, names).items()}
    return array, tuple(dims), None if known is None else tuple(known), backends


def concatenated(meshes: Sequence[Geometry]) -> tuple[Dims, Names]:
    """The mesh of all dims of several slices of one mesh, in their order.

    Raises:
        MeshError: slices of different meshes, or with a dim in common.
    """
    dims = tuple(dims for mesh in meshes for dims in mesh._dims)
    used = [d for group in dims for d in group]
    if any(mesh._root.key != meshes[0]._root.key for mesh in meshes) or len(set(used)) != len(used):
        raise MeshError(f"only slices of one mesh without a dim in common can be put together, got {list(meshes)}")
    named = all(mesh.mesh_dim_names is not None for mesh in meshes)
    return dims, tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ()) if named else None


def same_root(one: Geometry, other: Geometry) -> bool:
    """Whether both are parts of one mesh."""
    return one._root is other._root or one._root.key == other._root.key


def picked(mesh: Geometry, mesh_dims: Sequence[int]) -> tuple[Dims, Names]:
    """Some dims of a mesh, by number."""
    names = mesh.mesh_dim_names
    return tuple(mesh._dims[i] for i in mesh_dims), None if names is None else tuple(names[i] for i in mesh_dims)


def joined(one: Geometry, other: Geometry) -> tuple[Dims, Names]:
    """The mesh over the dims of both, in the order of the mesh that both are parts of."""
    dims = dict(zip(one._dims, one.mesh_dim_names or [None] * one.ndim, strict=True))
    dims |= dict(zip(other._dims, other.mesh_dim_names or [None] * other.ndim, strict=True))
    ordered = sorted(dims)
    names = tuple(name for name in map(dims.__getitem__, ordered) if name is not None)
    return tuple(ordered), names if len(names) == len(ordered) else None


def dims_of_ranks(mesh: Geometry, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh dims, outermost first, over which the current rank meets ``ranks``, in that order."""
    member = mesh.current_member()
    if member is None:
        return None
    orders = (dims for count in range(1, mesh.ndim + 1) for dims in itertools.permutations(range(mesh.ndim), count))
    return next((dims for dims in orders if tuple(mesh.ranks[m] for m in mesh.members_of(dims, member)) == ranks), None)
