"""``DeviceMesh``: ranks arranged as an n-d array with named dims.

A mesh is geometry: a *root* (all its members, laid out once) and, for each mesh dim, the root dims that make it up.
Slicing, reordering and flattening only pick root dims, so every derived mesh keeps the root's members, and in one
process a submesh lives on all its copies at once (``mesh["tp"]`` is the tp group of *each* dp coordinate).
A *member* is a position in the flattened root; ``ranks[member]`` is its rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from ..base.late_binding import pictured
from ..base.mode_stack import Scoped
from ..base.tracing import constant_of_graph
from ..errors import MeshError
from .current_rank import current_coordinate, current_rank
from .from_torch import of_torch
from .geometry import Dims, Geometry, Names, asked
from .process_groups import handle_of
from .root import Kind, Root, backends_of, device_type_of, make_root, mesh_shape_of
from .submesh import concatenated, flattened, on_one_root, sliced, unflattened


class DeviceMesh(Geometry, TorchDeviceMesh):
    """An n-d array of ranks.

    A ``torch.distributed.device_mesh.DeviceMesh`` as far as torch's functions look: functional collectives and ``DDP`` take it.
    Where no process group is initialised and no launcher's environment is set, all ranks live in this process;
    otherwise each rank is a process of ``torch.distributed``. Device type ``"meta"`` simulates one rank without data.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"meta"``.
        mesh: ranks as a nested list, array or tensor; an int n means ``range(n)``.
        mesh_dim_names: one name per mesh dim.
        backend_override: as of :func:`init_device_mesh`; or a sequence of (name, options), one per mesh dim.
        _init_backend: as torch has it. Process groups are made when they are first asked for, so it says nothing here.

    Raises:
        MeshError: repeated ranks, wrong number of names, ranks outside the world.

    >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    >>> mesh.shape, mesh["tp"].shape, mesh["tp", "dp"].shape
    ((2, 3), (3,), (3, 2))
    """

    __slots__ = ("_dims", "_hash", "_names", "_root")
    _hash: int

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Any = None,
        _init_backend: bool = True,
        _root: Root | None = None,
        _dims: Dims | None = None,
    ) -> None:
        if _root is None:
            _root = make_root(device_type, mesh, mesh_dim_names)
            _root.backends = backends_of(backend_override, _root.shape, _root.names)
            _dims = tuple((dim,) for dim in range(len(_root.shape)))
            mesh_dim_names = _root.names
        assert _dims is not None
        self._root = _root
        self._dims = _dims
        self._names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self._hash = hash((_root.geometry, _dims, self._names))

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, in all or along one mesh dim or flattened one."""
        if mesh_dim is None:
            return math.prod(self.shape)
        mesh, dim = self._along(mesh_dim, "size")
        return mesh.shape[dim]

    @asked
    def mesh(self) -> torch.Tensor:
        """The ranks of this mesh as the current rank sees it, shape ``self.shape``."""
        return torch.tensor(self.ranks_here(), dtype=torch.int, device="cpu").reshape(self.shape)

    # --- the current rank -------------------------------------------------------------------------------------
    def get_rank(self) -> Any:
        """The current rank.

        Where all ranks live in this process, and outside of ``map_ranks``: a ``RankNumber`` of all ranks. Asked whether it is 0,
        for what one rank does alone, it says yes.
        """
        return current_rank(self._root)

    def get_coordinate(self) -> tuple[Any, ...] | None:
        """The current rank's index along each mesh dim (see ``get_local_rank``); None if it is not part of the mesh."""
        return current_coordinate(self._root, self.coordinates, self.ndim)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        """The current rank's index along one mesh dim or flattened one (may be left out on a 1-d mesh).

        Where all ranks live in this process, and outside of ``map_ranks``: a ``RankNumber``, the index of each rank.

        Raises:
            MeshError: the current rank is not part of the mesh.

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_local_rank("tp")
        RankNumber(rank 0: 0, rank 1: 1, rank 2: 0, rank 3: 1)
        >>> map_ranks(lambda at: mesh.get_local_rank("tp"), mesh=mesh)
        RankValues(rank 0: 0, rank 1: 1, rank 2: 0, rank 3: 1)
        """
        mesh, dim = self._along(mesh_dim, "get_local_rank")
        if (coordinate := mesh.get_coordinate()) is None:
            raise MeshError(f"rank {self.get_rank()} is not part of {self!r}")
        return coordinate[dim]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The ``torch.distributed`` process group along one mesh dim or flattened one (may be left out on a 1-d mesh)."""
        return getattr(_GROUPS, _group_name(self, mesh_dim))

    def get_all_groups(self) -> list[Any]:
        """``get_group`` of every mesh dim."""
        return [self.get_group(mesh_dim) for mesh_dim in range(self.ndim)]

    @asked
    def _dim_group_names(self) -> list[Any]:
        """What torch's functional collectives ask for."""
        return [_group_name(self, mesh_dim) for mesh_dim in range(self.ndim)]

    def _along(self, mesh_dim: int | str | None, what: str) -> tuple[DeviceMesh, int]:
        """A mesh and its dim: one of this mesh, or a flattened one by its name, as the root knows it."""
        if mesh_dim is None:
            if self.ndim != 1:
                name = self._names[0] if self._names else 0
                raise MeshError(f"{what}() of a {self.ndim}-d mesh needs a mesh dim: {what}({name!r})")
            return self, 0
        if isinstance(mesh_dim, str) and mesh_dim not in (self._names or ()) and mesh_dim in self._root.flattened:
            return self._derive((self._root.flattened[mesh_dim],), (mesh_dim,)), 0
        return self, self.dim_index(mesh_dim)

    # --- derived meshes ---------------------------------------------------------------------------------------
    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh of one or several named dims, in the given order, adjacent or not."""
        return self._derive(*sliced(self, names))

    def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """The 1-d mesh over all dims of this one, first dim major; its name defaults to the names joined by "_".

        ``backend_override``: of their group, where the name is new: the name of a backend, its options, or (name, options).
        """
        return self._derive(*flattened(self, mesh_dim_name, backend_override))

    def unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], names: Sequence[str] | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """This mesh with one dim split into several, first one major. MeshError: sizes or ``names`` that do not fit.

        ``backend_override`` is as of :func:`init_device_mesh`, of the new dims. The others keep theirs.

        >>> init_device_mesh("cpu", (4,), mesh_dim_names=("world",)).unflatten("world", (2, 2), ("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
        """
        ranks, dims, known, backends = unflattened(self, dim, tuple(mesh_sizes), names, backend_override)
        made = DeviceMesh(self.device_type, ranks)
        made._root.backends = backends
        made._root.named.update(zip(known or (), dims, strict=False))
        return made._derive(dims, known)

    @staticmethod
    def _concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:  # type: ignore[override]  # more than lists
        meshes = on_one_root(meshes)
        return meshes[0]._derive(*concatenated(meshes))

    _flatten, _unflatten = flatten, unflatten  # type: ignore[assignment]  # torch's spelling; its names are never left out

    def _get_root_mesh(self) -> DeviceMesh:
        """All dims as they were made: what torch's own code asks a slice for."""
        return self._derive(tuple((dim,) for dim in range(len(self._root.shape))), self._root.names)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:  # type: ignore[override]  # lists of ours
        """A mesh of each group over one dim; torch's code asks for those that a rank is not in, too."""
        dim, ranks = self.dim_index(mesh_dim_name), self._root.ranks
        groups = dict.fromkeys(self.members_of((dim,), member) for member in self.members)
        return [DeviceMesh(self.device_type, [ranks[m] for m in group], mesh_dim_names=(mesh_dim_name,)) for group in groups]

    def _derive(self, dims: Dims, names: Names) -> DeviceMesh:
        if dims == self._dims and names == self._names:
            return self
        found = self._root.derived.get((dims, names))
        if found is None:
            found = DeviceMesh(self.device_type, None, mesh_dim_names=names, _root=self._root, _dims=dims)
            self._root.derived[dims, names] = found
        return found

    # --- from torch -------------------------------------------------------------------------------------------
    @staticmethod
    def from_group(group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        """A mesh over existing process groups: one group, or a list with one group per mesh dim and ``mesh`` given."""
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None and groups != [group]:
            raise MeshError("from_group with several groups needs mesh=, the ranks as an n-d array, with one dim for each group")
        if not groups:
            raise MeshError("from_group got an empty list of groups; give one for each mesh dim")
        mesh = dist.get_process_group_ranks(group) if mesh is None else mesh
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        if len(groups) != made.ndim:
            raise MeshError(
                f"{len(groups)} groups for the mesh {made.mesh.tolist()} of {made.ndim} dims; give one group per mesh dim"
            )
        if made.ndim == 1 and sorted(made.ranks) != sorted(ranks := dist.get_process_group_ranks(groups[0])):
            raise MeshError(f"Invalid mesh {made.mesh.tolist()} for a ProcessGroup with ranks {ranks}; leave mesh= out")
        made._root.groups = {(dim,): group for dim, group in enumerate(groups)}
        return made

    @staticmethod
    def from_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
        """This mesh for a ``torch.distributed.device_mesh.DeviceMesh``, with its process groups and flattened dims. Slices of one
        are slices of one here.
        """
        made: DeviceMesh = of_torch(mesh, DeviceMesh)
        return made

    # --- value semantics --------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh) or self._hash != other._hash:
            return False
        return (self._root.key, self._dims, self._names) == (other._root.key, other._dims, other._names)

    def __hash__(self) -> int:
        return self._hash

    def __enter__(self) -> DeviceMesh:
        self._root.entered.setdefault(self, []).append(CURRENT.enter(self))
        return self

    def __exit__(self, *exception: object) -> None:
        CURRENT.leave_one(self._root.entered[self])

    def __repr__(self) -> str:
        names = "" if self._names is None else f", mesh_dim_names={self._names}"
        return f"DeviceMesh({self.device_type!r}, {np.reshape(self.ranks_here(), self.shape).tolist()}{names})"

    _repr_html_ = pictured

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as geometry, without process groups."""
        root = self._root
        known = (root.device_type, root.ranks, root.shape, root.names, root.kind, self._dims, self._names)
        return restore_mesh, (*known, dict(root.named), dict(root.flattened), dict(root.backends))

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self  # immutable


CURRENT: Scoped[DeviceMesh] = Scoped("mesh")


def current_mesh() -> DeviceMesh:
    """The innermost mesh entered by ``with mesh:``.

    Raises:
        MeshError: no mesh was given and none is entered.
    """
    if (mesh := CURRENT.last(None)) is None:
        raise MeshError("no device mesh: pass device_mesh=, or enter one with `with mesh:`")
    return mesh


def as_mesh(mesh: Any) -> DeviceMesh:
    """``mesh`` as a :class:`DeviceMesh`: itself, a torch mesh converted, or None for the entered one."""
    match constant_of_graph(mesh):
        case DeviceMesh() as mesh:
            return mesh
        case None:
            return current_mesh()
        case TorchDeviceMesh():
            return DeviceMesh.from_torch(mesh)
        case _:
            raise MeshError(f"{mesh!r} is not a device mesh; make one with init_device_mesh(device_type, shape)")


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    *,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """A mesh over ranks ``0 .. prod(mesh_shape) - 1``.

    With a process group initialised, or under torchrun or another launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
    and ``MASTER_PORT``, each rank is a process (the group is initialised here if it is not yet: gloo for CPU, NCCL for CUDA);
    those of a larger world are outside of the mesh. Otherwise all ranks live in this process. ``"meta"`` simulates one rank.

    Args:
        mesh_dim_names: one per mesh dim.
        backend_override: mesh dim, by name or number -> the backend of the process groups along it, where it is not to be the
            world's: its name, its options, or (name, options). Groups over several dims are the world's (but see ``flatten``).

    Raises:
        MeshError: the world has fewer ranks, or the names do not fit.

    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))

    The first mesh over processes makes their groups, which all ranks do together; a mesh in one process communicates nothing.
    """
    device_type, shape = device_type_of(device_type), mesh_shape_of(mesh_shape)
    ranks = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backend_override)


class _Groups:
    """Process groups by name: a compiler takes an attribute of a global object as an input of its graph."""


_GROUPS = _Groups()


def _group_name(mesh: DeviceMesh, mesh_dim: int | str | None) -> str:
    """Under which the group along a mesh dim is found there."""
    named, dim = mesh._along(mesh_dim, "get_group")
    handle = handle_of(named, (dim,))
    setattr(_GROUPS, handle.group_name, handle)
    return str(handle.group_name)


_group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # to a compiler the name is a constant


def restore_mesh(
    device_type: str, ranks: Any, shape: Any, names: Any, kind: Kind, dims: Any, dim_names: Any, *known: dict[str, Any]
) -> DeviceMesh:
    base = DeviceMesh(device_type, np.asarray(ranks).reshape(shape), mesh_dim_names=names)
    root = base._root
    held: tuple[dict[Any, Any], ...] = (root.named, root.flattened, root.backends)
    for ours, theirs in zip(held, known, strict=False):  # older pickles have none
        ours.update(theirs)
    return base._derive(dims, dim_names)
