"""Under ``implicit_replication()`` a distributed value can be written into a plain tensor: every rank takes the whole value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gloo import run_gloo

import dtensor as dt
from dtensor.errors import MixedTensorError

Write = Callable[[torch.Tensor, torch.Tensor], object]

WRITES: dict[str, Write] = {
    "add_": lambda plain, x: plain.add_(x),
    "copy_": lambda plain, x: plain.copy_(x),
    "a slice": lambda plain, x: plain[:, 1:3].copy_(x[:, :2]),
    "rows": lambda plain, x: plain.__setitem__(torch.tensor([2, 0]), x[:2]),
    "a distributed index": lambda plain, x: plain.__setitem__((x[:, 0] * 0).long(), 7.0),
    "a distributed mask": lambda plain, x: plain.masked_fill_(x > 0, 5.0),
    "scatter_add_": lambda plain, x: plain.scatter_add_(0, (x > 0).long(), x),
    "lists": lambda plain, x: torch._foreach_lerp_([plain[:2], plain[2:]], [x[:2], x[2:]], 0.3),
    "index_add_": lambda plain, x: plain.index_add_(0, torch.tensor([3, 3, 1, 0, 2]), x),
}


@pytest.mark.parametrize("placement", [dt.Shard(0), dt.Shard(1), dt.Replicate(), dt.Partial()], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_the_plain_tensor_holds_what_it_would_on_one_device(write: Write, placement: dt.Placement) -> None:
    value, expected, plain = torch.randn(5, 4), torch.ones(5, 4), torch.ones(5, 4)
    write(expected, value)
    with dt.implicit_replication():
        write(plain, dt.distribute_tensor(value, dt.init_device_mesh("cpu", (3,)), [placement]))
    assert type(plain) is torch.Tensor
    assert torch.allclose(plain, expected)


@pytest.mark.parametrize("write", [WRITES["add_"], WRITES["a slice"], WRITES["rows"], WRITES["index_add_"]])
def test_gradients_flow_through_a_plain_tensor_that_was_written(write: Write) -> None:
    value = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    x = dt.distribute_tensor(value.detach(), dt.init_device_mesh("cpu", (3,)), [dt.Shard(0)]).requires_grad_()
    grads = []
    for given in (value, x):
        with dt.implicit_replication():
            plain = torch.zeros(5, 4, dtype=torch.float64)
            write(plain, given)
            (plain * plain * given).sum().backward()
        grads.append(given.grad)
    assert grads[1].placements == (dt.Shard(0),)
    assert torch.allclose(grads[1].full_tensor(), grads[0])


def test_elsewhere_such_a_write_is_refused() -> None:
    x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    with pytest.raises(MixedTensorError, match="implicit_replication"):
        torch.zeros(4).add_(x)


def written_on_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    plain, value = torch.ones(5, 4), torch.arange(20.0).reshape(5, 4)
    with dt.implicit_replication():
        plain[1:3].add_(dt.distribute_tensor(value, mesh, [dt.Shard(0)])[:2])
    assert torch.equal(plain[1:3], value[:2] + 1)


@pytest.mark.gloo
def test_every_rank_takes_the_whole_value() -> None:
    run_gloo(written_on_ranks, 4)
