"""Dispatch program: the table of passes, cache keys, and the plan variants of one key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.dispatch.cache_key import append_list_to_key
from dtensor.dispatch.dispatcher import plans_of_operators
from dtensor.dispatch.programs.program import WHOLE
from dtensor.dispatch.programs.steps import AFTER, BEFORE, LOCAL, PASSES, wrap_outputs

MESH = dt.DeviceMesh("cpu", 3)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def count_plans(name: str) -> int:
    return plans_of_operators()[name][1]


def test_each_dispatch_pass_is_in_its_table_once_and_has_a_docstring() -> None:
    assert PASSES == BEFORE + LOCAL + AFTER
    assert len(set(PASSES)) == len(PASSES)
    assert LOCAL[-1] is wrap_outputs
    for each in (*PASSES, *WHOLE):
        assert each.__doc__, each.__name__
        assert each.__doc__.strip().splitlines()[0][0].isupper(), each.__name__


def test_results_in_the_default_dtype_follow_its_changes_with_one_plan() -> None:
    x = dt.distribute_tensor(torch.arange(7), MESH, [dt.Shard(0)])
    found = []
    for dtype in (torch.float32, torch.float64) * 2:
        torch.set_default_dtype(dtype)
        y = x / 2
        assert torch.equal(y.full_tensor(), torch.arange(7) / 2)
        found.append((y.dtype, count_plans("aten.div.Tensor")))
    assert [dtype for dtype, _ in found] == [torch.float32, torch.float64] * 2
    assert len({count for _, count in found}) == 1  # variants count as one plan of the key


def test_partial_times_a_finite_number_stays_partial_and_times_infinity_is_right() -> None:
    """Multiply a partial value by finite numbers and by infinity."""
    x = dt.DTensor.from_local(torch.tensor([[1.0, -2.0, 3.0]]), MESH, [dt.Partial()])
    total = x.full_tensor()
    finite, infinite = x * 2.0, x * float("inf")
    assert finite.placements == (dt.Partial(),)
    for number, y in ((2.0, finite), (float("inf"), infinite), (0.0, x * 0.0), (3.0, x * 3.0)):
        assert torch.equal(y.full_tensor(), total * number)


def test_keyword_arguments_give_the_results_of_positional_ones() -> None:
    x = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), MESH, [dt.Shard(0)])
    y = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), MESH, [dt.Shard(1)])
    expected = torch.sub(torch.arange(15.0), torch.arange(15.0), alpha=2).reshape(5, 3)
    assert torch.equal(torch.sub(input=x, other=y, alpha=2).full_tensor(), expected)
    assert torch.equal(torch.ops.aten.sub.Tensor(x, other=y, alpha=2).full_tensor(), expected)


def _make_key(values: list[Any]) -> Any:
    key: list[Any] = []
    assert [*append_list_to_key(values, key, False)] == values
    return tuple(key)


def test_key_of_0d_tensor_lists_has_dtypes_shapes_and_length_but_no_values() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert _make_key([one, two]) == _make_key([two, two])
    different = [
        [one],
        [one, two, one],
        [one.double(), two.double()],
        [one, two.double()],
        [one.view(1), two.view(1)],
        [one, two.view(1)],
    ]
    assert len({_make_key(values) for values in [[one, two], *different]}) == len(different) + 1


def test_key_of_sparse_0d_tensors_differs_from_that_of_dense_ones() -> None:
    dense, sparse = torch.tensor(1.0), torch.tensor(1.0).to_sparse()
    key: list[Any] = []
    append_list_to_key([sparse, sparse], key, False)
    assert tuple(key) != _make_key([dense, dense])
