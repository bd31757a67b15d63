"""Tensor dims that are products of factors, major first: how they are cut when their factors are.

The blocks of the leading factor are blocks of the dim. Those of a factor inside are too where everything before it is cut into
single elements: ``(2, 6)`` cut by one mesh dim into rows and by another into columns flattens into ``12`` cut by both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..layout.splits import Split


class NotBlocks(Exception):
    """The blocks of factors that are cut together are no blocks of their tensor dim."""


def composed(names: tuple[str, ...], splits: Mapping[str, Split], sizes: Mapping[str, int]) -> Split | None:
    """How a dim made of these factors is cut; None if it is not.

    Raises:
        NotBlocks: see there.

    >>> composed(("a", "b"), {"a": Split((0,), (1, 1)), "b": Split((1,), (4, 2))}, {"a": 2, "b": 6})
    Split(mesh_dims=(0, 1), sizes=(4, 2, 4, 2))
    """
    if len(names) == 1:
        return splits.get(names[0])
    cut = [name for name in names if name in splits]
    if not cut:
        return None
    names = reading(names, cut[0])
    if not set(cut) <= set(names):
        raise NotBlocks(cut)  # two readings of one dim do not combine
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


def cut_in(
    names: tuple[str, ...], factor: str, current: Split, wanted: set[int], sizes: Mapping[str, int], mesh_shape: tuple[int, ...]
) -> Split | None:
    """How the mesh dims ``wanted`` cut ``factor`` in a dim that is cut like ``current``; None if they cut no factor of it."""
    if len(names) == 1 and len(current.mesh_dims) == len(wanted):
        return current if wanted.issuperset(current.mesh_dims) else None
    names = reading(names, factor)
    at = names.index(factor)
    inner = _product(names[at + 1 :], sizes)
    count = len(wanted)
    if _product(names[:at], sizes) == 1:
        mesh_dims = current.mesh_dims[:count]
        rest = math.prod(mesh_shape[i] for i in current.mesh_dims[count:])
        blocks = [sum(current.sizes[k : k + rest]) for k in range(0, len(current.sizes), rest)]
    else:  # inside: alike in every block of what stands before
        mesh_dims = current.mesh_dims[-count:]
        group = math.prod(mesh_shape[i] for i in mesh_dims)
        groups = [current.sizes[k : k + group] for k in range(0, len(current.sizes), group)]
        blocks = list(next((blocks for blocks in groups if sum(blocks) == sizes[factor] * inner), ()))
    if set(mesh_dims) != wanted or not blocks or not inner or any(block % inner for block in blocks):
        return None
    return Split(mesh_dims, tuple(block // inner for block in blocks))


def _product(names: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def reading(names: tuple[str, ...], factor: str) -> tuple[str, ...]:
    """The factors whose product the dim is, ``factor`` among them: "@0" and "@0/2", its inside, are one reading, "@1" another.

    >>> reading(("@0", "@0/2", "@1"), "@0"), reading(("a", "b"), "b")
    (('@0', '@0/2'), ('a', 'b'))
    """
    if factor[0] != "@":
        return names
    label = factor.partition("/")[0]
    return tuple(name for name in names if name.partition("/")[0] == label)
