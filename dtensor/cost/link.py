"""What a step takes: of a transfer seconds by an alpha-beta model per backend and collective, latency plus bytes over bandwidth;
of a local operation those that :class:`~dtensor.cost.device.Device` says.

The constants are those of the :class:`~dtensor.cost.profile.Profile` that all ranks go by, for the mesh dims concerned: a group
within one host may have a faster link than one that reaches over several.
"""

from __future__ import annotations

import numpy as np
import torch

from ..base.caches import remembered
from ..mesh.coordinate_tables import groups
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import backend_of, settled_by_first
from .device import DEVICES, STANDS_FOR, Device, named
from .profile import Link, profile_of

# One process plans like the process group that the same program would run on; a dry run stands for a cluster of GPUs.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "meta": "nccl"}


@remembered(1024)
def link_of(mesh: DeviceMesh, mesh_dims: tuple[int, ...] = ()) -> Link:
    """The constants for groups over ``mesh_dims``, () for all ranks of the mesh together."""
    mesh = mesh._root.stands_for or mesh
    profile = profile_of(mesh)
    backend = _BACKENDS.get(mesh.device_type, "nccl")
    if mesh.kind == "process_group":
        actual = backend_of(mesh._root.world, mesh.device_type)
        backend = actual if actual in profile.links else backend
    if not profile.ranks_per_host or backend not in profile.between_hosts:
        return profile.link(backend)
    ranks = np.asarray(mesh.ranks)[groups(mesh, mesh_dims or tuple(range(mesh.ndim)))]
    hosts = ranks // profile.ranks_per_host
    return profile.link(backend, between_hosts=bool((hosts != hosts[:, :1]).any()))


@remembered(1024)
def device_of(mesh: DeviceMesh) -> Device:
    """What computing takes on the devices of ``mesh``, all ranks going by one: measured, or built in for the kind they are."""
    mesh = mesh._root.stands_for or mesh
    kind = mesh.device_type
    measured = profile_of(mesh).devices.get(kind)
    if measured is not None:
        return measured
    name = STANDS_FOR.get(kind, "H100")
    if kind == "cuda" and torch.cuda.is_available():
        name = named(torch.cuda.get_device_name())
        if mesh.kind == "process_group":
            name = settled_by_first(mesh._root.world, "dtensor/device", name) or STANDS_FOR[kind]
    return DEVICES[name]


def collective_seconds(mesh: DeviceMesh, mesh_dims: tuple[int, ...], kind: str, nbytes: int) -> float:
    """Time of a collective over ``mesh_dims`` of which the busiest rank moves ``nbytes`` one way."""
    return link_of(mesh, mesh_dims).rate(kind).seconds(mesh.size_of(mesh_dims), nbytes)


def local_seconds(mesh: DeviceMesh, nbytes: int) -> float:
    """Time to write ``nbytes`` of new local memory."""
    return nbytes / link_of(mesh).memory
