"""Transforms of ``torch.func`` see DTensors through wrappers of their own, which count from where a view begins in memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fast_part import some
from torch.fx.experimental.proxy_tensor import make_fx

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard
from dtensor.comm import shards_of
from dtensor.dispatch.functorch import layout_of
from dtensor.ranks.per_rank_functorch import split_ranks
from dtensor.tensor.autograd import from_local_recorded, to_full_tensor, to_local_tensor
from dtensor.testing import scatter

X = (torch.arange(20.0, dtype=torch.float64).reshape(4, 5) % 7) - 2.5
LINE = dt.init_device_mesh("cpu", (2,))
TANGENT = torch.arange(20.0, dtype=torch.float64).reshape(4, 5) / 8 - 1
PLACEMENTS: list[list[Placement]] = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(1, sizes=(0, 4, 1))], [Partial()]]


def assigned(y: Any) -> None:
    y[:, 1:3] = y[:, 3:] * 2


def scaled(y: Any) -> None:
    y[1:3] *= 3


def of_a_view(y: Any) -> None:
    y[1:].t()[2:].mul_(y[1:, :3].t().sum())


def one_of_many(y: Any) -> None:
    y[:, 2:3].add_(y.split([2, 1, 2], 1)[2][:, 1:].clone())
    y[2].mul_(y.unbind(0)[3].clone())


def element(y: Any) -> None:
    y[2, 3] = y[0, 0].clone() * y[3, 4].clone()


def diagonal(y: Any) -> None:
    y.diagonal(1).copy_(y.diagonal().clone() ** 2)


def flat(y: Any) -> None:
    y.view(-1)[6:14].view(2, 4)[1] *= y.view(-1)[:4].clone()


def strided(y: Any) -> None:
    y.as_strided((2, 3), (5, 2), 5).mul_(y.as_strided((2, 3), (5, 2)).clone())


WRITES = (assigned, scaled, of_a_view, one_of_many, element, diagonal, flat, strided)
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any, Any], Any]] = {
    "grad": lambda f, x, t: torch.func.grad(lambda x: (f(x) ** 3).sum())(x),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "hvp": lambda f, x, t: torch.func.jvp(torch.func.grad(lambda x: (f(x) ** 3).sum()), (x,), (t,))[1],
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize(("write", "transform"), some(list(itertools.product(WRITES, TRANSFORMS)), every=3))
def test_writes_to_views_are_transformed(write: Callable[[Any], None], transform: str) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        write(y)
        return y

    expected = TRANSFORMS[transform](program, X, TANGENT)
    mesh = dt.init_device_mesh("cpu", (3,))
    for placements in PLACEMENTS:
        found = TRANSFORMS[transform](program, scatter(X, mesh, placements), scatter(TANGENT, mesh, placements))
        torch.testing.assert_close(found.full_tensor(), expected)


def test_writes_to_conjugated_views_are_transformed() -> None:
    def program(x: Any) -> Any:
        y = x * 1
        z = y.conj()
        z[1, 3] -= 2
        z.mT[2:] *= 3j
        return (y.abs() ** 2).sum() + (z[2:].abs() ** 3).sum()

    x, mesh = torch.complex(X, TANGENT), dt.init_device_mesh("cpu", (3,))
    for placements in PLACEMENTS:
        found = torch.func.grad(program)(scatter(x, mesh, placements))
        torch.testing.assert_close(found.full_tensor(), torch.func.grad(program)(x))


def test_zeros_without_memory_are_operands() -> None:
    """The tangent of what has none, where a second transform is under way: local operators read from nowhere."""

    def product(x: Any, y: Any, t: Any) -> Any:
        return torch.func.jvp(torch.func.grad(lambda x: torch.dot(x, y) ** 2), (x,), (t,))[1]

    given = [torch.arange(5.0) + k for k in range(3)]
    for placements in ([Shard(0)], [Replicate()]):
        mesh = dt.init_device_mesh("cpu", (4,))
        found = product(*(dt.distribute_tensor(x, mesh, placements) for x in given))
        torch.testing.assert_close(found.full_tensor(), product(*given))


# --- graphs of whole tensors ----------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own
@pytest.mark.parametrize("where", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_recorded_graph_computes_with_what_it_is_given_and_its_constants_are_whole(where: Any) -> None:
    x = dt.distribute_tensor(torch.arange(30.0).double().reshape(5, 6) / 8, LINE, [where])
    w = x * 3

    def fn(t: Any) -> Any:
        made = torch.zeros_like(w)
        made[0] = w[1]
        return (t * w).sin() + t.sum(0) + made

    recorded = make_fx(fn)(x.clone())
    assert torch.equal(recorded(x * 2).full_tensor(), fn(x * 2).full_tensor())
    scaled = make_fx(lambda s: w * s)(torch.tensor(2.0))
    assert torch.equal(scaled(torch.tensor(5.0)).full_tensor(), (w * 5).full_tensor())
    _, jvp = torch.func.linearize(fn, x)
    assert torch.allclose(jvp(x).full_tensor(), torch.func.jvp(fn, (x,), (x,))[1].full_tensor())


def test_what_is_no_operator_is_refused_in_a_graph_of_whole_tensors() -> None:
    x = dt.ones(4, 6, device_mesh=LINE, placements=[Shard(0)])
    for fn in (
        lambda t: t.redistribute(placements=[Replicate()]) * 2,
        lambda t: (t * 2).full_tensor(),
        lambda t: t.to_local() * 2,
    ):
        with pytest.raises(dt.errors.UnsupportedOperationError, match="make_fx"):
            make_fx(fn)(x.clone())
    constant = make_fx(lambda t: x.redistribute(placements=[Replicate()]) * t)(x.clone())
    assert constant(x * 2).sum().item() == 48


# --- a batch that hides a dim of a DTensor that is moved --------------------------------------------------------------------
def moved(x: Any) -> Any:
    return dt.distribute_tensor(x**2, dt.init_device_mesh("cpu", (3,)), [Shard(1)]).sin()


def gathered(x: Any) -> Any:
    return to_full_tensor(x**2, None).sin()


def by_pieces(x: Any) -> Any:
    squares = x**2
    layout = layout_of(squares)
    return from_local_recorded(layout, layout, False, *shards_of(split_ranks(to_local_tensor(squares) * 2))).sin()


def squared(x: Any, scale: int = 1) -> Any:
    return (x**2 * scale).sin()


BATCHES: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: (f(x) ** 3).sum())(x),
    "vmap over rows": lambda f, x: torch.func.vmap(f)(x),
    "vmap over the last dim": lambda f, x: torch.func.vmap(f, 2, 1)(x),
    "gradients of samples": lambda f, x: torch.func.vmap(torch.func.grad(lambda row: (f(row) ** 3).sum()))(x),
    "vectorized jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "vectorized hessian": lambda f, x: torch.autograd.functional.hessian(lambda x: (f(x) ** 3).sum(), x, vectorize=True),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("program", "scale"), [(moved, 1), (gathered, 1), (by_pieces, 2)])
def test_a_dtensor_is_moved_and_taken_apart_where_a_batch_hides_a_dim(program: Any, scale: int, batch: str) -> None:
    x = X.reshape(2, 5, 2)
    mesh, expected = dt.init_device_mesh("cpu", (3,)), BATCHES[batch](lambda x: squared(x, scale), x)
    for where in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(1, sizes=(0, 4, 1))):
        found = BATCHES[batch](program, dt.distribute_tensor(x, mesh, [where]))
        torch.testing.assert_close(found.full_tensor() if isinstance(found, dt.DTensor) else found, expected)


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_gradients_come_in_batches_however_those_lie(where: Placement) -> None:
    """A batch that is cut is made whole on all ranks before a DTensor is moved under it."""
    x = dt.distribute_tensor(torch.arange(6.0), LINE, [Shard(0)]).requires_grad_()
    wanted = torch.arange(18.0).reshape(3, 6)
    for move in (lambda: x.redistribute(placements=[Replicate()]), x.full_tensor):
        y = move()
        grads = dt.distribute_tensor(wanted, LINE, [where]) if isinstance(y, dt.DTensor) else wanted
        (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True)
        assert torch.equal(found.full_tensor(), wanted)


# --- tensors made inside of a transform ----------------------------------------------------------------------------------
MADE: dict[str, Callable[[Any], Any]] = {
    "distributed": lambda mesh: dt.distribute_tensor(torch.ones(5, dtype=torch.float64) * 3, mesh, [Shard(0)]),
    "copied": lambda mesh: dt.distribute_tensor(torch.full((5,), 3.0, dtype=torch.float64), mesh),
    "filled": lambda mesh: dt.full((5,), 3.0, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64),
}


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("transform", [*TRANSFORMS, "vmap", "functionalize"])
def test_what_is_made_inside_of_a_transform_is_a_constant(transform: str, make: str) -> None:
    others: dict[str, Any] = {
        "vmap": lambda f, x, _: torch.vmap(f)(x),
        "functionalize": lambda f, x, _: torch.func.functionalize(f)(x),
    }
    run = {**TRANSFORMS, **others}[transform]
    expected = run(lambda x: (x * 3) ** 2, X, TANGENT)
    given = (dt.distribute_tensor(x, LINE, [Shard(0)]) for x in (X, TANGENT))
    found = run(lambda x: (x * MADE[make](LINE)) ** 2, *given)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("transform", ["grad", "jvp", "hvp", "jacrev"])
@pytest.mark.parametrize(
    "make", [dt.zeros, lambda *size, **how: dt.distribute_tensor(torch.zeros(*size, dtype=how["dtype"]), LINE)]
)
def test_what_is_made_inside_of_a_transform_may_be_written_to(make: Any, transform: str) -> None:
    def program(x: Any, made: Any) -> Any:
        made[1:] = x[1:] * 2
        return made.mul_(x)

    run = TRANSFORMS[transform]
    expected = run(lambda x: program(x, torch.zeros_like(x)), X, TANGENT)
    given = (dt.distribute_tensor(x, LINE, [Shard(0)]) for x in (X, TANGENT))
    found = run(lambda x: program(x, make(4, 5, device_mesh=LINE, dtype=x.dtype)), *given)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("transform", ["grad", "jvp", "jacfwd"])
def test_what_is_seen_from_inside_of_a_transform_is_read_and_printed_as_outside(transform: str) -> None:
    x, seen = dt.distribute_tensor(X, LINE, [Shard(0)]), []

    def program(y: Any) -> Any:
        seen.append((repr(x), x.tolist(), copy.deepcopy(x).tolist()))
        return y * 2

    TRANSFORMS[transform](program, x, x)
    assert seen[0] == (repr(x), X.tolist(), X.tolist())


def test_random_numbers_drawn_inside_of_a_transform_are_those_drawn_outside() -> None:
    def drawn() -> Any:
        torch.manual_seed(0)
        return dt.randn(4, 5, device_mesh=LINE, placements=[Shard(0)], dtype=torch.float64)

    x = dt.distribute_tensor(X, LINE, [Shard(0)])
    assert torch.equal(torch.func.grad(lambda x: (x * drawn()).sum())(x).full_tensor(), drawn().full_tensor())
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda row: row * drawn())(x)


def test_a_tensor_that_is_differentiated_or_mapped_is_not_distributed_as_a_constant() -> None:
    def program(x: Any) -> Any:
        return dt.distribute_tensor(x, LINE, [Shard(0)]).sum()

    for transform in ("grad", "jvp", "jacrev", "jacfwd"):
        with pytest.raises(dt.errors.LayoutError, match="from_local"):
            TRANSFORMS[transform](program, X, TANGENT)
    with pytest.raises(dt.errors.LayoutError, match="from_local"):
        torch.func.jvp(lambda x: torch.func.grad(lambda w: w * program(x * 1))(torch.tensor(2.0).double()), (X,), (TANGENT,))
    with pytest.raises(dt.errors.UnsupportedOperationError, match="from_local"):
        torch.vmap(program)(X)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(dt.errors.LayoutError, match="from_local"):
        program(torch.autograd.forward_ad.make_dual(X, TANGENT))
