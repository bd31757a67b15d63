"""Autograd functions, checkpoints and random numbers on per-rank tensors in process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor, Replicate, Shard, per_rank
from dtensor.parallel import RowwiseParallel, fully_shard, parallelize_module
from dtensor.ranks.autograd_function import unpatch_functions
from dtensor.ranks.per_rank import PerRank


class Scale(torch.autograd.Function):
    """Function with two tensor results, a str result, saved tensors and an argument without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor, name: str) -> Any:
        ctx.save_for_backward(x, by)
        ctx.name = name
        assert ctx.needs_input_grad == (x.requires_grad, by.requires_grad, False)
        return x * by, (x * x).sum(), name

    @staticmethod
    def backward(ctx: Any, grad: Tensor, squares: Tensor, _: None) -> Any:
        x, by = ctx.saved_tensors
        return grad * by + 2 * x * squares, (grad * x) if ctx.needs_input_grad[1] else None, None


class Double(torch.autograd.Function):
    """In-place function with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def make_locals() -> list[Tensor]:
    return [torch.arange(4.0, dtype=torch.float64) + k for k in range(2)]


@pytest.mark.parametrize("shared", [True, False])
def test_an_autograd_function_of_per_rank_tensors_has_the_gradients_of_separate_ranks(shared: bool) -> None:
    dt.init_device_mesh("cpu", (2,))

    def run(x: Any, by: Any) -> Any:
        found, squares, name = Scale.apply(x, by, "name")
        assert name == "name"
        return found.sin().sum() + squares

    xs = [x.requires_grad_() for x in make_locals()]
    bys = [torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = per_rank([x.detach() for x in xs]).requires_grad_()
    by: Any = bys[0].detach() if shared else per_rank([b.detach() for b in bys]).requires_grad_()
    run(x, by).backward()
    for own, b in zip(xs, bys, strict=True):
        run(own, b).backward()
    for k in range(2):
        torch.testing.assert_close(x.grad.shards[k], xs[k].grad)
        if not shared:
            torch.testing.assert_close(by.grad.shards[k], bys[k].grad)


def test_an_in_place_autograd_function_of_per_rank_tensors_is_twice_differentiable() -> None:
    dt.init_device_mesh("cpu", (2,))
    x = per_rank(make_locals()).requires_grad_()
    y = Double.apply(x * 1)
    (first,) = torch.autograd.grad((y * y * y).sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [x])
    for own, found in zip(make_locals(), second.shards, strict=True):
        torch.testing.assert_close(found, 48 * own)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_per_rank_tensors_recomputes_dropout_and_collectives(reentrant: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    weight = torch.arange(16.0, dtype=torch.float64).reshape(4, 4) / 10

    def run(x: Any, w: Any, wrapped: bool) -> Any:
        def inner(z: Any) -> Any:
            if isinstance(w, DTensor):
                z = DTensor.from_local(F.dropout(z, 0.5), mesh, [Replicate()]) @ w
                return z.redistribute(placements=[Replicate()]).to_local().sin()
            return (F.dropout(z, 0.5) @ w).sin()

        z = x * 2
        return (checkpoint(inner, z, use_reentrant=reentrant) if wrapped else inner(z)).sum()

    plain, plain_weight = torch.ones(3, 4, dtype=torch.float64, requires_grad=True), weight.clone().requires_grad_()
    torch.manual_seed(1)
    run(plain, plain_weight, False).backward()
    x = per_rank([torch.ones(3, 4, dtype=torch.float64) for _ in range(2)]).requires_grad_()
    w = dt.distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
    torch.manual_seed(1)
    run(x, w, True).backward()
    for grad in x.grad.shards:
        torch.testing.assert_close(grad, plain.grad)
    torch.testing.assert_close(w.grad.full_tensor(), plain_weight.grad)


def test_random_functions_of_per_rank_tensors_draw_equal_numbers_on_all_ranks() -> None:
    torch.manual_seed(3)
    x = per_rank([torch.ones(5), torch.ones(5)])
    found = [F.dropout(x), torch.rand_like(x), x.clone().bernoulli_(0.5), torch.nn.init.uniform_(x.clone()), F.dropout(x)]
    torch.manual_seed(3)
    one = torch.ones(5)
    expected = [
        F.dropout(one),
        torch.rand_like(one),
        one.clone().bernoulli_(0.5),
        torch.nn.init.uniform_(one.clone()),
        F.dropout(one),
    ]
    for own, plain in zip(found, expected, strict=True):
        for shard in own.shards:
            torch.testing.assert_close(shard, plain)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return x * 3 if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, grad if ctx.needs_input_grad[1:] == (True,) else None


BOUND_AT_IMPORT = Triple.apply  # read at import, before any mesh exists


@pytest.fixture
def unpatched_functions() -> Any:
    unpatch_functions()
    yield
    unpatch_functions()


@pytest.mark.usefixtures("unpatched_functions")
@pytest.mark.parametrize("source", ["to_local", "per_rank", "map_ranks", "PerRank constructor", "unpickled"])
def test_function_apply_bound_before_mesh_creation_gives_per_rank_gradients(source: str) -> None:
    bound = Triple.apply
    mesh = dt.init_device_mesh("cpu", (2,))
    match source:
        case "to_local":
            distributed = dt.distribute_tensor(torch.ones(3), mesh, [Shard(0)]).requires_grad_()
            x: Any = distributed.to_local()
        case "map_ranks":
            x = dt.map_ranks(lambda at: torch.ones(2, requires_grad=True), mesh=mesh)
        case "unpickled":
            x = pickle.loads(pickle.dumps(per_rank(make_locals()))).requires_grad_()
        case "per_rank":
            x = per_rank(make_locals()).requires_grad_()
        case _:
            x = PerRank([torch.ones(2), torch.ones(1, requires_grad=True)])
    for function in (bound, BOUND_AT_IMPORT, Triple.apply):
        found = function(x)
        grads = torch.autograd.grad(found.shards[1].sum(), x.shards[1])
        torch.testing.assert_close(grads[0], torch.full_like(x.shards[1], 3))


@pytest.mark.usefixtures("unpatched_functions")
def test_a_plain_weight_gets_the_gradient_of_one_rank_which_must_be_equal_on_all_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    weight = torch.ones(1, requires_grad=True)
    x = dt.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).to_local()
    BOUND_AT_IMPORT(x * 1, weight).sum().backward()
    assert weight.grad.tolist() == [2.0]
    plain = torch.ones(1, requires_grad=True)
    Triple.apply(torch.ones(2), plain).sum().backward()
    assert torch.equal(weight.grad, plain.grad)
    uneven = dt.distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]).to_local()
    with pytest.raises(dt.errors.LayoutError, match="differs between ranks"):
        Triple.apply(uneven, weight).sum().backward()


@pytest.mark.usefixtures("unpatched_functions")
def test_autograd_function_is_patched_at_the_first_to_local_and_not_before() -> None:
    kind = type(torch.autograd.Function)
    x = dt.distribute_tensor(torch.ones(3), dt.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    Triple.apply(x).sum().backward()
    assert "__getattribute__" not in vars(kind)
    assert x.grad is not None
    x.to_local()
    assert "__getattribute__" in vars(kind)
    unpatch_functions()
    assert "__getattribute__" not in vars(kind)


class Quadruple(Triple):
    """Function with a ``forward`` that calls the ``forward`` of another one and applies a third one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return Triple.forward(ctx, x) + Double.apply(x.clone()) / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 4 * grad, None


@pytest.mark.usefixtures("unpatched_functions")
def test_autograd_function_that_calls_other_functions_uses_its_own_backward() -> None:
    dt.init_device_mesh("cpu", (2,))
    x = PerRank([torch.ones(2), torch.ones(1, requires_grad=True)])
    found: Any = Quadruple.apply(x)
    assert found.shards[1].requires_grad
    torch.testing.assert_close(found.shards[1], torch.full((1,), 4.0))
    torch.testing.assert_close(torch.autograd.grad(found.shards[1].sum(), x.shards[1])[0], torch.full((1,), 4.0))
    with torch.no_grad():
        assert not any(shard.requires_grad for shard in Quadruple.apply(x).shards)
    plain = torch.ones(3, requires_grad=True)
    Quadruple.apply(plain).sum().backward()
    torch.testing.assert_close(plain.grad, torch.full((3,), 4.0))
    with pytest.raises(TypeError):
        Double.apply(x, 1)
    torch.testing.assert_close(Double.apply(plain * 1), plain * 2)


@pytest.mark.usefixtures("unpatched_functions")
@pytest.mark.parametrize("two_results", [False, True])
@pytest.mark.parametrize("parallelism", ["fully_shard", "parallelize_module"])
def test_checkpointed_parallel_module_has_the_gradients_of_plain_torch(parallelism: str, two_results: bool) -> None:
    plain = torch.nn.Linear(3, 4)
    model, mesh = copy.deepcopy(plain), dt.init_device_mesh("cpu", (2,))
    if parallelism == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, RowwiseParallel(input_layouts=dt.Replicate()))
    found, inputs = [], []
    for module in (model, plain):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        run = (lambda x, m=module: (m(x), m(x).tanh())) if two_results else module
        y = checkpoint(run, x, use_reentrant=True)
        (y[0] * y[1] if two_results else y.sin()).sum().backward()
        inputs.append(x.grad)
        found.append([p.grad.full_tensor() if isinstance(p.grad, dt.DTensor) else p.grad for p in module.parameters()])
    for gradients, expected in zip(*found, strict=True):
        for own in getattr(gradients, "shards", [gradients]):
            torch.testing.assert_close(own, expected)
    torch.testing.assert_close(*inputs)


class SplitOverRanks(torch.autograd.Function):
    """Function that splits a plain tensor into per-rank tensors of different sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return per_rank([x[:2] * 2, x[2:] * 2])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Tensor:
        return torch.cat([2 * shard for shard in grad.shards])


APPLY_READ_AT_IMPORT = SplitOverRanks.apply


@pytest.mark.usefixtures("unpatched_functions")
def test_function_that_splits_plain_tensor_has_gradients_and_early_apply_raises() -> None:
    dt.init_device_mesh("cpu", (2,))
    per_rank(make_locals())
    x = torch.arange(3.0, requires_grad=True)
    (SplitOverRanks.apply(x) * per_rank([torch.ones(2), torch.full((1,), 5.0)])).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([2.0, 2.0, 10.0]))
    with torch.no_grad():
        assert not any(shard.requires_grad for shard in APPLY_READ_AT_IMPORT(x).shards)  # type: ignore[attr-defined]  # PerRank
    with pytest.raises(dt.errors.LayoutError, match=r"SplitOverRanks.apply was read before .* read it again at the call"):
        APPLY_READ_AT_IMPORT(x)
