"""Slow case marks: choose the cases of a parametrized test that run in `make test`. Others are slow: `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def keep_every_nth_fast(cases: Sequence[Any], every: int = 2) -> list[Any]:
    """Mark all cases slow except each ``every``-th. A tuple is one case of several arguments."""
    return [_make_param(case, k % every == 0) for k, case in enumerate(cases)]


def keep_diagonals_fast(*lists: Iterable[Any], every: int = 2) -> list[Any]:
    """Return all combinations of the lists, slow except those on each ``every``-th diagonal. A diagonal has every value of each
    list.
    """
    return [
        _make_param(tuple(value for _, value in numbered), sum(k for k, _ in numbered) % every == 0)
        for numbered in itertools.product(*map(enumerate, lists))
    ]


def keep_chosen_fast(cases: Sequence[Any], fast: Container[Any]) -> list[Any]:
    """Mark all cases slow except those in ``fast``."""
    return [_make_param(case, case in fast) for case in cases]


def _make_param(case: Any, fast: bool) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if fast else pytest.mark.slow)
