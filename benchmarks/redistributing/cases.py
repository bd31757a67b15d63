"""Cases of ``redistribute.py``: pairs of placements, shapes, and each rank's data before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch

# "S0,R > R,S0": one placement per mesh dim, before and after.
PAIRS = {
    1: "S0>R S1>R R>S0 R>S1 S0>S1 S1>S0 P>R P>S0 P>S1 R>P S0>P",
    2: "S0,S1>S1,S0 S0,S0>R,R S0,S1>R,R S0,R>R,S0 S0,R>S1,R R,S0>S0,S0 R,S0>S0,R S0,S0>S0,R S0,S0>R,S0 S0,S0>S0,S1 S0,S1>S0,S0 "
    "S0,S0>S1,S1 R,R>S0,S1 P,P>R,R P,P>S0,S1 P,R>S0,R P,S0>R,S0 P,S0>S0,S0 P,S0>S1,S0 S0,P>S0,S1 R,R>P,R",
    3: "S0,S1,R>R,S0,S1 S0,S0,S0>R,R,R S0,S1,S0>S1,S0,S1 R,R,R>S0,S1,S0 S0,R,S1>S1,R,S0 P,S0,S1>R,S0,S1 P,P,P>R,R,R "
    "P,S0,R>S0,R,S1 "
    "S0,S1,R>S0,S1,S1 S0,S0,S1>R,S0,S1 S1,S0,S0>S0,S0,S1",
}
MESHES = {2: ((2,),), 4: ((4,), (2, 2)), 8: ((8,), (2, 4), (2, 2, 2))}
EVEN = {"16 KB": (64, 64), "256 KB": (256, 256), "4 MB": (1024, 1024), "64 MB": (4096, 4096)}
UNEVEN = {"16 KB": (61, 67), "4 MB": (1031, 1021)}
QUICK = ("16 KB", "4 MB")


@dataclass(frozen=True)
class Case:
    """One redistribution of a float32 tensor."""

    mesh: tuple[int, ...]
    src: tuple[str, ...]
    dst: tuple[str, ...]
    size: str
    shape: tuple[int, int]
    even: bool

    @property
    def pair(self) -> str:
        return f"[{' '.join(self.src)}] -> [{' '.join(self.dst)}]"

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.mesh)):6} {self.pair:26} {self.size:>6} {'' if self.even else 'uneven'}"

    @cached_property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    @cached_property
    def bound(self) -> int:
        """Return the minimum, over all plans, of the bytes that the busiest rank receives. A rank receives at least the missing
        part of its new block, and the busiest at least the mean over ranks of all transfers: an element with n partial values and
        d receivers takes n - 1 transfers to be reduced and one to each receiver except the reducing rank, if it is a receiver.
        """
        after = [a if b == "P" else b for a, b in zip(self.src, self.dst, strict=True)]  # a value becomes a term for nothing
        terms = math.prod(n for n, a, b in zip(self.mesh, self.src, self.dst, strict=True) if a == "P" and b != "P")
        old, new = self.blocks(self.src), self.blocks(after)
        most = max(math.prod(b.size) - a.common(b) for a, b in zip(old, new, strict=True))
        if terms > 1:
            cuts = [sorted({at for block in old + new for at in block.edges(dim)}) for dim in (0, 1)]
            total = sum(
                _count_transfers(Block((i, j), (m - i, n - j)), old, new, terms)
                for i, m in pairwise(cuts[0])
                for j, n in pairwise(cuts[1])
            )
            most = max(most, -(-total // self.ranks))
        return 4 * most

    def blocks(self, placements: Sequence[str]) -> list[Block]:
        """Return each rank's block of the tensor: ``torch.chunk`` splits it along one mesh dim after the other."""
        return [_get_block(placements, self.mesh, coordinate, self.shape) for coordinate in np.ndindex(*self.mesh)]


@dataclass(frozen=True)
class Block:
    """A rectangular region of a matrix: the first row and column, and the numbers of rows and columns."""

    start: tuple[int, int]
    size: tuple[int, int]

    def common(self, other: Block) -> int:
        """Return the number of elements that are in both blocks."""
        return math.prod(
            max(0, min(a + n, b + m) - max(a, b))
            for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )

    def edges(self, dim: int) -> tuple[int, int]:
        return self.start[dim], self.start[dim] + self.size[dim]

    def of(self, value: torch.Tensor) -> torch.Tensor:
        (i, j), (m, n) = self.start, self.size
        return value[i : i + m, j : j + n]


def _count_transfers(cell: Block, old: Sequence[Block], new: Sequence[Block], terms: int) -> int:
    """Return the minimum number of element transfers for ``cell``, a region that each block contains completely or not at all."""
    holders, receivers = ({rank for rank, block in enumerate(side) if block.common(cell)} for side in (old, new))
    return math.prod(cell.size) * (terms - 1 + len(receivers) - bool(holders & receivers))


def _get_block(placements: Sequence[str], mesh: tuple[int, ...], coordinate: tuple[int, ...], shape: tuple[int, int]) -> Block:
    """Return the block of the rank at ``coordinate``, split as ``torch.chunk`` does along one mesh dim after the other."""
    start, size = [0, 0], list(shape)
    for placement, ranks, index in zip(placements, mesh, coordinate, strict=True):
        if placement[0] == "S":
            dim, chunk = int(placement[1]), -(-size[int(placement[1])] // ranks)
            skipped = min(size[dim], chunk * index)
            start[dim] += skipped
            size[dim] = min(chunk, size[dim] - skipped)
    return Block((start[0], start[1]), (size[0], size[1]))


def list_cases(world: int, sizes: Sequence[str], only: Sequence[str] = (), meshes: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the cases that run on ``world`` ranks, limited to some sizes, pairs of placements and meshes."""
    for mesh in MESHES[world]:
        if meshes and "x".join(map(str, mesh)) not in meshes:
            continue
        for pair in PAIRS[len(mesh)].split():
            src, dst = (tuple(side.split(",")) for side in pair.split(">"))
            for even, shapes in ((True, EVEN), (False, UNEVEN)):
                found = (Case(mesh, src, dst, size, shape, even) for size, shape in shapes.items() if size in sizes)
                yield from (case for case in found if not only or pair in only)


# --- values: small whole numbers, so that sums are exact in any order --------------------------------------------------
def make_global_tensor(case: Case) -> torch.Tensor:
    """Return the global tensor of a case, whose values are small whole numbers."""
    rows, columns = case.shape
    return ((torch.arange(rows)[:, None] * 7 + torch.arange(columns)) % 101).float()


def make_local_tensor(case: Case, rank: int) -> torch.Tensor:
    """Return the source data of ``rank``: its block, or its partial value (a multiple of the block, such that the multiples sum
    to one).
    """
    terms = math.prod(n for n, p in zip(case.mesh, case.src, strict=True) if p == "P")
    mine = case.blocks(case.src)[rank].of(make_global_tensor(case))
    position = 0
    for n, p, k in zip(case.mesh, case.src, np.unravel_index(rank, case.mesh), strict=True):
        position = position * n + int(k) if p == "P" else position
    if terms == 1:
        return mine.contiguous()
    return mine * (position if position < terms - 1 else 1 - (terms - 2) * (terms - 1) // 2)


def make_placements(library: ModuleType, spelled: Sequence[str]) -> list[Any]:
    """Return a library's placements for names such as ``("S0", "R")``."""
    made = {"R": library.Replicate(), "P": library.Partial()}
    return [made[p] if p in made else library.Shard(int(p[1])) for p in spelled]
