"""Outcome of a divergent program, and whether it is the expected one."""

from __future__ import annotations

import re
from typing import NamedTuple

from all_divergent_programs import DEADLY, DIFFERENT, FAILING, HEALTHY, ONLY_STRICT, PROGRAMS, RAISING
from divergent_programs import PEER
from process_pool import Outcome, Pool

OWN_WORDS = ("LayoutError", "CheckpointError")  # of functions with their own comparison of arguments between ranks
ENDS_S = 10.0  # limit of every wait: 5 s are promised, on an idle machine
STOPPED_S = 25.0  # limit of the wait for a stopped rank
_KINDS = {"different": DIFFERENT, "raising": RAISING, "deadly": DEADLY, "failing": FAILING, "healthy": HEALTHY}
_SAID = {"healthy/forked": "exit code 7", "healthy/loaded by a worker": "refused"}


class Finding(NamedTuple):
    """Finding of a program: ``what`` is the kind of outcome, and ``wrong`` the reason why it is not the promised one, or
    empty."""

    what: str
    wrong: str = ""


def kind_of(name: str) -> str:
    return next(kind for kind, programs in _KINDS.items() if name in programs)


def classify_pytorch_outcome(found: list[Outcome], odd: int) -> Finding:
    """Return the outcome of a program run by PyTorch DTensor, for which nothing is promised."""
    words = " ".join(outcome.words for outcome in found)
    if any(outcome.kind == "exit" for outcome in found):
        return Finding("a rank died without an error")
    if "mismatch between collectives" in words or re.search(rf"check rank {odd} logs|[Rr]ank {odd} failed", words):
        return Finding("named")
    if any(outcome.kind == "timeout" for outcome in found) or "imed out" in words:
        return Finding("waited for the timeout")
    return Finding("silent" if all(outcome.kind == "result" for outcome in found) else "another error")


class Judge:
    """Judge of programs at one check level; ``usual`` and ``other`` results are computed once for each call."""

    def __init__(self, pool: Pool, level: str) -> None:
        self.pool, self.level = pool, level
        self._right: dict[object, list[Outcome]] = {}
        self.found: list[Outcome] = []

    def of(self, name: str) -> Finding:
        kind = kind_of(name)
        if PEER:
            self.found = self.pool.run(name, timeout_s=50.0)
            return classify_pytorch_outcome(self.found, PROGRAMS[name].odd)
        odd = PROGRAMS[name].odd
        if odd >= self.pool.size and kind in ("different", "raising", "deadly"):  # no rank differs
            self.found = self.pool.run(name)
            failed = [outcome for outcome in self.found if outcome.kind != "result"]
            return Finding("all ranks do one thing", f"{failed}" if failed else "")
        sides = [self._results(name, side) for side in ("usual", "other")] if kind == "different" else []
        if wrong := next((outcome for side in sides for outcome in side if outcome.kind != "result"), None):
            return Finding("fails without a difference", f"{wrong}")
        found = self.found = self.pool.run(name, timeout_s=STOPPED_S if kind == "deadly" else 50.0)
        gone = {rank for rank in (odd,) if kind == "deadly"}
        for rank, outcome in enumerate(found):
            if outcome.kind in ("timeout", "exit") and rank not in gone:
                return Finding("hung" if outcome.kind == "timeout" else "died", f"rank {rank}: {outcome}")
        words = {outcome.words for outcome in found if outcome.name in ("DivergenceError", "RankLostError")}
        if len(words) > 1:
            return Finding("several words", "\n".join(words))
        match kind:
            case "different":
                return self._different(name, found, odd, *([each.value for each in side] for side in sides))
            case "raising":
                return _raising(name, found, odd)
            case "deadly":
                return _deadly(found, odd)
            case "failing":
                return _failing(found)
        return _healthy(name, found)

    def _results(self, name: str, side: str) -> list[Outcome]:
        """Return the results of each rank if all ranks do ``usual``, or all do ``other``."""
        action = getattr(PROGRAMS[name], side)
        if action not in self._right:
            self._right[action] = self.pool.run(name, side)
        return self._right[action]

    def _different(
        self, name: str, found: list[Outcome], odd: int, usual: list[list[object]], other: list[list[object]]
    ) -> Finding:
        given = [rank for rank, outcome in enumerate(found) if outcome.kind == "result"]
        right = {rank: found[rank].value[:3] == (other if rank == odd else usual)[rank][:3] for rank in given}
        if len(given) == len(found):
            if self.level == "watch" and name in ONLY_STRICT:
                return Finding("left to strict")
            return Finding("silent", "all ranks got something, as if nothing were wrong")
        if not all(right.values()):
            return Finding("a wrong number", f"{found}, right is {usual} and, of rank {odd}, {other[odd]}")
        late = _in_time(found, max(outcome.seconds for outcome in self._results(name, "usual")), "")
        return late if late.wrong else _named(found, odd)


def _named(found: list[Outcome], odd: int) -> Finding:
    errors = [outcome for outcome in found if outcome.kind == "error"]
    if {"CheckpointError", "DivergenceError"} <= {error.name for error in errors}:
        return Finding("several errors", f"{found}")
    named = [error for error in errors if f"rank {odd}" in error.words or re.search(rf"^  {odd}:", error.words, re.M)]
    if not named:
        own = all(error.name in OWN_WORDS for error in errors)
        return Finding("found by a function of its own" if own else "not named", "" if own else f"{found}")
    for error in named:
        lines = error.words.splitlines()[1:-1]  # between the first line and the remedy
        if (
            error.name not in OWN_WORDS
            and "differs from" in error.words
            and (len(lines) != 2 or not all(".py:" in line for line in lines))
        ):
            return Finding("named without lines", error.words)
    return Finding("named")


def _raising(name: str, found: list[Outcome], odd: int) -> Finding:
    others = [outcome for rank, outcome in enumerate(found) if rank != odd]
    parted = "goes on" in name or "drifts" in name
    lost = "interrupted" in name or "what ends a loop" in name
    expected = "RankLostError" if lost else "DivergenceError" if parted else "ValueError"
    if name.startswith("pipeline/"):  # torch's point-to-point messages raise torch's errors; ours is logged
        begun = all(outcome.name in (expected, "RuntimeError") for outcome in others)
        return _in_time(found, found[odd].seconds, "the others raise") if begun else Finding("another error", f"{found}")
    if {outcome.name for outcome in others} not in ({expected}, {"CheckpointError"}):
        return Finding("another error", f"expected {expected}: {found}")
    if not all(f"rank {odd}" in each.words or f"  {odd}:" in each.words for each in others):
        return Finding("not named", f"{found}")
    return _in_time(found, found[odd].seconds, "the others raise")


def _deadly(found: list[Outcome], odd: int) -> Finding:
    for rank, outcome in enumerate(found):
        lost = outcome.name == "RankLostError" and outcome.words.startswith(f"rank {odd} ")
        if rank != odd and not (lost or (outcome.name == "CheckpointError" and f"rank {odd} " in outcome.words)):
            return Finding("not named", f"{found}")
    return _in_time(
        [each for rank, each in enumerate(found) if rank != odd],
        0.0 if found[odd].kind == "timeout" else found[odd].seconds,
        "named",
    )


def _failing(found: list[Outcome]) -> Finding:
    if not all(outcome.kind == "error" for outcome in found):
        return Finding("raised by some", f"{found}")
    if len({(outcome.name, outcome.words.partition(" (on rank")[0]) for outcome in found}) != 1:
        return Finding("other words", f"{found}")
    return _in_time(found, min(outcome.seconds for outcome in found), "all raise the same")


def _healthy(name: str, found: list[Outcome]) -> Finding:
    wrong = [outcome for outcome in found if outcome.kind != "result" or not outcome.value[0] == outcome.value[2] == 2016.0]
    said = _SAID.get(name)
    if wrong or (said is not None and {outcome.value[1] for outcome in found} != {said}):
        return Finding("a false alarm", f"{found}")
    return Finding("no word")


def _in_time(found: list[Outcome], begin: float, what: str) -> Finding:
    late = [outcome for outcome in found if outcome.seconds > begin + ENDS_S]
    return Finding("late" if late else what, f"{late}" if late else "")
