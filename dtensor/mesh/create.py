"""Meshes over process groups that exist already: those given, and the world."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import MeshError
from .device_mesh import CURRENT, DeviceMesh, as_mesh
from .init_world import distributed, ensure_world
from .process_groups import new_handle
from .root import Root, make_root


class _World(threading.local):
    """The mesh over all ranks; every thread has its own, since torch's tests run ranks as threads."""

    mesh: DeviceMesh | None = None


_WORLD = _World()


def mesh_or_world(mesh: Any) -> DeviceMesh:
    """``mesh``, else the one entered by ``with mesh:``, else a mesh of one dim over all ranks where they are processes.

    Raises:
        MeshError: none of them.
    """
    if mesh is not None or CURRENT:
        return as_mesh(mesh)
    if not distributed():
        raise MeshError("no device mesh: pass mesh=, or enter one with `with mesh:`")
    on_gpu = torch.cuda.is_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())
    device_type = "cuda" if on_gpu else "cpu"
    ensure_world(device_type)
    found = _WORLD.mesh
    if found is None or found._root.world is not dist.group.WORLD or found.device_type != device_type:
        found = _WORLD.mesh = DeviceMesh(device_type, dist.get_world_size())
    return found


def with_groups_of_its_own(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> DeviceMesh:
    """The same ranks laid out alike, with a new process group over ``mesh_dims``; every member of the mesh calls it."""
    member, root = mesh.current_member(), mesh._root
    made = DeviceMesh(mesh.device_type, torch.tensor(root.ranks, device="cpu").reshape(root.shape))
    if member is not None and mesh.kind == "process_group":
        ranks = [mesh.ranks[m] for m in mesh.members_of(mesh_dims, member)]
        made._root.groups[mesh.group_id(mesh_dims)] = new_handle(mesh, mesh_dims, ranks)
    return made._derive(mesh._dims, mesh.mesh_dim_names)


def dry_run_of(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh without data of the same shape and names, on which everything is taken to last as long as on ``mesh``."""
    if mesh.kind == "dry_run":
        return mesh
    root = make_root("meta", np.asarray(mesh.ranks).reshape(mesh.shape), mesh.mesh_dim_names)
    root.stands_for = mesh
    return mesh_of(root)


def dry_run_on(profile: Any, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A mesh without data of a cluster of which a :class:`~dtensor.cost.profile.Profile` says what everything takes."""
    root = make_root("meta", np.arange(math.prod(shape)).reshape(shape), names)
    root.profile = profile
    return mesh_of(root)


def mesh_of(root: Root) -> DeviceMesh:
    """All dims of a root, as they were made."""
    dims = tuple((dim,) for dim in range(len(root.shape)))
    return DeviceMesh(root.device_type, None, mesh_dim_names=root.names, _root=root, _dims=dims)
