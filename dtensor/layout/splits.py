"""How one tensor dim is cut: the mesh dims that cut it, outermost first, and the sizes of all blocks; and how that is spelled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from ..base.caches import remembered
from ..base.symbolic_sizes import has_symbols, settled, sizes
from ..errors import PlacementError
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Shard


class Split(NamedTuple):
    """How one tensor dim is cut: by ``mesh_dims`` (outermost first) into blocks of ``sizes`` (row-major over them)."""

    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        return offsets_of(self.sizes)

    @property
    def even(self) -> bool:
        """All blocks have one size."""
        return all(size == self.sizes[0] for size in self.sizes)

    def of_size(self, whole: int) -> Split:
        """This split of a dim of ``whole`` elements: of a number, numbers, where an operand with a symbol told the blocks."""
        if not has_symbols(self.sizes):
            return self
        return Split(self.mesh_dims, tuple(map(settled, self.sizes)) if type(whole) is int else sizes(self.sizes))


@remembered(4096)
def offsets_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where each block starts."""
    return tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()


@remembered(4096)
def chunk_sizes(size: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Leaf block sizes when ``size`` is cut like ``torch.chunk`` by ``counts[0]`` ranks, each block by ``counts[1]``, ...

    >>> chunk_sizes(5, (2, 2)), chunk_sizes(1, (3,))
    ((2, 1, 1, 1), (1, 0, 0))
    """
    blocks = [size]
    for count in counts:
        blocks = [max(0, min(-(-block // count), block - k * -(-block // count))) for block in blocks for k in range(count)]
    return tuple(blocks)


def split_of(mesh: DeviceMesh, placements: Sequence[Placement], dim: int, size: int) -> Split | None:
    shards = [(i, p) for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    if not shards:
        return None
    ordered = _nested(shards, dim)
    leaves = _leaf_sizes([(mesh.shape[i], p) for i, p in ordered], dim, size)
    mesh_dims = tuple(i for i, _ in ordered if mesh.shape[i] > 1)
    return Split(mesh_dims, leaves) if mesh_dims else None


def _nested(shards: list[tuple[int, Shard]], dim: int) -> list[tuple[int, Shard]]:
    """The mesh dims that split one tensor dim, outermost first."""
    levels = [shard.level for _, shard in shards]
    if all(level is None for level in levels):
        return shards
    if sorted(level for level in levels if level is not None) != list(range(len(shards))):
        raise PlacementError(
            f"{len(shards)} mesh dims shard tensor dim {dim}: give each Shard a different level in "
            f"0..{len(shards) - 1}, or none of them; got levels {levels}"
        )
    return sorted(shards, key=lambda item: item[1].level or 0)


def _leaf_sizes(levels: list[tuple[int, Shard]], dim: int, size: int) -> tuple[int, ...]:
    blocks: tuple[int, ...] = (size,)
    leaf_count = math.prod(count for count, _ in levels)
    last = levels[-1][1].sizes
    if last is not None and len(last) == leaf_count:
        levels, blocks = [], last
    for count, shard in levels:
        given = shard.sizes
        if given is None:
            cut = {block: chunk_sizes(block, (count,)) for block in set(blocks)}  # few sizes, many blocks
            blocks = tuple(chain.from_iterable(map(cut.__getitem__, blocks)))
        elif len(given) == count * len(blocks):
            blocks = given
        elif len(given) == count and all(block == sum(given) for block in blocks):
            blocks = given * len(blocks)
        else:
            raise PlacementError(
                f"Shard({dim}, sizes={given}) does not shard {blocks} over {count} ranks: pass {count} sizes that "
                "sum to the size of the dim"
            )
    if sum(blocks) != size:
        raise PlacementError(
            f"the sizes of Shard({dim}) sum to {sum(blocks)}, but tensor dim {dim} has {size} elements: {blocks}"
        )
    return blocks


def canonical(
    mesh: DeviceMesh, placements: Sequence[Placement], splits: Sequence[Split | None], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """One spelling per meaning: levels only where not in mesh-dim order, sizes only where not ``torch.chunk``'s."""
    result = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
    for dim, split in enumerate(splits):
        if split is None:
            continue
        in_order = list(split.mesh_dims) == sorted(split.mesh_dims)
        default = split.sizes == chunk_sizes(shape[dim], tuple(mesh.shape[i] for i in split.mesh_dims))
        idle = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim and i not in split.mesh_dims]
        for level, i in enumerate((*idle, *split.mesh_dims)):
            innermost = i == split.mesh_dims[-1]
            given = None if default or not innermost else tuple(map(settled, split.sizes))
            result[i] = Shard(dim, given, None if in_order else level)
    return tuple(result)
