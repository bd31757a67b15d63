"""Modules and parameters: distribute_module, optimizers, gradient clipping, state dicts and dtype conversion."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients, assert_same_parameters
from torch import nn

import dtensor as dt
from dtensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")

MESH = dt.init_device_mesh("cpu", (2,))
R = Replicate()


def value(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False), nn.BatchNorm1d(3, affine=False))


def shard_linears(name: str, module: nn.Module, mesh: Any) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(dt.distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))


def test_distribute_module_shards_by_partition_fn_and_replicates_other_parameters() -> None:
    observed: list[str] = []

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        observed.append(name)
        shard_linears(name, module, mesh)

    module = dt.distribute_module(
        make_module(),
        MESH,
        partition,
        input_fn=lambda mod, inputs, mesh: (dt.distribute_tensor(inputs[0], mesh, [Shard(0)]),),
        output_fn=lambda mod, output, mesh: output.full_tensor(),
    )
    assert observed == ["", "0", "1", "2", "3"]
    assert module[0].weight.placements == (Shard(0),)
    assert module[0].bias.placements == (R,)
    assert module[3].running_mean.placements == (R,)
    assert isinstance(module[0].weight, nn.Parameter)
    plain = make_module()
    x = torch.randn(6, 5)
    assert torch.allclose(module(x), plain(x), atol=1e-6)
    module(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_gradients(module, plain)


def test_a_parameter_of_a_dtensor_is_a_parameter_and_a_dtensor() -> None:
    p = nn.Parameter(dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]))
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, DTensor)
    assert p.requires_grad
    assert p.placements == (Shard(0),)
    assert not nn.Parameter(dt.zeros(3, device_mesh=MESH), requires_grad=False).requires_grad


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_update_parameters_as_on_one_device(optimizer: Any, foreach: bool) -> None:
    plain, distributed = make_module()[:3], dt.distribute_module(make_module()[:3], MESH, shard_linears)
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    steps = [
        optimizer(module.parameters(), lr=0.05, weight_decay=0.1, foreach=foreach, **options) for module in (plain, distributed)
    ]
    x = torch.randn(6, 5)
    for _ in range(3):
        for module, batch in ((plain, x), (distributed, dt.distribute_tensor(x, MESH, [Shard(0)]))):
            module(batch).square().mean().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    assert_same_parameters(distributed, plain)
    moments = [s for state in steps[1].state.values() for s in state.values() if isinstance(s, torch.Tensor) and s.ndim]
    assert all(isinstance(moment, DTensor) for moment in moments)


def test_clip_grad_norm_uses_the_global_norm() -> None:
    plain, distributed = make_module()[:3], dt.distribute_module(make_module()[:3], MESH, shard_linears)
    x = torch.randn(6, 5)
    plain(x).square().sum().backward()
    distributed(dt.distribute_tensor(x, MESH, [Shard(0)])).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (plain, distributed)]
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=1e-5)
    assert_same_gradients(distributed, plain)


def test_load_state_dict_restores_values_and_placements() -> None:
    source, target = (dt.distribute_module(make_module(), MESH, shard_linears) for _ in range(2))
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    state = source.state_dict()
    assert all(isinstance(v, DTensor) for v in state.values())
    target.load_state_dict(state)
    for got, want in zip(target.parameters(), source.parameters(), strict=True):
        assert got.placements == want.placements
        assert torch.equal(got.full_tensor(), want.full_tensor())


def test_load_state_dict_redistributes_state_to_the_placements_of_the_parameters() -> None:
    source = dt.distribute_module(make_module(), MESH)
    target = dt.distribute_module(make_module(), MESH, shard_linears)
    with torch.no_grad():
        source[0].weight.fill_(2)
    target.load_state_dict(source.state_dict())
    assert target[0].weight.placements == (Shard(0),)
    assert target[0].weight.full_tensor().unique().tolist() == [2]


@pytest.mark.parametrize("convert", ["double", "half", "bfloat16", "float"])
def test_dtype_conversion_of_a_module_keeps_placements_and_values(convert: str) -> None:
    module = getattr(dt.distribute_module(make_module(), MESH, shard_linears), convert)()
    plain = getattr(make_module(), convert)()
    for got, want in zip(module.parameters(), plain.parameters(), strict=True):
        assert isinstance(got, nn.Parameter)
        assert got.dtype == want.dtype
        assert torch.equal(got.full_tensor(), want)
    assert module[0].weight.placements == (Shard(0),)
    assert module.to(torch.float32)[0].weight.dtype == torch.float32


def test_nn_init_functions_give_the_values_of_one_device() -> None:
    module = dt.distribute_module(make_module(), MESH, shard_linears)
    module.apply(lambda m: nn.init.constant_(m.weight, 0.5) if isinstance(m, nn.Linear) else None)
    assert module[0].weight.full_tensor().unique().tolist() == [0.5]
    torch.manual_seed(3)
    expected = nn.init.kaiming_uniform_(torch.empty(7, 5))
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(module[0].weight)
    assert torch.equal(module[0].weight.full_tensor(), expected)


def test_torch_save_and_load_keep_placements_and_values() -> None:
    module = dt.distribute_module(make_module(), MESH, shard_linears)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    assert state["0.weight"].placements == (Shard(0),)
    assert torch.equal(state["0.weight"].full_tensor(), module[0].weight.detach().full_tensor())
    parameter = pickle.loads(pickle.dumps(module[0].weight))
    assert isinstance(parameter, nn.Parameter)
