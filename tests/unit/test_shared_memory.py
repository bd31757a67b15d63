"""Shared memory: to_local aliases the DTensor; full_tensor, redistribute and distribute_tensor give copies."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.ranks.per_rank import shards_of
from dtensor.state.version_counters import take_snapshot

VALUE = torch.arange(15.0).view(5, 3)
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def make_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2,))


def make_dtensor(placement: Any, requires_grad: bool = False) -> DTensor:
    x = dt.distribute_tensor(VALUE, make_mesh(), [R if placement == P else placement])
    return (x.redistribute(placements=[P]) if placement == P else x).requires_grad_(requires_grad)


def is_unchanged(x: DTensor) -> bool:
    return torch.equal(x.detach().full_tensor(), VALUE)


def full_tensor_and_redistribute_copy() -> None:
    """Check that writes to gathered and redistributed values do not reach their source, for each pair of placements."""
    for source in (R, S0, S1, P):
        for requires_grad in (False, True):
            x = make_dtensor(source, requires_grad)
            for target in (R, S0, S1, P):
                y = x.redistribute(placements=[target])
                assert y is not x
                y.mul_(2)
                assert torch.equal(y.full_tensor(), VALUE * 2)
                assert is_unchanged(x)
            again = dt.distribute_tensor(x.detach(), x.device_mesh, [source])
            again.mul_(3)
            gathered = x.full_tensor()
            gathered.add_(1)
            with torch.no_grad():
                x.full_tensor().add_(1)
                x.redistribute(placements=[source]).zero_()
            assert is_unchanged(x)


def distribute_tensor_copies() -> None:
    for placement in (R, S0, P):
        for source in (0, None):
            source_value = VALUE.clone()
            x = dt.distribute_tensor(source_value, make_mesh(), [placement], src_data_rank=source)
            source_value.zero_()
            assert is_unchanged(x)
            x.mul_(2)
            assert not source_value.any()


def to_local_and_from_local_alias() -> None:
    for placement in (R, S0, P):
        for requires_grad in (False, True):
            x = make_dtensor(placement, requires_grad)
            with torch.no_grad():
                x.to_local().mul_(2)
            assert torch.equal(x.detach().full_tensor(), VALUE * 2)
        local = make_dtensor(placement).to_local().clone()
        x = DTensor.from_local(local, make_mesh(), [placement])
        local.mul_(2)
        assert torch.equal(x.full_tensor(), VALUE * 2)
        x.mul_(2)
        assert torch.equal(x.to_local(), local)


def to_local_is_a_new_tensor() -> None:
    x = make_dtensor(S0)
    for _ in range(2):  # the DTensor accumulates no gradient
        local = x.to_local().requires_grad_()
        (local * 3).sum().backward()
        assert torch.equal(local.grad, torch.full_like(local, 3.0))
    assert not x.to_local().requires_grad


def gradients_pass_through_trivial_redistributions() -> None:
    for source in (R, S0, P):
        x = make_dtensor(source, requires_grad=True)
        (x.redistribute(placements=[source]) * x.full_tensor().sum()).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(VALUE, 2 * VALUE.sum().item()))


CASES = [full_tensor_and_redistribute_copy, distribute_tensor_copies, to_local_and_from_local_alias, to_local_is_a_new_tensor]


@pytest.mark.parametrize("case", [*CASES, gradients_pass_through_trivial_redistributions], ids=lambda case: case.__name__)
def test_to_local_aliases_and_other_conversions_copy_in_process(case: Any) -> None:
    case()


def run_all_cases() -> None:
    for case in CASES:
        case()


@pytest.mark.gloo
def test_to_local_aliases_and_other_conversions_copy_on_processes() -> None:
    run_gloo(run_all_cases, 2)


@pytest.mark.parametrize("placement", [R, S0, Shard(1), P], ids=str)
def test_in_place_add_of_overlapping_views_equals_plain_torch(placement: dt.Placement) -> None:
    """Torch refuses overlapping operands without gaps, as those of a block of one row. Other ranks must write once."""
    plain = torch.arange(15.0).reshape(3, 5)
    x = dt.distribute_tensor(plain, make_mesh(), [placement])
    plain[:, :4].add_(plain[:, 1:])
    x[:, :4].add_(x[:, 1:])
    assert torch.equal(x.full_tensor(), plain)


@pytest.mark.parametrize("placement", [S0, Shard(1), Shard(1, sizes=(0, 4, 1, 1))], ids=str)
def test_in_place_sub_of_a_row_of_itself_with_empty_ranks_equals_plain_torch(placement: dt.Placement) -> None:
    plain = torch.arange(30.0).reshape(5, 6)
    x = dt.distribute_tensor(plain, dt.init_device_mesh("cpu", (4,)), [placement])
    x.sub_(x[0])
    assert torch.equal(x.full_tensor(), plain - plain[0])


@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_version_snapshot_keeps_local_tensors_alive_and_differs_from_other_memory(placement: dt.Placement) -> None:
    """A snapshot names tensors by address, so it must keep their memory alive."""
    x = make_dtensor(placement)
    snapshot, references = take_snapshot(x), [weakref.ref(shard) for shard in shards_of(x._local)]
    assert take_snapshot(x) == snapshot
    assert take_snapshot(make_dtensor(placement)) != snapshot
    del x
    assert all(shard() is not None for shard in references)
