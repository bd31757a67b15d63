"""Device mesh: ranks arranged as an n-d array with named dims.

[Note: Members of a mesh]
A mesh consists of a *root* (all its ranks, arranged once) and, for each mesh dim, the root dims that it is made of. Slicing,
reordering and flattening only select root dims. So every derived mesh keeps all members of the root. In one process a submesh
includes all its copies at once: ``mesh["tp"]`` is the tp group of *each* dp coordinate. A *member* is a position in the
flattened root. ``ranks[member]`` is its rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from ..base.late_binding import html_repr
from ..base.mode_stack import ModeStack
from ..base.tracing import unwrap_graph_constant
from ..errors import MeshError
from .current_rank import current_coordinate, current_rank
from .geometry import Dims, Geometry, Names, uncached_property
from .process_groups import get_torch_group
from .root import Kind, Root, make_root, parse_backends, parse_device_type, parse_mesh_shape
from .submesh import concatenate_dims, dims_of_ranks, flatten_dims, slice_dims, unflatten_dims, unify_roots


class DeviceMesh(Geometry, TorchDeviceMesh):
    """N-d array of ranks.

    It is a ``torch.distributed.device_mesh.DeviceMesh`` for torch's functions: functional collectives and ``DDP`` accept it.
    Without a process group and without the environment of a launcher, all ranks live in this process. Otherwise each rank is a
    process of ``torch.distributed``. Device type ``"meta"`` simulates one rank without data.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"meta"``.
        mesh: ranks as a nested list, array or tensor; an int n means ``range(n)``.
        mesh_dim_names: one name per mesh dim.
        backend_override: as in :func:`init_device_mesh`; or a sequence of (name, options), one per mesh dim.
        _init_backend: accepted for torch's code and ignored, because process groups are made at their first use.

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
            _root.backends = parse_backends(backend_override, _root.shape, _root.names)
            _dims = tuple((dim,) for dim in range(len(_root.shape)))
            mesh_dim_names = _root.names
        assert _dims is not None
        self._root = _root
        self._dims = _dims
        self._names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self._hash = hash((_root.geometry, _dims, self._names))

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks: of the mesh, or along one mesh dim or flattened dim."""
        if mesh_dim is None:
            return math.prod(self.shape)
        mesh, dim = self._mesh_and_dim(mesh_dim, "size")
        return mesh.shape[dim]

    @uncached_property
    def mesh(self) -> torch.Tensor:
        """Return the ranks of this mesh as the current rank sees them, with shape ``self.shape``."""
        return torch.tensor(self.current_ranks(), dtype=torch.int, device="cpu").reshape(self.shape)

    # --- the current rank -------------------------------------------------------------------------------------
    def get_rank(self) -> Any:
        """Return the rank of this process, or of the running ``map_ranks`` function.

        If all ranks live in this process, and outside of ``map_ranks``, this is a ``RankNumber`` of all ranks. It compares
        equal to 0, so that code for one rank runs.
        """
        return current_rank(self._root)

    def get_coordinate(self) -> tuple[Any, ...] | None:
        """Return the index of the current rank along each mesh dim (see ``get_local_rank``); None outside of the mesh."""
        return current_coordinate(self._root, self.coordinates, self.ndim)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        """Return the index of the current rank along one mesh dim or flattened dim. ``mesh_dim`` is optional for a 1-d mesh.

        If all ranks live in this process, and outside of ``map_ranks``, this is a ``RankNumber``: the index of each rank.

        Raises:
            MeshError: the current rank is not part of the mesh.

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_local_rank("tp")
        RankNumber(rank 0: 0, rank 1: 1, rank 2: 0, rank 3: 1)
        >>> map_ranks(lambda at: mesh.get_local_rank("tp"), mesh=mesh)
        RankValues(rank 0: 0, rank 1: 1, rank 2: 0, rank 3: 1)
        """
        mesh, dim = self._mesh_and_dim(mesh_dim, "get_local_rank")
        if (coordinate := mesh.get_coordinate()) is None:
            raise MeshError(f"rank {self.get_rank()} is not part of {self!r}; check mesh.get_coordinate() is not None before")
        return coordinate[dim]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the ``torch.distributed`` group along a mesh dim or flattened dim. A 1-d mesh needs no ``mesh_dim``."""
        return getattr(_GROUPS, _register_group_name(self, mesh_dim))

    def get_all_groups(self) -> list[Any]:
        """Return ``get_group`` of every mesh dim."""
        return [self.get_group(mesh_dim) for mesh_dim in range(self.ndim)]

    @uncached_property
    def _dim_group_names(self) -> list[Any]:
        """Return the group name of every mesh dim, for torch's functional collectives."""
        return [_register_group_name(self, mesh_dim) for mesh_dim in range(self.ndim)]

    def _mesh_and_dim(self, mesh_dim: int | str | None, what: str) -> tuple[DeviceMesh, int]:
        """Return a mesh and its dim: this mesh, or the mesh of a flattened dim that the root has under this name."""
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
        """Return the submesh of one or several named dims, in the given order. The dims need not be adjacent."""
        return self._derive(*slice_dims(self, names))

    def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Return the 1-d mesh over all dims of this mesh, with the first dim major.

        The default name joins the names of the dims by "_".

        Args:
            backend_override: for the group of a new name: the name of a backend, its options, or (name, options).
        """
        return self._derive(*flatten_dims(self, mesh_dim_name, backend_override))

    def unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], names: Sequence[str] | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """Return this mesh with one dim split into several, the first major.

        Args:
            backend_override: for the new dims, as in :func:`init_device_mesh`. The other dims keep their backends.

        Raises:
            MeshError: ``mesh_sizes`` or ``names`` do not fit.

        >>> init_device_mesh("cpu", (4,), mesh_dim_names=("world",)).unflatten("world", (2, 2), ("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
        """
        ranks, dims, dim_names, backends = unflatten_dims(self, dim, tuple(mesh_sizes), names, backend_override)
        mesh = DeviceMesh(self.device_type, ranks)
        mesh._root.backends = backends
        mesh._root.named.update(zip(dim_names or (), dims, strict=False))
        return mesh._derive(dims, dim_names)

    @staticmethod
    def _concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:  # type: ignore[override]  # accepts any sequence
        meshes = unify_roots(meshes)
        return meshes[0]._derive(*concatenate_dims(meshes))

    _flatten, _unflatten = flatten, unflatten  # type: ignore[assignment]  # torch's names; its mesh_dim_name is required

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the mesh of all dims of the root, as they were made. Torch's code calls it on slices."""
        return self._derive(tuple((dim,) for dim in range(len(self._root.shape))), self._root.names)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:  # type: ignore[override]  # returns meshes of this class
        """Return one mesh for each group along a mesh dim, also groups of other ranks. Torch's code calls it."""
        dim, ranks = self.dim_index(mesh_dim_name), self._root.ranks
        groups = dict.fromkeys(self.members_of((dim,), member) for member in self.members)
        return [DeviceMesh(self.device_type, [ranks[m] for m in group], mesh_dim_names=(mesh_dim_name,)) for group in groups]

    def _derive(self, dims: Dims, names: Names) -> DeviceMesh:
        """Return the mesh of this root with these root dims and names, one object for equal arguments."""
        if dims == self._dims and names == self._names:
            return self
        mesh = self._root.derived.get((dims, names))
        if mesh is None:
            mesh = DeviceMesh(self.device_type, None, mesh_dim_names=names, _root=self._root, _dims=dims)
            self._root.derived[dims, names] = mesh
        return mesh

    # --- from torch -------------------------------------------------------------------------------------------
    @staticmethod
    def from_group(group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        """Return a mesh over existing process groups: one group, or one per mesh dim with ``mesh``, the ranks."""
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if mesh is None and groups != [group]:
            raise MeshError("from_group with several groups needs mesh=, the ranks as an n-d array, with one dim for each group")
        if not groups:
            raise MeshError("from_group got an empty list of groups; give one for each mesh dim")
        mesh = dist.get_process_group_ranks(group) if mesh is None else mesh
        result = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        if len(groups) != result.ndim:
            raise MeshError(
                f"{len(groups)} groups for the mesh {result.mesh.tolist()} of {result.ndim} dims; give one group per mesh dim"
            )
        if result.ndim == 1 and sorted(result.ranks) != sorted(ranks := dist.get_process_group_ranks(groups[0])):
            raise MeshError(f"Invalid mesh {result.mesh.tolist()} for a ProcessGroup with ranks {ranks}; leave mesh= out")
        result._root.groups = {(dim,): group for dim, group in enumerate(groups)}
        return result

    @staticmethod
    def from_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
        """Convert a mesh of torch, with its process groups and flattened dims. A slice becomes a slice of the root."""
        return _convert_torch_slice(mesh) or _convert_torch_root(mesh)

    # --- value semantics --------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        """Return True if roots, root dims and names of the meshes are equal."""
        if self is other:
            return True
        if not isinstance(other, DeviceMesh) or self._hash != other._hash:
            return False
        return (self._root.key, self._dims, self._names) == (other._root.key, other._dims, other._names)

    def __hash__(self) -> int:
        return self._hash

    def __enter__(self) -> DeviceMesh:
        self._root.entered.setdefault(self, []).append(ENTERED_MESHES.enter(self))
        return self

    def __exit__(self, *exception: object) -> None:
        ENTERED_MESHES.leave_last(self._root.entered[self])

    def __repr__(self) -> str:
        names = "" if self._names is None else f", mesh_dim_names={self._names}"
        return f"DeviceMesh({self.device_type!r}, {np.reshape(self.current_ranks(), self.shape).tolist()}{names})"

    _repr_html_ = html_repr

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the geometry, without process groups."""
        root = self._root
        geometry = (root.device_type, root.ranks, root.shape, root.names, root.kind, self._dims, self._names)
        return restore_mesh, (*geometry, dict(root.named), dict(root.flattened), dict(root.backends))

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self  # immutable


ENTERED_MESHES: ModeStack[DeviceMesh] = ModeStack("mesh")


def as_mesh(mesh: Any) -> DeviceMesh:
    """Return ``mesh`` as a :class:`DeviceMesh`. A torch mesh is converted, None means the innermost mesh of ``with mesh:``.

    Raises:
        MeshError: ``mesh`` is no mesh, or None while no mesh is entered.
    """
    match unwrap_graph_constant(mesh):
        case DeviceMesh() as mesh:
            return mesh
        case None:
            if (entered := ENTERED_MESHES.last(None)) is None:
                raise MeshError("no device mesh: pass device_mesh=, or enter one with `with mesh:`")
            return entered
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
    """Return a mesh over ranks ``0 .. prod(mesh_shape) - 1``.

    With an initialized process group, or under torchrun or another launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
    and ``MASTER_PORT``, each rank is a process. If the group is not initialized yet, this call does it: gloo for CPU, NCCL for
    CUDA. Ranks of a larger world are outside of the mesh. Otherwise all ranks live in this process. ``"meta"`` simulates one
    rank.

    Args:
        mesh_dim_names: one per mesh dim.
        backend_override: mesh dim, by name or number -> the backend of the process groups along it, if it differs from the
            world's: its name, its options, or (name, options). Groups over several mesh dims use the world's backend (but see
            ``flatten``).

    Raises:
        MeshError: the world has fewer ranks, or the names do not fit.

    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))

    The first mesh over processes makes their groups; all ranks must do this together. A mesh in one process communicates
    nothing.
    """
    device_type, shape = parse_device_type(device_type), parse_mesh_shape(mesh_shape)
    ranks = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backend_override)


def _convert_torch_slice(mesh: TorchDeviceMesh) -> DeviceMesh | None:
    """Convert a slice of a torch mesh to a slice of its converted root; return None if it is not a slice by names.

    Uses a private method of torch's mesh, which returns the mesh that a slice was taken from.
    """
    root_mesh, names = getattr(mesh, "_get_root_mesh", lambda: mesh)(), mesh.mesh_dim_names
    if root_mesh is mesh or names is None:
        return None
    converted = _convert_torch_root(root_mesh)
    if not all(name in converted._root.named or name in converted._root.flattened for name in names):
        return None
    result = converted[names]
    return result if result.mesh.tolist() == mesh.mesh.tolist() else None


def _convert_torch_root(mesh: TorchDeviceMesh) -> DeviceMesh:
    """Convert a torch mesh with its process groups; its flattened dims are read from a private attribute."""
    converted = DeviceMesh.from_group(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    for name, flat in getattr(mesh, "_flatten_mapping", {}).items():
        dims = dims_of_ranks(converted, tuple(flat.mesh.tolist()))
        if dims is not None:
            converted._root.flattened[name] = dims
            converted._root.groups[dims] = flat.get_group()
    return converted


class _GroupNamespace:
    """Namespace of process groups by name. A compiler makes an attribute of a global object an input of its graph."""


_GROUPS = _GroupNamespace()


def _register_group_name(mesh: DeviceMesh, mesh_dim: int | str | None) -> str:
    """Make the process group along a mesh dim an attribute of ``_GROUPS``, for compilers, and return its name."""
    named, dim = mesh._mesh_and_dim(mesh_dim, "get_group")
    handle = get_torch_group(named, (dim,))
    setattr(_GROUPS, handle.group_name, handle)
    return str(handle.group_name)


_register_group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo treats the name as a constant


def restore_mesh(
    device_type: str, ranks: Any, shape: Any, names: Any, kind: Kind, dims: Any, dim_names: Any, *saved_tables: dict[str, Any]
) -> DeviceMesh:
    """Rebuild a mesh from the fields of a pickle. Pickles of older versions have fewer tables."""
    base = DeviceMesh(device_type, np.asarray(ranks).reshape(shape), mesh_dim_names=names)
    root = base._root
    tables: tuple[dict[Any, Any], ...] = (root.named, root.flattened, root.backends)
    for table, saved in zip(tables, saved_tables, strict=False):
        table.update(saved)
    return base._derive(dims, dim_names)
