"""What shares memory and what does not: the pieces are the DTensor, whole values and redistributed ones are copies, whatever the
placements were. In one process and on process groups."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.dispatch.version_counters import take_snapshot
from dtensor.ranks.per_rank import shards_of

VALUE = torch.arange(15.0).view(5, 3)
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def mesh_of() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2,))


def made(placement: Any, requires_grad: bool = False) -> DTensor:
    x = dt.distribute_tensor(VALUE, mesh_of(), [R if placement == P else placement])
    return (x.redistribute(placements=[P]) if placement == P else x).requires_grad_(requires_grad)


def unchanged(x: DTensor) -> bool:
    return torch.equal(x.detach().full_tensor(), VALUE)


def copies_are_apart() -> None:
    """Whole and redistributed values are written to without a trace in their source, for every pair of placements."""
    for source in (R, S0, S1, P):
        for requires_grad in (False, True):
            x = made(source, requires_grad)
            for target in (R, S0, S1, P):
                y = x.redistribute(placements=[target])
                assert y is not x
                y.mul_(2)
                assert torch.equal(y.full_tensor(), VALUE * 2)
                assert unchanged(x)
            again = dt.distribute_tensor(x.detach(), x.device_mesh, [source])
            again.mul_(3)
            whole = x.full_tensor()
            whole.add_(1)
            with torch.no_grad():
                x.full_tensor().add_(1)
                x.redistribute(placements=[source]).zero_()
            assert unchanged(x)


def plain_sources_are_apart() -> None:
    for placement in (R, S0, P):
        for source in (0, None):
            given = VALUE.clone()
            x = dt.distribute_tensor(given, mesh_of(), [placement], src_data_rank=source)
            given.zero_()
            assert unchanged(x)
            x.mul_(2)
            assert not given.any()


def pieces_are_shared() -> None:
    for placement in (R, S0, P):
        for requires_grad in (False, True):
            x = made(placement, requires_grad)
            with torch.no_grad():
                x.to_local().mul_(2)
            assert torch.equal(x.detach().full_tensor(), VALUE * 2)
        piece = made(placement).to_local().clone()
        x = DTensor.from_local(piece, mesh_of(), [placement])
        piece.mul_(2)
        assert torch.equal(x.full_tensor(), VALUE * 2)
        x.mul_(2)
        assert torch.equal(x.to_local(), piece)


def a_piece_is_a_tensor_of_its_own() -> None:
    x = made(S0)
    for _ in range(2):  # a gradient does not pile up in the DTensor
        piece = x.to_local().requires_grad_()
        (piece * 3).sum().backward()
        assert torch.equal(piece.grad, torch.full_like(piece, 3.0))
    assert not x.to_local().requires_grad


def gradients_pass_where_nothing_moves() -> None:
    for source in (R, S0, P):
        x = made(source, requires_grad=True)
        (x.redistribute(placements=[source]) * x.full_tensor().sum()).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(VALUE, 2 * VALUE.sum().item()))


CASES = [copies_are_apart, plain_sources_are_apart, pieces_are_shared, a_piece_is_a_tensor_of_its_own]


@pytest.mark.parametrize("case", [*CASES, gradients_pass_where_nothing_moves], ids=lambda case: case.__name__)
def test_in_one_process(case: Any) -> None:
    case()


def everything() -> None:
    for case in CASES:
        case()


@pytest.mark.gloo
def test_on_process_groups() -> None:
    run_gloo(everything, 2)


@pytest.mark.parametrize("placement", [R, S0, Shard(1), P], ids=str)
def test_operands_that_overlap_are_written_once_on_every_rank(placement: dt.Placement) -> None:
    """Torch refuses them where both have no gaps, as of a block of one row; ranks that it lets through must not write again."""
    plain = torch.arange(15.0).reshape(3, 5)
    x = dt.distribute_tensor(plain, mesh_of(), [placement])
    plain[:, :4].add_(plain[:, 1:])
    x[:, :4].add_(x[:, 1:])
    assert torch.equal(x.full_tensor(), plain)


@pytest.mark.parametrize("placement", [S0, Shard(1), Shard(1, sizes=(0, 4, 1, 1))], ids=str)
def test_no_rank_refuses_what_one_without_elements_lets_through(placement: dt.Placement) -> None:
    plain = torch.arange(30.0).reshape(5, 6)
    x = dt.distribute_tensor(plain, dt.init_device_mesh("cpu", (4,)), [placement])
    x.sub_(x[0])
    assert torch.equal(x.full_tensor(), plain - plain[0])


@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_a_stamp_is_not_that_of_other_memory_at_the_same_address(placement: dt.Placement) -> None:
    """What is named by where it is has to stay there."""
    x = made(placement)
    of_x, seen = take_snapshot(x), [weakref.ref(shard) for shard in shards_of(x._local)]
    assert take_snapshot(x) == of_x
    assert take_snapshot(made(placement)) != of_x
    del x
    assert all(shard() is not None for shard in seen)
