"""Data-parallel modes: a table with four placements for each mode, from which its communication follows.

``S`` is sharded over a data-parallel mesh dim, ``R`` is replicated. With two letters the first is for the outer mesh dims, which
replicate, and the second for the inner ones, which shard.

- stored ``S``, compute ``R``: an all-gather before the computation, over the mesh dims that differ.
- gradient ``S``: a reduce-scatter of the ranks' gradients; gradient ``R``: an all-reduce.
- state ``S``, stored ``R``: gradients are sliced without communication, and updated shards are gathered after the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....errors import MeshError
from ....mesh.create_mesh import mesh_or_world
from ....mesh.device_mesh import DeviceMesh
from .policy import DataParallelMeshDims, HostOffload, OffloadPolicy


class DataParallelMode(NamedTuple):
    """Placements of a parameter at rest and in the computation, of its gradient, and of its optimizer state."""

    stored: str
    compute: str
    gradient: str
    state: str


DP_MODES = {
    "FSDP": DataParallelMode("S", "R", "S", "S"),
    "HSDP": DataParallelMode("RS", "R", "RS", "RS"),
    "DDP": DataParallelMode("R", "R", "R", "R"),
    "ZeRO-1": DataParallelMode("R", "R", "R", "S"),
}


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Data-parallel mesh and the role of each of its dims.

    Attributes:
        mesh: the data-parallel mesh; dims that replicate come first.
        mode: the row of the table.
        num_replicate_dims: number of dims that replicate, if the row has two letters.
        offload: host memory for stored parameters; None: they stay on the device.
        shard, replicate: mesh dims over which stored parameters are sharded, and replicated.
        reduce_scatter, all_reduce: mesh dims over which gradients are reduce-scattered, and all-reduced.
    """

    mesh: DeviceMesh
    mode: DataParallelMode
    num_replicate_dims: int = 0
    offload: HostOffload | None = None
    shard: tuple[int, ...] = field(init=False)
    replicate: tuple[int, ...] = field(init=False)
    reduce_scatter: tuple[int, ...] = field(init=False)
    all_reduce: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        roles = {
            "shard": self.dims_with(self.mode.stored, "S"),
            "replicate": self.dims_with(self.mode.stored, "R"),
            "reduce_scatter": self.dims_with(self.mode.gradient, "S"),
            "all_reduce": self.dims_with(self.mode.gradient, "R"),
        }
        for name, dims in roles.items():
            object.__setattr__(self, name, dims)

    def dims_with(self, letters: str, letter: str) -> tuple[int, ...]:
        """Return the data-parallel mesh dims for which ``letters``, an entry of the mode table, has ``letter``."""
        return tuple(i for i in self.all_dims if (letters[0] if i < self.num_replicate_dims else letters[-1]) == letter)

    @property
    def storage_device(self) -> str:
        """Return the device type on which sharded parameters are stored."""
        return self.mesh.device_type if self.offload is None else "cpu"

    @property
    def all_dims(self) -> tuple[int, ...]:
        """Return all dims of the data-parallel mesh."""
        return tuple(range(self.mesh.ndim))


def make_sharding_axes(mesh: Any, dims: DataParallelMeshDims | None, offload: OffloadPolicy) -> MeshAxes:
    """Return the axes of ``fully_shard``: the mesh dims that ``dims`` names, or all.

    Raises:
        MeshError: ``dims`` names no dim, or it is None and the mesh has more than two dims.
    """
    mesh = mesh_or_world(mesh)
    host = HostOffload.from_policy(offload, mesh.device_type)
    if dims is not None:
        shard, replicate = dims.shard_names, dims.replicate_names
        if not shard and not replicate:
            raise MeshError(f"dp_mesh_dims of fully_shard needs shard=, replicate= or both, got {dims}")
        if not shard:
            return make_replicating_axes(mesh, dims, offload)
        return MeshAxes(mesh[(*replicate, *shard)], DP_MODES["HSDP" if replicate else "FSDP"], len(replicate), host)
    return make_axes_of_mesh(mesh, host)


def make_axes_of_mesh(mesh: DeviceMesh, offload: HostOffload | None) -> MeshAxes:
    """Return the axes that shard over all dims of a 1-d mesh, or over the second dim of a 2-d mesh.

    Raises:
        MeshError: the mesh has more than two dims.
    """
    if mesh.ndim > 2:
        raise MeshError(
            "data parallelism takes a mesh of one dim (sharded), or of two (replicated over the first, "
            f"sharded over the second), got {mesh!r}; slice the data-parallel dims from it"
        )
    return MeshAxes(mesh, DP_MODES["HSDP" if mesh.ndim == 2 else "FSDP"], mesh.ndim - 1, offload)


def make_replicating_axes(mesh: Any, dims: DataParallelMeshDims | None, offload: OffloadPolicy) -> MeshAxes:
    """Return the axes of ``replicate``: gradients are averaged over the mesh dims that ``dims`` names, or over all.

    Raises:
        MeshError: ``dims`` names dims to shard over, or none to replicate over.
    """
    mesh = mesh_or_world(mesh)
    if dims is not None:
        names = dims.replicate_names
        if dims.shard or not names:
            raise MeshError(f"dp_mesh_dims of replicate needs replicate= and no shard=, got {dims}; see fully_shard()")
        mesh = mesh[names]
    return MeshAxes(mesh, DP_MODES["DDP"], 0, HostOffload.from_policy(offload, mesh.device_type))
