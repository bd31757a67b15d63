"""Geometry of a mesh in integers: root dims, members and coordinates. ``DeviceMesh`` adds torch's interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import MeshDimError, MeshError
from .current_rank import current_member
from .root import Kind, Root, parse_mesh_dim

Dims = tuple[tuple[int, ...], ...]  # per mesh dim its root dims, first one major
Names = tuple[str, ...] | None
T = TypeVar("T")


class uncached_property(Generic[T]):  # noqa: N801  # used like `property`
    """Read-only property without a cache. Unlike ``property`` a compiler can read it on a constant of its graph."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, x: Any, kind: Any) -> T:
        return self if x is None else self.compute(x)  # type: ignore[return-value]  # access on the class returns the property


class Geometry:
    """Integer geometry of a mesh: its root and, for each mesh dim, the root dims that it is made of.

    Computed values are cached in the instance dictionary, where a compiler finds them (see ``interop.torch_compile``).
    """

    _root: Root
    _dims: Dims
    _names: Names

    # --- shape and names --------------------------------------------------------------------------------------
    @cached_property
    def device_type(self) -> str:
        return self._root.device_type

    @cached_property
    def kind(self) -> Kind:
        """``"process_group"``, ``"in_process"`` or ``"dry_run"``."""
        return self._root.kind

    @cached_property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        return self._names

    def named(self, mesh_dims: Iterable[int]) -> tuple[str | int, ...]:
        """Return the names of mesh dims, or their numbers if the mesh has no names."""
        return tuple(mesh_dims) if self._names is None else tuple(self._names[i] for i in mesh_dims)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self._root.shape[d] for d in dims) for dims in self._dims)

    @cached_property
    def ndim(self) -> int:
        return len(self._dims)

    def dim_index(self, mesh_dim: int | str) -> int:
        """Return the index of a mesh dim that is given by name or by (possibly negative) index."""
        if isinstance(mesh_dim, str):
            if self._names is None or mesh_dim not in self._names:
                raise MeshDimError(f"Invalid mesh_dim_name: {self!r} has no mesh dim {mesh_dim!r}; its dims are {self._names}")
            return self._names.index(mesh_dim)
        mesh_dim = parse_mesh_dim(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise MeshError(f"mesh dim {mesh_dim} is out of range for {self!r}; use a dim in [{-self.ndim}, {self.ndim - 1}]")
        return mesh_dim % self.ndim

    @cached_property
    def _is_root(self) -> bool:
        return self._dims == tuple((d,) for d in range(len(self._root.shape)))

    # --- members and coordinates: integer arithmetic only -------------------------------------------------------
    @cached_property
    def members(self) -> range:
        """Return the positions of all members of the root. In one process each has a local tensor."""
        return range(len(self._root.ranks))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the rank of each member."""
        return self._root.ranks

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinate of each member, one index per mesh dim."""
        shape = self._root.shape
        grid = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), dtype=int)
        columns = [_ravel_index([grid[d] for d in dims], [shape[d] for d in dims], len(self._root.ranks)) for dims in self._dims]
        return tuple(zip(*(column.tolist() for column in columns), strict=True)) if columns else ((),) * len(self.members)

    def members_of(self, mesh_dims: Iterable[int], member: int) -> tuple[int, ...]:
        """Return the group of ``member`` over ``mesh_dims`` (first one major): the members that differ from it only there."""
        root_dims = self.group_id(mesh_dims)
        cache: dict[Any, Any] = self.__dict__.setdefault("_members", {})
        group = cache.get((root_dims, member))
        if group is None:
            strides = [math.prod(self._root.shape[d + 1 :]) for d in range(len(self._root.shape))]
            index = np.unravel_index(member, self._root.shape) if self._root.shape else ()
            base = member - sum(int(index[d]) * strides[d] for d in root_dims)
            offsets = np.zeros(1, dtype=int)
            for d in root_dims:
                offsets = (offsets[:, None] + np.arange(self._root.shape[d])[None, :] * strides[d]).reshape(-1)
            group = cache[root_dims, member] = tuple(int(base + offset) for offset in offsets)
        return group

    def group_id(self, mesh_dims: Iterable[int]) -> tuple[int, ...]:
        """Return the root dims of ``mesh_dims``, which identify the communication groups over them."""
        return tuple(d for mesh_dim in mesh_dims for d in self._dims[mesh_dim])

    def size_of(self, mesh_dims: Iterable[int]) -> int:
        """Return the number of ranks over several mesh dims."""
        return math.prod(self.shape[mesh_dim] for mesh_dim in mesh_dims)

    @cached_property
    def spans_root(self) -> bool:
        """Return True if every member sees the same ranks: no root dim of size > 1 is left out."""
        used = {d for dims in self._dims for d in dims}
        return all(size == 1 or d in used for d, size in enumerate(self._root.shape))

    def index_over(self, mesh_dims: Iterable[int], coordinate: Sequence[int]) -> int:
        """Return the position of a coordinate in its group over ``mesh_dims``, with the first mesh dim major."""
        index = 0
        for mesh_dim in mesh_dims:
            index = index * self.shape[mesh_dim] + coordinate[mesh_dim]
        return index

    def coordinate_of(self, member: int | None) -> tuple[int, ...] | None:
        """Return the coordinate of a member, or None for None (a rank outside of the mesh)."""
        return None if member is None else self.coordinates[member]

    def current_member(self) -> int | None:
        """Return this process's position in the root, None if it has none; in one process that of the running rank, else 0."""
        return current_member(self._root)

    def current_ranks(self) -> list[int]:
        """Return the ranks of this mesh as the current rank sees it, with the first mesh dim major."""
        member = self.current_member()
        return [self._root.ranks[m] for m in self.members_of(range(self.ndim), 0 if member is None else member)]


def _ravel_index(columns: list[Any], sizes: list[int], count: int) -> Any:
    """Return the row-major linear index of each of ``count`` coordinates; ``columns`` has their indices by dim."""
    index = np.zeros(count, dtype=int)
    for column, size in zip(columns, sizes, strict=True):
        index = index * size + column
    return index
