"""Root of meshes: all ranks, arranged once, and the state that derived meshes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.validation import check_int, check_ints
from ..errors import ArgumentError, MeshError
from .init_world import ensure_world, has_processes

Kind = str  # "process_group", "in_process", "dry_run": a key of ``comm.BACKENDS``
MESH_HOOKS: list[Callable[[], None]] = []  # hooks that run when a mesh over processes is made


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend of a process group: the name of a torch backend (None: the world's) and its options."""

    name: str | None
    options: Any = None


@dataclass(slots=True, eq=False)
class Root:
    """Shared state of a mesh and all meshes that are derived from it.

    Attributes:
        derived: derived meshes by their root dims and names, and other cached meshes.
        named: root dims of each name that the root was made with.
        flattened: root dims of each name that flattening added.
        groups: torch process groups by their root dims.
        backends: requested backends by the root dims of the group.
        seeded: root dims over which ranks generate random numbers from the same generator state.
        units: number of data-parallel units by the mesh dims that they use.
        entered: the ``with mesh:`` blocks of each mesh.
        simulated_mesh: for a dry run of a real mesh, that mesh; its cost estimates are used.
        profile: for a dry run of a cluster, the :class:`~dtensor.cost.profile.Profile` of the cluster.
    """

    device_type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    kind: Kind
    world: Any = None  # torch's world group at the time, None in one process
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    backends: dict[tuple[int, ...], Backend] = field(default_factory=dict)
    derived: dict[Any, Any] = field(default_factory=dict)
    seeded: set[int] = field(default_factory=set)
    units: dict[Any, int] = field(default_factory=dict)
    entered: dict[Any, list[Any]] = field(default_factory=dict)
    simulated_mesh: Any = None
    profile: Any = None

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Return the parts of ``key`` that never change, for hashes. Backends may be requested later."""
        return self.device_type, self.ranks, self.shape, self.kind, id(self.world)

    @property
    def family(self) -> tuple[Any, ...]:
        """Return the parts of ``key`` that are equal for roots with the same ranks in other shapes."""
        return self.device_type, self.ranks, self.kind, id(self.world), self.simulated_mesh, id(self.profile)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key by which roots are compared: ``family``, shape and requested backends."""
        return *self.family, self.shape, tuple(sorted(self.backends.items()))

    def count_unit(self, dims: Any) -> int:
        """Count a new data-parallel unit over ``dims``, and return its number, for its default name.

        It is equal on all ranks of its groups, because they make units in the same order.
        """
        self.units[dims] = self.units.get(dims, 0) + 1
        return self.units[dims]

    def multi_rank_dims(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Return the root dims among ``dims`` with several ranks, sorted. Equal results mean groups of the same ranks."""
        return tuple(sorted(d for d in dims if self.shape[d] > 1))


def parse_device_type(device: Any) -> str:
    """Return the type of a device without an index, such as ``"cpu"`` or ``"cuda"``."""
    try:
        parsed = torch.device(device if isinstance(device, torch.device) else str(device))
    except RuntimeError:
        parsed = None
    if parsed is None or not isinstance(device, (str, torch.device)):
        raise MeshError(f"{device!r} is not a device type; write 'cpu', 'cuda', or 'meta' for a mesh without data")
    if parsed.index is not None:
        raise MeshError(f"Device type with index is not supported: {str(device)!r}; each rank uses its current device")
    return parsed.type


def parse_mesh_shape(shape: Any) -> tuple[int, ...]:
    """Return a mesh shape as a tuple of positive ints. One int means a mesh of one dim."""
    try:
        sizes = check_ints(shape if isinstance(shape, Iterable) else (shape,), "mesh_shape")
    except ArgumentError as error:
        raise MeshError(f"{error}; write (2, 4), for example") from None
    if any(size < 1 for size in sizes):
        raise MeshError(f"mesh_shape {sizes} must have positive sizes")
    return sizes


def parse_mesh_dim(mesh_dim: Any) -> int:
    """Return the index of a mesh dim as an int."""
    try:
        return check_int(mesh_dim, "a mesh dim")
    except ArgumentError as wrong:
        raise MeshError(f"{wrong}; give its index or its name") from None


def _parse_rank_array(mesh: Any) -> Any:
    """Return the ranks of a mesh as an array of ints; raise MeshError if they are not ints or rows differ in length."""
    if isinstance(mesh, (int, np.integer)):
        mesh = range(mesh)
    try:
        array = np.asarray(mesh.tolist() if isinstance(mesh, torch.Tensor) else mesh)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.size and array.dtype.kind not in "iu":
        raise MeshError(
            f"a mesh is an array of ranks with rows of equal length, got {mesh!r}; write for example [[0, 1], [2, 3]]"
        )
    return array.astype(int)


def make_root(device_type: str, mesh: Any, names: Sequence[str] | None) -> Root:
    """Make the root over an n-d array of ranks. If ranks are processes, initialize the world and run the mesh hooks.

    Raises:
        MeshError: repeated ranks, wrong number of names, ranks outside the world.
    """
    device_type, array = parse_device_type(device_type), _parse_rank_array(mesh)
    ranks = tuple(int(rank) for rank in array.reshape(-1))
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise MeshError(f"mesh ranks must be distinct ints from 0 on, at least one, got {array.tolist()}")
    if names is not None:
        names = tuple(names)
        if not all(isinstance(name, str) for name in names):
            raise MeshError(f"mesh_dim_names are strings, one per mesh dim, got {names}")
        if len(names) != array.ndim:
            raise MeshError(f"a mesh of shape {array.shape} needs {array.ndim} mesh_dim_names, got {names}")
        if len(set(names)) != len(names):
            raise MeshError(f"two mesh dims have the same name: mesh_dim_names={names}; give each its own")
    kind: Kind = "in_process"
    world = None
    if device_type == "meta":
        kind = "dry_run"
    elif has_processes():
        ensure_world(device_type)
        kind, world = "process_group", dist.group.WORLD
        if max(ranks) >= dist.get_world_size():
            size = dist.get_world_size()
            raise MeshError(
                f"the mesh has rank {max(ranks)}, but the world has {size} ranks, 0 to {size - 1}; start more processes"
            )
        for hook in MESH_HOOKS:
            hook()
    named: dict[str, tuple[int, ...]] = {name: (dim,) for dim, name in enumerate(names or ())}
    return Root(device_type, ranks, tuple(array.shape), names, kind, world, named)


def parse_backends(override: Any, shape: Sequence[int], names: Sequence[str] | None) -> dict[tuple[int, ...], Backend]:
    """Return the backends that ``backend_override`` requests, by mesh dim.

    Raises:
        MeshError: ``override`` is not a dict from mesh dims (names or numbers, each once) to backends.
    """
    backends: dict[tuple[int, ...], Backend] = {}
    items = override.items() if isinstance(override, Mapping) else enumerate(override or ())
    for mesh_dim, backend in items:
        if backend in (None, (None, None)):
            continue
        dim = (names or ()).index(mesh_dim) if mesh_dim in (names or ()) else mesh_dim
        if not isinstance(dim, int) or not 0 <= dim < len(shape):
            raise MeshError(
                f"backend_override names the mesh dim {mesh_dim!r}; a mesh of shape {tuple(shape)} with {names=} has none"
            )
        if (dim,) in backends:
            raise MeshError(f"backend_override names mesh dim {dim} twice, as {mesh_dim!r} too")
        name, options = backend if isinstance(backend, tuple) and len(backend) == 2 else (backend, None)
        if not isinstance(name, str) and options is None:
            name, options = None, name
        if not (isinstance(name, str) or name is None) or not (options is None or hasattr(options, "backend")):
            raise MeshError(f"backend_override takes the name of a backend, its options, or (name, options), got {backend!r}")
        backends[dim,] = Backend(name, options)
    return backends
