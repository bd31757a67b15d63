"""Data parallelism as a table: four layouts of a parameter in each way to do it. What a way communicates follows from its row.

``S`` is cut over a data-parallel mesh dim, ``R`` is the same on all its ranks; of two letters the first is for the dims that copy
(the outer ones), the second for those that cut.

- stored ``S``, compute ``R``: an all-gather before the computation, over the dims that differ;
- gradient ``S``: a reduce-scatter of what ranks have computed; gradient ``R``: an all-reduce;
- state ``S``, stored ``R``: gradients are cut, which moves nothing, and updated parts are gathered after the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import MeshError
from ...mesh.create import mesh_or_world
from ...mesh.device_mesh import DeviceMesh
from .offload import Host
from .policy import DataParallelMeshDims, OffloadPolicy


class Way(NamedTuple):
    """A row: how a parameter, its gradient and the optimizer's state of it lie between and in steps."""

    stored: str
    compute: str
    gradient: str
    state: str


WAYS = {
    "FSDP": Way("S", "R", "S", "S"),
    "HSDP": Way("RS", "R", "RS", "RS"),
    "DDP": Way("R", "R", "R", "R"),
    "ZeRO-1": Way("R", "R", "R", "S"),
}


@dataclass(frozen=True, slots=True)
class Axes:
    """The data-parallel mesh and what its dims do.

    Attributes:
        mesh: its dims that copy come first.
        way: the row of the table.
        copying: how many of the dims copy, where the row tells them apart.
        host: where parameters are kept instead of on the device, if so.
        shard, replicate: the mesh dims that cut what is stored, and those that copy it.
        scattered, reduced: those over which gradients are reduce-scattered, and those over which they are all-reduced.
    """

    mesh: DeviceMesh
    way: Way
    copying: int = 0
    host: Host | None = None
    shard: tuple[int, ...] = field(init=False)
    replicate: tuple[int, ...] = field(init=False)
    scattered: tuple[int, ...] = field(init=False)
    reduced: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        roles = {
            "shard": self.dims(self.way.stored, "S"),
            "replicate": self.dims(self.way.stored, "R"),
            "scattered": self.dims(self.way.gradient, "S"),
            "reduced": self.dims(self.way.gradient, "R"),
        }
        for name, dims in roles.items():
            object.__setattr__(self, name, dims)

    def dims(self, letters: str, letter: str) -> tuple[int, ...]:
        """The mesh dims that have ``letter`` in a cell of the table."""
        return tuple(i for i in self.both if (letters[0] if i < self.copying else letters[-1]) == letter)

    @property
    def kept_on(self) -> str:
        """The type of device that parameters are kept on."""
        return self.mesh.device_type if self.host is None else "cpu"

    @property
    def both(self) -> tuple[int, ...]:
        return tuple(range(self.mesh.ndim))


def sharding(mesh: Any, dims: DataParallelMeshDims | None, offload: OffloadPolicy) -> Axes:
    """The roles of a mesh's dims for ``fully_shard``: of those that ``dims`` names, or of all.

    Raises:
        MeshError: it names none; or without it, there are more than two.
    """
    mesh = mesh_or_world(mesh)
    host = Host.of(offload, mesh.device_type)
    if dims is not None:
        shard, copy = dims.shard_names, dims.replicate_names
        if not shard and not copy:
            raise MeshError(f"dp_mesh_dims of fully_shard needs shard=, replicate= or both, got {dims}")
        if not shard:
            return copying(mesh, dims, offload)
        return Axes(mesh[(*copy, *shard)], WAYS["HSDP" if copy else "FSDP"], len(copy), host)
    return cutting(mesh, host)


def cutting(mesh: DeviceMesh, host: Host | None) -> Axes:
    """The roles of all dims of a mesh.

    Raises:
        MeshError: there are more than two.
    """
    if mesh.ndim > 2:
        raise MeshError(
            "data parallelism takes a mesh of one dim (sharded), or of two (replicated over the first, "
            f"sharded over the second), got {mesh!r}; slice the data-parallel dims from it"
        )
    return Axes(mesh, WAYS["HSDP" if mesh.ndim == 2 else "FSDP"], mesh.ndim - 1, host)


def copying(mesh: Any, dims: DataParallelMeshDims | None, offload: OffloadPolicy) -> Axes:
    """The roles of a mesh's dims for ``replicate``: gradients are averaged over those that ``dims`` names, or over all.

    Raises:
        MeshError: ``dims`` names some to cut over, or none.
    """
    mesh = mesh_or_world(mesh)
    if dims is not None:
        names = dims.replicate_names
        if dims.shard or not names:
            raise MeshError(f"dp_mesh_dims of replicate needs replicate= and no shard=, got {dims}; see fully_shard()")
        mesh = mesh[names]
    return Axes(mesh, WAYS["DDP"], 0, Host.of(offload, mesh.device_type))
