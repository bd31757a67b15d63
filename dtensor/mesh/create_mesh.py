"""Create the meshes that the library itself makes: the default one over the world, copies with new process groups, dry runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import MeshError
from .device_mesh import ENTERED_MESHES, DeviceMesh, as_mesh
from .init_world import ensure_world, has_processes
from .process_groups import make_torch_group
from .root import Root, make_root


class _WorldMesh(threading.local):
    """Mesh over all ranks, for each thread, because torch's tests run ranks as threads."""

    mesh: DeviceMesh | None = None


_WORLD_MESH = _WorldMesh()


def mesh_or_world(mesh: Any) -> DeviceMesh:
    """Return ``mesh``, else the entered mesh, else a 1-d mesh over all ranks if ranks are processes.

    Raises:
        MeshError: none of these exists.
    """
    if mesh is not None or ENTERED_MESHES:
        return as_mesh(mesh)
    if not has_processes():
        raise MeshError("no device mesh: pass mesh=, or enter one with `with mesh:`")
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    device_type = "cuda" if on_gpu else "cpu"
    ensure_world(device_type)
    world = _WORLD_MESH.mesh
    if world is None or world._root.world is not dist.group.WORLD or world.device_type != device_type:
        world = _WORLD_MESH.mesh = DeviceMesh(device_type, dist.get_world_size())
    return world


def copy_with_new_group(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> DeviceMesh:
    """Return a mesh of the same ranks with a new process group over ``mesh_dims``. Every member of the mesh must call it."""
    member, root = mesh.current_member(), mesh._root
    copy = DeviceMesh(mesh.device_type, torch.tensor(root.ranks, device="cpu").reshape(root.shape))
    if member is not None and mesh.kind == "process_group":
        ranks = [mesh.ranks[m] for m in mesh.members_of(mesh_dims, member)]
        copy._root.groups[mesh.group_id(mesh_dims)] = make_torch_group(mesh, mesh_dims, ranks)
    return copy._derive(mesh._dims, mesh.mesh_dim_names)


def dry_run_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a dry-run mesh of the same shape and names, with the cost estimates of ``mesh``."""
    if mesh.kind == "dry_run":
        return mesh
    root = make_root("meta", np.asarray(mesh.ranks).reshape(mesh.shape), mesh.mesh_dim_names)
    root.simulated_mesh = mesh
    return mesh_of_root(root)


def dry_run_of_profile(profile: Any, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a dry-run mesh of a cluster, with cost estimates from a :class:`~dtensor.cost.profile.Profile`."""
    root = make_root("meta", np.arange(math.prod(shape)).reshape(shape), names)
    root.profile = profile
    return mesh_of_root(root)


def mesh_of_root(root: Root) -> DeviceMesh:
    """Return the mesh that has each dim of ``root`` as a mesh dim."""
    dims = tuple((dim,) for dim in range(len(root.shape)))
    return DeviceMesh(root.device_type, None, mesh_dim_names=root.names, _root=root, _dims=dims)
