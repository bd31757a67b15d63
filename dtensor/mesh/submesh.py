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
        raise MeshError(f"mesh[{names!r}] needs one or several different mesh dims of {known}")
    dims = []
    for name in wanted:
        if known is not None and name in known:
            dims.append(mesh._dims[known.index(name)])
        elif name in root.flattened and mesh._is_root:
            dims.append(root.flattened[name])
        elif known is None:
            raise MeshDimError(f"{mesh!r} has no mesh dim {name!r}: it was made without mesh_dim_names")
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
        raise MeshError(f"flatten(backend_override=...) needs mesh_dim_name=, because the mesh dims of {mesh!r} have no names")
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
        raise MeshError(f"mesh dim {dim!r} of {mesh!r} has {mesh.shape[at]} ranks and cannot be unflattened to {sizes}")
    if (mesh.mesh_dim_names is None) != (names is None) or (names is not None and len(names) != len(sizes)):
        raise MeshError(
            f"the mesh dims of {mesh!r} have the names {mesh.mesh_dim_names} and the {len(sizes)} new ones "
            f"{names}: name all or none"
        )
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
        raise MeshError(f"only submeshes of one mesh with different mesh dims can be concatenated, got {list(meshes)}")
    named = all(mesh.mesh_dim_names is not None for mesh in meshes)
    return dims, tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ()) if named else None


def on_one_root(meshes: Sequence[Any]) -> list[Any]:
    """Meshes as parts of one. Those that have the same ranks in the same order (one mesh, unflattened in several ways) become
    parts of the mesh of the finest dims of all of them, where there is one; others stay as they are."""
    roots = list({mesh._root.key: mesh._root for mesh in meshes}.values())
    ends = sorted({end for root in roots for end in _ends(root.shape)}, reverse=True)
    if len(roots) == 1 or len({root.family for root in roots}) > 1 or any(a % b for a, b in itertools.pairwise(ends)):
        return list(meshes)
    ones = {end: max(_ends(root.shape).count(end) - 1 for root in roots) for end in ends}  # dims of one rank, by where they stand
    shape: list[int] = []
    first: dict[int, int] = {}  # of the dims that end there
    for k, end in enumerate(ends):
        first[end] = len(shape)
        shape += [1] * ones[end] + ([end // ends[k + 1]] if k + 1 < len(ends) else [])
    now = {root.key: _among(root.shape, first, ones) for root in roots}
    backends = {}
    for root in roots:
        for dims, asked in root.backends.items():
            backends[tuple(sorted(d for old in dims for d in now[root.key][old] if shape[d] > 1))] = asked
    made = next((m for m in meshes if m._root.shape == tuple(shape) and m._root.backends == backends), None)
    known = ("with", *now)
    if made is None and (made := roots[0].derived.get(known)) is None:
        made = roots[0].derived[known] = type(meshes[0])(roots[0].device_type, np.reshape(roots[0].ranks, shape))
        made._root.stands_for, made._root.profile, made._root.backends = roots[0].stands_for, roots[0].profile, backends
    moved = [tuple(tuple(d for old in dims for d in now[mesh._root.key][old]) for dims in mesh._dims) for mesh in meshes]
    return [made._derive(dims, mesh.mesh_dim_names) for dims, mesh in zip(moved, meshes, strict=True)]


def _ends(shape: Sequence[int]) -> list[int]:
    """How many ranks there are from each dim on, and none."""
    return [math.prod(shape[k:]) for k in range(len(shape) + 1)]


def _among(shape: Sequence[int], first: dict[int, int], ones: dict[int, int]) -> list[tuple[int, ...]]:
    """For each dim of ``shape`` the finer ones that it is made of: those of one rank in their order."""
    found: list[tuple[int, ...]] = []
    seen = dict.fromkeys(first, 0)
    for size, (start, end) in zip(shape, itertools.pairwise(_ends(shape)), strict=True):
        if size == 1:
            found.append((first[start] + seen[start],))
            seen[start] += 1
        else:
            found.append(tuple(d for at in first if end < at <= start for d in (first[at] + ones[at],)))
    return found


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
