"""What one rank does otherwise is named, what one fails at all fail at; no rank hangs, aborts or gets a wrong number.

Here a part of the table; ``make test-chaos`` runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import table
from pool import Outcome, Pool

SIZE = 3
ALL = bool(os.environ.get("DTENSOR_CHAOS"))
ENDS_S = 10.0  # after which every wait is over: promised are 5, of a machine that has the time
STOPPED_S = 25.0  # how long a stopped rank is waited for
# The collectives are the same: only what is computed between them differs, which nobody compares but "strict".
ALIKE = {"sum0/mean0", "sum_then_product/item", "sum_then_large_sum/item", "sum_then_large_sum/nothing", "nothing/item"}

pytestmark = pytest.mark.gloo


def some(programs: dict[str, Any], few: str) -> list[str]:
    return list(programs) if ALL else [name for name in programs if name in few.split(", ")]


@pytest.fixture(scope="module", params=["watch", "strict"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool(level: str) -> Iterator[Pool]:
    made = Pool(SIZE, level)
    yield made
    made.close()


@pytest.fixture(scope="module")
def right(pool: Pool) -> dict[str, list[Any]]:
    return {}


def results(pool: Pool, right: dict[str, list[Any]], deed: str) -> list[Any]:
    """What a deed gives on each rank when all do it."""
    if deed not in right:
        found = pool.run("table", f"healthy/{deed}")
        assert all(outcome.kind == "result" for outcome in found), found
        right[deed] = [outcome.value for outcome in found]
    return right[deed]


def ended_alike(found: list[Outcome]) -> None:
    """No rank hung or died, and all that raise say the same."""
    assert not [outcome for outcome in found if outcome.kind in ("timeout", "exit")], found
    assert len({outcome.words for outcome in found if outcome.name in ("DivergenceError", "RankLostError")}) <= 1, found


@pytest.mark.parametrize(
    "name",
    some(table.DIFFERENT, "sum0/sum1, sum0/mean0, full/large, large_sum/large, nothing/barrier, full/rows_of_5, nothing/item"),
)
def test_a_rank_that_does_something_else_is_named(name: str, level: str, pool: Pool, right: dict[str, list[Any]]) -> None:
    program, (usual, other) = table.DIFFERENT[name], name.split("/")
    expected = [results(pool, right, other if rank == program.odd else usual)[rank] for rank in range(SIZE)]
    found = pool.run("table", name)
    ended_alike(found)
    given = [rank for rank, outcome in enumerate(found) if outcome.kind == "result"]
    if level == "strict" or name not in ALIKE:
        assert len(given) < SIZE, "all ranks got something, as if nothing were wrong"
        assert all(found[rank].value == expected[rank] for rank in given)
        errors = [outcome for outcome in found if outcome.kind == "error"]
        assert any(f"rank {program.odd}" in error.words or f"\n  {program.odd}:" in error.words for error in errors), found


@pytest.mark.parametrize("name", some(table.RAISING, "sum0/raises, full/raises and goes on"))
def test_a_rank_that_raises_ends_the_others(name: str, pool: Pool) -> None:
    program, found = table.RAISING[name], pool.run("table", name)
    ended_alike(found)
    others = [outcome for rank, outcome in enumerate(found) if rank != program.odd]
    expected = "DivergenceError" if "goes on" in name else "ValueError"
    assert [outcome.name for outcome in others] == [expected] * 2, found
    assert all(f"rank {program.odd}" in each.words or f"  {program.odd}:" in each.words for each in others)
    assert all(outcome.seconds < found[program.odd].seconds + ENDS_S for outcome in found), found


@pytest.mark.parametrize("name", some(table.DEADLY, "sum0/killed, full/stopped"))
def test_a_rank_that_dies_ends_the_others(name: str, pool: Pool) -> None:
    program, found = table.DEADLY[name], pool.run("table", name, timeout_s=STOPPED_S)
    for rank, outcome in enumerate(found):
        if rank != program.odd:
            assert outcome.name == "RankLostError", found
            assert outcome.words.startswith(f"rank {program.odd} "), found
            assert outcome.seconds < found[program.odd].seconds + ENDS_S


@pytest.mark.parametrize("name", some(table.FAILING, "failing/embedding, failing/one hot, failing/binary cross entropy"))
def test_what_one_rank_fails_at_all_fail_at(name: str, pool: Pool) -> None:
    found = pool.run("table", name)
    ended_alike(found)
    assert all(outcome.kind == "error" for outcome in found), found
    assert len({(outcome.name, outcome.words.partition(" (on rank")[0]) for outcome in found}) == 1, found
    first = min(outcome.seconds for outcome in found)
    assert all(outcome.seconds < first + ENDS_S for outcome in found), found


@pytest.mark.parametrize(
    "name", some(table.HEALTHY | table.SLOW, "healthy/backward, healthy/many, healthy/forked, healthy/dropped, slow/sum0")
)
def test_nothing_is_said_of_a_healthy_program(name: str, pool: Pool) -> None:
    found = pool.run("table", name)
    assert all(outcome.kind == "result" for outcome in found), found
    assert all(outcome.value[::2] == [2016.0, 2016.0] for outcome in found)
    assert name != "healthy/forked" or [outcome.value[1] for outcome in found] == ["exit code 7"] * SIZE
