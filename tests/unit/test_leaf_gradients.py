"""Gradients of leaves lie as the leaves do, and those of one backward pass travel together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import same_gradients, same_parameters
from gloo_processes import run_gloo
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_versions import WHOLE

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.tensor import leaf_gradients

MESH = dt.init_device_mesh("cpu", (4,))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))


def placed(model: nn.Module, mesh: Any, placements: Callable[[nn.Parameter], Any]) -> nn.Module:
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(dt.distribute_tensor(p.detach(), mesh, placements(p)))
    return model


def replicated(p: Any) -> list[Any]:
    return [Replicate()]


def rows(p: Any) -> list[Any]:
    return [Shard(0)]


def batch(mesh: Any = MESH) -> tuple[torch.Tensor, Any]:
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    return x, dt.distribute_tensor(x, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))


def agree(model: nn.Module, plain: nn.Module) -> None:
    same_gradients(model, plain)


@pytest.mark.parametrize("where", [replicated, rows])
def test_those_of_a_pass_move_in_one_collective(where: Callable[[Any], Any]) -> None:
    plain, (x, cut) = net(), batch()
    model = placed(copy.deepcopy(plain), MESH, where)
    loss = model(cut).square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    plain(x).square().sum().backward()
    agree(model, plain)
    if where is replicated:
        nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
        assert dict(comm.get_comm_counts()) == {"all_reduce": 1}
        assert dict(comm.get_comm_bytes()) == {"all_reduce": 2 * nbytes * 3 // 4}


def test_what_would_be_too_much_at_once_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_gradients, "BATCH_NBYTES", 100)
    plain, (x, cut) = net(), batch()
    model = placed(copy.deepcopy(plain), MESH, replicated)
    loss = model(cut).square().sum()
    with CommDebugMode() as comm:
        loss.backward()
    plain(x).square().sum().backward()
    agree(model, plain)
    assert comm.get_total_counts() == 2 + WHOLE  # of a layer and half a norm, half a norm and a weight, the rest


def test_hooks_see_them_as_the_leaf_lies() -> None:
    plain, (x, cut) = net(), batch()
    model, seen = placed(copy.deepcopy(plain), MESH, replicated), []

    def step(p: Any) -> None:
        seen.append(p.grad.placements)
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    def plain_step(p: Any) -> None:
        p.data.sub_(0.1 * p.grad)

    for p in (*model.parameters(), *plain.parameters()):
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(step if isinstance(p, dt.DTensor) else plain_step)
    model(cut).square().sum().backward()
    plain(x).square().sum().backward()
    assert seen == [(Replicate(),)] * 6
    same_parameters(model, plain)


def test_those_that_are_asked_for_lie_as_the_leaf_does() -> None:
    plain, (x, cut) = net(), batch()
    model = placed(copy.deepcopy(plain), MESH, replicated)
    with CommDebugMode() as comm:
        found = torch.autograd.grad(model(cut).square().sum(), list(model.parameters()))
    assert comm.get_total_counts() == 1
    for grad, own in zip(found, torch.autograd.grad(plain(x).square().sum(), list(plain.parameters())), strict=True):
        assert grad.placements == (Replicate(),)
        torch.testing.assert_close(grad.full_tensor(), own)


def test_second_derivatives() -> None:
    def penalty(model: nn.Module, x: Any) -> Any:
        return sum(
            g.square().sum() for g in torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        )

    plain, (x, cut) = net().double(), (x.double() for x in batch())
    model = placed(copy.deepcopy(plain), MESH, replicated)
    penalty(model, cut).backward()
    penalty(plain, x).backward()
    agree(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_passes_after_and_within_each_other(reentrant: bool) -> None:
    def run(model: Any, x: Any) -> None:
        for _ in range(2):
            h = model[0](x)
            y = checkpoint(model[1:], h, use_reentrant=reentrant)
            y.square().sum().backward()

    plain, (x, cut) = net(), batch()
    model = placed(copy.deepcopy(plain), MESH, replicated)
    run(model, cut)
    run(plain, x)
    agree(model, plain)


def test_a_pass_that_ends_early_leaves_those_that_were_complete() -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ValueError("no further")

    plain, (x, cut) = net(), batch()
    model = placed(copy.deepcopy(plain), MESH, replicated)
    for each, value in ((model, cut), (plain, x)):
        with pytest.raises(ValueError, match="no further"):
            each[1:](Refuses.apply(each[0](value))).square().sum().backward()
    assert model[0].weight.grad is None
    agree(model[1:], plain[1:])
    model.zero_grad()
    plain.zero_grad()
    for each, value in ((model, cut), (plain, x)):
        each(value).sum().backward()
    agree(model, plain)


def test_a_write_to_one_that_has_not_left_is_refused() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.mul_(2)

    a, b = (dt.zeros(3, device_mesh=MESH, placements=[Replicate()]).requires_grad_() for _ in range(2))
    rows = dt.ones(8, 3, device_mesh=MESH, placements=[Shard(0)])
    loss = ((Writes.apply(b * 1) + a) * rows).sum()  # both are given the same gradient, a's first
    with pytest.raises(dt.errors.DTensorError, match="written to in place"):
        loss.backward()


def on_processes(mesh: Any) -> None:
    for where, dtype in ((replicated, torch.float32), (rows, torch.float64)):
        plain, (x, _) = net().to(dtype), batch()
        x = x.to(dtype)
        cut = dt.distribute_tensor(x, mesh, [Shard(0)])
        model = placed(copy.deepcopy(plain), mesh, where)
        for _ in range(2):
            for _ in range(2):
                model(cut).square().sum().backward()
                plain(x).square().sum().backward()
            agree(model, plain)
            model.zero_grad()
            plain.zero_grad()


def main() -> None:
    on_processes(dt.init_device_mesh("cpu", (3,)))


@pytest.mark.gloo
def test_on_processes() -> None:
    run_gloo(main, 3)


def test_a_gradient_that_memory_repeats_is_stored_where_its_leaf_lies() -> None:
    """Autograd copies it where the leaf lies apart in memory; of what few ranks have, a copy that grows is dealt out."""
    whole = dt.distribute_tensor(torch.randn(6, 16), MESH, [Shard(1)])
    leaf = whole.chunk(2, 1)[1].detach().requires_grad_()
    leaf.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.placements == leaf.placements == (Shard(1, sizes=(0, 0, 4, 4)),)
    assert leaf.grad.stride() == (8, 1)
