"""Rules of matrix products, distances and linear algebra: values of plain torch, and no communication where local operations
suffice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check

R, S0, S1, S2, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3).to(dtype)


# name, function, shapes, placements on one mesh dim, placements of the result
LOCAL_CASES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], list[Any], Any]] = [
    ("rows", torch.mm, [(5, 6), (6, 7)], [S0, R], S0),
    ("columns", torch.mm, [(5, 6), (6, 7)], [R, S1], S1),
    ("contracted", torch.mm, [(5, 6), (6, 7)], [S1, S0], SUM),
    ("bias with columns", torch.addmm, [(7,), (5, 6), (6, 7)], [S0, R, S1], S1),
    ("bias of a contraction", torch.addmm, [(7,), (5, 6), (6, 7)], [R, S1, S0], SUM),
    ("batch", torch.bmm, [(5, 2, 6), (5, 6, 7)], [S0, S0], S0),
    ("column-parallel linear", F.linear, [(2, 5, 6), (7, 6), (7,)], [R, S0, S0], S2),
    ("row-parallel linear", F.linear, [(2, 5, 6), (7, 6), (7,)], [S2, S1, R], SUM),
    ("data-parallel linear", F.linear, [(5, 2, 6), (7, 6), (7,)], [S0, R, R], S0),
    ("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(5, 2, 6), (5, 6, 7)], [S0, S0], S0),
    ("distances", torch.cdist, [(5, 3), (6, 3)], [S0, R], S0),
    ("distances from rows", torch.cdist, [(5, 3), (6, 3)], [R, S0], S1),
    ("inverse", lambda a: torch.linalg.inv_ex(a)[0], [(5, 3, 3)], [S0], S0),
    ("columns of right-hand sides", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), [(3, 3), (3, 5)], [R, S1], S1),
    ("bilinear", lambda a, b, w: F.bilinear(a, b, w), [(5, 2), (5, 3), (6, 2, 3)], [S0, S0, R], S0),
]


def test_mm_keeps_partial_integers_and_reduces_partial_floats() -> None:
    for dtype, result in ((torch.int64, SUM), (torch.float64, R)):
        a, b = x(5, 6, dtype=dtype), x(6, 7, seed=1, dtype=dtype)
        outcome = check(torch.mm, a, b, mesh=MESHES[3,], placements=[[SUM], [R]], gradients=False)
        assert outcome.layouts[0].placements == (result,)


@pytest.mark.parametrize(("name", "fn", "shapes", "placements", "result"), LOCAL_CASES, ids=[case[0] for case in LOCAL_CASES])
def test_contractions_of_matching_shards_do_not_communicate(
    name: str, fn: Callable[..., Any], shapes: Any, placements: Any, result: Any
) -> None:
    tensors = [x(*shape, seed=i) for i, shape in enumerate(shapes)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        outcome = check(fn, *tensors, mesh=MESHES[3,], placements=[[p] for p in placements], gradients=False)
    assert outcome.events == []
    assert outcome.layouts[0].placements == (result,)


LOCAL_CASES_IN_INFERENCE_MODE: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], list[Any], Any]] = [
    ("sequence-sharded linear", F.linear, [(2, 5, 6), (7, 6), (7,)], [S1, R, R], S1),
    ("heads of a matmul", torch.matmul, [(2, 5, 3, 6), (2, 5, 6, 7)], [S1, S1], S1),
    ("einsum over heads", lambda a, b: torch.einsum("bshd,bthd->bhst", a, b), [(2, 3, 5, 6), (2, 4, 5, 6)], [S2, S2], S1),
]


@pytest.mark.parametrize(
    ("name", "fn", "shapes", "placements", "result"),
    LOCAL_CASES_IN_INFERENCE_MODE,
    ids=[case[0] for case in LOCAL_CASES_IN_INFERENCE_MODE],
)
def test_composites_of_sharded_inner_dims_do_not_communicate_in_inference_mode(
    name: str, fn: Any, shapes: Any, placements: Any, result: Any
) -> None:
    tensors = [x(*shape, seed=i) for i, shape in enumerate(shapes)]
    with torch.inference_mode():
        outcome = check(fn, *tensors, mesh=MESHES[2,], placements=[[p] for p in placements], gradients=False)
    assert outcome.events == []
    assert outcome.layouts[0].placements == (result,)


COMPOSITES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]]]] = [
    ("tensordot", lambda a, b: torch.tensordot(a, b, 2), [(5, 2, 6), (2, 6, 7)]),
    ("outer", torch.outer, [(5,), (6,)]),
    ("kron", torch.kron, [(5, 2), (3, 6)]),
    ("chain", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), [(5, 6), (6, 7), (7, 3)]),
    ("bilinear", F.bilinear, [(5, 2), (5, 3), (6, 2, 3), (6,)]),
    ("einsum", lambda a, b: torch.einsum("bsd,dhe->bhse", a, b), [(5, 2, 6), (6, 3, 7)]),
    ("matmul", torch.matmul, [(5, 2, 6), (5, 6, 7)]),
    ("linear", F.linear, [(5, 2, 6), (7, 6), (7,)]),
    ("det", torch.linalg.det, [(5, 3, 3)]),
    ("slogdet", lambda a: torch.linalg.slogdet(a)[1], [(5, 3, 3)]),
    ("solve", torch.linalg.solve, [(5, 3, 3), (5, 3, 2)]),
    ("power", lambda a: torch.linalg.matrix_power(a, 3), [(5, 3, 3)]),
    ("svd", torch.linalg.svdvals, [(5, 4, 3)]),
    ("qr", lambda a: torch.linalg.qr(a)[1].abs(), [(5, 4, 3)]),
    ("lstsq", lambda a, b: torch.linalg.lstsq(a, b)[0], [(5, 4, 3), (5, 4, 2)]),
]


@pytest.mark.parametrize(("name", "shape"), keep_diagonals_fast([case[0] for case in COMPOSITES], MESHES, every=3), ids=str)
def test_composite_products_values_and_gradients_equal_plain_torch(name: str, shape: tuple[int, ...]) -> None:
    fn, shapes = next(case[1:] for case in COMPOSITES if case[0] == name)
    tensors = [x(*shape_, seed=i) for i, shape_ in enumerate(shapes)]
    for first, second in ((S0, S0), (Shard(-1), S0), (S0, Shard(-1)), (SUM, R)):
        placements = [[first, second][: len(shape)] for _ in tensors]
        check(fn, *tensors, mesh=MESHES[shape], placements=placements)


def test_scaled_mm_of_3d_tensor_raises() -> None:
    a, b = torch.ones(4, 1, 16).to(torch.float8_e4m3fn), torch.ones(32, 16).to(torch.float8_e4m3fn).t()
    one = torch.ones(())
    with pytest.raises(RuntimeError, match="must be a matrix"):
        torch._scaled_mm(*(dt.distribute_tensor(x, MESHES[2,], [R]) for x in (a, b, one, one)))


def test_integer_mm_overflow_equals_plain_torch() -> None:
    a, b = x(5, 6, dtype=torch.int64), x(6, 7, seed=1, dtype=torch.int64)
    check(torch.mm, a * 2**40, b * 2**30, mesh=MESHES[3,], placements=[[S1], [S0]])


def test_cdist_uses_the_algorithm_of_the_global_shape() -> None:
    a = x(30, 3).float() * 1e-3 + 100
    whole = torch.cdist(a, a)
    local = torch.cdist(dt.distribute_tensor(a, MESHES[3,], [S0]), dt.distribute_tensor(a, MESHES[3,], [R]))
    assert torch.allclose(local.full_tensor(), whole, rtol=0, atol=1e-2)
    assert [block.shape[0] for block in local._local.shards] == [10, 10, 10]


def test_inverse_of_singular_matrix_on_one_rank_raises_on_all_ranks() -> None:
    a = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1)
    a[4] = 0
    with pytest.raises(torch.linalg.LinAlgError, match="4"):
        torch.linalg.inv(dt.distribute_tensor(a, MESHES[2,], [S0]))


def test_linear_backward_of_matching_shards_gives_sharded_or_partial_gradients() -> None:
    rows, grad, weight = x(2, 5, 6), x(2, 5, 7, seed=1), x(7, 6, seed=2)
    expected = (grad @ weight, torch.einsum("bsn,bsk->nk", grad, rows), grad.sum((0, 1)))
    for placements, results in (
        ([S1, S1, R], (S1, SUM, SUM)),
        ([S2, R, S1], (S2, S1, R)),
        ([R, S2, S0], (SUM, S0, S0)),
    ):
        own = [dt.distribute_tensor(t, MESHES[3,], [p]) for t, p in zip((rows, grad, weight), placements, strict=True)]
        given = torch.ops.aten.linear_backward(*own, [True, True, True])
        assert [g.placements for g in given] == [(p,) for p in results]
        assert all(torch.allclose(g.full_tensor(), e) for g, e in zip(given, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_addbmm_of_integers_with_fractional_alpha_equals_plain_torch(dtype: torch.dtype) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for fn, bias in ((torch.addbmm, (5, 6)), (torch.baddbmm, (1, 5, 6))):
        given = torch.ones(bias, dtype=dtype), torch.ones(1, 5, 3, dtype=dtype), torch.ones(1, 3, 6, dtype=dtype)
        for where in ([Shard(0), Shard(0)], [Shard(2, sizes=(0, 3)), Shard(1, sizes=(0, 3))]):
            for beta, alpha in ((0.2, 1), (2.5, 1.5), (2, 3)):
                check(
                    fn,
                    *given,
                    mesh=mesh,
                    placements=[[Replicate()], *([w] for w in where)],
                    kwargs={"beta": beta, "alpha": alpha},
                )


@pytest.mark.parametrize("name", ["addmm", "addmv", "addbmm", "baddbmm"])
def test_addmm_adds_a_plain_scalar_tensor_once(name: str) -> None:
    shapes: dict[str, Any] = {
        "addmm": ((5, 6), (6, 7)),
        "addmv": ((5, 6), (6,)),
        "addbmm": ((3, 5, 6), (3, 6, 7)),
        "baddbmm": ((3, 5, 6), (3, 6, 7)),
    }
    a, b = (torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) for shape in shapes[name])
    inner: Any = ([Shard(a.ndim - 1)], [Shard(max(0, b.ndim - 2))])
    places = [inner, ([Shard(0)], [Shard(0)])] if a.ndim == 3 else [inner]
    for left, right in places:
        for number in (torch.tensor(10.0, dtype=torch.float64), torch.full((1,), 10.0, dtype=torch.float64)):
            check(getattr(torch, name), number, a, b, mesh=dt.init_device_mesh("cpu", (2,)), placements=[None, left, right])


def test_float8_matmul_with_sharded_inner_dim_equals_plain_torch():
    mesh = dt.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x, y = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.randn(64, 16).to(torch.float8_e4m3fn)
    made = dt.distribute_tensor(x, mesh, [dt.Shard(1)]) @ dt.distribute_tensor(y, mesh, [dt.Shard(0)])
    assert torch.equal(made.full_tensor().float(), (x @ y).float())
