"""The root of meshes: all ranks, laid out once, and where they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.late_binding import in_use
from ..base.validation import whole, wholes
from ..errors import ArgumentError, MeshError
from .init_world import distributed, ensure_world

Kind = str  # "process_group", "in_process", "dry_run": the row of ``comm.BACKENDS``
LAID_OUT: list[Callable[[], None]] = []  # called when this process has become a rank among others


@dataclass(frozen=True, slots=True)
class Backend:
    """What a process group is made with: a backend of torch's by name, None: the world's; and options of it."""

    name: str | None
    options: Any = None


@dataclass(slots=True, eq=False)
class Root:
    """All members of a family of meshes, and what they share."""

    device_type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    kind: Kind
    world: Any = None  # the torch world group that the ranks belong to, None in one process
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)  # root dims, for each name that a mesh dim was made with
    flattened: dict[str, tuple[int, ...]] = field(default_factory=dict)  # and those that came later
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)  # root dims -> torch group
    backends: dict[tuple[int, ...], Backend] = field(default_factory=dict)  # root dims -> of the group over them, where asked for
    derived: dict[Any, Any] = field(default_factory=dict)
    seeded: set[int] = field(default_factory=set)  # root dims over which ranks draw from the same generator state
    units: dict[Any, int] = field(
        default_factory=dict
    )  # how many units of data parallelism there are, by the root dims they lie over
    entered: dict[Any, list[Any]] = field(default_factory=dict)  # blocks of `with mesh:`
    stands_for: Any = None  # of a dry run, the mesh that it is one of: what things take there is what they take here
    profile: Any = None  # of a dry run, what things take on the cluster that it is one of, if not on one like this machine's

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What never changes: backends may be asked for later."""
        return self.device_type, self.ranks, self.shape, self.kind, id(self.world)

    @property
    def family(self) -> tuple[Any, ...]:
        """What meshes have in common that are one mesh in several ways."""
        return self.device_type, self.ranks, self.kind, id(self.world), self.stands_for, id(self.profile)

    @property
    def key(self) -> tuple[Any, ...]:
        return *self.family, self.shape, tuple(sorted(self.backends.items()))

    def next_unit(self, dims: Any) -> int:
        """The number of one more unit: the same on all ranks of its groups, which make them in one order."""
        self.units[dims] = self.units.get(dims, 0) + 1
        return self.units[dims]

    def wide(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Those along which there are several ranks, in one order: whichever dims have these are over the same ranks."""
        return tuple(sorted(d for d in dims if self.shape[d] > 1))


def device_type_of(device: Any) -> str:
    """``"cpu"``, ``"cuda"``, ...: a device without an index, that torch knows."""
    try:
        known = torch.device(device if isinstance(device, torch.device) else str(device))
    except RuntimeError:
        known = None
    if known is None or not isinstance(device, (str, torch.device)):
        raise MeshError(f"{device!r} is not a device type; write 'cpu', 'cuda', or 'meta' for a mesh without data")
    if known.index is not None:
        raise MeshError(f"Device type with index is not supported: {str(device)!r}; each rank uses its current device")
    return known.type


def mesh_shape_of(shape: Any) -> tuple[int, ...]:
    """Positive whole numbers; one alone counts as a mesh of one dim."""
    try:
        found = wholes(shape if isinstance(shape, Iterable) else (shape,), "mesh_shape")
    except ArgumentError as wrong:
        raise MeshError(f"{wrong}; write (2, 4), for example") from None
    if any(size < 1 for size in found):
        raise MeshError(f"mesh_shape {found} must have positive sizes")
    return found


def mesh_dim_of(mesh_dim: Any) -> int:
    """A mesh dim given by its index."""
    try:
        return whole(mesh_dim, "a mesh dim")
    except ArgumentError as wrong:
        raise MeshError(f"{wrong}; give its index or its name") from None


def _ranks(mesh: Any) -> Any:
    """An array of whole numbers."""
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
    """The root over an n-d array of ranks.

    Raises:
        MeshError: repeated ranks, wrong number of names, ranks outside the world.
    """
    in_use()
    device_type, array = device_type_of(device_type), _ranks(mesh)
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
            raise MeshError(f"two mesh dims have the same name: mesh_dim_names={names}")
    kind: Kind = "in_process"
    world = None
    if device_type == "meta":
        kind = "dry_run"
    elif distributed():
        ensure_world(device_type)
        kind, world = "process_group", dist.group.WORLD
        if max(ranks) >= dist.get_world_size():
            size = dist.get_world_size()
            raise MeshError(f"the mesh has rank {max(ranks)}, but the world has {size} ranks, 0 to {size - 1}")
        for tell in LAID_OUT:
            tell()
    named: dict[str, tuple[int, ...]] = {name: (dim,) for dim, name in enumerate(names or ())}
    return Root(device_type, ranks, tuple(array.shape), names, kind, world, named)


def backends_of(override: Any, shape: Sequence[int], names: Sequence[str] | None) -> dict[tuple[int, ...], Backend]:
    """What ``backend_override`` says, by mesh dim.

    Raises:
        MeshError: it is no dict of mesh dims, names or numbers, each once, and of backends.
    """
    found: dict[tuple[int, ...], Backend] = {}
    asked_for = override.items() if isinstance(override, Mapping) else enumerate(override or ())
    for which, asked in asked_for:
        if asked in (None, (None, None)):
            continue
        dim = (names or ()).index(which) if which in (names or ()) else which
        if not isinstance(dim, int) or not 0 <= dim < len(shape):
            raise MeshError(
                f"backend_override names the mesh dim {which!r}; a mesh of shape {tuple(shape)} with {names=} has none"
            )
        if (dim,) in found:
            raise MeshError(f"backend_override names mesh dim {dim} twice, as {which!r} too")
        name, options = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, None)
        if not isinstance(name, str) and options is None:
            name, options = None, name
        if not (isinstance(name, str) or name is None) or not (options is None or hasattr(options, "backend")):
            raise MeshError(f"backend_override takes the name of a backend, its options, or (name, options), got {asked!r}")
        found[dim,] = Backend(name, options)
    return found
