"""Collectives under way: of one round, and of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dtensor.comm.pending import Pending


def two_rounds(seen: list[str]) -> Pending[int]:
    def begin() -> Callable[[], int]:
        seen.append("second round")
        return lambda: seen.append("end") or 7

    return Pending.of_two_rounds(begin)


def around(name: str, seen: list[str]) -> Callable[[Callable[[], Any]], Any]:
    def run(fn: Callable[[], Any]) -> Any:
        seen.append(f"{name} (")
        found = fn()
        seen.append(")")
        return found

    return run


@pytest.mark.parametrize("advances", [False, True])
def test_two_rounds_run_once_and_in_order(advances):
    seen: list[str] = []
    pending = two_rounds(seen)
    if advances:
        assert pending.advance()
        assert seen == ["second round"]
        assert not pending.ended
        assert not pending.advance()
    assert pending.then(lambda x: x + 1).wait() == 8
    assert pending.wait() == 7
    assert seen == ["second round", "end"]
    assert pending.ended
    assert not pending.advance()


@pytest.mark.parametrize("advances", [False, True])
def test_what_stands_around_the_end_stands_around_each_round_if_it_is_to(advances):
    seen: list[str] = []
    pending = two_rounds(seen).within(around("wait", seen), rounds=True).within(around("told", seen))
    if advances:
        pending.advance()
        assert seen == ["wait (", "second round", ")"]
    assert pending.wait() == 7
    rounds = ["wait (", "second round", ")"], ["wait (", "end", ")"]
    assert seen == ([*rounds[0], "told (", *rounds[1], ")"] if advances else ["told (", *rounds[0], *rounds[1], ")"])


def test_of_one_round_nothing_advances():
    assert not Pending(lambda: 1).advance()
    assert not Pending.of(1).advance()
