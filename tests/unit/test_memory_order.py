"""A block lies in memory as the global tensor does, so what can be viewed globally can be viewed on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch

import dtensor as dt

PLACEMENTS = [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Shard(2), dt.Partial()]


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(PLACEMENTS[:4], 2), (PLACEMENTS[4], dt.Replicate())])
@pytest.mark.parametrize("async_op", [False, True])
def test_redistribution_keeps_the_order_of_dims_in_memory(source: dt.Placement, target: dt.Placement, async_op: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    x = torch.arange(5.0 * 6 * 7).reshape(5, 6, 7)
    sharded = dt.distribute_tensor(x.permute(2, 0, 1), mesh, [source])
    moved = sharded.redistribute(placements=[target], async_op=async_op)
    assert moved.stride() == (1, 42, 7)
    for piece in moved.to_local().shards:
        in_order = piece.permute(1, 2, 0)
        strides = [step for step, size in zip(in_order.stride(), in_order.shape, strict=True) if size > 1]
        assert strides == sorted(strides, reverse=True)
    assert torch.equal(moved.full_tensor(), x.permute(2, 0, 1))
    if target == dt.Replicate():
        assert torch.equal(moved.permute(1, 2, 0).view(30, 7).full_tensor(), x.view(30, 7))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
@pytest.mark.parametrize("other", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
def test_terms_that_are_made_have_the_memory_order_of_the_value(op: str, other: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for x in (torch.ones(4, 6).t(), torch.ones(4, 6, 2).permute(2, 0, 1), torch.ones(4, 6)):
        made = dt.distribute_tensor(x, mesh, [dt.Partial(op), other])
        moved = dt.distribute_tensor(x, mesh, [dt.Replicate(), other]).redistribute(placements=[dt.Partial(op), other])
        for terms in (made, moved):
            orders = [sorted(range(x.ndim), key=local.stride().__getitem__) for local in terms._local.shards]
            assert orders == [sorted(range(x.ndim), key=x.stride().__getitem__)] * 4
