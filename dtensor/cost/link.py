"""Link costs: seconds of a transfer by latency and bandwidth, per backend and collective, and the device of a mesh.

The constants belong to the :class:`~dtensor.cost.profile.Profile` that all ranks of the mesh use. They depend on the mesh dims:
a group within one host may have a faster link than a group over several hosts.
"""

from __future__ import annotations

import numpy as np
import torch

from ..base.caches import memoize
from ..mesh.coordinate_tables import group_members
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import backend_name, elect_value
from .device import DEFAULT_DEVICE, DEVICES, Device, nearest_device
from .profile import Link, get_profile

# One process plans like the process group of the same program; a dry run simulates a cluster of GPUs.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "nccl"}


@memoize(1024)
def get_link(mesh: DeviceMesh, mesh_dims: tuple[int, ...] = ()) -> Link:
    """Return the constants of collectives in groups over ``mesh_dims``; () means all ranks of the mesh together."""
    mesh = mesh._root.simulated_mesh or mesh
    profile = get_profile(mesh)
    backend = _BACKENDS.get(mesh.device_type, "nccl")
    if mesh.kind == "process_group":
        actual = backend_name(mesh._root.world, mesh.device_type)
        backend = actual if actual in profile.links else backend
    if not profile.ranks_per_host or backend not in profile.between_hosts:
        return profile.link(backend)
    ranks = np.asarray(mesh.ranks)[group_members(mesh, mesh_dims or tuple(range(mesh.ndim)))]
    hosts = ranks // profile.ranks_per_host
    return profile.link(backend, between_hosts=bool((hosts != hosts[:, :1]).any()))


@memoize(1024)
def get_device(mesh: DeviceMesh) -> Device:
    """Return the compute constants of a mesh's devices, equal on all ranks: measured, or built in for the kind of device."""
    mesh = mesh._root.simulated_mesh or mesh
    kind = mesh.device_type
    measured = get_profile(mesh).devices.get(kind)
    if measured is not None:
        return measured
    name = DEFAULT_DEVICE.get(kind, "H100")
    if kind == "cuda" and torch.cuda.is_available():
        name = nearest_device(torch.cuda.get_device_name())
        if mesh.kind == "process_group":
            name = elect_value(mesh._root.world, "dtensor/device", name) or DEFAULT_DEVICE[kind]
    return DEVICES[name]


def collective_seconds(mesh: DeviceMesh, mesh_dims: tuple[int, ...], kind: str, nbytes: int) -> float:
    """Return the estimated seconds of a collective over ``mesh_dims`` in which the busiest rank sends or receives ``nbytes``."""
    return get_link(mesh, mesh_dims).rate(kind).seconds(mesh.size_of(mesh_dims), nbytes)


def local_seconds(mesh: DeviceMesh, nbytes: int) -> float:
    """Return the estimated seconds to write ``nbytes`` of new local memory."""
    return nbytes / get_link(mesh).memory
