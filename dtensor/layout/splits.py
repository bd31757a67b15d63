"""Splits: which mesh dims shard a tensor dim, with the sizes of all blocks, and their canonical placements."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from ..base.caches import memoize
from ..base.symbolic_sizes import contains_symbols, hashable_sizes, specialize_symbols
from ..errors import PlacementError
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Shard


class Split(NamedTuple):
    """Sharding of one tensor dim: by ``mesh_dims`` (outermost first) into blocks of ``sizes`` (row-major over the mesh dims)."""

    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return offsets_of(self.sizes)

    @property
    def is_even(self) -> bool:
        """Return True if all blocks have one size."""
        return all(size == self.sizes[0] for size in self.sizes)

    def of_size(self, dim_size: int) -> Split:
        """Return this split for a dim of ``dim_size`` elements: with int block sizes if that is an int, else with symbols.

        Another operand may have given symbolic block sizes for an int.
        """
        if not contains_symbols(self.sizes):
            return self
        return Split(
            self.mesh_dims, tuple(map(specialize_symbols, self.sizes)) if type(dim_size) is int else hashable_sizes(self.sizes)
        )

    def without(self, mesh_dims: Container[int], mesh: DeviceMesh) -> Split | None:
        """Return this split with ``mesh_dims`` replicated, None if no mesh dim remains.

        If they are innermost, the blocks of the other mesh dims stay. Otherwise their sizes become those of ``torch.chunk``.
        """
        kept = tuple(i for i in self.mesh_dims if i not in mesh_dims)
        if not kept or kept == self.mesh_dims:
            return self if kept else None
        if kept == self.mesh_dims[: len(kept)]:
            inner = len(self.sizes) // mesh.size_of(kept)
            return Split(kept, tuple(sum(self.sizes[k : k + inner]) for k in range(0, len(self.sizes), inner)))
        return Split(kept, chunk_sizes(sum(self.sizes), tuple(mesh.shape[i] for i in kept)))


@memoize(4096)
def offsets_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the start of each block along the tensor dim."""
    return tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()


@memoize(4096)
def chunk_sizes(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block sizes of ``size`` elements split like ``torch.chunk`` by ``counts[0]``, each block by ``counts[1]`` ...

    >>> chunk_sizes(5, (2, 2)), chunk_sizes(1, (3,))
    ((2, 1, 1, 1), (1, 0, 0))
    """
    blocks = [size]
    for count in counts:
        blocks = [max(0, min(-(-block // count), block - k * -(-block // count))) for block in blocks for k in range(count)]
    return tuple(blocks)


def make_split(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, size: int) -> Split | None:
    """Return the split of tensor dim ``dim``, or None if no mesh dim of several ranks shards it."""
    shards = [(i, p) for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    if not shards:
        return None
    ordered = _outermost_first(shards, dim)
    leaves = _block_sizes([(mesh.shape[i], p) for i, p in ordered], dim, size)
    mesh_dims = tuple(i for i, _ in ordered if mesh.shape[i] > 1)
    return Split(mesh_dims, leaves) if mesh_dims else None


def _outermost_first(shards: list[tuple[int, Shard]], dim: int) -> list[tuple[int, Shard]]:
    """Return ``shards``, pairs (mesh dim, ``Shard``) of one tensor dim, outermost first; raise if their levels do not fit."""
    levels = [shard.level for _, shard in shards]
    if all(level is None for level in levels):
        return shards
    if sorted(level for level in levels if level is not None) != list(range(len(shards))):
        raise PlacementError(
            f"{len(shards)} mesh dims shard tensor dim {dim}: give each Shard a different level in "
            f"0..{len(shards) - 1}, or none of them; got levels {levels}"
        )
    return sorted(shards, key=lambda item: item[1].level or 0)


def _block_sizes(levels: list[tuple[int, Shard]], dim: int, size: int) -> tuple[int, ...]:
    """Return the block sizes of a tensor dim that is sharded level by level; ``levels``: (number of ranks, ``Shard``)."""
    blocks: tuple[int, ...] = (size,)
    leaf_count = math.prod(count for count, _ in levels)
    last = levels[-1][1].sizes
    if last is not None and len(last) == leaf_count:
        levels, blocks = [], last
    for count, shard in levels:
        sizes = shard.sizes
        if sizes is None:
            chunks = {block: chunk_sizes(block, (count,)) for block in set(blocks)}  # few sizes, many blocks
            blocks = tuple(chain.from_iterable(map(chunks.__getitem__, blocks)))
        elif len(sizes) == count * len(blocks):
            blocks = sizes
        elif len(sizes) == count and all(block == sum(sizes) for block in blocks):
            blocks = sizes * len(blocks)
        else:
            raise PlacementError(
                f"Shard({dim}, sizes={sizes}) does not shard {blocks} over {count} ranks: pass {count} sizes that "
                "sum to the size of the dim"
            )
    if sum(blocks) != size:
        raise PlacementError(
            f"the sizes of Shard({dim}) sum to {sum(blocks)}, but tensor dim {dim} has {size} elements: {blocks}"
        )
    return blocks


def without_sizes(placement: Placement) -> Placement:
    """Return a placement without shard sizes and level, so that a layout chooses the default."""
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def canonical_placements(
    mesh: DeviceMesh, placements: Sequence[Placement], splits: Sequence[Split | None], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """Return the canonical placements: levels only if not in mesh-dim order, sizes only if not those of ``torch.chunk``."""
    result = [*map(without_sizes, placements)]
    for dim, split in enumerate(splits):
        if split is None:
            continue
        in_order = list(split.mesh_dims) == sorted(split.mesh_dims)
        default = split.sizes == chunk_sizes(shape[dim], tuple(mesh.shape[i] for i in split.mesh_dims))
        unsplit = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim and i not in split.mesh_dims]
        for level, i in enumerate((*unsplit, *split.mesh_dims)):
            innermost = i == split.mesh_dims[-1]
            sizes = None if default or not innermost else tuple(map(specialize_symbols, split.sizes))
            result[i] = Shard(dim, sizes, None if in_order else level)
    return tuple(result)
