"""``DeviceMesh``: ranks arranged as an n-d array with named dims.

A mesh is geometry: a *root* (all its members, laid out once) and, for each mesh dim, the root dims that make it up.
Slicing, reordering and flattening only pick root dims, so every derived mesh keeps the root's members, and in one
process a submesh lives on all its copies at once (``mesh["tp"]`` is the tp group of *each* dp coordinate).
A *member* is a position in the flattened root; ``ranks[member]`` is its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from ..base.scoped import Scoped
from ..errors import MeshDimError, MeshError
from .current_rank import current_coordinate, current_member, current_rank
from .root import Kind, Root, device_type_of, distributed, ensure_world, make_root, mesh_dim_of, mesh_shape_of


class DeviceMesh(TorchDeviceMesh):
    """An n-d array of ranks.

    A ``torch.distributed.device_mesh.DeviceMesh`` as far as torch's functions look: functional collectives and ``DDP`` take it.

    Where no process group is initialised and no torchrun environment is set, all ranks live in this process;
    otherwise each rank is a process of ``torch.distributed``. Device type ``"meta"`` simulates one rank without data.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"meta"``.
        mesh: ranks as a nested list, array or tensor; an int n means ``range(n)``.
        mesh_dim_names: one name per mesh dim.

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
        _root: Root | None = None,
        _dims: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        if _root is None:
            _root = make_root(device_type, mesh, mesh_dim_names)
            _dims = tuple((dim,) for dim in range(len(_root.shape)))
            mesh_dim_names = _root.names
        assert _dims is not None
        self._root = _root
        self._dims = _dims
        self._names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self._hash = hash((_root.key, _dims, self._names))

    # --- what it is -------------------------------------------------------------------------------------------
    @property
    def device_type(self) -> str:
        return self._root.device_type

    @property
    def kind(self) -> Kind:
        """``"process_group"``, ``"in_process"`` or ``"dry_run"``."""
        return self._root.kind

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        return self._names

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self._root.shape[d] for d in dims) for dims in self._dims)

    @property
    def ndim(self) -> int:
        return len(self._dims)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, in all or along one mesh dim or flattened one."""
        if mesh_dim is None:
            return math.prod(self.shape)
        mesh, dim = self._along(mesh_dim, "size")
        return mesh.shape[dim]

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks of this mesh as the current rank sees it, shape ``self.shape``."""
        member = self.current_member()
        members = self.members_of(range(self.ndim), 0 if member is None else member)
        return torch.tensor([self._root.ranks[m] for m in members], dtype=torch.int).reshape(self.shape)

    def dim_index(self, mesh_dim: int | str) -> int:
        """The position of a mesh dim given by name or (possibly negative) index."""
        if isinstance(mesh_dim, str):
            if self._names is None or mesh_dim not in self._names:
                raise MeshDimError(f"Invalid mesh_dim_name: {self!r} has no mesh dim {mesh_dim!r}; its dims are {self._names}")
            return self._names.index(mesh_dim)
        mesh_dim = mesh_dim_of(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise MeshError(f"mesh dim {mesh_dim} is out of range for {self!r}; use a dim in [{-self.ndim}, {self.ndim - 1}]")
        return mesh_dim % self.ndim

    # --- members and coordinates: pure integer maths ------------------------------------------------------------
    @property
    def members(self) -> range:
        """Positions of all members of the root: one local value each when all ranks live in this process."""
        return range(len(self._root.ranks))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each member."""
        return self._root.ranks

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Each member's coordinate, one index per mesh dim."""
        shape = self._root.shape
        grid = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), dtype=int)
        columns = [_ravel([grid[d] for d in dims], [shape[d] for d in dims], len(self._root.ranks)) for dims in self._dims]
        return tuple(zip(*(column.tolist() for column in columns), strict=True)) if columns else ((),) * len(self.members)

    def members_of(self, mesh_dims: Iterable[int], member: int) -> tuple[int, ...]:
        """The members that vary over ``mesh_dims`` (first one major) and share all else with ``member``."""
        root_dims = tuple(d for mesh_dim in mesh_dims for d in self._dims[mesh_dim])
        cache: dict[Any, Any] = self.__dict__.setdefault("_members", {})
        found = cache.get((root_dims, member))
        if found is None:
            strides = [math.prod(self._root.shape[d + 1 :]) for d in range(len(self._root.shape))]
            at = np.unravel_index(member, self._root.shape) if self._root.shape else ()
            base = member - sum(int(at[d]) * strides[d] for d in root_dims)
            offsets = np.zeros(1, dtype=int)
            for d in root_dims:
                offsets = (offsets[:, None] + np.arange(self._root.shape[d])[None, :] * strides[d]).reshape(-1)
            found = cache[root_dims, member] = tuple(int(base + offset) for offset in offsets)
        return found

    def group_id(self, mesh_dims: Iterable[int]) -> tuple[int, ...]:
        """The root dims behind ``mesh_dims``: equal ids mean the same communication group."""
        return tuple(d for mesh_dim in mesh_dims for d in self._dims[mesh_dim])

    def size_of(self, mesh_dims: Iterable[int]) -> int:
        """Number of ranks over several mesh dims."""
        return math.prod(self.shape[mesh_dim] for mesh_dim in mesh_dims)

    @property
    def spans_root(self) -> bool:
        """Whether every member sees the same ranks: no root dim of size > 1 is left out."""
        used = {d for dims in self._dims for d in dims}
        return all(size == 1 or d in used for d, size in enumerate(self._root.shape))

    # --- the current rank -------------------------------------------------------------------------------------
    def current_member(self) -> int | None:
        """This process's member; in one process the one that ``map_ranks`` runs for, else the first. None: not in the mesh."""
        return current_member(self._root)

    def get_rank(self) -> Any:
        """The current rank.

        Where all ranks live in this process, and outside of ``map_ranks``: a ``RankNumber`` of all ranks. Asked whether it is 0,
        for what one rank does alone, it says yes.
        """
        return current_rank(self._root)

    def get_coordinate(self) -> tuple[Any, ...] | None:
        """The current rank's index along each mesh dim (see ``get_local_rank``); None if it is not part of the mesh."""
        return current_coordinate(self)

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
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.get_rank()} is not part of {self!r}")
        return coordinate[dim]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The ``torch.distributed`` process group along one mesh dim or flattened one (may be left out on a 1-d mesh)."""
        from ..comm import communicator_of  # the communicator stands on the mesh; this is the way back up

        mesh, dim = self._along(mesh_dim, "get_group")
        return communicator_of(mesh).process_group((dim,))

    def get_all_groups(self) -> list[Any]:
        """``get_group`` of every mesh dim."""
        return [self.get_group(mesh_dim) for mesh_dim in range(self.ndim)]

    @property
    def _dim_group_names(self) -> list[str]:  # type: ignore[override]  # an attribute of torch's; functional collectives ask
        return [group.group_name for group in self.get_all_groups()]

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
        from .derive import sliced  # stands on this module

        return sliced(self, names)

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """The 1-d mesh over all dims of this one, first dim major; its name defaults to the names joined by "_"."""
        from .derive import flattened  # stands on this module

        return flattened(self, mesh_dim_name)

    def unflatten(self, dim: int | str, mesh_sizes: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """This mesh with one dim split into several, first one major. MeshError: sizes or ``names`` that do not fit.

        >>> init_device_mesh("cpu", (4,), mesh_dim_names=("world",)).unflatten("world", (2, 2), ("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
        """
        from .derive import unflattened  # stands on this module

        return unflattened(self, dim, mesh_sizes, names)

    @staticmethod
    def _concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:  # type: ignore[override]  # more than lists
        from .derive import concatenated  # stands on this module

        return concatenated(meshes)

    _flatten, _unflatten = flatten, unflatten  # type: ignore[assignment]  # torch's spelling; its own take a backend as well

    def _derive(self, dims: tuple[tuple[int, ...], ...], names: tuple[str, ...] | None) -> DeviceMesh:
        if dims == self._dims and names == self._names:
            return self
        found = self._root.derived.get((dims, names))
        if found is None:
            found = DeviceMesh(self.device_type, None, mesh_dim_names=names, _root=self._root, _dims=dims)
            self._root.derived[dims, names] = found
        return found

    @property
    def _is_root(self) -> bool:
        return self._dims == tuple((d,) for d in range(len(self._root.shape)))

    # --- from torch -------------------------------------------------------------------------------------------
    @staticmethod
    def from_group(group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        """A mesh over existing process groups: one group, or a list with one group per mesh dim and ``mesh`` given."""
        from .create import mesh_of_groups  # stands on this module

        return mesh_of_groups(group, device_type, mesh, mesh_dim_names)

    @staticmethod
    def from_torch(mesh: TorchDeviceMesh) -> DeviceMesh:
        """This mesh for a ``torch.distributed.device_mesh.DeviceMesh``, with its process groups and flattened dims."""
        from .create import mesh_of_torch  # stands on this module

        return mesh_of_torch(mesh)

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
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{names})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as geometry, without process groups."""
        root = self._root
        known = (root.device_type, root.ranks, root.shape, root.names, root.kind, self._dims, self._names)
        return restore_mesh, (*known, dict(root.named), dict(root.flattened))

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
    match mesh:
        case DeviceMesh():
            return mesh
        case None:
            return current_mesh()
        case TorchDeviceMesh():
            return DeviceMesh.from_torch(mesh)
        case _:
            raise MeshError(f"{mesh!r} is not a device mesh; make one with init_device_mesh(device_type, shape)")


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None, **options: Any
) -> DeviceMesh:
    """A mesh over ranks ``0 .. prod(mesh_shape) - 1``.

    With a process group initialised, or under torchrun, each rank is a process (the group is initialised here if it
    is not yet: gloo for CPU, NCCL for CUDA). Otherwise all ranks live in this process. ``"meta"`` simulates one rank.

    Raises:
        MeshError: the world does not have that many ranks, or the names do not fit.

    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    """
    if options.pop("backend_override", None) is not None:
        raise MeshError("backend_override is not supported: build the groups yourself and use DeviceMesh.from_group")
    device_type = device_type_of(device_type)
    if options:
        raise TypeError(f"init_device_mesh() got unexpected keyword arguments {sorted(options)}")
    shape = mesh_shape_of(mesh_shape)
    count = math.prod(shape)
    if device_type != "meta" and distributed():
        ensure_world(device_type)
        if count != dist.get_world_size():
            raise MeshError(
                f"mesh_shape {shape} needs {count} ranks, the world has {dist.get_world_size()}; "
                "for a part of the world use DeviceMesh(device_type, ranks)"
            )
    return DeviceMesh(device_type, np.arange(count).reshape(shape), mesh_dim_names=mesh_dim_names)


def restore_mesh(
    device_type: str, ranks: Any, shape: Any, names: Any, kind: Kind, dims: Any, dim_names: Any, *known: dict[str, Any]
) -> DeviceMesh:
    base = DeviceMesh(device_type, np.asarray(ranks).reshape(shape), mesh_dim_names=names)
    for ours, theirs in zip((base._root.named, base._root.flattened), known, strict=False):  # older pickles have none
        ours.update(theirs)
    return base._derive(dims, dim_names)


def _ravel(columns: list[Any], sizes: list[int], count: int) -> Any:
    index = np.zeros(count, dtype=int)
    for column, size in zip(columns, sizes, strict=True):
        index = index * size + column
    return index
