"""Tied parameters: weights that modules share stay shared, and optimizers with replaced parameters raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients, full_value, make_dp_mesh, make_per_rank_batch, step_and_clear_gradients
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import DTensor, Replicate
from dtensor.errors import DTensorError, UnitError
from dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    fully_shard,
    materialize,
    parallelize_module,
    replicate,
)

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
TOKENS = [torch.tensor([[1, 2]]), torch.tensor([[4, 0]])]


class Tied(nn.Module):
    """Model in which the embedding table is the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.mid, self.out = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(self.tok(tokens))))


class TiedThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.second = Tied(), nn.Linear(5, 7)
        self.second.weight = self.inner.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) + self.second(self.inner.tok(tokens))


class SharedModule(nn.Module):
    """Model with one layer in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(5, 5)
        self.tok = nn.Embedding(7, 5)
        self.a, self.b = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(5, 5), shared)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(self.a(self.tok(tokens)))


def build(cls: type[nn.Module] = Tied) -> Any:
    torch.manual_seed(0)
    return cls().double()


def loss_of(out: Tensor) -> Tensor:
    return (out**2).mean()


def assert_trains_like_plain(model: nn.Module, alone: nn.Module, mesh: dt.DeviceMesh, optimizer: Any = torch.optim.AdamW) -> None:
    """Compare gradients and state dicts of two steps with the plain model."""
    optimizers = [optimizer(model.parameters(), lr=0.1), torch.optim.AdamW(alone.parameters(), lr=0.1)]
    for _ in range(2):
        loss_of(model(make_per_rank_batch(TOKENS, mesh["dp"]))).backward()
        torch.stack([loss_of(alone(tokens)) for tokens in TOKENS]).mean().backward()
        assert_same_gradients(model, alone)
        step_and_clear_gradients(*optimizers)
    for ours, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(full_value(ours), theirs)


def in_a_list(model: Any, mesh: Any) -> None:
    fully_shard([model.tok, model.out], mesh=mesh)


def in_a_list_and_its_parent(model: Any, mesh: Any) -> None:
    in_a_list(model, mesh)
    fully_shard(model, mesh=mesh)


def in_a_list_with_its_parent(model: Any, mesh: Any) -> None:
    fully_shard([model.out, model], mesh=mesh)


def one_and_its_parent(model: Any, mesh: Any) -> None:
    fully_shard(model.tok, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_replicated(model: Any, mesh: Any) -> None:
    replicate(model.mid, mesh)
    replicate(model, mesh)


def ignored_by_one(model: Any, mesh: Any) -> None:
    fully_shard(model.tok, mesh=mesh, ignored_params={model.tok.weight})
    fully_shard(model, mesh=mesh)


WAYS = [in_a_list, in_a_list_and_its_parent, in_a_list_with_its_parent, one_and_its_parent, one_replicated, ignored_by_one]


@pytest.mark.parametrize("way", WAYS)
def test_tied_weight_stays_shared_and_trains_like_plain_model(way: Callable[..., None]) -> None:
    model, alone, mesh = build(), build(), make_dp_mesh()
    way(model, mesh)
    if way is in_a_list:
        fully_shard(model.mid, mesh=mesh)
    assert model.tok.weight is model.out.weight
    assert list(model.state_dict()) == list(alone.state_dict())
    assert_trains_like_plain(model, alone, mesh)


def _train_tied() -> list[float]:
    for way in (in_a_list_and_its_parent, one_and_its_parent):
        model, alone, mesh = build(), build(), make_dp_mesh()
        way(model, mesh)
        assert_trains_like_plain(model, alone, mesh)
    return [float(full_value(p).sum()) for p in model.parameters()]


@pytest.mark.gloo
def test_tied_weight_trains_like_plain_model_on_process_groups() -> None:
    run_gloo(_train_tied, 2)


def test_tied_weight_with_zero_optimizer_trains_like_plain_model() -> None:
    model, alone, mesh = build(), build(), make_dp_mesh()
    replicate(model, mesh)
    assert_trains_like_plain(model, alone, mesh, lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=lr))


@pytest.mark.parametrize("inner", ["", "tok", "out", "list"])
def test_weight_shared_by_three_modules_trains_like_plain_model(inner: str) -> None:
    model, alone, mesh = build(TiedThrice), build(TiedThrice), make_dp_mesh()
    if inner:
        fully_shard([model.inner.tok, model.inner.out] if inner == "list" else getattr(model.inner, inner), mesh=mesh)
        fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.inner.tok.weight is model.inner.out.weight
    assert model.inner.tok.weight is model.second.weight
    assert_trains_like_plain(model, alone, mesh)


@pytest.mark.parametrize("units", [["a.0", "a", "b"], ["a"], [["a", "b"]]], ids=str)
def test_module_shared_by_two_blocks_trains_like_plain_model(units: list[Any]) -> None:
    """Check a shared module with its own unit, in one of the units, and in one unit with both blocks."""
    model, alone, mesh = build(SharedModule), build(SharedModule), make_dp_mesh()
    for name in units:
        found = [model.get_submodule(each) for each in ([name] if isinstance(name, str) else name)]
        fully_shard(found, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_trains_like_plain(model, alone, mesh)


def test_weight_tied_between_two_fully_shard_calls_trains_like_plain_model() -> None:
    model, alone, mesh = build(), build(), make_dp_mesh()
    model.out.weight = nn.Parameter(model.out.weight.detach().clone())
    fully_shard(model.tok, mesh=mesh)
    model.out.weight = model.tok.weight
    fully_shard(model, mesh=mesh)
    assert_trains_like_plain(model, alone, mesh)


def test_tied_weight_under_tensor_parallelism_trains_like_plain_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, alone = build(), build()
    plan = {"tok": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard([model.tok, model.out], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model.tok.weight is model.out.weight
    assert_trains_like_plain(model, alone, mesh)


def test_tied_weight_from_the_meta_device_trains_like_plain_model() -> None:
    mesh, alone = make_dp_mesh(), build()
    with torch.device("meta"):
        model = Tied().double()
    values, names = alone.state_dict(), {inner: name for name, inner in model.named_modules()}
    in_a_list_and_its_parent(model, mesh)

    def init(inner: nn.Module) -> None:
        for name, p in inner.named_parameters(recurse=False):
            p.copy_(dt.distribute_tensor(values[f"{names[inner]}.{name}"], p.device_mesh, p.placements))

    materialize(model, init=init)
    assert model.tok.weight is model.out.weight
    assert_trains_like_plain(model, alone, mesh)


def test_distribute_module_keeps_ties() -> None:
    model = dt.distribute_module(build(), make_dp_mesh())
    assert model.tok.weight is model.out.weight


# --- ties that cannot be kept raise -------------------------------------------------------------------------------------
def _colwise(module: nn.Module, mesh: Any) -> None:
    parallelize_module(module, mesh, ColwiseParallel())


def _sharded(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh)


FIRST_AND_SECOND = [
    (_sharded, _sharded),
    (replicate, replicate),
    (_sharded, replicate),
    (_colwise, _colwise),
    (_colwise, _sharded),
    (dt.distribute_module, dt.distribute_module),
]


@pytest.mark.parametrize(("first", "second"), FIRST_AND_SECOND)
def test_wrapping_siblings_that_share_a_weight_raises(first: Any, second: Any) -> None:
    model, mesh = build(), make_dp_mesh()
    first(model.tok, mesh)
    before = dict(model.out._parameters)
    with pytest.raises(UnitError, match="'weight' of this Linear is also a weight of another module"):
        second(model.out, mesh)
    assert dict(model.out._parameters) == before


def test_fully_shard_of_siblings_that_share_a_module_raises() -> None:
    model, mesh = build(SharedModule), make_dp_mesh()
    fully_shard(model.a, mesh=mesh)
    with pytest.raises(UnitError, match="or on both: fully_shard"):
        fully_shard(model.b, mesh=mesh)
    assert not isinstance(model.b[0].weight, DTensor)
    fully_shard(model, mesh=mesh)
    assert_trains_like_plain(model, build(SharedModule), mesh)


def test_tied_weight_of_units_on_two_meshes_raises() -> None:
    mesh, model = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "more")), build()
    fully_shard(model.tok, mesh=mesh["dp"])
    with pytest.raises(UnitError, match="use the same mesh"):
        fully_shard(model, mesh=mesh)


# --- optimizers made before parameters are replaced ---------------------------------------------------------------------
def _plain(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _zero(module: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, make_dp_mesh(), lr=0.1)


REPLACING_FUNCTIONS = [
    (_sharded, "fully_shard"),
    (replicate, "replicate"),
    (_colwise, "parallelize_module"),
    (dt.distribute_module, "distribute_module"),
    (dt.shard_model, "shard_model"),
]


@pytest.mark.parametrize(("way", "name"), REPLACING_FUNCTIONS)
@pytest.mark.parametrize("optimizer", [_plain, _zero])
def test_step_of_optimizer_with_replaced_parameters_raises(way: Any, name: str, optimizer: Any) -> None:
    module = nn.Linear(4, 4)
    early = optimizer(module)
    way(module, *([dt.sharding_spec.single_split(0, [0, 1])] if name == "shard_model" else []), make_dp_mesh())
    with pytest.raises(DTensorError, match=f"2 of the 2 parameters .* were replaced by {name}.*Make the optimizer afterwards"):
        early.step()
    optimizer(module).step()


def test_step_of_optimizer_made_before_materialize_raises() -> None:
    module = fully_shard(nn.Linear(4, 4, device="meta"), mesh=make_dp_mesh())
    early = _plain(module)
    materialize(module)
    with pytest.raises(DTensorError, match="were replaced by materialize"):
        early.step()


def test_optimizer_step_raises_after_some_parameters_are_replaced() -> None:
    mesh, first, second = make_dp_mesh(), fully_shard(nn.Linear(2, 2), mesh=make_dp_mesh()), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    optimizer.step()
    fully_shard(second, mesh=mesh)
    with pytest.raises(DTensorError, match=r"2 of the 4 parameters .*shapes \(3, 3\), \(3,\)"):
        optimizer.step()
    optimizer.param_groups[0]["params"][2:] = list(second.parameters())  # as some launchers do
    optimizer.step()


def test_optimizer_ignores_replaced_frozen_parameters() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    fully_shard(module, mesh=make_dp_mesh())
    optimizer.step()


def test_optimizer_step_with_weight_tied_to_a_plain_module_raises() -> None:
    model, mesh = build(), make_dp_mesh()
    fully_shard(model.tok, mesh=mesh)
    with pytest.raises(DTensorError, match="a module that is not distributed shares a weight"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("way", [fully_shard, replicate])
@pytest.mark.parametrize("loaded", ["to_empty", "assigned", "assigned in a parent module"])
def test_loading_and_to_empty_keep_ties(way: Any, loaded: str) -> None:
    """Check ties after loading and ``to_empty``, before the first forward."""
    mesh = dt.init_device_mesh("cpu", (2,))
    with torch.device("meta" if loaded == "to_empty" else "cpu"):
        model = Tied()
    way(model, mesh=mesh)
    if loaded == "to_empty":
        model.to_empty(device="cpu")
    else:
        state = {name: x.detach().clone() for name, x in model.state_dict().items()}
        if loaded == "assigned":
            model.load_state_dict(state, assign=True)
        else:
            nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": x for name, x in state.items()}, assign=True)
    assert model.out.weight is model.tok.weight
    assert len(list(model.parameters())) == 3
