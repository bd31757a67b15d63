"""Where members stand along mesh dims, as tables of integers for all of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.caches import remembered
from .device_mesh import DeviceMesh

Table = np.ndarray[Any, np.dtype[np.int64]]


@remembered(1024)
def leaves(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Table:
    """Every member's position among the blocks that ``mesh_dims`` cut, first one major."""
    coordinates = _coordinates(mesh)
    index = np.zeros(len(coordinates), dtype=np.int64)
    for mesh_dim in mesh_dims:
        index = index * mesh.shape[mesh_dim] + coordinates[:, mesh_dim]
    return index


@remembered(64)
def _coordinates(mesh: DeviceMesh) -> Table:
    return np.asarray(mesh.coordinates, dtype=np.int64).reshape(len(mesh.members), mesh.ndim)


@remembered(256)
def groups(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Table:
    """The members of each communication group over ``mesh_dims``, shape (groups, group size), in group order."""
    firsts = np.flatnonzero(leaves(mesh, mesh_dims) == 0)
    within = np.asarray(mesh.members_of(mesh_dims, 0), dtype=np.int64)  # member 0 is a first: all groups are this one, moved
    return firsts[:, None] + within[None, :]
