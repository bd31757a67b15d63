"""``torch.func`` and forward-mode derivatives through distributed modules: right, or refused and nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import dtensor as dt
from dtensor import DTensor, Replicate
from dtensor.errors import DTensorError, UnsupportedOperationError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def dp() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def units(model: Any) -> None:
    fully_shard(model[0], mesh=dp())
    fully_shard(model, mesh=dp())


def one_unit(model: Any) -> None:
    fully_shard(model, mesh=dp(), reshard_after_forward=True)


def copies(model: Any) -> None:
    replicate(model, dp())


def styles(model: Any) -> None:
    parallelize_module(model, dp(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def made(way: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    alone = copy.deepcopy(model)
    way(model)
    return model, alone


def whole(x: Any) -> Tensor:
    full = x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
    return full.shards[0] if isinstance(full, dt.PerRank) else full


def trains(model: Any, alone: Any, given: Any) -> None:
    model.zero_grad()
    alone.zero_grad()
    model(given).square().sum().backward()
    alone(X).square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


GIVEN = [lambda: dt.per_rank([X.clone(), X.clone()]), lambda: dt.distribute_tensor(X, dp(), [Replicate()]), lambda: X.clone()]
WAYS = pytest.mark.parametrize("way", [units, one_unit, copies, styles])
DATA_PARALLEL = pytest.mark.parametrize("way", [units, one_unit, copies])
INPUTS = pytest.mark.parametrize("given", GIVEN, ids=["per rank", "distributed", "plain"])
TRANSFORMS = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "grad of parameters": lambda model, x: torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)).sum())(
        dict(model.named_parameters())
    ),
}


@WAYS
@INPUTS
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_transforms_are_refused_and_leave_the_module_as_it_was(way: Any, given: Any, transform: str) -> None:
    model, alone = made(way)
    for _ in range(2):
        with pytest.raises(UnsupportedOperationError, match=r"inside torch\.func"):
            TRANSFORMS[transform](model, given())
        if given is not GIVEN[2]:
            trains(model, alone, given())


@WAYS
@INPUTS
def test_forward_mode_derivatives_are_those_of_one_device(way: Any, given: Any) -> None:
    model, alone = made(way)
    _, wanted = torch.func.jvp(alone, (X,), (X.cos(),))
    for _ in range(2):
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(given(), given().cos()))).tangent
            torch.testing.assert_close(whole(tangent), wanted)


@WAYS
@INPUTS
def test_functional_call_computes_with_other_values(way: Any, given: Any) -> None:
    model, alone = made(way)
    before = list(model.parameters())
    found = [
        torch.func.functional_call(m, {name: p.detach() * 2 for name, p in m.named_parameters()}, (x,))
        for m, x in ((model, given()), (alone, X))
    ]
    torch.testing.assert_close(whole(found[0]), found[1])
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(whole(model(given())), alone(X))


def test_functional_call_differentiates_what_styles_distribute() -> None:
    model, alone = made(styles)
    for m in (model, alone):
        torch.func.functional_call(m, {name: p * 2 for name, p in m.named_parameters()}, (X,)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


@DATA_PARALLEL
@INPUTS
@pytest.mark.parametrize("kind", ["computed", "leaves", "parameters", "tangents"])
def test_functional_call_with_values_to_differentiate_by_is_refused(way: Any, given: Any, kind: str) -> None:
    """Gradients would be lost, or computed with the module's own parameters."""
    model, alone = made(way)
    own = dict(model.named_parameters())
    with forward_ad.dual_level():
        values = {
            "computed": lambda p: p * 2,
            "leaves": lambda p: (p.detach() * 2).requires_grad_(),
            "parameters": lambda p: nn.Parameter(p.detach() * 2),
            "tangents": lambda p: forward_ad.make_dual(p.detach(), p.detach()),
        }[kind]
        with pytest.raises(DTensorError, match="functional_call"):
            torch.func.functional_call(model, {n: values(p) for n, p in own.items()}, (given(),)).square().sum().backward()
    assert all(p.grad is None for p in own.values())
    if given is not GIVEN[2]:
        trains(model, alone, given())
