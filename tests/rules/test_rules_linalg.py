"""Factorizations whose form depends on how a matrix lies in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.testing.oracle import check


def in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return x.permute(order).contiguous().permute(sorted(range(x.ndim), key=order.__getitem__))


@pytest.mark.parametrize(
    "fn", [torch.linalg.det, torch.linalg.slogdet, torch.logdet, torch.linalg.inv], ids=lambda fn: fn.__name__
)
def test_gradients_know_which_factors_were_saved(fn: Callable[..., object]) -> None:
    """One device factors the transpose of a contiguous matrix; a block may be contiguous where the whole is not."""
    mesh = dt.init_device_mesh("cpu", (2,))
    x = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x @ x.mT + torch.triu(x)  # positive determinants
    for order in itertools.permutations(range(3)):
        for where in (Replicate(), Shard(0), Shard(1)):
            check(fn, in_order(x, order), mesh=mesh, placements=[[where]])


@pytest.mark.parametrize("left", [True, False])
def test_solutions_have_their_gradients_in_every_order(left: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(2)
    a, b = (torch.randn(3, 4, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    for order in itertools.permutations(range(3)):
        for where in ([Shard(0)], [Shard(0, sizes=(1, 2))], [Replicate()]):
            for right in ([Replicate()], [Shard(1)], [Shard(2)]):
                check(
                    lambda a, b: torch.linalg.solve(a, b, left=left), in_order(a, order), b, mesh=mesh, placements=[where, right]
                )
