"""Specs of one tensor: a grid of blocks, and the places of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import MeshError, PlacementError
from ..layout.layout import Layout
from ..layout.splits import Split, chunk_sizes, offsets_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement
from .block_grid import Cell, layout_of_cells, merge_equal_slices
from .rank_device import Place, common_device_type, mesh_ranks_of

Replicas = tuple[Place, ...]


class Spec:
    """Base class of the sharding specs of one tensor: a grid of blocks, and the places of each.

    A value: no communication. Raises if it is applied to a tensor that it does not fit.

    >>> import dtensor as dt
    >>> isinstance(dt.sharding_spec.single_split(0, [0, 1]), Spec)
    True
    """

    __slots__ = ()
    shards: tuple[Replicas, ...]

    def grid(self, ndim: int) -> tuple[Any, tuple[tuple[int, ...] | None, ...]]:
        """Return the array of places of the blocks, one dim per tensor dim, and per dim the given block sizes or None."""
        raise NotImplementedError

    def to_data(self) -> Any:
        """Return the spec as dicts, lists, strings and numbers, for YAML or JSON."""
        raise NotImplementedError

    def __repr__(self) -> str:
        ((name, arguments),) = self.to_data().items()
        return f"{name}({', '.join(map(repr, arguments.values()))})"

    @property
    def places(self) -> tuple[Place, ...]:
        """Return every place that has a shard, in order of appearance."""
        return tuple(dict.fromkeys(place for each in self.shards for place in each))

    def cells(self, shape: Sequence[int]) -> list[Cell]:
        """Return offset, sizes and places of every block of a tensor of ``shape``, row-major.

        Raises:
            PlacementError: the spec does not fit the shape.

        >>> from dtensor.sharding_spec import single_split
        >>> [(cell.offset, cell.shape) for cell in single_split(0, [0, 1]).cells((5, 3))]
        [((0, 0), (3, 3)), ((3, 0), (2, 3))]
        """
        array, given_sizes = self.grid(len(shape))
        sizes = [
            _block_sizes(self, d, n, count, given_sizes[d]) for d, (n, count) in enumerate(zip(shape, array.shape, strict=True))
        ]
        starts = [offsets_of(each) for each in sizes]
        return [
            Cell(tuple(starts[d][i] for d, i in enumerate(index)), tuple(sizes[d][i] for d, i in enumerate(index)), array[index])
            for index in np.ndindex(array.shape)
        ]

    def layout(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None) -> Layout | None:
        """Return the layout that the spec gives a tensor of ``shape``; None if the blocks of a place do not form one box.

        Args:
            mesh: the mesh of the layout, default one made of the spec's own places.

        Raises:
            PlacementError: the spec does not fit the shape, or cannot be written on ``mesh``.
        """
        cells = self.cells(shape)
        rank_of = mesh_ranks_of(self.places)
        if mesh is not None:
            return layout_of_cells(mesh, cells, rank_of, shape, dtype, repr(self))
        array, given_sizes = self.grid(len(shape))
        ranks = np.empty(array.shape, dtype=object)
        for index in np.ndindex(array.shape):
            ranks[index] = tuple(dict.fromkeys(rank_of[place] for place in array[index]))
        merged, groups = merge_equal_slices(ranks)
        replicas = {len(each) for each in merged.reshape(-1)}
        flat = [rank for each in merged.reshape(-1) for rank in each]
        if len(replicas) > 1 or len(set(flat)) != len(flat):
            return None
        sharded_dims = [d for d, count in enumerate(merged.shape) if count > 1]
        copies = list(replicas) if replicas != {1} or not sharded_dims else []
        mesh = DeviceMesh(
            common_device_type(self.places), np.asarray(flat).reshape([merged.shape[d] for d in sharded_dims] + copies)
        )
        splits: list[Split | None] = [None] * len(shape)
        for i, d in enumerate(sharded_dims):
            sizes = _block_sizes(self, d, shape[d], sum(groups[d]), given_sizes[d])
            ends = np.cumsum([0, *groups[d]]).tolist()
            splits[d] = Split((i,), tuple(sum(sizes[a:b]) for a, b in itertools.pairwise(ends)))
        return Layout.from_splits(mesh, splits, [None] * mesh.ndim, tuple(shape), None, dtype)

    def mesh_and_placements(self, shape: Sequence[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and placements equivalent to the spec for a tensor of ``shape``; raise if there are none.

        >>> from dtensor.sharding_spec import single_split
        >>> single_split(0, ["rank:0", "rank:1"], [1, 4]).mesh_and_placements((5, 3))
        (DeviceMesh('cpu', [0, 1]), (Shard(dim=0, sizes=(1, 4)),))
        """
        layout = self.layout(shape)
        if layout is None:
            raise PlacementError(
                f"{self!r} gives one device several shards that are not adjacent, which no placements can describe"
            )
        return layout.mesh, layout.placements


def _block_sizes(spec: Spec, dim: int, size: int, count: int, given_sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the block sizes along one dim: the given ones, checked against ``size`` and ``count``, else those of torch.chunk."""
    if given_sizes is None:
        return chunk_sizes(size, (count,))
    if len(given_sizes) != count or sum(given_sizes) != size:
        raise PlacementError(
            f"{spec!r}: shard_sizes {list(given_sizes)} do not split tensor dim {dim} of size {size} into {count} shards"
        )
    return given_sizes


@dataclass(frozen=True, slots=True, repr=False)
class SingleSplit(Spec):
    """Split of one tensor dim.

    A value: no communication. See ``single_split``.

    >>> import dtensor as dt
    >>> dt.sharding_spec.single_split(0, [0, 1], [3, 2]).shard_sizes
    (3, 2)
    """

    dim: int
    shards: tuple[Replicas, ...]
    shard_sizes: tuple[int, ...] | None

    def grid(self, ndim: int) -> tuple[Any, tuple[tuple[int, ...] | None, ...]]:
        """Return the array of places, with the shards along ``dim`` and size 1 in other dims, and the shard sizes per dim."""
        if not -ndim <= self.dim < ndim:
            raise PlacementError(f"{self!r} does not fit a tensor of {ndim} dims: it has no dim {self.dim}; split another dim")
        dim = self.dim % ndim
        shape = [len(self.shards) if d == dim else 1 for d in range(ndim)]
        return _place_array(self.shards, shape), tuple(self.shard_sizes if d == dim else None for d in range(ndim))

    def to_data(self) -> Any:
        """Return the spec as the arguments of ``single_split`` that make it, for YAML or JSON."""
        sizes = {} if self.shard_sizes is None else {"shard_sizes": list(self.shard_sizes)}
        return {"single_split": {"dim": self.dim, "placements": [replicas_text(each) for each in self.shards], **sizes}}


@dataclass(frozen=True, slots=True, repr=False)
class MeshSplit(Spec):
    """Split of all tensor dims: an array of places with as many dims as the tensor.

    A value: no communication. See ``mesh``.

    >>> import dtensor as dt
    >>> dt.sharding_spec.mesh([[0, 1], [2, 3]]).shape
    (2, 2)
    """

    shape: tuple[int, ...]
    shards: tuple[Replicas, ...]
    shard_sizes: tuple[tuple[int, ...] | None, ...] | None

    def grid(self, ndim: int) -> tuple[Any, tuple[tuple[int, ...] | None, ...]]:
        """Return the array of places and the block sizes per dim; raise for a tensor of another number of dims."""
        if ndim != len(self.shape):
            raise PlacementError(f"{self!r} is for tensors of {len(self.shape)} dims, got one of {ndim}")
        return _place_array(self.shards, self.shape), self.shard_sizes or (None,) * ndim

    def to_data(self) -> Any:
        """Return the spec as the arguments of ``mesh`` that make it, for YAML or JSON."""
        sizes = {} if self.shard_sizes is None else {"shard_sizes": [s if s is None else list(s) for s in self.shard_sizes]}
        nested = np.asarray([replicas_text(each) for each in self.shards], dtype=object).reshape(self.shape).tolist()
        return {"mesh": {"placements": nested, **sizes}}


@dataclass(frozen=True, slots=True, repr=False)
class Whole(Spec):
    """Complete tensor on one place, or a copy on each of several.

    A value: no communication. See ``whole``.

    >>> import dtensor as dt
    >>> dt.sharding_spec.whole("rank:0", "rank:1")
    whole('rank:0|rank:1')
    """

    replicas: Replicas

    @property
    def shards(self) -> tuple[Replicas, ...]:  # type: ignore[override]  # a property instead of a field
        return (self.replicas,)

    def grid(self, ndim: int) -> tuple[Any, tuple[tuple[int, ...] | None, ...]]:
        return _place_array(self.shards, (1,) * ndim), (None,) * ndim

    def to_data(self) -> Any:
        return replicas_text(self.replicas)

    def __repr__(self) -> str:
        return f"whole({replicas_text(self.replicas)!r})"


# --- places ------------------------------------------------------------------------------------------------------------
def parse_replicas(notation: Any) -> Replicas:
    """Return the places of the replicas of one shard: one place, or text with several joined by "|"."""
    if isinstance(notation, np.generic):
        notation = notation.item()
    parts = notation.split("|") if isinstance(notation, str) else [notation]
    places = tuple(Place.of(part) for part in parts)
    if len(set(places)) != len(places):
        raise MeshError(f"{notation!r} has a device placement twice; name each once")
    return places


def replicas_text(replicas: Replicas) -> str:
    return "|".join(map(str, replicas))


def _place_array(shards: Sequence[Replicas], shape: Sequence[int]) -> Any:
    """Return an object array of ``shape`` with one tuple of replicas' places in each entry."""
    array = np.empty(len(shards), dtype=object)
    for i, each in enumerate(shards):
        array[i] = each  # one by one, because numpy would unpack tuples
    return array.reshape(tuple(shape))
