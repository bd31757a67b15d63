"""Meta initialization: models built on the meta device are distributed, then materialized with the values of a plain model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_with_one_device import full_value
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.errors import DTensorError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, materialize, parallelize_module, replicate

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
from gpt_model import GPT, Config, loss_of, rotary_angles  # found by the path above

CONFIG = Config(vocabulary=23, context=6, width=8, heads=2, layers=2)


class Net(nn.Module):
    """Model with modules of many kinds, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.mixed = nn.MultiheadAttention(6, 2)
        self.conv = nn.Conv1d(6, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.rest = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GRU(6, 6), nn.Linear(6, 7))


def build(make: Any = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


def build_on_meta(make: Any = Net) -> nn.Module:
    with torch.device("meta"):
        return make()


def mesh_2d() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def fully_shard_net(module: nn.Module) -> None:
    fully_shard(module.rest, mesh=mesh_2d()["dp"])
    fully_shard(module, mesh=mesh_2d()["dp"])


def over_both_dims(module: nn.Module) -> None:
    def cut(name: str, inner: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, p in list(inner._parameters.items()):
            if p is not None:
                inner._parameters[key] = nn.Parameter(dt.distribute_tensor(p, mesh, [Shard(0), Shard(p.ndim - 1)]))

    dt.distribute_module(module, mesh_2d(), cut)


WAYS = {
    "plain": lambda module: None,
    "fully_shard": fully_shard_net,
    "hsdp": lambda module: fully_shard(module, mesh=mesh_2d()),
    "replicate": lambda module: replicate(module, mesh_2d()["dp"]),
    "tensor parallel": lambda module: parallelize_module(
        module, mesh_2d()["tp"], {"rest.0": ColwiseParallel(), "embedding": RowwiseParallel(input_layouts=Replicate())}
    ),
    "distribute_module": over_both_dims,
}


@pytest.mark.parametrize("way", WAYS)
def test_materialize_gives_the_initial_values_of_the_plain_model(way: str) -> None:
    module, alone = build_on_meta(), build()
    WAYS[way](module)
    torch.manual_seed(0)
    assert materialize(module) is module
    ours, theirs = module.state_dict(), alone.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert not ours[name].is_meta
        assert torch.equal(full_value(ours[name]), value), name


def init(module: nn.Module) -> None:
    if isinstance(module, GPT):
        angles = rotary_angles(CONFIG.context, CONFIG.width // CONFIG.heads)
        for name, value in (("cos", angles.cos()), ("sin", angles.sin())):
            buffer = getattr(module, name)
            layout = {"device_mesh": buffer.device_mesh, "placements": buffer.placements} if isinstance(buffer, DTensor) else None
            buffer.copy_(value if layout is None else dt.distribute_tensor(value, **layout))
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def gpt(mesh: dt.DeviceMesh) -> nn.Module:
    model = build_on_meta(lambda: GPT(CONFIG))
    plan = {"attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel()}
    plan |= {"attention.out": RowwiseParallel(), "feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], {"blocks.*": plan | {"feed_forward.down": RowwiseParallel()}})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train_materialized() -> list[float]:
    """Return the losses of a model on 2 x 2 ranks that is never unsharded on one device."""
    mesh = mesh_2d()
    model = gpt(mesh)
    torch.manual_seed(0)
    materialize(model, init=init)
    tokens = torch.randint(23, (4, 7), generator=torch.Generator().manual_seed(1))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(3):
        x = dt.map_ranks(lambda at: tokens.chunk(2)[at[0]].clone(), mesh=mesh)
        loss = loss_of(model(x[:, :-1]), x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = DTensor.from_local(loss.detach(), mesh, [dt.Partial("avg"), Replicate()]).full_tensor()
        losses.append(float(getattr(mean, "shards", (mean,))[0]))
    return losses


def test_materialized_model_trains_like_plain_model() -> None:
    alone = build(lambda: GPT(CONFIG))
    tokens = torch.randint(23, (4, 7), generator=torch.Generator().manual_seed(1))
    optimizer, expected = torch.optim.AdamW(alone.parameters(), lr=0.01), []
    for _ in range(3):
        loss = loss_of(alone(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert train_materialized() == pytest.approx(expected, rel=1e-5)


@pytest.mark.gloo
def test_materialized_model_trains_equally_on_process_groups() -> None:
    here = train_materialized()
    for there in run_gloo(train_materialized, 4):
        assert there == pytest.approx(here, rel=1e-5)


def test_materialized_model_stores_only_shards() -> None:
    model = gpt(mesh_2d())
    materialize(model, init=init)
    held = [[p._local.shards[rank].untyped_storage().nbytes() for p in model.parameters()] for rank in range(4)]
    total = sum(p.numel() * 4 for p in GPT(CONFIG).parameters())
    cut_by_dp_only = sum(p.numel() * 4 for name, p in GPT(CONFIG).named_parameters() if "blocks" not in name or "norm" in name)
    assert max(map(sum, held)) <= cut_by_dp_only / 2 + (total - cut_by_dp_only) / 4 + 64


def test_materialize_raises_for_tensors_without_an_initializer() -> None:
    model = build_on_meta(lambda: GPT(CONFIG))
    with pytest.raises(DTensorError, match=r"nothing initializes cos, sin: .* materialize\(module, init=f\)"):
        materialize(model)
    assert all(p.is_meta for p in model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@pytest.mark.parametrize("way", ["plain", "fully_shard", "tensor parallel"])
def test_materialize_keeps_tied_parameters_and_needs_init(way: str) -> None:
    model, mesh = build_on_meta(Tied), mesh_2d()
    if way == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
    elif way == "tensor parallel":
        parallelize_module(model, mesh["tp"], {"table": RowwiseParallel(), "head": ColwiseParallel()})
    with pytest.raises(DTensorError, match=r"table\.weight and head\.weight are one shared parameter"):
        materialize(model)

    def init(module: nn.Module) -> None:
        kept = model.table.weight.detach().clone() if module is model.head else None
        getattr(module, "reset_parameters", lambda: None)()
        if kept is not None:
            model.table.weight.copy_(kept)

    torch.manual_seed(0)
    materialize(model, init=init)
    assert model.head.weight is model.table.weight
    for name, value in build(Tied).state_dict().items():
        assert torch.equal(full_value(model.state_dict()[name]), value), name


def test_materialize_keeps_requires_grad_dtypes_and_real_tensors() -> None:
    model = nn.Sequential(build_on_meta(lambda: nn.Linear(3, 2)).to(torch.bfloat16).requires_grad_(False), nn.Linear(2, 2))
    kept = model[1].weight.detach().clone()
    materialize(model)
    assert model[0].weight.dtype is torch.bfloat16
    assert not model[0].weight.requires_grad
    assert torch.equal(model[1].weight, kept)


class ReplacesItsTensors(nn.Module):
    """Module that initializes its submodules, and replaces a parameter and a buffer by new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.weight = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.layer.weight)
        self.weight = nn.Parameter(torch.randn(5), requires_grad=False)
        self.table = torch.arange(7.0)


def test_tensors_replaced_by_an_initializer_keep_their_layout() -> None:
    model = build_on_meta(ReplacesItsTensors)
    over_both_dims(model)
    torch.manual_seed(0)
    materialize(model)
    for name, value in build(ReplacesItsTensors).state_dict().items():
        assert torch.equal(full_value(model.state_dict()[name]), value), name
    assert model.weight.placements == (Shard(0), Shard(0))
    assert not model.weight.requires_grad
    assert isinstance(model.table, DTensor)


def test_real_tensors_keep_values_if_a_parent_initializes_its_submodules() -> None:
    model, kept = build_on_meta(ReplacesItsTensors), nn.Linear(4, 6)
    before = kept.weight.detach().clone()
    model.layer = kept
    materialize(model)
    assert model.layer.weight is kept.weight
    assert torch.equal(kept.weight, before)
    model.weight = nn.Parameter(torch.empty(5, device="meta"))
    model.table = table = torch.ones(7)
    materialize(model)
    assert model.table is table
    assert torch.equal(table, torch.ones(7))


def test_materialize_of_nested_modules_gives_the_values_of_the_constructor() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.AdaptiveLogSoftmaxWithLoss(6, 9, [2, 5], div_value=1.5),
            nn.Transformer(4, 2, 1, 1, 5, batch_first=True),
            nn.Linear(3, 2),
        )

    module = build_on_meta(make)
    torch.manual_seed(0)
    materialize(module)
    for name, value in build(make).state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_gradient_has_the_placements_of_a_parameter_redistributed_through_data() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    linear = materialize(parallelize_module(linear, mesh, ColwiseParallel(use_local_output=False)))
    linear.weight.data = linear.weight.detach().redistribute(placements=[dt.Replicate()])
    linear(torch.ones(2, 4)).sum().backward()
    assert linear.weight.grad.placements == linear.weight.placements == (dt.Replicate(),)
