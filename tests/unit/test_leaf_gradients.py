"""Leaf gradients: they have the placements of their leaves, and those of one backward pass are reduced together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients, assert_same_parameters
from gloo_processes import run_gloo
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_version_marks import LINEAR_REACHES_DTENSOR

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.tensor import leaf_gradients

MESH = dt.init_device_mesh("cpu", (4,))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))


def distribute_parameters(model: nn.Module, mesh: Any, placements: Callable[[nn.Parameter], Any]) -> nn.Module:
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(dt.distribute_tensor(p.detach(), mesh, placements(p)))
    return model


def replicated(p: Any) -> list[Any]:
    return [Replicate()]


def sharded_rows(p: Any) -> list[Any]:
    return [Shard(0)]


def make_batch(mesh: Any = MESH) -> tuple[torch.Tensor, Any]:
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    return x, dt.distribute_tensor(x, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("placements", [replicated, sharded_rows])
def test_leaf_gradients_of_one_backward_are_reduced_in_one_collective(placements: Callable[[Any], Any]) -> None:
    plain, (x, dx) = make_net(), make_batch()
    model = distribute_parameters(copy.deepcopy(plain), MESH, placements)
    loss = model(dx).square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    plain(x).square().sum().backward()
    check_gradients(model, plain)
    if placements is replicated:
        nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
        assert dict(comm.get_comm_counts()) == {"all_reduce": 1}
        assert dict(comm.get_comm_bytes()) == {"all_reduce": 2 * nbytes * 3 // 4}


def test_leaf_gradients_beyond_the_batch_limit_are_reduced_in_several_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_gradients, "BATCH_NBYTES", 100)
    plain, (x, dx) = make_net(), make_batch()
    model = distribute_parameters(copy.deepcopy(plain), MESH, replicated)
    loss = model(dx).square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    plain(x).square().sum().backward()
    check_gradients(model, plain)
    assert comm.get_total_counts() == 2 + LINEAR_REACHES_DTENSOR  # batches end inside the norm and inside the last layer


def test_gradient_hooks_receive_gradients_with_the_placements_of_the_leaf() -> None:
    plain, (x, dx) = make_net(), make_batch()
    model, observed = distribute_parameters(copy.deepcopy(plain), MESH, replicated), []

    def step(p: Any) -> None:
        observed.append(p.grad.placements)
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    def plain_step(p: Any) -> None:
        p.data.sub_(0.1 * p.grad)

    for p in (*model.parameters(), *plain.parameters()):
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(step if isinstance(p, dt.DTensor) else plain_step)
    model(dx).square().sum().backward()
    plain(x).square().sum().backward()
    assert observed == [(Replicate(),)] * 6
    assert_same_parameters(model, plain)


def test_autograd_grad_returns_gradients_with_the_placements_of_the_leaf() -> None:
    plain, (x, dx) = make_net(), make_batch()
    model = distribute_parameters(copy.deepcopy(plain), MESH, replicated)
    with CommDebugMode() as comm:
        found = torch.autograd.grad(model(dx).square().sum(), list(model.parameters()))
    assert comm.get_total_counts() == 1
    for grad, own in zip(found, torch.autograd.grad(plain(x).square().sum(), list(plain.parameters())), strict=True):
        assert grad.placements == (Replicate(),)
        torch.testing.assert_close(grad.full_tensor(), own)


def test_gradient_penalty_has_the_gradients_of_plain_torch() -> None:
    def penalty(model: nn.Module, x: Any) -> Any:
        return sum(
            g.square().sum() for g in torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        )

    plain, (x, dx) = make_net().double(), (x.double() for x in make_batch())
    model = distribute_parameters(copy.deepcopy(plain), MESH, replicated)
    penalty(model, dx).backward()
    penalty(plain, x).backward()
    check_gradients(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_repeated_and_nested_backward_passes_accumulate_leaf_gradients(reentrant: bool) -> None:
    def run(model: Any, x: Any) -> None:
        for _ in range(2):
            h = model[0](x)
            y = checkpoint(model[1:], h, use_reentrant=reentrant)
            y.square().sum().backward()

    plain, (x, dx) = make_net(), make_batch()
    model = distribute_parameters(copy.deepcopy(plain), MESH, replicated)
    run(model, dx)
    run(plain, x)
    check_gradients(model, plain)


def test_a_backward_that_raises_keeps_complete_leaf_gradients() -> None:
    class RaiseInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ValueError("no further")

    plain, (x, dx) = make_net(), make_batch()
    model = distribute_parameters(copy.deepcopy(plain), MESH, replicated)
    for each, value in ((model, dx), (plain, x)):
        with pytest.raises(ValueError, match="no further"):
            each[1:](RaiseInBackward.apply(each[0](value))).square().sum().backward()
    assert model[0].weight.grad is None
    check_gradients(model[1:], plain[1:])
    model.zero_grad()
    plain.zero_grad()
    for each, value in ((model, dx), (plain, x)):
        each(value).sum().backward()
    check_gradients(model, plain)


def test_a_write_to_a_leaf_gradient_before_its_reduction_raises() -> None:
    class ScaleGradientInPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mul_(2)

    a, b = (dt.zeros(3, device_mesh=MESH, placements=[Replicate()]).requires_grad_() for _ in range(2))
    data = dt.ones(8, 3, device_mesh=MESH, placements=[Shard(0)])
    loss = ((ScaleGradientInPlace.apply(b * 1) + a) * data).sum()  # a and b receive the same gradient tensor, a first
    with pytest.raises(dt.errors.DTensorError, match="written to in place"):
        loss.backward()


def check_accumulation(mesh: Any) -> None:
    for placements, dtype in ((replicated, torch.float32), (sharded_rows, torch.float64)):
        plain, (x, _) = make_net().to(dtype), make_batch()
        x = x.to(dtype)
        dx = dt.distribute_tensor(x, mesh, [Shard(0)])
        model = distribute_parameters(copy.deepcopy(plain), mesh, placements)
        for _ in range(2):
            for _ in range(2):
                model(dx).square().sum().backward()
                plain(x).square().sum().backward()
            check_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


def check_on_processes() -> None:
    check_accumulation(dt.init_device_mesh("cpu", (3,)))


@pytest.mark.gloo
def test_accumulated_leaf_gradients_on_processes_equal_plain_torch() -> None:
    run_gloo(check_on_processes, 3)


def test_an_expanded_gradient_is_stored_with_placements_and_strides_of_its_leaf() -> None:
    """The gradient of ``sum`` is expanded; autograd copies it with the strides and placements of the leaf."""
    x = dt.distribute_tensor(torch.randn(6, 16), MESH, [Shard(1)])
    leaf = x.chunk(2, 1)[1].detach().requires_grad_()
    leaf.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.placements == leaf.placements == (Shard(1, sizes=(0, 0, 4, 4)),)
    assert leaf.grad.stride() == (8, 1)
