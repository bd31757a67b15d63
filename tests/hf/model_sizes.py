"""The sizes of shrunk models and of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from family import BATCH, numbers
from torch import Tensor

TRIED = (
    (0, 16),
    (0, 64),
    (16, 64),
    (8, 64),
    (16, 224),
    (4, 64),
    (-1, 16),
    (-1, 64),
)  # divisor (0: widths all alike, -1: so are sizes left open) and edge of images, in order


@dataclass(frozen=True)
class Scale:
    """Widths of models whose widths are all set alike, and sizes of a batch.

    Attributes:
        heads: of queries; ``shared``: of keys and values; ``head``: the width of one; ``turned``: the rotary part of that width.
        inner: width of an MLP.
        tried: divisors of sizes and edges of images, in order.
    """

    width: int = 32
    heads: int = 4
    shared: int = 2
    head: int = 8
    turned: int = 4
    inner: int = 48
    vocabulary: int = 64
    batch: int = BATCH
    length: int = 12
    tried: tuple[tuple[int, int], ...] = TRIED
    most_parameters: int = 12_000_000

    def numbers(self, *shape: int) -> Tensor:
        """Return numbers for each row of a batch."""
        return numbers(self.batch, *shape)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.ones(self.batch, *shape, dtype=dtype)

    def words(self, length: int) -> Tensor:
        """Return tokens other than special ones."""
        return torch.randint(45, self.vocabulary, (self.batch, length), generator=torch.Generator().manual_seed(7))


SMALL = Scale()
