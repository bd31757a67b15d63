"""Rules of reductions: sums, extrema with indices, variances, norms and scans over sharded dims."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from rule_tables import (
    MESHES,
    RuleCase,
    check_many_placements,
    check_placement,
    get_collective_kinds,
    get_received_bytes,
    make_floats,
    make_integers,
)
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.comm import events
from dtensor.testing import check

X, Z = make_floats(5, 6, 7), make_integers(5, 6)
ODD = torch.tensor([[3, 1, 3, 2, 3, 0], [1, 1, 1, 1, 1, 1], [0, 7, 0, 7, 0, 7]])
NAN = torch.tensor([[1.0, math.nan, 3.0, math.nan, 0.0], [2.0, 5.0, 5.0, -1.0, 5.0]], dtype=torch.float64)

CASES = {
    "sum": RuleCase(lambda x: x.sum((0, 2), keepdim=True), (X,)),
    "sum of integers": RuleCase(lambda x: x.sum(1), (Z,)),
    "mean": RuleCase(torch.mean, (make_floats(5, 6),)),
    "mean of dims": RuleCase(lambda x: x.mean((0, 1)), (X,)),
    "prod": RuleCase(lambda x: x.prod(0), (make_floats(5, 3),), ("sum", "product")),
    "amax": RuleCase(lambda x: x.amax((0, 1)), (X,)),
    "max of integers": RuleCase(torch.max, (Z,)),
    "aminmax": RuleCase(lambda x: torch.aminmax(x, dim=0), (make_floats(5, 6),)),
    "max with index": RuleCase(lambda x: x.max(1), (X,)),
    "min with index": RuleCase(lambda x: torch.min(x, -1, keepdim=True), (X,)),
    "first of equal values": RuleCase(lambda x: x.max(1), (ODD,)),
    "NaN is the extremum": RuleCase(lambda x: (x.max(1), x.argmax(), x.argmin(0), x.amax()), (NAN,), gradients=False),
    "argmax of all": RuleCase(torch.argmax, (ODD,)),
    "argmin": RuleCase(lambda x: x.argmin(0, keepdim=True), (ODD,)),
    "any": RuleCase(lambda x: (x > 1.9).any(0), (X,)),
    "all": RuleCase(lambda x: torch.all(x < 1.9), (X,)),
    "isnan any": RuleCase(lambda x: torch.isnan(x).any(), (NAN,), ("sum",)),
    "count_nonzero": RuleCase(lambda x: torch.count_nonzero(x, 0), (Z,)),
    "var": RuleCase(lambda x: x.var((0, 1)), (X,)),
    "std": RuleCase(lambda x: x.std(1, correction=0), (make_floats(5, 6),)),
    "var_mean": RuleCase(lambda x: torch.var_mean(x, 0, keepdim=True), (make_floats(5, 6),)),
    "vector_norm": RuleCase(torch.linalg.vector_norm, (make_floats(5, 6),)),
    "vector_norm inf": RuleCase(lambda x: torch.linalg.vector_norm(x, math.inf, 0), (make_floats(5, 6),)),
    "norm 3": RuleCase(lambda x: x.norm(3, 1), (make_floats(5, 6),)),
    "cumsum": RuleCase(lambda x: x.cumsum(1), (X,)),
    "cumsum of integers": RuleCase(lambda x: x.cumsum_(0), (Z,), written=True),
    "cumprod": RuleCase(lambda x: x.cumprod(0), (make_floats(5, 3, low=0.5),), ("sum",)),
    "cummax": RuleCase(lambda x: x.cummax(1), (make_floats(5, 6),)),
    "logcumsumexp": RuleCase(lambda x: x.logcumsumexp(0), (make_floats(5, 6),)),
    "logsumexp": RuleCase(lambda x: x.logsumexp((0, 1)), (X,)),
    "median": RuleCase(lambda x: x.median(0), (make_floats(5, 6),), ("sum",)),
    "item": RuleCase(lambda x: x.sum().item(), (X,)),
    "equal": RuleCase(
        lambda x, y: (torch.equal(x, y), torch.equal(x, x.clone()), torch.equal(x, y[:1])), (Z, make_integers(5, 6, seed=1))
    ),
    "allclose": RuleCase(lambda x, y: torch.allclose(x, y), (make_floats(5, 6), make_floats(5, 6))),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_reduction_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape, 8)


@pytest.mark.parametrize(
    ("fn", "placements", "expected", "collectives"),
    [
        (lambda x: x.sum(), [Shard(0), Shard(1)], [Partial(), Partial()], []),
        (lambda x: x.mean(0), [Shard(0), Shard(1)], [Partial("avg"), Shard(0)], []),
        (lambda x: x.mean(), [Shard(1), Shard(1)], [Partial(), Partial()], []),
        (lambda x: x.amax(0), [Shard(0), Replicate()], [Partial("max"), Replicate()], []),
        (lambda x: x.max(0), [Shard(0), Shard(1)], [Replicate(), Shard(0)], ["all_reduce"]),
        (lambda x: x.argmax(), [Shard(0), Shard(1)], [Replicate(), Replicate()], ["all_reduce"]),
        (lambda x: x.var(), [Shard(0), Shard(1)], [Replicate(), Replicate()], ["all_reduce"]),
        (lambda x: x.logsumexp(1), [Shard(0), Shard(1)], [Shard(0), Replicate()], ["all_reduce"]),
        (lambda x: x.cumsum(1), [Shard(0), Shard(1)], [Shard(0), Shard(1)], ["all_gather"]),
        (lambda x: x.any(1), [Shard(1), Shard(0)], [Partial("max"), Shard(0)], []),
    ],
)
def test_reductions_over_sharded_dims_communicate_only_partial_results(fn, placements, expected, collectives) -> None:
    x = make_floats(64, 50)
    outcome = check_placement(fn, [x], (2, 2), [placements], gradients=False)
    assert outcome.layouts[0].placements == tuple(expected)
    assert get_collective_kinds(outcome) == collectives
    assert get_received_bytes(outcome) < x.nbytes // 8


def test_clip_grad_norm_reduces_one_number() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    layouts = [
        ([Shard(0), Shard(1)], (5, 7)),
        ([Replicate(), Shard(0)], (3,)),
        ([Shard(0), Shard(0)], (6, 2)),
        ([Replicate(), Replicate()], (2,)),
    ]
    plain, distributed = [], []
    for seed, (placements, shape) in enumerate(layouts):
        value, grad = make_floats(*shape, seed=seed), make_floats(*shape, seed=seed + 9)
        plain.append(torch.nn.Parameter(value))
        plain[-1].grad = grad.clone()
        distributed.append(torch.nn.Parameter(dt.distribute_tensor(value, mesh, placements)))
        distributed[-1].grad = dt.distribute_tensor(grad, mesh, placements)
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0)
    seen: list[events.Event] = []
    with events.listening(seen.append), warnings.catch_warnings():
        warnings.simplefilter("error")
        total = torch.nn.utils.clip_grad_norm_(distributed, 1.0)
    assert len(seen) <= 2
    assert sum(event.bytes for event in seen) <= 200
    assert math.isclose(total.item(), expected.item())
    for own, like in zip(distributed, plain, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), like.grad)


def test_mean_of_half_precision_does_not_overflow() -> None:
    x = torch.full((5, 4), 30000.0, dtype=torch.float16)
    assert check_placement(torch.mean, [x], (3,), [[Shard(0)]], gradients=False).layouts[0].dtype is torch.float16


def test_item_of_tensor_with_several_elements_raises() -> None:
    check_placement(lambda x: x.item(), [make_floats(2)], (2,), [[Shard(0)]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 2, 5])
def test_bincount_with_weights_and_empty_shards_has_the_dtype_of_torch(count: int, dtype: torch.dtype) -> None:
    given = torch.arange(count) % 3, torch.ones(count, dtype=dtype)
    for where in (Shard(0), Shard(0, sizes=(0, count, 0, 0))):
        check(torch.bincount, *given, mesh=dt.init_device_mesh("cpu", (4,)), placements=[[where]] * 2, kwargs={"minlength": 2})


def test_bincount_with_negative_minlength_raises() -> None:
    check_placement(lambda x: torch.bincount(x, minlength=-1), [torch.arange(4)], (2,), [[Shard(0)]])


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "amax", "min", "amin"])  # torch takes "max" and "amax"
@pytest.mark.parametrize("initial", [None, 0.5])
def test_segment_reduce_by_every_reduction_name_equals_plain_torch(reduce: str, initial: float | None) -> None:
    options = {} if initial is None else {"initial": initial}
    for where in (Shard(0), Shard(1)):
        check(
            lambda x, lengths: torch.segment_reduce(x, reduce, lengths=lengths, **options),
            torch.randn(10, 4, dtype=torch.float64),
            torch.tensor([2, 0, 5, 3]),
            mesh=dt.init_device_mesh("cpu", (3,)),
            placements=[[where], [Replicate()]],
        )


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_segment_reduce_takes_lengths_of_int32_and_int64(dtype: torch.dtype, unsafe: bool) -> None:
    check(
        lambda x, lengths: torch.segment_reduce(x, "sum", lengths=lengths, unsafe=unsafe),
        torch.randn(6, dtype=torch.float64),
        torch.tensor([2, 0, 4], dtype=dtype),
        mesh=dt.init_device_mesh("cpu", (2,)),
        placements=[[Shard(0)], [Replicate()]],
    )
