"""Placements that samples are tried under: all of them, random ones, uneven shards and combinations for several tensors."""

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
from ..rules.partial_rules import named_reductions
from ..rules.rule import Rule
from .scatter import can_be_partial


@cache
def get_or_make_mesh(shape: tuple[int, ...], device_type: str = "cpu") -> DeviceMesh:
    """Return the mesh of this shape and device type, cached because new process groups take time."""
    return init_device_mesh(device_type, shape)


Combination = tuple[tuple[Placement, ...], ...]  # for each tensor, one placement per mesh dim


def placement_options(x: torch.Tensor, ranks: int, ops: Sequence[str], ragged: bool = True) -> list[Placement]:
    """Return the placements that ``x`` can have on one mesh dim of ``ranks`` ranks.

    They are replicated, sharded (by chunks, and by sizes that chunking does not give) and partial.
    """
    placements: list[Placement] = [Replicate()]
    for dim, size in enumerate(x.shape):
        placements += dict.fromkeys([Shard(dim), ragged_shard(dim, size, ranks) if ragged else Shard(dim)])
    return placements + [Partial(op) for op in ops if can_be_partial(x.dtype, op)]


def placement_kinds(shape: Sequence[int], reductions: Sequence[str]) -> list[list[Placement]]:
    """Return the possible placements of a tensor of this shape, in one list for each kind: replicated, sharded, partial."""
    by_kind: list[list[Placement]] = [
        [Replicate()],
        [Shard(dim) for dim in range(len(shape))],
        [Partial(op) for op in reductions],
    ]
    return [kind for kind in by_kind if kind]


def choose_placements(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    choices: Sequence[Sequence[Placement]],
    rng: random.Random,
    *,
    ragged: float = 0.3,
    reordered: float = 0.5,
) -> tuple[Placement, ...]:
    """Return a random placement for each mesh dim, drawn from a random list of ``choices``, with random shard sizes.

    Args:
        ragged: probability of arbitrary shard sizes for a tensor dim that one mesh dim shards.
        reordered: probability of a random shard order for a tensor dim that several mesh dims shard.
    """
    placements = [rng.choice(rng.choice(choices)) for _ in mesh_shape]
    for dim, size in enumerate(shape):
        split = [k for k, placement in enumerate(placements) if placement == Shard(dim)]
        if len(split) == 1 and rng.random() > 1 - ragged:
            cuts = sorted(rng.randint(0, size) for _ in range(mesh_shape[split[0]] - 1))
            placements[split[0]] = Shard(dim, sizes=tuple(b - a for a, b in itertools.pairwise([0, *cuts, size])))
        elif len(split) > 1 and rng.random() > 1 - reordered:
            for k, level in zip(split, rng.sample(range(len(split)), len(split)), strict=True):
                placements[k] = Shard(dim, level=level)
    return tuple(placements)


def ragged_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Return uneven shard sizes: one element, then none, then the rest in equal parts.

    >>> ragged_sizes(5, 3), ragged_sizes(7, 4), ragged_sizes(5, 2)
    ((1, 0, 4), (1, 0, 3, 3), (1, 4))
    """
    if ranks == 1:
        return (size,)
    first = [min(1, size), *([0] if ranks > 2 else [])]
    other_ranks = ranks - len(first)
    remaining = size - first[0]
    return (*first, *(remaining // other_ranks + (k < remaining % other_ranks) for k in range(other_ranks)))


def ragged_shard(dim: int, size: int, ranks: int) -> Shard:
    """Return a placement with shard sizes that chunking does not give, if there are such sizes."""
    sizes = ragged_sizes(size, ranks)
    return Shard(dim) if sizes == chunk_sizes(size, (ranks,)) else Shard(dim, sizes=sizes)


def reductions_to_try(rule: Rule | None) -> list[str]:
    """Return the names of the reductions to try partial operands with: sum, avg, max and those that the rule declares."""
    declared = named_reductions(() if rule is None else rule.partials)
    return ["sum", "avg", "max", *sorted(declared.difference(("sum", "avg", "max")))]


def placement_combinations(
    xs: Sequence[torch.Tensor], mesh_shape: Sequence[int], ops: Sequence[str], limit: int, rng: random.Random, ragged: bool = True
) -> list[Combination]:
    """Return combinations of placements for tensors: all of them if there are at most ``limit``.

    Otherwise return a mix of three kinds: one tensor that is not replicated, one placement for all tensors, and random ones.
    """
    menus = [[placement_options(x, ranks, ops, ragged and len(mesh_shape) == 1) for ranks in mesh_shape] for x in xs]
    per_tensor = [list(itertools.product(*menu)) for menu in menus]
    if math.prod(map(len, per_tensor)) <= limit:
        return list(itertools.product(*per_tensor))
    replicated = tuple((Replicate(),) * len(mesh_shape) for _ in xs)
    single = [(*replicated[:i], choice, *replicated[i + 1 :]) for i, choices in enumerate(per_tensor) for choice in choices]
    shared = [(choice,) * len(xs) for choice in per_tensor[0] if all(choice in choices for choices in per_tensor)]
    mixed = [tuple(rng.choice(choices) for choices in per_tensor) for _ in range(limit)]
    rng.shuffle(single)
    rng.shuffle(shared)
    woven = (item for group in itertools.zip_longest(shared, mixed, single) for item in group if item is not None)
    return list(dict.fromkeys(woven))[:limit]
