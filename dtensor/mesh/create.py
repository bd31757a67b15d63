"""Meshes over process groups that exist already: those given, and the world."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from ..errors import MeshError
from .device_mesh import CURRENT, DeviceMesh, as_mesh
from .root import distributed, ensure_world


def mesh_of_groups(group: Any, device_type: str, mesh: Any, names: Sequence[str] | None) -> DeviceMesh:
    """See ``DeviceMesh.from_group``."""
    if isinstance(group, (list, tuple)):
        if mesh is None:
            raise MeshError("from_group with several groups needs mesh=, the ranks as an n-d array")
        groups = list(group)
    else:
        groups = [group]
        mesh = dist.get_process_group_ranks(group) if mesh is None else mesh
    made = DeviceMesh(device_type, mesh, mesh_dim_names=names)
    if len(groups) != made.ndim:
        raise MeshError(
            f"{len(groups)} groups for the mesh {made.mesh.tolist()} of {made.ndim} dims; give one group per mesh dim"
        )
    if made.ndim == 1 and sorted(made.ranks) != sorted(ranks := dist.get_process_group_ranks(groups[0])):
        raise MeshError(f"Invalid mesh {made.mesh.tolist()} for a ProcessGroup with ranks {ranks}; leave mesh= out")
    made._root.groups = {(dim,): group for dim, group in enumerate(groups)}
    return made


def mesh_of_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
    """See ``DeviceMesh.from_torch``."""
    made = mesh_of_groups(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh.mesh_dim_names)
    # Private: what torch has flattened it tells by name only, and not which names there are.
    for name, flat in getattr(mesh, "_flatten_mapping", {}).items():
        dims = _dims_of_ranks(made, tuple(flat.mesh.tolist()))
        if dims is not None:
            made._root.flattened[name] = dims
            made._root.groups[dims] = flat.get_group()
    return made


def _dims_of_ranks(mesh: DeviceMesh, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh dims, outermost first, over which the current rank meets ``ranks``, in that order."""
    member = mesh.current_member()
    if member is None:
        return None
    orders = (dims for count in range(1, mesh.ndim + 1) for dims in itertools.permutations(range(mesh.ndim), count))
    return next((dims for dims in orders if tuple(mesh.ranks[m] for m in mesh.members_of(dims, member)) == ranks), None)


class _World(threading.local):
    """The mesh over all ranks; every thread has its own, since torch's tests run ranks as threads."""

    mesh: DeviceMesh | None = None


_WORLD = _World()


def mesh_or_world(mesh: Any) -> DeviceMesh:
    """``mesh``, else the one entered by ``with mesh:``, else a mesh of one dim over all ranks where they are processes.

    Raises:
        MeshError: none of them.
    """
    if mesh is not None or CURRENT or not distributed():
        return as_mesh(mesh)
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    device_type = "cuda" if on_gpu else "cpu"
    ensure_world(device_type)
    found = _WORLD.mesh
    if found is None or found._root.world is not dist.group.WORLD or found.device_type != device_type:
        found = _WORLD.mesh = DeviceMesh(device_type, dist.get_world_size())
    return found
