"""Coordinate tables: positions of all members along mesh dims, as integer arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.caches import memoize
from .device_mesh import DeviceMesh

Table = np.ndarray[Any, np.dtype[np.int64]]


@memoize(1024)
def block_indices(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Table:
    """Return for every member the index of its block if ``mesh_dims`` shard a tensor dim, with the first mesh dim major."""
    coordinates = _coordinates(mesh)
    index = np.zeros(len(coordinates), dtype=np.int64)
    for mesh_dim in mesh_dims:
        index = index * mesh.shape[mesh_dim] + coordinates[:, mesh_dim]
    return index


@memoize(64)
def _coordinates(mesh: DeviceMesh) -> Table:
    return np.asarray(mesh.coordinates, dtype=np.int64).reshape(len(mesh.members), mesh.ndim)


@memoize(256)
def group_members(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Table:
    """Return the members of each communication group over ``mesh_dims``, with shape (groups, group size), in group order."""
    firsts = np.flatnonzero(block_indices(mesh, mesh_dims) == 0)
    within = np.asarray(mesh.members_of(mesh_dims, 0), dtype=np.int64)  # every group is the group of member 0, shifted
    return firsts[:, None] + within[None, :]
