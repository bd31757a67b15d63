"""``torch.autograd.grad`` and ``backward(inputs=...)`` on data-parallel modules: gradients of plain torch, or an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import dtensor as dt
from dtensor.errors import UnsupportedOperationError
from dtensor.parallel import fully_shard, replicate


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 7), nn.ReLU()), nn.Linear(7, 3)).double()


def sharded(model: nn.Module, nested: bool, mesh: dt.DeviceMesh) -> nn.Module:
    if nested:
        for child in (model[0], model[2]):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def assert_gradients_equal(ours: Any, theirs: Any) -> None:
    for own, expected in zip(ours, theirs, strict=True):
        assert own.placements == (dt.Shard(0),)
        torch.testing.assert_close(own.full_tensor(), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("some", [slice(None), slice(2, 3)])
def test_autograd_grad_and_backward_of_inputs_equal_plain_torch(nested: bool, some: slice) -> None:
    mesh, alone = dt.init_device_mesh("cpu", (2,)), make_model()
    model, whole = sharded(copy.deepcopy(alone), nested, mesh), torch.randn(4, 6, dtype=torch.float64)
    x = dt.distribute_tensor(whole, mesh, [dt.Shard(0)])
    expected = torch.autograd.grad(alone(whole).square().sum(), list(alone.parameters())[some])
    parameters = list(model.parameters())[some]
    assert_gradients_equal(torch.autograd.grad(model(x).square().sum(), parameters, allow_unused=True), expected)
    assert all(p.grad is None for p in model.parameters())
    model(x).square().sum().backward(inputs=parameters)
    assert_gradients_equal([p.grad for p in parameters], expected)
    assert sum(p.grad is not None for p in model.parameters()) == len(parameters)
    model.zero_grad()
    model(x).square().sum().backward()
    assert_gradients_equal([p.grad for p in parameters], expected)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="stage_backward_weight takes a node's first gradient for all")
@pytest.mark.parametrize("nested", [False, True])
def test_separate_backward_of_inputs_and_weights_equals_plain_torch(nested: bool) -> None:
    mesh, alone = dt.init_device_mesh("cpu", (2,)), make_model()
    model = sharded(copy.deepcopy(alone), nested, mesh)
    for _ in range(2):
        run_split_backward(alone, model, mesh)
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            assert_gradients_equal([q.grad], [p.grad])
            with torch.no_grad():
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
        alone.zero_grad()
        model.zero_grad()


def run_split_backward(alone: nn.Module, model: nn.Module, mesh: dt.DeviceMesh) -> None:
    """Run three batches: two with separate backward passes for inputs and for weights, and one with a single backward."""
    waiting: list[Any] = []
    for i in range(3):
        whole = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        alone(whole).square().sum().backward()
        x = dt.distribute_tensor(whole.detach(), mesh, [dt.Shard(0)]).requires_grad_()
        loss = model(x).square().sum()
        if i == 2:
            loss.backward()
        else:
            _, groups = stage_backward_input([loss], None, [x], model.parameters())
            waiting.append(groups)
        assert whole.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    for groups in waiting:
        stage_backward_weight(model.parameters(), groups)


def test_grad_of_inputs_frees_unsharded_parameters_unless_graph_is_retained() -> None:
    """Check gradients of inputs alone: unsharded parameters are freed, or with ``retain_graph`` kept until parameters change."""
    mesh = dt.init_device_mesh("cpu", (2,))
    model = sharded(make_model(), True, mesh)
    x = dt.distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh, [dt.Shard(0)]).requires_grad_()
    unit = model[0].__dict__["_data_parallel_unit"]
    for retains in (False, True):
        loss = model(x).square().sum()
        torch.autograd.grad(loss, [x], retain_graph=retains)
        assert unit.groups[0].unsharded.is_filled is retains
    for p in model.parameters():
        with torch.no_grad():
            p += 1
    model(x).square().sum().backward()
    assert not unit.groups[0].unsharded.is_filled


@pytest.mark.parametrize("way", ["replicated", "without sync", "deferred"])
def test_autograd_grad_with_deferred_reduction_raises(way: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    model: Any = replicate(make_model(), mesh=mesh) if way == "replicated" else sharded(make_model(), True, mesh)
    if way == "without sync":
        model.set_requires_gradient_sync(False)
    if way == "deferred":
        model.set_reduce_scatter_unused_params(True)
    x = dt.distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh, [dt.Shard(0)])
    with pytest.raises(dt.errors.UnsupportedOperationError, match=r"Call backward\(\).*ScheduleInterleaved1F1B"):
        torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
    with pytest.raises(dt.errors.UnsupportedOperationError, match=r"Call backward\(\)"):
        model(x).square().sum().backward(inputs=list(model.parameters()))


@pytest.mark.parametrize("wrap", [fully_shard, replicate])
def test_parameter_hooks_run_once_per_gradient(wrap: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    model = wrap(make_model(), mesh=mesh)
    x = dt.distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh, [dt.Shard(0)])
    seen: list[tuple[int, Tensor]] = []
    after: list[int] = []
    for i, p in enumerate(model.parameters()):
        p.register_hook(lambda grad, i=i: seen.append((i, grad)))
        p.register_post_accumulate_grad_hook(lambda p, i=i: after.append(i))
    for _ in range(3):
        seen.clear()
        after.clear()
        model(x).square().sum().backward()
        assert sorted(i for i, _ in seen) == sorted(after) == list(range(6))
        assert all(isinstance(grad, dt.DTensor) for _, grad in seen)
    torch.testing.assert_close([p.grad.full_tensor() / 3 for p in model.parameters()], [g.full_tensor() for _, g in sorted(seen)])


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")  # torch warns once
@pytest.mark.parametrize("distribute", [fully_shard, replicate])
def test_backward_with_create_graph_raises_and_gradient_penalty_works(distribute: Any) -> None:
    mesh, alone = dt.init_device_mesh("cpu", (2,)), make_model()
    model, x = copy.deepcopy(alone), torch.randn(4, 6, dtype=torch.float64)
    distribute(model, mesh=mesh)
    with pytest.raises(UnsupportedOperationError, match="create_graph=True"):
        model(x).square().sum().backward(create_graph=True)
    penalised = []
    for module in (alone, model):  # gradient penalty of the input, as for Wasserstein critics
        module.zero_grad()
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(given).square().sum(), given, create_graph=True)
        slope.square().sum().backward()
        penalised.append([p.grad for p in module.parameters()])
    for own, expected in zip(penalised[1], penalised[0], strict=True):
        if expected is not None:
            torch.testing.assert_close(own.full_tensor(), expected)
