"""Factored dims: tensor dims that are products of factors, major first, and their splits.

The blocks of the leading factor are blocks of the dim. The blocks of an inner factor are too, if all factors before it are split
into single elements: ``(2, 6)``, split by one mesh dim into rows and by another into columns, flattens into ``12`` split by both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..layout.splits import Split


class NotBlocks(Exception):
    """The blocks of factors that are sharded together are no blocks of their tensor dim."""


def compose_splits(names: tuple[str, ...], splits: Mapping[str, Split], sizes: Mapping[str, int]) -> Split | None:
    """Return the split of a dim made of these factors, or None if it is not sharded.

    Raises:
        NotBlocks: the blocks of the factors are no blocks of the dim.

    >>> compose_splits(("a", "b"), {"a": Split((0,), (1, 1)), "b": Split((1,), (4, 2))}, {"a": 2, "b": 6})
    Split(mesh_dims=(0, 1), sizes=(4, 2, 4, 2))
    """
    if len(names) == 1:
        return splits.get(names[0])
    sharded = [name for name in names if name in splits]
    if not sharded:
        return None
    names = factors_of_same_reading(names, sharded[0])
    if not set(sharded) <= set(names):
        raise NotBlocks(sharded)  # two readings of one dim do not combine
    mesh_dims: tuple[int, ...] = ()
    blocks: tuple[int, ...] = (1,)
    for name in names:
        if name in splits:
            if max(blocks) > 1:
                raise NotBlocks(name)
            mesh_dims += splits[name].mesh_dims
            blocks = tuple(block * size for block in blocks for size in splits[name].sizes)
        else:
            blocks = tuple(block * sizes[name] for block in blocks)
    return Split(mesh_dims, blocks)


def split_of_factor(
    names: tuple[str, ...],
    factor: str,
    current: Split,
    mesh_dims_wanted: set[int],
    sizes: Mapping[str, int],
    mesh_shape: tuple[int, ...],
) -> Split | None:
    """Return the split of ``factor`` by exactly ``mesh_dims_wanted`` in a dim with split ``current``; None if there is none."""
    if len(names) == 1 and len(current.mesh_dims) == len(mesh_dims_wanted):
        return current if mesh_dims_wanted.issuperset(current.mesh_dims) else None
    names = factors_of_same_reading(names, factor)
    at = names.index(factor)
    inner = _product_of_sizes(names[at + 1 :], sizes)
    count = len(mesh_dims_wanted)
    if _product_of_sizes(names[:at], sizes) == 1:
        mesh_dims = current.mesh_dims[:count]
        rest = math.prod(mesh_shape[i] for i in current.mesh_dims[count:])
        blocks = [sum(current.sizes[k : k + rest]) for k in range(0, len(current.sizes), rest)]
    else:  # an inner factor is split alike in every block of the factors before it
        mesh_dims = current.mesh_dims[-count:]
        group = math.prod(mesh_shape[i] for i in mesh_dims)
        groups = [current.sizes[k : k + group] for k in range(0, len(current.sizes), group)]
        blocks = list(next((blocks for blocks in groups if sum(blocks) == sizes[factor] * inner), ()))
    if set(mesh_dims) != mesh_dims_wanted or not blocks or not inner or any(block % inner for block in blocks):
        return None
    return Split(mesh_dims, tuple(block // inner for block in blocks))


def _product_of_sizes(names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def factors_of_same_reading(names: tuple[str, ...], factor: str) -> tuple[str, ...]:
    """Return the factors that express a dim together with ``factor``: "@0" and "@0/2" do, "@1" expresses the dim anew.

    >>> factors_of_same_reading(("@0", "@0/2", "@1"), "@0"), factors_of_same_reading(("a", "b"), "b")
    (('@0', '@0/2'), ('a', 'b'))
    """
    if factor[0] != "@":
        return names
    label = factor.partition("/")[0]
    return tuple(name for name in names if name.partition("/")[0] == label)
