"""What one rank does otherwise is named, what one fails at all fail at; no rank hangs, aborts or gets a wrong number.

Here a part of the table; ``make test-chaos`` runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pool import Outcome, Pool
from programs_of_ranks import DEADLY, DIFFERENT, FAILING, HEALTHY, PROGRAMS, RAISING

SIZE = 3
ALL = bool(os.environ.get("DTENSOR_CHAOS"))
ENDS_S = 10.0  # after which every wait is over: promised are 5, of a machine that has the time
STOPPED_S = 25.0  # how long a stopped rank is waited for
OWN_WORDS = ("LayoutError", "CheckpointError")  # of functions that compare by themselves what ranks give them

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
def right(pool: Pool) -> dict[Any, list[Any]]:
    return {}


def results(pool: Pool, right: dict[Any, list[Any]], name: str, side: str) -> list[Any]:
    """What a program gives on each rank when all do what is usual, or the other thing."""
    deed = getattr(PROGRAMS[name], side)
    if deed not in right:
        found = pool.run(name, side)
        assert all(outcome.kind == "result" for outcome in found), found
        right[deed] = [outcome.value for outcome in found]
    return right[deed]


def ended_alike(found: list[Outcome]) -> None:
    """No rank hung or died, and all that raise say the same."""
    assert not [outcome for outcome in found if outcome.kind in ("timeout", "exit")], found
    assert len({outcome.words for outcome in found if outcome.name in ("DivergenceError", "RankLostError")}) <= 1, found


@pytest.mark.parametrize(
    "name",
    some(
        DIFFERENT,
        "sum0/sum1, sum0/mean0, full/large, large_sum/large, nothing/barrier, full/rows_of_5, nothing/item, blocks/wide blocks, "
        "random/drawn before, all to all/all to all of others, sharded/inside backward/sums",
    ),
)
def test_a_rank_that_does_something_else_is_named(name: str, level: str, pool: Pool, right: dict[Any, list[Any]]) -> None:
    odd = DIFFERENT[name].odd
    usual, other = results(pool, right, name, "usual"), results(pool, right, name, "other")
    found = pool.run(name)
    ended_alike(found)
    given = [rank for rank, outcome in enumerate(found) if outcome.kind == "result"]
    alike = all(one[3] == another[3] for one, another in zip(usual, other, strict=True))
    if level == "watch" and alike:  # the collectives are the same: only what is computed between them differs
        return
    assert len(given) < SIZE, "all ranks got something, as if nothing were wrong"
    if level == "strict":  # under "watch" a sum may meet another sum of as many numbers
        assert all(found[rank].value[:3] == (other if rank == odd else usual)[rank][:3] for rank in given), found
    errors = [outcome for outcome in found if outcome.kind == "error"]
    named = [error for error in errors if f"rank {odd}" in error.words or f"\n  {odd}:" in error.words]
    assert named or all(error.name in OWN_WORDS for error in errors), found
    for error in named:
        if "differs from" in error.words:
            lines = error.words.splitlines()[1:]
            assert len(lines) == 2, error.words
            assert all(".py:" in line for line in lines), error.words


@pytest.mark.parametrize(
    "name",
    some(RAISING, "sum0/raises, full/raises and goes on, sharded/inside forward/raises, item/is interrupted, a state drifts"),
)
def test_a_rank_that_raises_ends_the_others(name: str, pool: Pool) -> None:
    odd, found = RAISING[name].odd, pool.run(name)
    ended_alike(found)
    others = [outcome for rank, outcome in enumerate(found) if rank != odd]
    expected = (
        "RankLostError" if "interrupted" in name else "DivergenceError" if "goes on" in name or "drifts" in name else "ValueError"
    )
    assert [outcome.name for outcome in others] == [expected] * 2, found
    assert all(f"rank {odd}" in each.words or f"  {odd}:" in each.words for each in others)
    assert all(outcome.seconds < found[odd].seconds + ENDS_S for outcome in found), found


@pytest.mark.parametrize("name", some(DEADLY, "sum0/killed, full/stopped, replicated/before optimizer/is killed"))
def test_a_rank_that_dies_ends_the_others(name: str, pool: Pool) -> None:
    odd, found = DEADLY[name].odd, pool.run(name, timeout_s=STOPPED_S)
    for rank, outcome in enumerate(found):
        if rank != odd:
            assert outcome.name == "RankLostError", found
            assert outcome.words.startswith(f"rank {odd} "), found
            assert outcome.seconds < found[odd].seconds + ENDS_S


@pytest.mark.parametrize(
    "name", some(FAILING, "failing/embedding, failing/one hot, failing/binary cross entropy, failing/svd of NaN")
)
def test_what_one_rank_fails_at_all_fail_at(name: str, pool: Pool) -> None:
    found = pool.run(name)
    ended_alike(found)
    assert all(outcome.kind == "error" for outcome in found), found
    assert len({(outcome.name, outcome.words.partition(" (on rank")[0]) for outcome in found}) == 1, found
    first = min(outcome.seconds for outcome in found)
    assert all(outcome.seconds < first + ENDS_S for outcome in found), found


@pytest.mark.parametrize(
    "name",
    some(HEALTHY, "healthy/backward, healthy/many, healthy/forked, healthy/dropped, slow/sum0, healthy/loaded by a worker"),
)
def test_nothing_is_said_of_a_healthy_program(name: str, pool: Pool) -> None:
    found = pool.run(name)
    assert all(outcome.kind == "result" for outcome in found), found
    assert all(outcome.value[0] == outcome.value[2] == 2016.0 for outcome in found)
    said = {"healthy/forked": "exit code 7", "healthy/loaded by a worker": "refused"}.get(name)
    assert said is None or [outcome.value[1] for outcome in found] == [said] * SIZE


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pool]:
    made = Pool(SIZE, "watch", apart=True)
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    some(
        {name: DIFFERENT[name] for name in DIFFERENT if "nothing" not in name.split("/")},
        "sum0/sum1, full/large, all to all/all to all of others",
    ),
)
def test_ranks_of_several_hosts_tell_each_other(name: str, hosts: Pool, right: dict[Any, list[Any]]) -> None:
    usual, other = results(hosts, right, name, "usual"), results(hosts, right, name, "other")
    found, odd = hosts.run(name), DIFFERENT[name].odd
    assert not [outcome for outcome in found if outcome.kind in ("timeout", "exit")], found
    if all(one[3] == another[3] for one, another in zip(usual, other, strict=True)):
        return
    named = [outcome for outcome in found if outcome.name in ("DivergenceError", "RankLostError")]
    assert named or all(outcome.name in OWN_WORDS for outcome in found), found
    assert all(f"rank {odd}" in each.words or f"\n  {odd}:" in each.words for each in named), found


@pytest.mark.parametrize("name", some(FAILING, "failing/embedding") + some(RAISING, "sum0/raises"))
def test_an_error_reaches_other_hosts(name: str, hosts: Pool) -> None:
    found = hosts.run(name)
    assert all(outcome.kind == "error" for outcome in found), found
    if "goes on" not in name and "interrupted" not in name and "drifts" not in name:
        assert len({(outcome.name, outcome.words.partition(" (on rank")[0]) for outcome in found}) == 1, found
