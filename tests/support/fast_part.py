"""Choose the cases of a list that run in `make test`; the rest are slow and run in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest


def some(cases: Sequence[Any], every: int = 2) -> list[Any]:
    """Mark all cases slow except each ``every``-th; a tuple is a case of several arguments."""
    return [_case(case, k % every == 0) for k, case in enumerate(cases)]


def diagonals(*lists: Iterable[Any], every: int = 2) -> list[Any]:
    """Return all combinations, slow except those on each ``every``-th diagonal, which has every value."""
    return [
        _case(tuple(value for _, value in numbered), sum(k for k, _ in numbered) % every == 0)
        for numbered in itertools.product(*map(enumerate, lists))
    ]


def chosen(cases: Sequence[Any], fast: Container[Any]) -> list[Any]:
    """Mark all cases slow except these."""
    return [_case(case, case in fast) for case in cases]


def _case(case: Any, fast: bool) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if fast else pytest.mark.slow)
