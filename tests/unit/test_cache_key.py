"""What of a call's arguments a plan is looked up by."""

from __future__ import annotations

from typing import Any

import torch

from dtensor.dispatch.cache_key import append_list_to_key


def _key(values: list[Any]) -> Any:
    key: list[Any] = []
    assert [*append_list_to_key(values, key, False)] == values
    return tuple(key)


def test_step_counts_are_told_apart_by_dtype_and_how_many_not_by_value() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert _key([one, two]) == _key([two, two])
    others = [
        [one],
        [one, two, one],
        [one.double(), two.double()],
        [one, two.double()],
        [one.view(1), two.view(1)],
        [one, two.view(1)],
    ]
    assert len({_key(values) for values in [[one, two], *others]}) == len(others) + 1


def test_a_number_that_is_sparse_is_no_step_count() -> None:
    dense, sparse = torch.tensor(1.0), torch.tensor(1.0).to_sparse()
    key: list[Any] = []
    append_list_to_key([sparse, sparse], key, False)
    assert tuple(key) != _key([dense, dense])
