"""functorch: torch.func transforms, make_fx and vmap of programs on DTensors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_case_marks import keep_diagonals_fast, keep_every_nth_fast
from torch.fx.experimental.proxy_tensor import make_fx

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard
from dtensor.comm import shards_of
from dtensor.ranks.per_rank_functorch import split_ranks
from dtensor.state.functorch import layout_of
from dtensor.tensor.autograd import from_local_recorded, to_full_tensor, to_local_tensor
from dtensor.testing import scatter

X = (torch.arange(20.0, dtype=torch.float64).reshape(4, 5) % 7) - 2.5
LINE = dt.init_device_mesh("cpu", (2,))
TANGENT = torch.arange(20.0, dtype=torch.float64).reshape(4, 5) / 8 - 1
PLACEMENTS: list[list[Placement]] = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(1, sizes=(0, 4, 1))], [Partial()]]


def assign_columns(y: Any) -> None:
    y[:, 1:3] = y[:, 3:] * 2


def scale_rows(y: Any) -> None:
    y[1:3] *= 3


def scale_view_of_view(y: Any) -> None:
    y[1:].t()[2:].mul_(y[1:, :3].t().sum())


def write_split_and_unbind(y: Any) -> None:
    y[:, 2:3].add_(y.split([2, 1, 2], 1)[2][:, 1:].clone())
    y[2].mul_(y.unbind(0)[3].clone())


def write_element(y: Any) -> None:
    y[2, 3] = y[0, 0].clone() * y[3, 4].clone()


def write_diagonal(y: Any) -> None:
    y.diagonal(1).copy_(y.diagonal().clone() ** 2)


def write_flat_view(y: Any) -> None:
    y.view(-1)[6:14].view(2, 4)[1] *= y.view(-1)[:4].clone()


def write_as_strided(y: Any) -> None:
    y.as_strided((2, 3), (5, 2), 5).mul_(y.as_strided((2, 3), (5, 2)).clone())


WRITES = (
    assign_columns,
    scale_rows,
    scale_view_of_view,
    write_split_and_unbind,
    write_element,
    write_diagonal,
    write_flat_view,
    write_as_strided,
)
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any, Any], Any]] = {
    "grad": lambda f, x, t: torch.func.grad(lambda x: (f(x) ** 3).sum())(x),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "hvp": lambda f, x, t: torch.func.jvp(torch.func.grad(lambda x: (f(x) ** 3).sum()), (x,), (t,))[1],
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize(("write", "transform"), keep_every_nth_fast(list(itertools.product(WRITES, TRANSFORMS)), every=3))
def test_transforms_of_writes_to_views_equal_plain_torch(write: Callable[[Any], None], transform: str) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        write(y)
        return y

    expected = TRANSFORMS[transform](program, X, TANGENT)
    mesh = dt.init_device_mesh("cpu", (3,))
    for placements in PLACEMENTS:
        found = TRANSFORMS[transform](program, scatter(X, mesh, placements), scatter(TANGENT, mesh, placements))
        torch.testing.assert_close(found.full_tensor(), expected)


def test_grad_of_writes_to_conjugated_views_equals_plain_torch() -> None:
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


def test_operators_on_zero_tangents_without_storage_equal_plain_torch() -> None:
    """A second transform makes zero tangents without storage; local operators must not read them."""

    def product(x: Any, y: Any, t: Any) -> Any:
        return torch.func.jvp(torch.func.grad(lambda x: torch.dot(x, y) ** 2), (x,), (t,))[1]

    operands = [torch.arange(5.0) + k for k in range(3)]
    for placements in ([Shard(0)], [Replicate()]):
        mesh = dt.init_device_mesh("cpu", (4,))
        found = product(*(dt.distribute_tensor(x, mesh, placements) for x in operands))
        torch.testing.assert_close(found.full_tensor(), product(*operands))


# --- make_fx --------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # from make_fx itself
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_make_fx_graph_of_dtensors_replays_on_new_inputs_with_global_constants(placement: Any) -> None:
    x = dt.distribute_tensor(torch.arange(30.0).double().reshape(5, 6) / 8, LINE, [placement])
    w = x * 3

    def fn(t: Any) -> Any:
        made = torch.zeros_like(w)
        made[0] = w[1]
        return (t * w).sin() + t.sum(0) + made

    recorded = make_fx(fn)(x.clone())
    assert torch.equal(recorded(x * 2).full_tensor(), fn(x * 2).full_tensor())
    graph = make_fx(lambda s: w * s)(torch.tensor(2.0))
    assert torch.equal(graph(torch.tensor(5.0)).full_tensor(), (w * 5).full_tensor())
    _, jvp = torch.func.linearize(fn, x)
    assert torch.allclose(jvp(x).full_tensor(), torch.func.jvp(fn, (x,), (x,))[1].full_tensor())


def test_make_fx_refuses_redistribute_full_tensor_and_to_local() -> None:
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


# --- redistribution under vmap --------------------------------------------------------------------------------------
def distribute_squares(x: Any) -> Any:
    return dt.distribute_tensor(x**2, dt.init_device_mesh("cpu", (3,)), [Shard(1)]).sin()


def gather_squares(x: Any) -> Any:
    return to_full_tensor(x**2, None).sin()


def rebuild_squares_from_local(x: Any) -> Any:
    squares = x**2
    layout = layout_of(squares)
    return from_local_recorded(layout, layout, False, *shards_of(split_ranks(to_local_tensor(squares) * 2))).sin()


def square_plain(x: Any, scale: int = 1) -> Any:
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


@pytest.mark.parametrize(
    ("case", "batch"),
    keep_diagonals_fast([(distribute_squares, 1), (gather_squares, 1), (rebuild_squares_from_local, 2)], BATCHES),
)
def test_redistribution_gather_and_to_local_under_vmap_equal_plain_torch(case: tuple[Any, int], batch: str) -> None:
    program, scale = case
    x = X.reshape(2, 5, 2)
    mesh, expected = dt.init_device_mesh("cpu", (3,)), BATCHES[batch](lambda x: square_plain(x, scale), x)
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(1, sizes=(0, 4, 1))):
        found = BATCHES[batch](program, dt.distribute_tensor(x, mesh, [placement]))
        torch.testing.assert_close(found.full_tensor() if isinstance(found, dt.DTensor) else found, expected)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_batched_gradients_of_redistribute_are_right_for_each_batch_placement(placement: Placement) -> None:
    """A sharded batch of gradients is gathered before a DTensor is redistributed under vmap."""
    x = dt.distribute_tensor(torch.arange(6.0), LINE, [Shard(0)]).requires_grad_()
    expected = torch.arange(18.0).reshape(3, 6)
    for redistribute in (lambda: x.redistribute(placements=[Replicate()]), x.full_tensor):
        y = redistribute()
        grads = dt.distribute_tensor(expected, LINE, [placement]) if isinstance(y, dt.DTensor) else expected
        (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True)
        assert torch.equal(found.full_tensor(), expected)


# --- tensors created inside a transform -----------------------------------------------------------------------------
FACTORIES: dict[str, Callable[[Any], Any]] = {
    "distributed": lambda mesh: dt.distribute_tensor(torch.ones(5, dtype=torch.float64) * 3, mesh, [Shard(0)]),
    "copied": lambda mesh: dt.distribute_tensor(torch.full((5,), 3.0, dtype=torch.float64), mesh),
    "filled": lambda mesh: dt.full((5,), 3.0, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64),
}


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("transform", [*TRANSFORMS, "vmap", "functionalize"])
def test_a_dtensor_created_inside_a_transform_is_a_constant(transform: str, make: str) -> None:
    others: dict[str, Any] = {
        "vmap": lambda f, x, _: torch.vmap(f)(x),
        "functionalize": lambda f, x, _: torch.func.functionalize(f)(x),
    }
    run = {**TRANSFORMS, **others}[transform]
    expected = run(lambda x: (x * 3) ** 2, X, TANGENT)
    operands = (dt.distribute_tensor(x, LINE, [Shard(0)]) for x in (X, TANGENT))
    found = run(lambda x: (x * FACTORIES[make](LINE)) ** 2, *operands)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("transform", ["grad", "jvp", "hvp", "jacrev"])
@pytest.mark.parametrize(
    "make", [dt.zeros, lambda *size, **how: dt.distribute_tensor(torch.zeros(*size, dtype=how["dtype"]), LINE)]
)
def test_a_dtensor_created_inside_a_transform_can_be_written(make: Any, transform: str) -> None:
    def program(x: Any, made: Any) -> Any:
        made[1:] = x[1:] * 2
        return made.mul_(x)

    run = TRANSFORMS[transform]
    expected = run(lambda x: program(x, torch.zeros_like(x)), X, TANGENT)
    operands = (dt.distribute_tensor(x, LINE, [Shard(0)]) for x in (X, TANGENT))
    found = run(lambda x: program(x, make(4, 5, device_mesh=LINE, dtype=x.dtype)), *operands)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize("transform", ["grad", "jvp", "jacfwd"])
def test_a_closed_over_dtensor_is_read_and_printed_inside_a_transform(transform: str) -> None:
    x, observed = dt.distribute_tensor(X, LINE, [Shard(0)]), []

    def program(y: Any) -> Any:
        observed.append((repr(x), x.tolist(), copy.deepcopy(x).tolist()))
        return y * 2

    TRANSFORMS[transform](program, x, x)
    assert observed[0] == (repr(x), X.tolist(), X.tolist())


def test_random_numbers_inside_grad_equal_those_outside_and_raise_in_vmap() -> None:
    def draw() -> Any:
        torch.manual_seed(0)
        return dt.randn(4, 5, device_mesh=LINE, placements=[Shard(0)], dtype=torch.float64)

    x = dt.distribute_tensor(X, LINE, [Shard(0)])
    assert torch.equal(torch.func.grad(lambda x: (x * draw()).sum())(x).full_tensor(), draw().full_tensor())
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda row: row * draw())(x)


def test_distribute_tensor_of_a_transformed_plain_tensor_raises() -> None:
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
