"""Plain writes: in-place writes of DTensors to plain tensors under implicit_replication, and gradients of plain leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

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
def test_in_place_writes_of_a_dtensor_to_a_plain_tensor_equal_one_device(write: Write, placement: dt.Placement) -> None:
    value, expected, plain = torch.randn(5, 4), torch.ones(5, 4), torch.ones(5, 4)
    write(expected, value)
    with dt.implicit_replication():
        write(plain, dt.distribute_tensor(value, dt.init_device_mesh("cpu", (3,)), [placement]))
    assert type(plain) is torch.Tensor
    assert torch.allclose(plain, expected)


@pytest.mark.parametrize("write", [WRITES["add_"], WRITES["a slice"], WRITES["rows"], WRITES["index_add_"]])
def test_gradients_flow_through_in_place_writes_to_a_plain_tensor(write: Write) -> None:
    value = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    x = dt.distribute_tensor(value.detach(), dt.init_device_mesh("cpu", (3,)), [dt.Shard(0)]).requires_grad_()
    grads = []
    for source in (value, x):
        with dt.implicit_replication():
            plain = torch.zeros(5, 4, dtype=torch.float64)
            write(plain, source)
            (plain * plain * source).sum().backward()
        grads.append(source.grad)
    assert grads[1].placements == (dt.Shard(0),)
    assert torch.allclose(grads[1].full_tensor(), grads[0])


def test_an_in_place_write_of_a_dtensor_to_a_plain_tensor_raises_by_default() -> None:
    x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    with pytest.raises(MixedTensorError, match="implicit_replication"):
        torch.zeros(4).add_(x)


def test_data_of_a_plain_tensor_refuses_a_dtensor() -> None:
    """Without this error, the next read of ``plain`` crashed the process."""
    x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    plain, parameter = torch.zeros(4), torch.nn.Parameter(torch.zeros(4))
    for own in (plain, parameter):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            own.data = x
        assert own.sum() == 0
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            own.data = x.to_local()
        assert own.sum() == 0


def test_module_apply_can_distribute_and_gather_parameters() -> None:
    mesh, module = dt.init_device_mesh("cpu", (2,)), torch.nn.BatchNorm1d(3)
    plain_state = {name: value.clone() for name, value in module.state_dict().items()}
    module._apply(lambda t: dt.distribute_tensor(t, mesh, [dt.Shard(0) if t.ndim else dt.Replicate()]))
    assert all(isinstance(value, dt.DTensor) for value in module.state_dict().values())
    assert type(module.double().weight) is dt.DTensor
    module.float()._apply(lambda t: t.full_tensor())
    assert all(
        type(value) is torch.Tensor and torch.equal(value, plain_state[name]) for name, value in module.state_dict().items()
    )


def _write_on_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    plain, value = torch.ones(5, 4), torch.arange(20.0).reshape(5, 4)
    with dt.implicit_replication():
        plain[1:3].add_(dt.distribute_tensor(value, mesh, [dt.Shard(0)])[:2])
    assert torch.equal(plain[1:3], value[:2] + 1)


@pytest.mark.gloo
def test_in_place_writes_to_a_plain_tensor_on_processes_equal_one_device() -> None:
    run_gloo(_write_on_ranks, 4)


def _accumulate_gradient(x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor | None:
    plain.grad = None
    (plain**2).sum().backward()  # a plain gradient; the next backward adds a distributed one
    (x.sum() + (3 * plain).sum()).backward()
    return plain.grad


def check_gradients_of_a_plain_leaf() -> None:
    x = dt.ones(5, 4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    plain = torch.arange(3.0, requires_grad=True)
    for _ in range(2):
        found = _accumulate_gradient(x, plain)
        assert type(found) is torch.Tensor
        assert torch.equal(found, 2 * plain.detach() + 3)


def test_plain_and_distributed_gradients_of_a_plain_leaf_accumulate() -> None:
    check_gradients_of_a_plain_leaf()


@pytest.mark.gloo
def test_plain_and_distributed_gradients_of_a_plain_leaf_accumulate_on_processes() -> None:
    run_gloo(check_gradients_of_a_plain_leaf, 2)


OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {}),
)


def check_training_with_a_plain_scale(shape: tuple[int, ...]) -> None:
    for kind, options in OPTIMIZERS:
        trained = []
        for mesh in (None, dt.init_device_mesh("cpu", (2,))):
            weight: Any = torch.arange(12.0).reshape(4, 3).cos()
            x: Any = torch.arange(12.0).reshape(4, 3).sin()
            if mesh is not None:
                weight, x = (dt.distribute_tensor(value, mesh, [dt.Shard(0)]) for value in (weight, x))
            weight.requires_grad_()
            scale = torch.full(shape, 0.5, requires_grad=True)
            optimizer = kind([weight, scale], lr=0.1, **options)
            for step in range(3):
                optimizer.zero_grad(set_to_none=step != 1)
                ((weight * x * scale).tanh().sum() + scale.sum()).backward()
                optimizer.step()
            trained.append((weight.full_tensor() if mesh is not None else weight, scale))
        for value, expected in zip(trained[1], trained[0], strict=True):
            assert type(value) is type(expected)
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_optimizers_update_a_plain_scalar_with_a_distributed_gradient(shape: tuple[int, ...]) -> None:
    check_training_with_a_plain_scale(shape)


@pytest.mark.gloo
def test_optimizers_update_a_plain_scalar_on_processes() -> None:
    run_gloo(check_training_with_a_plain_scale, 2, (1,))
