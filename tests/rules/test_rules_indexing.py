"""Rules of indexing, gather and scatter: along a sharded dim the large operand is not communicated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_tables import MESHES, RuleCase, check_many_placements, check_placement, get_collective_kinds, make_floats, make_integers
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.testing import check

F = torch.nn.functional
X, Z = make_floats(5, 6), make_integers(5, 6)


NARROW = [getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e8m0fnu")]
UNCOMMON = [torch.uint16, torch.uint32, torch.uint64, torch.complex32, *NARROW]
FEW_ROWS = torch.tensor([3, 0, 1, 3])
ROW_OPERATIONS: dict[str, Any] = {
    "flip": lambda x, rows: x.flip(0),
    "an index": lambda x, rows: x[rows],
    "index_select": lambda x, rows: x.index_select(0, rows),
    "embedding": lambda x, rows: F.embedding(rows, x),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ROW_OPERATIONS)
@pytest.mark.parametrize("dtype", UNCOMMON, ids=str)
def test_flip_index_and_embedding_of_uncommon_dtypes_equal_plain_torch(dtype: torch.dtype, name: str) -> None:
    values = torch.arange(1, 21).reshape(5, 4).to(torch.float32 if dtype in NARROW else torch.int64).to(dtype)
    expected = ROW_OPERATIONS[name](values, FEW_ROWS)
    for ranks, placement in itertools.product((2, 4), (Shard(0), Shard(1), Replicate())):
        mesh = dt.init_device_mesh("cpu", (ranks,))
        x, rows = dt.distribute_tensor(values, mesh, [placement]), dt.distribute_tensor(FEW_ROWS, mesh, [Replicate()])
        assert torch.equal(bits(ROW_OPERATIONS[name](x, rows).full_tensor()), bits(expected))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def ids(high: int, *shape: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    return make_integers(*shape, seed=seed, low=low, high=high)


ROWS, COLUMNS = ids(5, 7, low=-5), ids(6, 7, seed=1)
DISTINCT = torch.tensor([3, 0, 4])
SORTED = make_floats(7).sort().values


def put_rows(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x[i] = v
    return x


def add_rows(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_put_((i,), v, accumulate=True)


def fill_mask(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    x[m] = -1.0
    return x


CASES = {
    "embedding": RuleCase(lambda w, i: F.embedding(i, w), (make_floats(7, 3), ids(7, 5, 2)), ("sum", "avg")),
    "embedding with padding": RuleCase(lambda w, i: F.embedding(i, w, 2), (make_floats(7, 3), ids(4, 9)), ("sum",)),
    "embedding used twice": RuleCase(
        lambda w, i: (h := F.embedding(i, w), h.relu() @ w.t(), h.sum())[1:], (make_floats(7, 3), ids(7, 5)), ("sum",)
    ),
    "embedding by frequency": RuleCase(
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), (make_floats(7, 3), ids(4, 9)), ("sum",)
    ),
    "index_select": RuleCase(lambda x, i: x.index_select(0, i), (X, ids(5, 7)), ("sum", "max")),
    "index_select of integers": RuleCase(lambda x, i: x.index_select(1, i), (Z, ids(6, 4)), ("sum",)),
    "gather": RuleCase(lambda x, i: x.gather(0, i), (X, ids(5, 7, 6))),
    "gather with a shorter index": RuleCase(lambda x, i: x.gather(1, i), (X, ids(6, 3, 4)), ("sum",)),
    "take_along_dim": RuleCase(lambda x, i: torch.take_along_dim(x, i, 1), (X, ids(6, 5, 1)), ("sum",)),
    "take": RuleCase(lambda x, i: x.take(i), (X, ids(30, 7, low=-30)), ("sum",)),
    "x[rows]": RuleCase(lambda x, i: x[i], (X, ROWS)),
    "x[:, columns]": RuleCase(lambda x, i: x[:, i], (X, COLUMNS)),
    "x[rows, columns]": RuleCase(lambda x, i, j: x[i, j], (X, ROWS, COLUMNS), ("sum",)),
    "x[rows, :, columns]": RuleCase(lambda x, i, j: x[i, :, j], (make_floats(5, 3, 6), ROWS, COLUMNS), ("sum",)),
    "broadcast indices": RuleCase(lambda x, i, j: x[:, i, j], (make_floats(3, 5, 6), ids(5, 4, 1), ids(6, 2)), ("sum",)),
    "indices from a list": RuleCase(lambda x: (x[[0, 3, -1]], x[[0, 2], [1, 1]], x[:, [5, 0]]), (X,)),
    "x[mask]": RuleCase(lambda x, m: x[m] * 2, (X, X > 0), ("sum",)),
    "masked_select and nonzero": RuleCase(
        lambda x, m: (x.masked_select(m), x.nonzero(), torch.argwhere(m)), (X, X > 0), ("sum",)
    ),
    "x[rows] = v": RuleCase(put_rows, (X, DISTINCT, make_floats(3, 6, seed=1)), ("sum",), written=True),
    "x[rows] += v": RuleCase(add_rows, (X, ROWS, make_floats(7, 6, seed=1)), ("sum", "avg"), written=True),
    "x[rows] = v of integers": RuleCase(put_rows, (Z, DISTINCT, make_integers(3, 6, seed=1)), ("sum",), written=True),
    "x[mask] = v": RuleCase(fill_mask, (X, X > 0), ("sum",), written=True),
    "index_add": RuleCase(lambda x, i, v: x.index_add(0, i, v, alpha=2), (X, ids(5, 7), make_floats(7, 6, seed=1)), ("sum",)),
    "index_add_": RuleCase(
        lambda x, i, v: x.index_add_(1, i, v), (X, ids(6, 4), make_floats(5, 4, seed=1)), ("sum",), written=True
    ),
    "index_copy": RuleCase(lambda x, i, v: x.index_copy(0, i, v), (X, DISTINCT, make_floats(3, 6, seed=1)), ("sum",)),
    "index_fill": RuleCase(lambda x, i: x.index_fill(1, i, 2.5), (X, ids(6, 3)), ("sum",)),
    "index_reduce": RuleCase(
        lambda x, i, v: x.index_reduce(0, i, v, "amax"), (X, ids(5, 7), make_floats(7, 6, seed=1)), ("sum",), gradients=False
    ),
    "scatter": RuleCase(
        lambda x, i, v: x.scatter(0, i, v), (X, DISTINCT[:, None].repeat(1, 6), make_floats(3, 6, seed=1)), ("sum",)
    ),
    "scatter a number": RuleCase(lambda x, i: x.scatter(1, i, 7.0), (X, ids(6, 5, 2)), ("sum",)),
    "scatter_add": RuleCase(lambda x, i, v: x.scatter_add(0, i, v), (X, ids(5, 7, 6), make_floats(7, 6, seed=1)), ("sum",)),
    "scatter_add_": RuleCase(
        lambda x, i, v: x.scatter_add_(1, i, v), (X, ids(6, 5, 9), make_floats(5, 9, seed=1)), ("sum",), written=True
    ),
    "scatter_reduce": RuleCase(
        lambda x, i, v: x.scatter_reduce(0, i, v, "mean"), (X, ids(5, 7, 6), make_floats(7, 6, seed=1)), ("sum",)
    ),
    "scatter_reduce of largest": RuleCase(
        lambda x, i, v: x.scatter_reduce(0, i, v, "amax"), (X, ids(5, 7, 6), make_floats(7, 6, seed=1)), ("sum",)
    ),
    "put_": RuleCase(
        lambda x, i, v: x.put_(i, v), (X, torch.tensor([4, 29, -2, 0]), make_floats(4, seed=1)), ("sum",), written=True
    ),
    "one_hot": RuleCase(lambda i: F.one_hot(i, 7), (ids(7, 5),), ("sum",)),
    "one_hot without a size": RuleCase(lambda i: F.one_hot(i), (ids(7, 5),), ("sum",)),
    "bucketize": RuleCase(lambda x, b: torch.bucketize(x, b), (X, SORTED), ("sum",)),
    "searchsorted": RuleCase(lambda s, v: torch.searchsorted(s, v, right=True), (make_floats(5, 7).sort().values, X), ("sum",)),
    "where": RuleCase(lambda m, x, y: torch.where(m, x, y), (X > 0, X, make_floats(6, seed=1)), ("sum", "max")),
    "masked_fill": RuleCase(lambda x, m: x.masked_fill(m, -3.0), (X, X > 1)),
    "masked_scatter": RuleCase(lambda x, m, v: x.masked_scatter(m, v), (X, X > 0, make_floats(30, seed=1)), ("sum",)),
    "index_select of infinite values": RuleCase(
        lambda x, i: x.index_select(0, i), (make_floats(5) / 0.0, ids(5, 3)), (), gradients=False
    ),
    "empty indices": RuleCase(lambda x, i: (x[i], x.index_select(0, i), F.embedding(i, x)), (X, ids(5, 0)), ("sum",)),
}


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_indexing_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape, 6)


R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LOCAL_CASES: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], list[Any], Any]] = [
    ("vocabulary", lambda w, i: F.embedding(i, w), (make_floats(7, 3), ids(7, 5, 2)), [S0, R], P),
    ("uneven vocabulary", lambda w, i: F.embedding(i, w), (make_floats(7, 3), ids(7, 5)), [Shard(0, sizes=(7, 0)), R], P),
    ("embedding dim", lambda w, i: F.embedding(i, w), (make_floats(7, 3), ids(7, 5)), [S1, R], S1),
    ("batch", lambda w, i: F.embedding(i, w), (make_floats(7, 3), ids(7, 5)), [R, S0], S0),
    ("rows of a sharded dim", lambda x, i: x.index_select(0, i), (X, ids(5, 7)), [S0, R], P),
    ("gather along a sharded dim", lambda x, i: x.gather(0, i), (X, ids(5, 7, 6)), [S0, R], P),
    ("gather along the unsharded dim", lambda x, i: x.gather(0, i), (X, ids(5, 7, 6)), [S1, S1], S1),
    ("advanced index of a sharded dim", lambda x, i, j: x[i, j], (X, ROWS, COLUMNS), [S0, R, R], P),
    ("batched indices", lambda x, i: x[i], (X, ROWS), [R, S0], S0),
    ("take", lambda x, i: x.take(i), (X, ids(30, 7)), [S1, R], P),
    ("x[rows] = v of a sharded dim", put_rows, (X, DISTINCT, make_floats(3, 6)), [S0, R, R], S0),
    ("index_add of a sharded source", lambda x, i, v: x.index_add(0, i, v), (X, ids(5, 7), make_floats(7, 6)), [R, S0, S0], P),
    ("scatter into shards", lambda x, i, v: x.scatter_add(0, i, v), (X, ids(5, 7, 6), make_floats(7, 6)), [S0, R, R], S0),
    ("x[mask] = number", fill_mask, (X, X > 0), [S0, S0], S0),
    ("searchsorted in a sharded sequence", lambda s, v: torch.searchsorted(s, v), (SORTED, X), [S0, R], P),
]


@pytest.mark.parametrize(
    ("fn", "tensors", "given", "expected"),
    [row[1:] for row in LOCAL_CASES],
    ids=[row[0] for row in LOCAL_CASES],
)
def test_indexing_with_matching_shards_does_not_communicate(
    fn: Callable[..., Any], tensors: Any, given: list[Any], expected: Any
) -> None:
    outcome = check_placement(fn, tensors, (2,), [[placement] for placement in given], cloned=True)
    assert get_collective_kinds(outcome) == []
    assert outcome.layouts[0].placements == (expected,)


def test_indexing_two_dims_sharded_on_two_mesh_dims_does_not_communicate() -> None:
    outcome = check_placement(lambda x, i, j: x[i, j], (X, ROWS, COLUMNS), (2, 2), [[S0, S1], [R, R], [R, R]])
    assert get_collective_kinds(outcome) == []
    assert outcome.layouts[0].placements == (P, P)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.embedding(torch.tensor([0, 5]), x),
        lambda x: x[torch.tensor([1, -6])],
        lambda x: x.index_select(0, torch.tensor([5])),
        lambda x: x.gather(0, torch.tensor([[5] * 6])),
        lambda x: x.take(torch.tensor([30])),
    ],
    ids=["embedding", "index", "index_select", "gather", "take"],
)
def test_index_out_of_range_raises_on_every_rank(fn: Callable[[torch.Tensor], Any]) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with dt.implicit_replication():
        for placement in (S0, S1, R):
            check(fn, X, mesh=mesh, placements=[[placement]])


INVALID_INDICES = {
    "a short mask": (torch.ones(4).bool(), slice(None)),
    "a long mask": (torch.ones(7).bool(),),
    "a mask of two dims": (torch.ones(5, 4).bool(),),
    "a mask of the second dim": (slice(None), torch.ones(5).bool()),
    "uint8 mask of another size": (torch.ones(4, dtype=torch.uint8),),
    "int8 indices": (torch.tensor([1, 0], dtype=torch.int8),),
    "float indices": (torch.tensor([1.0, 0.0]),),
    "indices of two sizes": (torch.tensor([1, 0]), torch.tensor([1, 0, 2])),
}


def write_by_index(x: torch.Tensor, *key: Any) -> torch.Tensor:
    x = x.clone()
    x[key] = 2.5
    return x


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("name", INVALID_INDICES)
@pytest.mark.filterwarnings("ignore:.*torch.uint8 is now deprecated")
def test_invalid_indices_raise_index_error_as_in_torch(name: str, where: dt.Placement) -> None:
    def key(*given: Any) -> tuple[Any, ...]:
        tensors = iter(given)
        return tuple(next(tensors) if isinstance(item, torch.Tensor) else item for item in INVALID_INDICES[name])

    tensors = [item for item in INVALID_INDICES[name] if isinstance(item, torch.Tensor)]
    for fn in (lambda x, *given: x[key(*given)], lambda x, *given: write_by_index(x, *key(*given))):
        outcome = check_placement(fn, [X, *tensors], (2,), [[where], *([Replicate()],) * len(tensors)])
        assert isinstance(outcome.error, IndexError), outcome.problems
        assert outcome.same_error


def test_embedding_gradient_has_the_sharding_of_the_vocabulary() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    weight = dt.distribute_tensor(make_floats(7, 3), mesh, [S0]).requires_grad_()
    i = dt.distribute_tensor(ids(7, 5), mesh, [R])
    F.embedding(i, weight).pow(2).sum().backward()
    assert weight.grad.placements == (S0,)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_index_reduce_prod_with_small_shards_equals_plain_torch(dtype: torch.dtype) -> None:
    x, places, source = make_floats(5, 4).to(dtype), ids(4, 6), make_floats(5, 6, seed=1).to(dtype)
    for where in ([Shard(0)], [Shard(1)], [Shard(0, sizes=(0, 1, 4))]):
        for keep in (True, False):
            check(
                lambda x, i, v: x.index_reduce(1, i, v, "prod", include_self=keep),  # noqa: B023  called at once
                x,
                places,
                source,
                mesh=dt.init_device_mesh("cpu", (3,)),
                placements=[where, [Replicate()], [Replicate()]],
                gradients=False,
            )


def test_index_select_of_one_row_of_a_sharded_dim_does_not_communicate() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    x = dt.distribute_tensor(X, mesh, [Shard(0)])
    with CommDebugMode() as comm:
        row = x.index_select(0, dt.distribute_tensor(torch.tensor(3), mesh, [Replicate()]))
    assert comm.get_total_counts() == 0
    assert row.placements == (Partial("sum"),)
    assert torch.equal(row.full_tensor(), X.index_select(0, torch.tensor(3)))


@pytest.mark.parametrize("index", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("where", [[Replicate()], [Shard(0)], [Partial()]], ids=str)
def test_put_of_one_value_with_sharded_index_equals_plain_torch(index: tuple[int, ...], where: list[Any]) -> None:
    for value in (torch.tensor(2.0, dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)):
        check(
            lambda x, i, v: x.put(i, v, accumulate=True),
            *(make_floats(3), torch.ones(index, dtype=torch.int64), value),
            mesh=dt.init_device_mesh("cpu", (2,)),
            placements=[where, [Shard(0)], [Replicate()]],
        )


@pytest.mark.parametrize("where", [Replicate(), Shard(0)], ids=str)
def test_masked_select_with_integer_mask_raises(where: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, mask = (dt.distribute_tensor(t, mesh, [where]) for t in (torch.arange(6.0), torch.ones(6, dtype=torch.int64)))
    for of, by in ((x, mask), (x.to_local(), mask.to_local())):
        with pytest.raises(RuntimeError, match="mask"):
            torch.masked_select(of, by)


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("op", ["scatter_add", "index_add", "index_put", "gather", "index_select"])
def test_mesh_dim_of_size_1_does_not_change_scatter_and_gather_results(op: str, mesh_shape: tuple[int, ...]) -> None:
    """Check meshes with a dim of size 1, for which a strategy with another kernel once counted sums twice."""
    i = torch.tensor([[0, 4], [4, 0], [2, 2], [0, 1], [5, 5], [4, 3]])
    programs: dict[str, Any] = {
        "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
        "index_add": lambda x, i, s: x.index_add(0, i[:, 0], s),
        "index_put": lambda x, i, s: x.index_put((i[:, 0],), s, accumulate=True),
        "gather": lambda x, i, s: x.gather(0, i),
        "index_select": lambda x, i, s: x.index_select(0, i[:, 0]),
    }
    mesh = dt.init_device_mesh("cpu", mesh_shape)
    check(programs[op], make_floats(6, 2), i, make_floats(6, 2), mesh=mesh, placements=[[Shard(0), Shard(0)]] * 3)
