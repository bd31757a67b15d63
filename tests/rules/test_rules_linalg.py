"""Rules of linear algebra: factorizations that depend on the memory order of a matrix."""

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
def test_det_and_inv_gradients_in_every_memory_order_equal_plain_torch(fn: Callable[..., object]) -> None:
    """Check all memory orders: torch factors the transpose of a contiguous matrix, and a shard can be contiguous where the global
    tensor is not."""
    mesh = dt.init_device_mesh("cpu", (2,))
    x = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x @ x.mT + torch.triu(x)  # positive determinants
    for order in itertools.permutations(range(3)):
        for where in (Replicate(), Shard(0), Shard(1)):
            check(fn, in_order(x, order), mesh=mesh, placements=[[where]])


@pytest.mark.parametrize("left", [True, False])
def test_solve_values_and_gradients_in_every_memory_order_equal_plain_torch(left: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(2)
    a, b = (torch.randn(3, 4, 4, dtype=torch.float64, generator=draw) for _ in range(2))
    for order in itertools.permutations(range(3)):
        for where in ([Shard(0)], [Shard(0, sizes=(1, 2))], [Replicate()]):
            for right in ([Replicate()], [Shard(1)], [Shard(2)]):
                check(
                    lambda a, b: torch.linalg.solve(a, b, left=left), in_order(a, order), b, mesh=mesh, placements=[where, right]
                )


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_lu_solve_of_complex_matrices_with_empty_shards_equals_plain_torch(left: bool, adjoint: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    factors, pivots = torch.linalg.lu_factor(torch.randn(2, 2, 2, dtype=torch.complex128, generator=generator))
    right = torch.randn(2, 2, 2, dtype=torch.complex128, generator=generator)
    mesh = dt.init_device_mesh("cpu", (3,))
    for where in itertools.product((Replicate(), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Shard(0), Shard(1))):
        check(
            lambda a, p, b: torch.linalg.lu_solve(a, p, b, left=left, adjoint=adjoint),
            *(factors, pivots, right),
            mesh=mesh,
            placements=[[p] for p in where],
        )
