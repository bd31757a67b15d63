"""Special values and shapes: NaN next to infinity, empty reductions, dtypes that an operator refuses, ties and signed zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.testing import check
from dtensor.testing.placements import get_or_make_mesh

NAN, INF = float("nan"), float("inf")


def even_and_one_sided_shards(x: torch.Tensor, ranks: int = 3) -> list[tuple[Placement, ...]]:
    """Return placements that shard each dim, once evenly and once with all elements on the last rank."""
    found: list[tuple[Placement, ...]] = []
    for dim, size in enumerate(x.shape):
        found += [(Shard(dim),), (Shard(dim, sizes=(0,) * (ranks - 1) + (size,)),)]
    return found


@pytest.mark.parametrize("order", [0, 1, 2, 3, INF, -INF, -1])
def test_vector_norm_is_nan_if_shards_have_nan_and_infinity(order: float) -> None:
    x = torch.tensor([[INF, 1.0, 2.0, NAN], [NAN, 1.0, 2.0, INF], [INF, 1.0, 2.0, -INF]], dtype=torch.float64)
    for where in even_and_one_sided_shards(x):
        check(
            lambda x: torch.linalg.vector_norm(x, order, -1), x, mesh=get_or_make_mesh((3,)), placements=[where], gradients=False
        )


def test_total_norm_of_gradients_with_nan_is_nan() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.distribute_tensor(torch.tensor([INF, 1.0, 1.0, NAN]), mesh, [Shard(0)])
    assert torch.nn.utils.get_total_norm([x]).full_tensor().isnan()


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin"])
@pytest.mark.parametrize("shape", [(0, 6), (7, 0)])
def test_max_and_min_of_empty_tensor_raise(name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for where in [*even_and_one_sided_shards(x), (Replicate(),)]:
        made = dt.distribute_tensor(x, dt.init_device_mesh("cpu", (3,)), where)
        with pytest.raises((RuntimeError, IndexError), match="dim"):
            getattr(torch, name)(made)


@pytest.mark.parametrize(
    ("call", "x"),
    [
        (torch.var, torch.ones(5, 6, dtype=torch.int64)),
        (torch.std, torch.ones(5, 6, dtype=torch.bool)),
        (lambda x: torch.var_mean(x, 0), torch.ones(5, 6, dtype=torch.int32)),
        (torch.argmax, torch.ones(5, 6, dtype=torch.bool)),
        (lambda x: torch.argmin(x, 1), torch.ones(5, 6, dtype=torch.bool)),
        (lambda x: torch.renorm(x, 2, 0, 1.0), torch.ones(5)),
        (lambda x: torch.block_diag(x, x), torch.ones(5, 2, 3)),
    ],
)
def test_calls_with_unsupported_dtypes_and_shapes_raise_as_in_torch(call: Callable[..., Any], x: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(x)
    for where in even_and_one_sided_shards(x):
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(dt.distribute_tensor(x, dt.init_device_mesh("cpu", (3,)), where))


@pytest.mark.parametrize("order", [INF, -INF])
def test_infinity_norm_of_tensor_without_rows_equals_plain_torch(order: float) -> None:
    x = torch.ones(0, 6, dtype=torch.float64)
    for where in [*even_and_one_sided_shards(x), (Replicate(),), (Partial("avg"),)]:
        check(
            lambda x: torch.linalg.vector_norm(x, order, -1), x, mesh=get_or_make_mesh((3,)), placements=[where], gradients=False
        )


def test_partial_avg_of_infinite_complex_values_is_infinite() -> None:
    x = torch.zeros(2, 3, dtype=torch.complex128)
    outcome = check(
        lambda x: torch.nn.functional.pad(x, (1, 0), value=-INF),
        x,
        mesh=get_or_make_mesh((3,)),
        placements=[[Partial("avg")]],
        gradients=False,
    )
    assert str(outcome.layouts[0].placements[0]) in ("P(avg)", "R")
    mesh = dt.init_device_mesh("cpu", (2,))
    terms = dt.DTensor.from_local(torch.full((2,), complex(INF, 1.0)), mesh, [Partial("avg")])
    assert torch.view_as_real(terms.full_tensor()).tolist() == [[INF, 1.0]] * 2


def test_eig_gradient_of_empty_matrices_equals_plain_torch() -> None:
    x = torch.zeros(1, 1, 0, 0, dtype=torch.float64)
    for dim in (0, 1):
        check(torch.linalg.eig, x, mesh=get_or_make_mesh((4,)), placements=[[Shard(dim)]])


SPECIAL = torch.tensor(
    [[NAN, INF, -INF, -0.0, 0.0, 1.0], [1.0, NAN, 1.0, -2.0, 3.0, 3.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]]
).double()
TIES = torch.tensor([[1, 2, 2, 1, 2, 0], [0, 0, 0, 0, 0, 0], [-1, -1, 3, 3, 3, -1]])
ORDER_FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda x: torch.argmax(x, 1),
    "argmin of all": torch.argmin,
    "max.dim": lambda x: torch.max(x, 1),
    "min.dim": lambda x: torch.min(x, 1),
    "stable sort": lambda x: torch.sort(x, dim=1, stable=True),
    "stable descending sort": lambda x: torch.sort(x, dim=1, stable=True, descending=True),
    "topk values": lambda x: torch.topk(x, 3, 1).values,
    "kthvalue": lambda x: torch.kthvalue(x, 2, 1).values,
    "median": lambda x: torch.median(x, 1).values,
    "mode": lambda x: torch.mode(x, 1).values,
    "cummax": lambda x: torch.cummax(x, 1),
    "cummin": lambda x: torch.cummin(x, 1),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "sign of sorted zeros": lambda x: torch.signbit(torch.sort(x, dim=1, stable=True).values.double()),
}


@pytest.mark.parametrize("name", ORDER_FUNCTIONS)
def test_sort_topk_argmax_of_ties_and_special_values_equal_plain_torch(name: str) -> None:
    for x in (SPECIAL, TIES):
        for where in even_and_one_sided_shards(x):
            check(ORDER_FUNCTIONS[name], x, mesh=get_or_make_mesh((3,)), placements=[where], gradients=False)


def test_masked_fill_of_partial_avg_with_smallest_number_does_not_overflow() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, hidden = torch.randn(3, 4, dtype=torch.float64), torch.tensor([[True] * 4, [False] * 4, [True, False] * 2])
    least = torch.finfo(torch.float64).min
    check(
        lambda x, hidden: torch.softmax(x.masked_fill(hidden, least), -1),
        x,
        hidden,
        mesh=mesh,
        placements=[[dt.Partial("avg")], [dt.Replicate()]],
    )


FACTORS = {
    "nan": [[2.0, NAN, 3], [1, 2, 3]],
    "nan and a zero": [[2.0, NAN, 3], [0, 2, 3]],
    "nan and zeros": [[2.0, NAN, 0], [0, 2, 3]],
    "infinite": [[2.0, INF, 3], [1, 2, -3]],
    "too large": [[1e300, 1e300, 2], [1, 2, 3]],
    "a zero": [[2.0, 0, 3], [1, 2, 3]],
}


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_philox_uniform"), reason="torch before 2.13 has another way for subclasses")
@pytest.mark.parametrize("values", FACTORS.values(), ids=FACTORS.keys())
def test_prod_gradients_with_nan_infinity_and_zero_equal_plain_torch(values: list[list[float]]) -> None:
    mesh, x = dt.init_device_mesh("cpu", (2,)), torch.tensor(values, dtype=torch.float64)
    for where in (Replicate(), Shard(0), Shard(1)):
        for fn in (torch.prod, lambda x: x.prod(0), lambda x: x.prod(1, keepdim=True), lambda x: x.prod(-1, dtype=torch.float32)):
            check(fn, x, mesh=mesh, placements=[[where]])


def test_prod_gradients_of_empty_tensors_equal_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for shape, dim in (((3, 0), 1), ((0, 3), 0), ((3, 0), 0), ((), 0)):
        x = torch.ones(shape, dtype=torch.float64)
        for fn in (torch.prod, lambda x: x.prod(dim), lambda x: x.prod(dim, keepdim=True)):  # noqa: B023  called at once
            check(fn, x, mesh=mesh, placements=[[Shard(0) if shape else Replicate()]])


def test_second_derivatives_of_prod_equal_plain_torch() -> None:
    def curvature(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.prod(1).sum() + x.prod(), x, create_graph=True)
        return slope.square().sum()

    mesh = dt.init_device_mesh("cpu", (2,))
    for values in (FACTORS["a zero"], [[2.0, 1, 3], [1, 2, 3]], [[0.0, 0, 3], [1, 2, 3]]):
        for where in (Shard(0), Shard(1)):
            check(curvature, torch.tensor(values, dtype=torch.float64), mesh=mesh, placements=[[where]])


def test_bit_shifts_of_bools_and_integers_equal_plain_torch() -> None:
    mesh, bits, counts = dt.init_device_mesh("cpu", (2,)), torch.tensor([True, False, True]), torch.tensor([1, 2, 3])
    for where in (Replicate(), Shard(0), Partial()):
        for fn in (lambda x, y: x << y, lambda x, y: x >> y, lambda x, y: y << x, lambda x, y: (x << 2) + (y >> 1)):
            check(fn, bits, counts, mesh=mesh, placements=[[where], [where]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_partial_avg_of_largest_finite_values_is_finite(dtype: torch.dtype, ranks: int) -> None:
    real = torch.float32 if dtype is torch.complex64 else dtype
    value = torch.tensor([torch.finfo(real).min, torch.finfo(real).max, 0.1, -3.3]).to(real).to(dtype)
    mesh = dt.init_device_mesh("cpu", (ranks,))
    for where in ([dt.Replicate()], [dt.Shard(0)]):
        moved = dt.DTensor.from_local(value, mesh, [dt.Partial("avg")]).redistribute(placements=where)
        torch.testing.assert_close(moved.full_tensor(), value)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "masked_scatter with too few elements": (
        lambda x, m: x.masked_scatter(m, x[:1]),
        (torch.ones(5, 6), torch.ones(6, dtype=torch.bool)),
    ),
    "select_scatter of a row that broadcasts": (lambda x, s: x.select_scatter(s, 0, 2), (torch.ones(5, 6), torch.ones(1))),
    "slice_scatter of another size": (lambda x, s: x.slice_scatter(s, 1, 0, 3), (torch.ones(5, 6), torch.ones(5, 2))),
    "diagonal_scatter of another size": (lambda x, s: x.diagonal_scatter(s, 1), (torch.ones(5, 6), torch.ones(6))),
    "index_reduce of rows of another size": (
        lambda x, i, s: x.index_reduce(0, i, s, "prod"),
        (torch.ones(5, 6), torch.tensor([0, 1]), torch.ones(2, 1)),
    ),
    "one_hot of a class too large": (lambda x: torch.nn.functional.one_hot(x, 3), (torch.tensor([0, 1, 2, 3, 0]),)),
    "one_hot of a negative class": (torch.nn.functional.one_hot, (torch.tensor([0, 1, -1, 3, 0]),)),
    "one_hot of an empty tensor": (torch.nn.functional.one_hot, (torch.zeros(0, dtype=torch.int64),)),
    "slice_scatter of dim out of range": (lambda x, s: x.slice_scatter(s, 2), (torch.ones(5, 6), torch.ones(5, 6))),
    "index_select with 2-d index": (lambda x, i: x.index_select(0, i), (torch.ones(5, 6), torch.zeros(1, 5, dtype=torch.int64))),
    "index_fill with float index": (lambda x, i: x.index_fill(0, i, 1.0), (torch.ones(5, 6), torch.zeros(2))),
    "index_add with uint8 index": (lambda x, i: x.index_add(0, i, x[:2]), (torch.ones(5, 6), torch.zeros(2, dtype=torch.uint8))),
    "index_copy with int32 index": (lambda x, i: x.index_copy(0, i, x[:2]), (torch.ones(5, 6), torch.tensor([0, 1]).int())),
    "index_select with bool index": (lambda x, i: x.index_select(0, i), (torch.ones(5, 6), torch.ones(2) > 0)),
    "put with int32 index": (lambda x, i: x.put(i, x[0, :2]), (torch.ones(5, 6), torch.tensor([0, 1]).int())),
    "index_reduce of dim out of range": (lambda x, i: x.index_reduce(3, i, x, "prod"), (torch.ones(5, 6), torch.tensor([0, 1]))),
    "masked_scatter of another dtype": (lambda x, m: x.masked_scatter(m, x.double()), (torch.ones(5, 6), torch.ones(6) > 0)),
    "binary_cross_entropy with target of another dtype": (
        torch.nn.functional.binary_cross_entropy,
        (torch.ones(5, 6), torch.ones(5, 6).double()),
    ),
    "unique_consecutive of dim out of range": (lambda x: torch.unique_consecutive(x, dim=2), (torch.ones(5, 6),)),
    "solve with a vector as matrix": (torch.linalg.solve, (torch.ones(5), torch.ones(5, 3))),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_calls_that_torch_meta_functions_accept_raise(name: str) -> None:
    fn, given = REFUSED[name]
    for where in (Replicate(), Shard(0), Partial("max")):
        placed = [(where if i == 0 else Replicate(),) for i, _ in enumerate(given)]
        assert check(fn, *given, mesh=get_or_make_mesh((3,)), placements=placed, gradients=False).same_error


def test_cat_of_empty_1d_tensors_takes_any_dim() -> None:
    for dim in (-7, 0, 3):
        mesh, placements = get_or_make_mesh((3,)), [[Shard(0)]] * 2
        check(lambda x, y: torch.cat([x, y], dim), *[torch.zeros(0)] * 2, mesh=mesh, placements=placements)  # noqa: B023


def test_masked_scatter_reads_the_source_in_row_major_order() -> None:
    x, mask = torch.randn(4, 3, dtype=torch.float64).t(), torch.tensor([[True, False, True, False]] * 3)
    for where in (Replicate(), Shard(0), Shard(1), Partial()):
        for source in (torch.ones(3, 4, dtype=torch.float64), x.clone()):
            check(
                torch.masked_scatter,
                x,
                mask,
                source,
                mesh=get_or_make_mesh((2,)),
                placements=[[where], [Shard(0)], [Replicate()]],
            )
    nothing = torch.zeros(0, dtype=torch.float64)
    check(
        torch.masked_scatter,
        x[0],
        mask & False,
        nothing,
        mesh=get_or_make_mesh((2,)),
        placements=[[Shard(0)], [Shard(0)], [Shard(0)]],
    )


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_cumsum_of_complex_infinity_keeps_the_finite_part(ranks: int) -> None:
    x = torch.tensor([1 + 2j, complex(INF), 1j, -1, complex(0, INF), 3j], dtype=torch.complex128)
    whole = x.cumsum(0)
    for where in even_and_one_sided_shards(x, ranks):
        found = dt.distribute_tensor(x, get_or_make_mesh((ranks,)), where).cumsum(0).full_tensor()
        torch.testing.assert_close(torch.view_as_real(found), torch.view_as_real(whole), equal_nan=True)


ZERO_PRESERVING_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "multiplied by 1": lambda x, i: x * 1,
    "row": lambda x, i: x[4],
    "rows": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(4, 5)),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "take": lambda x, i: x.take(i),
    "sum plus a row": lambda x, i: x.sum(0) + x[1],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ZERO_PRESERVING_FUNCTIONS)
def test_negative_zero_keeps_its_sign_under_all_placements(name: str, dtype: torch.dtype) -> None:
    def signs(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x).signbit() if x.is_complex() else x.signbit()

    x = torch.where(torch.arange(30).view(6, 5) % 3 == 0, -0.0, 0.0).to(dtype)
    x, i = (torch.complex(x.real, -x.real.roll(1)) if x.is_complex() else x), torch.tensor([0, 4, 2, 5])
    for where in (Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")):
        mesh = get_or_make_mesh((3,))
        given = dt.distribute_tensor(x, mesh, [where]), dt.distribute_tensor(i, mesh, [Replicate()])
        assert torch.equal(
            signs(ZERO_PRESERVING_FUNCTIONS[name](*given).full_tensor()), signs(ZERO_PRESERVING_FUNCTIONS[name](x, i))
        )
