"""The placements that a sample is tried under."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import cache

import torch

from ..layout.splits import chunk_sizes
from ..mesh.device_mesh import DeviceMesh, init_device_mesh
from ..placement import Partial, Placement, Replicate, Shard
from ..rules.partial_rules import reductions
from ..rules.rule import Rule
from .scatter import can_be_partial


@cache
def mesh_of(shape: tuple[int, ...], device_type: str = "cpu") -> DeviceMesh:
    """The mesh of this shape, made once: on process groups its groups cost time."""
    return init_device_mesh(device_type, shape)


Combination = tuple[tuple[Placement, ...], ...]  # per tensor its placements, one per mesh dim


def options(x: torch.Tensor, ranks: int, ops: Sequence[str], ragged: bool = True) -> list[Placement]:
    """What one mesh dim of ``ranks`` can be for ``x``: whole, sharded (by chunks and by sizes no chunking gives), partial."""
    found: list[Placement] = [Replicate()]
    for dim, size in enumerate(x.shape):
        found += dict.fromkeys([Shard(dim), ragged_shard(dim, size, ranks) if ragged else Shard(dim)])
    return found + [Partial(op) for op in ops if can_be_partial(x.dtype, op)]


def kinds(shape: Sequence[int], terms: Sequence[str]) -> list[list[Placement]]:
    """Whole, sharded, in terms: what a placement of a tensor of this shape can be."""
    found: list[list[Placement]] = [[Replicate()], [Shard(dim) for dim in range(len(shape))], [Partial(op) for op in terms]]
    return [kind for kind in found if kind]


def drawn(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    choices: Sequence[Sequence[Placement]],
    rng: random.Random,
    *,
    ragged: float = 0.3,
    reordered: float = 0.5,
) -> tuple[Placement, ...]:
    """One placement per mesh dim, each of one of the kinds in ``choices``; the first of all is the simplest.

    Args:
        ragged: how often a tensor dim that is split once gets blocks of any sizes.
        reordered: how often one that is split several times is nested in any order.
    """
    found = [rng.choice(rng.choice(choices)) for _ in mesh_shape]
    for dim, size in enumerate(shape):
        split = [k for k, placement in enumerate(found) if placement == Shard(dim)]
        if len(split) == 1 and rng.random() > 1 - ragged:
            cuts = sorted(rng.randint(0, size) for _ in range(mesh_shape[split[0]] - 1))
            found[split[0]] = Shard(dim, sizes=tuple(b - a for a, b in itertools.pairwise([0, *cuts, size])))
        elif len(split) > 1 and rng.random() > 1 - reordered:
            for k, level in zip(split, rng.sample(range(len(split)), len(split)), strict=True):
                found[k] = Shard(dim, level=level)
    return tuple(found)


def ragged_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """One element, nothing, the rest.

    >>> ragged_sizes(5, 3), ragged_sizes(7, 4), ragged_sizes(5, 2)
    ((1, 0, 4), (1, 0, 3, 3), (1, 4))
    """
    if ranks == 1:
        return (size,)
    first = [min(1, size), *([0] if ranks > 2 else [])]
    rest = ranks - len(first)
    left = size - first[0]
    return (*first, *(left // rest + (k < left % rest) for k in range(rest)))


def ragged_shard(dim: int, size: int, ranks: int) -> Shard:
    """A tensor dim cut as no chunking does, where that is possible."""
    sizes = ragged_sizes(size, ranks)
    return Shard(dim) if sizes == chunk_sizes(size, (ranks,)) else Shard(dim, sizes=sizes)


def partial_ops(rule: Rule | None) -> list[str]:
    """The reductions to try: the usual ones and those that the rule speaks of."""
    declared = reductions(() if rule is None else rule.partials)
    return ["sum", "avg", "max", *sorted(declared.difference(("sum", "avg", "max")))]


def combinations(
    xs: Sequence[torch.Tensor], mesh_shape: Sequence[int], ops: Sequence[str], limit: int, rng: random.Random, ragged: bool = True
) -> list[Combination]:
    """All of them if there are at most ``limit``; else each option alone, options shared by all, and random ones."""
    menus = [[options(x, ranks, ops, ragged and len(mesh_shape) == 1) for ranks in mesh_shape] for x in xs]
    per_tensor = [list(itertools.product(*menu)) for menu in menus]
    if math.prod(map(len, per_tensor)) <= limit:
        return list(itertools.product(*per_tensor))
    whole = tuple((Replicate(),) * len(mesh_shape) for _ in xs)
    alone = [(*whole[:i], choice, *whole[i + 1 :]) for i, choices in enumerate(per_tensor) for choice in choices]
    shared = [(choice,) * len(xs) for choice in per_tensor[0] if all(choice in choices for choices in per_tensor)]
    mixed = [tuple(rng.choice(choices) for choices in per_tensor) for _ in range(limit)]
    rng.shuffle(alone)
    rng.shuffle(shared)
    woven = (item for group in itertools.zip_longest(shared, mixed, alone) for item in group if item is not None)
    return list(dict.fromkeys(woven))[:limit]
