"""Submesh: the root dims and names of meshes that are derived by slicing, flattening, unflattening and concatenating."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MeshDimError, MeshError
from .geometry import Dims, Geometry, Names
from .root import Backend, parse_backends


def slice_dims(mesh: Geometry, names: str | tuple[str, ...]) -> tuple[Dims, Names]:
    """Return root dims and names of the submesh of these mesh dims or flattened dims, for ``DeviceMesh.__getitem__``."""
    own_names, root = mesh.mesh_dim_names, mesh._root
    requested = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, (tuple, list)) else ()
    if not requested or not all(isinstance(name, str) for name in requested) or len(set(requested)) != len(requested):
        raise MeshError(f"mesh[{names!r}] needs one or several different mesh dims of {own_names}")
    dims = []
    for name in requested:
        if own_names is not None and name in own_names:
            dims.append(mesh._dims[own_names.index(name)])
        elif name in root.flattened and mesh._is_root:
            dims.append(root.flattened[name])
        elif own_names is None:
            raise MeshDimError(
                f"{mesh!r} has no mesh dim {name!r}: it was made without mesh_dim_names; pass them when you make the mesh"
            )
        else:
            raise MeshDimError(f"Invalid mesh_dim_name: {mesh!r} has no mesh dim {name!r}; its dims are {own_names}")
    used = [d for group in dims for d in group]
    if len(set(used)) != len(used):
        raise MeshError(f"mesh[{names!r}]: the dims overlap; name each underlying dim once")
    return tuple(dims), requested


def flatten_dims(mesh: Geometry, name: str | None, backend_override: Any = None) -> tuple[Dims, Names]:
    """Return root dims and name of the 1-d mesh over all dims; store the name and the requested backend in the root."""
    if not isinstance(name, str | None):
        raise MeshError(f"flatten(mesh_dim_name) takes a string, got {name!r}")
    if name is None and mesh.mesh_dim_names is not None:
        name = "_".join(mesh.mesh_dim_names)
    root, dims = mesh._root, tuple(d for group in mesh._dims for d in group)
    requested = parse_backends({0: backend_override}, (1,), None)
    if requested and name is None:
        raise MeshError(f"flatten(backend_override=...) needs mesh_dim_name=, because the mesh dims of {mesh!r} have no names")
    if name is None:
        return (dims,), None
    if requested and name not in root.named and name not in root.flattened:
        root.backends[root.multi_rank_dims(dims)] = requested[0,]
        root.groups.pop(root.multi_rank_dims(dims), None)  # holders of the earlier group keep it
    dims_of_name = root.named.get(name) or root.flattened.setdefault(name, dims)
    if dims_of_name != dims:
        raise MeshError(f"a mesh dim named {name!r} exists already; give flatten() another name")
    return (dims,), (name,)


def unflatten_dims(
    mesh: Geometry, dim: int | str, sizes: Sequence[int], names: Sequence[str] | None, backend_override: Any
) -> tuple[Any, Dims, Names, dict[tuple[int, ...], Backend]]:
    """Return ranks, root dims, names and backends for a new root in which one mesh dim is split into several."""
    at, sizes, root = mesh.dim_index(dim), tuple(sizes), mesh._root
    if math.prod(sizes) != mesh.shape[at] or any(size < 1 for size in sizes):
        raise MeshError(
            f"mesh dim {dim!r} of {mesh!r} has {mesh.shape[at]} ranks and cannot be unflattened to {sizes}; "
            "give sizes with that product"
        )
    if (mesh.mesh_dim_names is None) != (names is None) or (names is not None and len(names) != len(sizes)):
        raise MeshError(
            f"the mesh dims of {mesh!r} have the names {mesh.mesh_dim_names} and the {len(sizes)} new ones "
            f"{names}: name all or none"
        )
    group = mesh._dims[at]
    other_dims = [d for d in range(len(root.shape)) if d not in group]
    before = len([d for d in other_dims if d < min(group)])
    other_sizes = [root.shape[d] for d in other_dims]
    ranks = np.asarray(root.ranks).reshape(root.shape).transpose(*other_dims[:before], *group, *other_dims[before:])
    new_dim_of = {d: k if k < before else k + len(sizes) for k, d in enumerate(other_dims)}
    dims = [tuple(new_dim_of[d] for d in old) for k, old in enumerate(mesh._dims) if k != at]
    dims[at:at] = [(before + k,) for k in range(len(sizes))]
    dim_names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    if dim_names is not None and names is not None:
        dim_names[at : at + 1] = names
        if len(set(dim_names)) != len(dim_names):
            raise MeshError(f"mesh dims need different names, got {tuple(dim_names)}")
    array = ranks.reshape(*other_sizes[:before], *sizes, *other_sizes[before:])
    split, new_dims = set(root.multi_rank_dims(group)), [before + k for k, size in enumerate(sizes) if size > 1]
    backends = {}
    for key, backend in root.backends.items():
        if not (shared := split & set(key)) or shared == split:  # else no dims of the new mesh have the ranks of this group
            backends[tuple(sorted([new_dim_of[d] for d in key if d in new_dim_of] + (new_dims if shared else [])))] = backend
    backends |= {(before + k,): backend for (k,), backend in parse_backends(backend_override, sizes, names).items()}
    return array, tuple(dims), None if dim_names is None else tuple(dim_names), backends


def concatenate_dims(meshes: Sequence[Geometry]) -> tuple[Dims, Names]:
    """Return root dims and names of the mesh over the dims of several slices of one mesh, in the order of the slices.

    Raises:
        MeshError: slices of different meshes, or with a dim in common.
    """
    dims = tuple(dims for mesh in meshes for dims in mesh._dims)
    used = [d for group in dims for d in group]
    if any(mesh._root.key != meshes[0]._root.key for mesh in meshes) or len(set(used)) != len(used):
        raise MeshError(f"only submeshes of one mesh with different mesh dims can be concatenated, got {list(meshes)}")
    named = all(mesh.mesh_dim_names is not None for mesh in meshes)
    return dims, tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ()) if named else None


def unify_roots(meshes: Sequence[Any]) -> list[Any]:
    """Return meshes with the same ranks in the same order as meshes of one common root; others unchanged.

    Such meshes are one mesh, unflattened in several ways. The common root has the finest dims of all of them, if there are
    such dims; else the meshes are returned unchanged.
    """
    roots = list({mesh._root.key: mesh._root for mesh in meshes}.values())
    ends = sorted({end for root in roots for end in _suffix_sizes(root.shape)}, reverse=True)
    if len(roots) == 1 or len({root.family for root in roots}) > 1 or any(a % b for a, b in itertools.pairwise(ends)):
        return list(meshes)
    # number of dims of size 1, by end
    unit_dims = {end: max(_suffix_sizes(root.shape).count(end) - 1 for root in roots) for end in ends}
    shape: list[int] = []
    first: dict[int, int] = {}  # first new dim, by end
    for k, end in enumerate(ends):
        first[end] = len(shape)
        shape += [1] * unit_dims[end] + ([end // ends[k + 1]] if k + 1 < len(ends) else [])
    new_dims_of = {root.key: _finer_dims(root.shape, first, unit_dims) for root in roots}
    backends = {}
    for root in roots:
        for dims, backend in root.backends.items():
            backends[tuple(sorted(d for old in dims for d in new_dims_of[root.key][old] if shape[d] > 1))] = backend
    common = next((m for m in meshes if m._root.shape == tuple(shape) and m._root.backends == backends), None)
    cache_key = ("common root", *new_dims_of)
    if common is None and (common := roots[0].derived.get(cache_key)) is None:
        common = roots[0].derived[cache_key] = type(meshes[0])(roots[0].device_type, np.reshape(roots[0].ranks, shape))
        common._root.simulated_mesh = roots[0].simulated_mesh
        common._root.profile = roots[0].profile
        common._root.backends = backends
    new_dims = [
        tuple(tuple(d for old in dims for d in new_dims_of[mesh._root.key][old]) for dims in mesh._dims) for mesh in meshes
    ]
    return [common._derive(dims, mesh.mesh_dim_names) for dims, mesh in zip(new_dims, meshes, strict=True)]


def _suffix_sizes(shape: Sequence[int]) -> list[int]:
    """Return the products of all suffixes of ``shape``, the empty one included."""
    return [math.prod(shape[k:]) for k in range(len(shape) + 1)]


def _finer_dims(shape: Sequence[int], first: dict[int, int], unit_dims: dict[int, int]) -> list[tuple[int, ...]]:
    """Return for each dim of ``shape`` the dims of the common root that it is made of. Dims of size 1 keep their order."""
    result: list[tuple[int, ...]] = []
    used = dict.fromkeys(first, 0)
    for size, (start, end) in zip(shape, itertools.pairwise(_suffix_sizes(shape)), strict=True):
        if size == 1:
            result.append((first[start] + used[start],))
            used[start] += 1
        else:
            result.append(tuple(d for at in first if end < at <= start for d in (first[at] + unit_dims[at],)))
    return result


def have_same_root(one: Geometry, other: Geometry) -> bool:
    """Return True if both meshes are derived from one root, or from equal ones."""
    return one._root is other._root or one._root.key == other._root.key


def select_dims(mesh: Geometry, mesh_dims: Sequence[int]) -> tuple[Dims, Names]:
    """Return the root dims and names of some mesh dims, given by number."""
    names = mesh.mesh_dim_names
    return tuple(mesh._dims[i] for i in mesh_dims), None if names is None else tuple(names[i] for i in mesh_dims)


def join_dims(one: Geometry, other: Geometry) -> tuple[Dims, Names]:
    """Return root dims and names of the mesh over the dims of both meshes, in the order of their root."""
    dims = dict(zip(one._dims, one.mesh_dim_names or [None] * one.ndim, strict=True))
    dims |= dict(zip(other._dims, other.mesh_dim_names or [None] * other.ndim, strict=True))
    ordered = sorted(dims)
    names = tuple(name for name in map(dims.__getitem__, ordered) if name is not None)
    return tuple(ordered), names if len(names) == len(ordered) else None


def dims_of_ranks(mesh: Geometry, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the mesh dims, outermost first, over which the current rank's group is ``ranks`` in that order, or None."""
    member = mesh.current_member()
    if member is None:
        return None
    orders = (dims for count in range(1, mesh.ndim + 1) for dims in itertools.permutations(range(mesh.ndim), count))
    return next((dims for dims in orders if tuple(mesh.ranks[m] for m in mesh.members_of(dims, member)) == ranks), None)
