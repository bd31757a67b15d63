"""``torch.func`` and forward mode on distributed modules: results of plain torch, or an error that leaves the module
unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients, full_value, make_dp_mesh
from slow_case_marks import keep_diagonals_fast
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import DTensorError, LayoutError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def units(model: Any) -> None:
    fully_shard(model[0], mesh=make_dp_mesh())
    fully_shard(model, mesh=make_dp_mesh())


def one_unit(model: Any) -> None:
    fully_shard(model, mesh=make_dp_mesh(), reshard_after_forward=True)


def copies(model: Any) -> None:
    replicate(model, make_dp_mesh())


def styles(model: Any) -> None:
    parallelize_module(model, make_dp_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def make_models(way: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    alone = copy.deepcopy(model)
    way(model)
    return model, alone


def assert_gradients_equal(model: Any, alone: Any, given: Any) -> None:
    model.zero_grad()
    alone.zero_grad()
    model(given).square().sum().backward()
    alone(X).square().sum().backward()
    assert_same_gradients(model, alone)


def mesh_2d() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def copies_of_shards(model: Any) -> None:
    fully_shard(model[0], mesh=mesh_2d())
    fully_shard(model, mesh=mesh_2d())


def over_styles(model: Any) -> None:
    parallelize_module(model, mesh_2d()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh_2d()["dp"])


WAYS_1D = [units, one_unit, copies, styles]
INPUTS_1D = [
    lambda: dt.per_rank([X.clone(), X.clone()]),
    lambda: dt.distribute_tensor(X, make_dp_mesh(), [Replicate()]),
    lambda: X.clone(),
]
WAYS = pytest.mark.parametrize("way", WAYS_1D)
DATA_PARALLEL = pytest.mark.parametrize("way", [units, one_unit, copies])
INPUTS = pytest.mark.parametrize("given", INPUTS_1D, ids=["per rank", "distributed", "plain"])
INPUTS_2D = [
    lambda: dt.per_rank([X.clone() for _ in range(4)]),
    lambda: dt.distribute_tensor(X, mesh_2d(), [Shard(0), Replicate()]),
    lambda: X.clone(),
]
CASES_2D = [(copies_of_shards, given) for given in INPUTS_2D] + [(over_styles, INPUTS_2D[0])]
CASES = [(way, given) for way in WAYS_1D for given in INPUTS_1D] + CASES_2D


def total(y: Any) -> Any:
    return y.square().sum()


def by_parameters(model: Any, x: Any) -> dict[str, Any]:
    values = dict(model.named_parameters())
    return torch.func.grad(lambda given: total(torch.func.functional_call(model, given, (x,))))(values)


def jvp_then_backward(model: Any, x: Any) -> Any:
    out, tangent = torch.func.jvp(model, (x,), (x.cos(),))
    tangent.sum().backward()
    return out, tangent, [p.grad for p in model.parameters() if p.grad is not None]


def vjp(model: Any, x: Any) -> Any:
    out, back = torch.func.vjp(model, x)
    return out, back(out.detach() * 2)


TRANSFORMS: dict[str, Any] = {
    "jvp": jvp_then_backward,
    "vjp": vjp,
    "grad": lambda model, x: torch.func.grad(lambda y: total(model(y)))(x),
    "jvp of grad": lambda model, x: torch.func.jvp(torch.func.grad(lambda y: total(model(y))), (x,), (x.cos(),)),
    "vjp of grad": lambda model, x: torch.func.vjp(torch.func.grad(lambda y: total(model(y))), x)[1](x.cos()),
    "grad of parameters": by_parameters,
}


@pytest.mark.parametrize(("case", "transform"), keep_diagonals_fast(CASES, TRANSFORMS))
def test_torch_func_transforms_equal_plain_torch_and_keep_the_module(case: tuple[Any, Any], transform: str) -> None:
    way, given = case
    model, alone = make_models(way)
    before = list(model.parameters())
    found, wanted = (tree_leaves(TRANSFORMS[transform](m, x)) for m, x in ((model, given()), (alone, X)))
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(full_value(ours), full_value(theirs))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    if given not in (INPUTS_1D[2], INPUTS_2D[2]):
        assert_gradients_equal(model, alone, given())


@pytest.mark.parametrize(("way", "given"), [case for case in CASES if case[0] in WAYS_1D])
def test_vmap_of_modules_and_of_gradients_equals_plain_torch(way: Any, given: Any) -> None:
    model, alone = make_models(way)
    torch.testing.assert_close(full_value(torch.func.vmap(model)(given())), torch.func.vmap(alone)(X))
    found = full_value(torch.func.vmap(torch.func.grad(lambda y: model(y).square().sum()))(given()))
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(lambda y: alone(y).square().sum()))(X))
    if given is not INPUTS_1D[2]:
        assert_gradients_equal(model, alone, given())


def test_jvp_of_uneven_per_rank_batches_equals_plain_torch_and_vjp_raises() -> None:
    model, alone = make_models(units)
    pieces = list(X.split([2, 1]))
    _, tangent = torch.func.jvp(model, (dt.per_rank(pieces),), (dt.per_rank([piece.cos() for piece in pieces]),))
    _, wanted = torch.func.jvp(alone, (X,), (X.cos(),))
    torch.testing.assert_close(torch.cat([piece.detach().clone() for piece in tangent.shards]), wanted)
    with pytest.raises(LayoutError, match="differs between ranks"):
        torch.func.vjp(model, dt.per_rank(pieces))


def test_plain_input_gradient_of_styled_module_on_submesh_equals_plain_torch() -> None:
    """Check that the gradient is not summed over the copies of the submesh."""
    model, alone = make_models(lambda m: parallelize_module(m, mesh_2d()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}))
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(ours).square().sum().backward()
    alone(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_vjp_of_per_rank_tensor_has_gradients_to_the_tensors_of_each_rank() -> None:
    """Check that ``vjp``, which sees one tensor, keeps the autograd graph of each rank's tensor."""
    weights = [torch.full((3, 5), k + 1.0, dtype=torch.float64, requires_grad=True) for k in range(2)]
    given = dt.per_rank([w * 2 for w in weights])
    out, back = torch.func.vjp(lambda y: (y * y).sin(), given)
    (out.sum() + back(torch.ones_like(out))[0].sum()).backward()
    for w in weights:
        other = w.detach().clone().requires_grad_()
        y = other * 2
        ((y * y).sin().sum() + ((y * y).cos() * 2 * y).sum()).backward()
        torch.testing.assert_close(w.grad, other.grad)


@WAYS
@INPUTS
def test_forward_mode_derivatives_equal_plain_torch(way: Any, given: Any) -> None:
    model, alone = make_models(way)
    _, wanted = torch.func.jvp(alone, (X,), (X.cos(),))
    for _ in range(2):
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(given(), given().cos()))).tangent
            torch.testing.assert_close(full_value(tangent), wanted)


@WAYS
@INPUTS
def test_functional_call_uses_the_given_values_and_restores_the_module(way: Any, given: Any) -> None:
    model, alone = make_models(way)
    before = list(model.parameters())
    found = [
        torch.func.functional_call(m, {name: p.detach() * 2 for name, p in m.named_parameters()}, (x,))
        for m, x in ((model, given()), (alone, X))
    ]
    torch.testing.assert_close(full_value(found[0]), found[1])
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(full_value(model(given())), alone(X))


def test_functional_call_gradients_of_tensor_parallel_parameters_equal_plain() -> None:
    model, alone = make_models(styles)
    for m in (model, alone):
        torch.func.functional_call(m, {name: p * 2 for name, p in m.named_parameters()}, (X,)).square().sum().backward()
    assert_same_gradients(model, alone)


@DATA_PARALLEL
@INPUTS
@pytest.mark.parametrize("kind", ["computed", "leaves", "parameters", "tangents"])
def test_functional_call_with_differentiable_values_raises(way: Any, given: Any, kind: str) -> None:
    """Check errors of ``functional_call``, which would lose gradients or use the module's own parameters."""
    model, alone = make_models(way)
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
    if given is not INPUTS_1D[2]:
        assert_gradients_equal(model, alone, given())


def test_second_derivatives_by_a_plain_tensor_sum_over_ranks() -> None:
    """Check second derivatives by a plain tensor that all ranks use."""
    weight = dt.per_rank([torch.full((3,), 2.0, dtype=torch.float64)] * 2)
    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad((x**3 * weight).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(grad.detach(), 6 * x.detach() ** 2)
    torch.testing.assert_close(again, 144 * x.detach() ** 3)
