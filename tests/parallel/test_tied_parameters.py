"""Weights that modules have in common stay one weight, and what holds a weight that was replaced is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import dp, own, same_gradients, stepped, whole
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
    """An embedding whose table is the last layer's weight."""

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
    """One layer in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(5, 5)
        self.tok = nn.Embedding(7, 5)
        self.a, self.b = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(5, 5), shared)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(self.a(self.tok(tokens)))


def made(cls: type[nn.Module] = Tied) -> Any:
    torch.manual_seed(0)
    return cls().double()


def loss_of(out: Tensor) -> Tensor:
    return (out**2).mean()


def trains_as_alone(model: nn.Module, alone: nn.Module, mesh: dt.DeviceMesh, optimizer: Any = torch.optim.AdamW) -> None:
    """Two steps, gradients and weights compared; under as many names."""
    optimizers = [optimizer(model.parameters(), lr=0.1), torch.optim.AdamW(alone.parameters(), lr=0.1)]
    for _ in range(2):
        loss_of(model(own(TOKENS, mesh["dp"]))).backward()
        torch.stack([loss_of(alone(tokens)) for tokens in TOKENS]).mean().backward()
        same_gradients(model, alone)
        stepped(*optimizers)
    for ours, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(ours), theirs)


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
def test_a_tied_weight_stays_one(way: Callable[..., None]) -> None:
    model, alone, mesh = made(), made(), dp()
    way(model, mesh)
    if way is in_a_list:
        fully_shard(model.mid, mesh=mesh)
    assert model.tok.weight is model.out.weight
    assert list(model.state_dict()) == list(alone.state_dict())
    trains_as_alone(model, alone, mesh)


def _on_processes() -> list[float]:
    for way in (in_a_list_and_its_parent, one_and_its_parent):
        model, alone, mesh = made(), made(), dp()
        way(model, mesh)
        trains_as_alone(model, alone, mesh)
    return [float(whole(p).sum()) for p in model.parameters()]


@pytest.mark.gloo
def test_a_tied_weight_stays_one_on_process_groups() -> None:
    run_gloo(_on_processes, 2)


def test_a_tied_weight_stays_one_under_an_optimizer_in_parts() -> None:
    model, alone, mesh = made(), made(), dp()
    replicate(model, mesh)
    trains_as_alone(model, alone, mesh, lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=lr))


@pytest.mark.parametrize("inner", ["", "tok", "out", "list"])
def test_a_weight_of_three_modules(inner: str) -> None:
    model, alone, mesh = made(TiedThrice), made(TiedThrice), dp()
    if inner:
        fully_shard([model.inner.tok, model.inner.out] if inner == "list" else getattr(model.inner, inner), mesh=mesh)
        fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.inner.tok.weight is model.inner.out.weight
    assert model.inner.tok.weight is model.second.weight
    trains_as_alone(model, alone, mesh)


@pytest.mark.parametrize("units", [["a.0", "a", "b"], ["a"], [["a", "b"]]], ids=str)
def test_a_module_in_two_units(units: list[Any]) -> None:
    """Of its own unit; of one that the outer unit takes over from; of one unit with both."""
    model, alone, mesh = made(SharedModule), made(SharedModule), dp()
    for name in units:
        found = [model.get_submodule(each) for each in ([name] if isinstance(name, str) else name)]
        fully_shard(found, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trains_as_alone(model, alone, mesh)


def test_a_tie_made_between_two_calls() -> None:
    model, alone, mesh = made(), made(), dp()
    model.out.weight = nn.Parameter(model.out.weight.detach().clone())
    fully_shard(model.tok, mesh=mesh)
    model.out.weight = model.tok.weight
    fully_shard(model, mesh=mesh)
    trains_as_alone(model, alone, mesh)


def test_a_tied_weight_under_tensor_parallelism() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, alone = made(), made()
    plan = {"tok": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard([model.tok, model.out], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model.tok.weight is model.out.weight
    trains_as_alone(model, alone, mesh)


def test_a_tied_weight_from_the_meta_device() -> None:
    mesh, alone = dp(), made()
    with torch.device("meta"):
        model = Tied().double()
    values, names = alone.state_dict(), {inner: name for name, inner in model.named_modules()}
    in_a_list_and_its_parent(model, mesh)

    def init(inner: nn.Module) -> None:
        for name, p in inner.named_parameters(recurse=False):
            p.copy_(dt.distribute_tensor(values[f"{names[inner]}.{name}"], p.device_mesh, p.placements))

    materialize(model, init=init)
    assert model.tok.weight is model.out.weight
    trains_as_alone(model, alone, mesh)


def test_distribute_module_keeps_ties() -> None:
    model = dt.distribute_module(made(), dp())
    assert model.tok.weight is model.out.weight


# --- what cannot stay one is refused ------------------------------------------------------------------------------------
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
def test_siblings_that_share_a_weight_are_refused(first: Any, second: Any) -> None:
    model, mesh = made(), dp()
    first(model.tok, mesh)
    before = dict(model.out._parameters)
    with pytest.raises(UnitError, match="'weight' of this Linear is also a weight of another module"):
        second(model.out, mesh)
    assert dict(model.out._parameters) == before


def test_siblings_that_share_a_module_are_refused() -> None:
    model, mesh = made(SharedModule), dp()
    fully_shard(model.a, mesh=mesh)
    with pytest.raises(UnitError, match="or on both: fully_shard"):
        fully_shard(model.b, mesh=mesh)
    assert not isinstance(model.b[0].weight, DTensor)
    fully_shard(model, mesh=mesh)
    trains_as_alone(model, made(SharedModule), mesh)


def test_units_of_two_meshes_do_not_share_a_weight() -> None:
    mesh, model = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "more")), made()
    fully_shard(model.tok, mesh=mesh["dp"])
    with pytest.raises(UnitError, match="use the same mesh"):
        fully_shard(model, mesh=mesh)


# --- optimizers made before -----------------------------------------------------------------------------------------------
def _plain(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _in_parts(module: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, dp(), lr=0.1)


NAMED = [
    (_sharded, "fully_shard"),
    (replicate, "replicate"),
    (_colwise, "parallelize_module"),
    (dt.distribute_module, "distribute_module"),
    (dt.shard_model, "shard_model"),
]


@pytest.mark.parametrize(("way", "name"), NAMED)
@pytest.mark.parametrize("optimizer", [_plain, _in_parts])
def test_an_optimizer_made_before_says_so_at_its_step(way: Any, name: str, optimizer: Any) -> None:
    module = nn.Linear(4, 4)
    early = optimizer(module)
    way(module, *([dt.sharding_spec.single_split(0, [0, 1])] if name == "shard_model" else []), dp())
    with pytest.raises(DTensorError, match=f"2 of the 2 parameters .* were replaced by {name}.*Make the optimizer afterwards"):
        early.step()
    optimizer(module).step()


def test_an_optimizer_made_before_values_are_is_told_too() -> None:
    module = fully_shard(nn.Linear(4, 4, device="meta"), mesh=dp())
    early = _plain(module)
    materialize(module)
    with pytest.raises(DTensorError, match="were replaced by materialize"):
        early.step()


def test_an_optimizer_is_asked_again_after_a_later_replacement() -> None:
    mesh, first, second = dp(), fully_shard(nn.Linear(2, 2), mesh=dp()), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    optimizer.step()
    fully_shard(second, mesh=mesh)
    with pytest.raises(DTensorError, match=r"2 of the 4 parameters .*shapes \(3, 3\), \(3,\)"):
        optimizer.step()
    optimizer.param_groups[0]["params"][2:] = list(second.parameters())  # as some launchers mend it
    optimizer.step()


def test_an_optimizer_ignores_frozen_parameters_that_fully_shard_replaced() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    fully_shard(module, mesh=dp())
    optimizer.step()


def test_a_tie_with_a_module_that_is_not_distributed_is_noticed() -> None:
    model, mesh = made(), dp()
    fully_shard(model.tok, mesh=mesh)
    with pytest.raises(DTensorError, match="a module that is not distributed shares a weight"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("way", [fully_shard, replicate])
@pytest.mark.parametrize("loaded", ["to_empty", "assigned", "assigned above"])
def test_loading_and_to_empty_keep_ties(way: Any, loaded: str) -> None:
    """An optimizer made before the first forward pass has one parameter of them."""
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
