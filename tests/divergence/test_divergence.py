"""What one rank does otherwise is named, what one fails at all fail at; no rank hangs, aborts or gets a wrong number.

Here a part of the table; ``make test-chaos`` runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from judged import Judge
from pool import Pool
from programs_of_ranks import DEADLY, DIFFERENT, FAILING, HEALTHY, RAISING

SIZE = 3
ALL = bool(os.environ.get("DTENSOR_CHAOS"))

pytestmark = pytest.mark.gloo


def some(programs: dict[str, Any], few: str) -> list[str]:
    return list(programs) if ALL else [name for name in programs if name in few.split(", ")]


@pytest.fixture(scope="module", params=["watch", "strict"])
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    pool = Pool(SIZE, request.param)
    yield Judge(pool, request.param)
    pool.close()


def check(judge: Judge, name: str) -> None:
    assert not (wrong := judge.of(name).wrong), wrong


@pytest.mark.parametrize(
    "name",
    some(
        DIFFERENT,
        "sum0/sum1, sum0/mean0, full/large, large_sum/large, nothing/barrier, full/rows_of_5, nothing/item, blocks/wide blocks, "
        "random/drawn before, all to all/all to all of others, sharded/inside backward/sums, sum_then_large_sum/item, "
        "sharded/before optimizer/sums, nothing/destroyed",
    ),
)
def test_a_rank_that_does_something_else_is_named(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name",
    some(RAISING, "sum0/raises, full/raises and goes on, sharded/inside forward/raises, item/is interrupted, a state drifts"),
)
def test_a_rank_that_raises_ends_the_others(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize("name", some(DEADLY, "sum0/killed, full/stopped, replicated/before optimizer/is killed"))
def test_a_rank_that_dies_ends_the_others(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name", some(FAILING, "failing/embedding, failing/one hot, failing/binary cross entropy, failing/svd of NaN")
)
def test_what_one_rank_fails_at_all_fail_at(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name",
    some(HEALTHY, "healthy/backward, healthy/many, healthy/forked, healthy/dropped, slow/sum0, healthy/loaded by a worker"),
)
def test_nothing_is_said_of_a_healthy_program(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Judge]:
    pool = Pool(SIZE, "watch", apart=True)
    yield Judge(pool, "watch")
    pool.close()


@pytest.mark.parametrize(
    "name",
    some(
        {name: DIFFERENT[name] for name in DIFFERENT if "nothing" not in name.split("/")},
        "sum0/sum1, full/large, all to all/all to all of others",
    ),
)
def test_ranks_of_several_hosts_tell_each_other(name: str, hosts: Judge) -> None:
    check(hosts, name)


@pytest.mark.parametrize("name", some(FAILING, "failing/embedding") + some(RAISING, "sum0/raises"))
def test_an_error_reaches_other_hosts(name: str, hosts: Judge) -> None:
    check(hosts, name)
