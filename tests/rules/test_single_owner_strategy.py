"""What one rank has all of it works on alone: nothing moves, values and gradients are those of one device, on all ranks."""

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


def whole(x: Any) -> list[Tensor]:
    x = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def two_layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up[1].t()) @ down[1].t()


def crosswise(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows of one along the columns of the other."""
    return up[2].t() + down[2] * 2


def several(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(up[0], down[0].t()) + torch.cat([down[0], up[0].t()])[:5]


PROGRAMS: list[Callable[..., Tensor]] = [two_layers, crosswise, several]


def moved(program: Callable[..., Tensor], mesh: dt.DeviceMesh, cut: list[dt.Placement]) -> list[str]:
    """The operators that move something in a forward pass; results and gradients are compared."""
    torch.manual_seed(0)
    plain = [torch.rand(2, 7), torch.rand(*STACK), torch.rand(3, 7, 5)]
    ours = [dt.distribute_tensor(x, mesh, cut if x.ndim == 3 else [Replicate()] * mesh.ndim) for x in plain]
    for x in (*plain, *ours):
        x.requires_grad_()
    expected = program(*plain)
    with dt.debug.CommDebugMode() as comm:
        found = program(*ours)
    for own in whole(found):
        torch.testing.assert_close(own, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for x, like in zip(ours, plain, strict=True):
        assert (x.grad is None) == (like.grad is None)
        for own in whole(x.grad) if x.grad is not None else ():
            torch.testing.assert_close(own, like.grad)
        assert x.grad is None or x.grad.placements == x.placements
    return [str(event.kind) for event in comm.events]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_owner_of_a_position_computes_with_it(program: Callable[..., Tensor]) -> None:
    assert moved(program, dt.init_device_mesh("cpu", (3,)), [Shard(0)]) == []
    assert moved(program, dt.init_device_mesh("cpu", (2,)), [Shard(0)]) == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_several_mesh_dims(program: Callable[..., Tensor]) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 3))
    assert moved(program, mesh, [Replicate(), Shard(0)]) == []
    moved(program, mesh, [Shard(0), Shard(0)])
    moved(program, mesh, [Shard(1), Shard(0)])


def test_what_lies_elsewhere_and_is_less_comes_to_the_owner() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    up, down = [dt.distribute_tensor(torch.rand(3, 8, 8), mesh, [Shard(0)])[1] for _ in range(2)]
    few = dt.distribute_tensor(torch.rand(2, 8), mesh, [Shard(1)])
    made = torch.cat([up.t(), down, few])
    assert find_single_owner(made.layout) == (0, 1)
    for own in whole(made):
        torch.testing.assert_close(own, torch.cat([whole(up)[0].t(), whole(down)[0], whole(few)[0]]))


def test_of_two_owners_neither_does_the_other_s_work() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    stack = dt.distribute_tensor(torch.rand(3, 4, 4), mesh, [Shard(0)])
    for own in whole(stack[0] @ stack[2]):
        torch.testing.assert_close(own, whole(stack)[0][0] @ whole(stack)[0][2])


def test_what_is_drawn_or_written_is_not_left_to_an_owner() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    stack = dt.distribute_tensor(torch.rand(3, 4, 4), mesh, [Shard(0)])
    one, other = stack[1] + 0, (stack[1] + 0).t()
    dt.manual_seed(3)
    assert F.dropout(one, 0.5).placements == one.placements
    before = one.placements
    one += other
    assert one.placements == before


def _all() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    for program in PROGRAMS:
        assert moved(program, mesh, [Shard(0)]) == []


@pytest.mark.slow
@pytest.mark.gloo
def test_on_process_groups() -> None:
    run_gloo(_all, 3)
