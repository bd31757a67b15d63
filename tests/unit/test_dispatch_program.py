"""Programs of operator calls: one table of passes, and variants of a cache key by what its plan depends on beside the key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dtensor as dt
from dtensor.dispatch.dispatcher import plans_of_operators
from dtensor.dispatch.program import WHOLE
from dtensor.dispatch.steps import AFTER, BEFORE, LOCAL, PASSES, wrap_outputs

MESH = dt.DeviceMesh("cpu", 3)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def planned(name: str) -> int:
    return plans_of_operators()[name][1]


def test_each_pass_stands_in_the_table_once_and_says_what_it_does() -> None:
    assert PASSES == BEFORE + LOCAL + AFTER
    assert len(set(PASSES)) == len(PASSES)
    assert LOCAL[-1] is wrap_outputs
    for each in (*PASSES, *WHOLE):
        assert each.__doc__, each.__name__
        assert each.__doc__.strip().splitlines()[0][0].isupper(), each.__name__


def test_a_result_in_the_default_dtype_has_the_one_that_is_set_now_and_each_is_planned_once() -> None:
    x = dt.distribute_tensor(torch.arange(7), MESH, [dt.Shard(0)])
    found = []
    for dtype in (torch.float32, torch.float64) * 2:
        torch.set_default_dtype(dtype)
        y = x / 2
        assert torch.equal(y.full_tensor(), torch.arange(7) / 2)
        found.append((y.dtype, planned("aten.div.Tensor")))
    assert [dtype for dtype, _ in found] == [torch.float32, torch.float64] * 2
    assert len({count for _, count in found}) == 1  # a variant is no other plan of the key


def test_numbers_of_other_kinds_have_programs_of_their_own_under_one_key() -> None:
    """A partial value times a finite number stays partial; times an infinite one it is reduced first."""
    x = dt.DTensor.from_local(torch.tensor([[1.0, -2.0, 3.0]]), MESH, [dt.Partial()])
    total = x.full_tensor()
    finite, infinite = x * 2.0, x * float("inf")
    assert finite.placements == (dt.Partial(),)
    for number, y in ((2.0, finite), (float("inf"), infinite), (0.0, x * 0.0), (3.0, x * 3.0)):
        assert torch.equal(y.full_tensor(), total * number)


def test_arguments_given_by_name_run_the_same_program() -> None:
    x = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), MESH, [dt.Shard(0)])
    y = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), MESH, [dt.Shard(1)])
    expected = torch.sub(torch.arange(15.0), torch.arange(15.0), alpha=2).reshape(5, 3)
    assert torch.equal(torch.sub(input=x, other=y, alpha=2).full_tensor(), expected)
    assert torch.equal(torch.ops.aten.sub.Tensor(x, other=y, alpha=2).full_tensor(), expected)
