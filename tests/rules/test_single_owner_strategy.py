"""Single-owner strategy: an operator runs on the rank that has all elements of its operands, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch import Tensor
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.propagation.owner_strategies import find_single_owner

STACK = (3, 5, 7)


def full_tensors(x: Any) -> list[Tensor]:
    x = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def two_layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up[1].t()) @ down[1].t()


def add_transposed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Add a transposed matrix to another one."""
    return up[2].t() + down[2] * 2


def several(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(up[0], down[0].t()) + torch.cat([down[0], up[0].t()])[:5]


PROGRAMS: list[Callable[..., Tensor]] = [two_layers, add_transposed, several]


def run_and_list_collectives(program: Callable[..., Tensor], mesh: dt.DeviceMesh, cut: list[dt.Placement]) -> list[str]:
    """Compare results and gradients with plain torch, and return the kinds of the collectives of the forward pass."""
    torch.manual_seed(0)
    plain = [torch.rand(2, 7), torch.rand(*STACK), torch.rand(3, 7, 5)]
    ours = [dt.distribute_tensor(x, mesh, cut if x.ndim == 3 else [Replicate()] * mesh.ndim) for x in plain]
    for x in (*plain, *ours):
        x.requires_grad_()
    expected = program(*plain)
    with dt.debug.CommDebugMode() as comm:
        found = program(*ours)
    for own in full_tensors(found):
        torch.testing.assert_close(own, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for x, like in zip(ours, plain, strict=True):
        assert (x.grad is None) == (like.grad is None)
        for own in full_tensors(x.grad) if x.grad is not None else ():
            torch.testing.assert_close(own, like.grad)
        assert x.grad is None or x.grad.placements == x.placements
    return [str(event.kind) for event in comm.events]


@pytest.mark.parametrize("program", PROGRAMS)
def test_operators_on_slices_of_a_sharded_dim_do_not_communicate_in_forward(program: Callable[..., Tensor]) -> None:
    assert run_and_list_collectives(program, dt.init_device_mesh("cpu", (3,)), [Shard(0)]) == []
    assert run_and_list_collectives(program, dt.init_device_mesh("cpu", (2,)), [Shard(0)]) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_operators_on_slices_of_sharded_dims_equal_plain_torch_on_a_2d_mesh(program: Callable[..., Tensor]) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 3))
    assert run_and_list_collectives(program, mesh, [Replicate(), Shard(0)]) == []
    run_and_list_collectives(program, mesh, [Shard(0), Shard(0)])
    run_and_list_collectives(program, mesh, [Shard(1), Shard(0)])


def test_cat_of_single_owner_tensors_and_a_small_tensor_runs_on_the_owner() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    up, down = [dt.distribute_tensor(torch.rand(3, 8, 8), mesh, [Shard(0)])[1] for _ in range(2)]
    few = dt.distribute_tensor(torch.rand(2, 8), mesh, [Shard(1)])
    made = torch.cat([up.t(), down, few])
    assert find_single_owner(made.layout) == (0, 1)
    for own in full_tensors(made):
        torch.testing.assert_close(own, torch.cat([full_tensors(up)[0].t(), full_tensors(down)[0], full_tensors(few)[0]]))


def test_product_of_operands_with_different_owners_equals_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    stack = dt.distribute_tensor(torch.rand(3, 4, 4), mesh, [Shard(0)])
    for own in full_tensors(stack[0] @ stack[2]):
        torch.testing.assert_close(own, full_tensors(stack)[0][0] @ full_tensors(stack)[0][2])


def test_dropout_and_in_place_add_of_single_owner_tensors_keep_placements() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    stack = dt.distribute_tensor(torch.rand(3, 4, 4), mesh, [Shard(0)])
    one, other = stack[1] + 0, (stack[1] + 0).t()
    dt.manual_seed(3)
    assert F.dropout(one, 0.5).placements == one.placements
    before = one.placements
    one += other
    assert one.placements == before


def _check_programs() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    for program in PROGRAMS:
        assert run_and_list_collectives(program, mesh, [Shard(0)]) == []


@pytest.mark.slow
@pytest.mark.gloo
def test_operators_on_slices_do_not_communicate_in_forward_on_process_groups() -> None:
    run_gloo(_check_programs, 3)
