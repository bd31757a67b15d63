"""``random_divergence.py [SECONDS] [SEED]``: random programs on three or four processes, with delays, of which one does something
else, fails, is killed, stopped or slow at some place; each process has a hash seed of its own. Prints the outcomes: a hang, an
abort, a wrong number or a false alarm is a defect.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

for folder in ("../support", "."):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from divergent_programs import ACTIONS, Scene, torch  # noqa: E402
from process_pool import Outcome, Pool  # noqa: E402

FAULTS = ("none", "none", "other", "fewer", "more", "raises", "killed", "stopped", "slow")
NAMES = [
    name
    for name in ACTIONS
    if name not in ("destroyed", "forked", "loaded by a worker", "written to a file", "random", "another seed", "drawn before")
]
_RIGHT: dict[str, Any] = {}  # in a rank: what each action gives when all do it


class Random:
    """Random program of a seed; ``all_do="learn"`` records the result of each call."""

    def __init__(self, seed: int, size: int) -> None:
        dice = random.Random(seed)
        self.seed, self.actions = seed, [dice.choice(NAMES) for _ in range(dice.randint(3, 12))]
        self.fault, self.odd, self.place = dice.choice(FAULTS), dice.randrange(size), dice.randrange(len(self.actions))
        self.instead = dice.choice(NAMES)

    def run(self, rank: int, all_do: str = "") -> Any:
        at = Scene(rank)
        if all_do == "learn":
            _RIGHT.update({name: _value(name, at) for name in NAMES})
            return None
        delays = random.Random((self.seed << 8) + rank)
        for number, name in enumerate(self._own(rank)):
            if delays.random() < 0.3:
                time.sleep(delays.choice((0.001, 0.02, 0.4)))
            if rank == self.odd and number == self.place:
                self._fail()
            found = _value(name, at)
            if repr(found) != repr(_RIGHT[name]):
                return f"wrong: {name} gave {found!r:.200}, right is {_RIGHT[name]!r:.200}"
        return "right"

    def _own(self, rank: int) -> list[str]:
        before, after = self.actions[: self.place], self.actions[self.place :]
        if rank != self.odd or self.fault not in ("other", "fewer", "more"):
            return self.actions
        return {
            "other": [*before, self.instead, *after[1:]],
            "fewer": before + after[1:],
            "more": [*before, self.instead, *after],
        }[self.fault]

    def _fail(self) -> None:
        match self.fault:
            case "raises":
                raise ValueError("a reason of its own")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(4.0)


def _value(name: str, at: Scene) -> Any:
    found = ACTIONS[name](at)
    return found.tolist() if isinstance(found, torch.Tensor) else found


def verdict(program: Random, found: list[Outcome]) -> str:
    """Return what is wrong with the outcome, or ""."""
    for rank, outcome in enumerate(found):
        lost = rank == program.odd and program.fault in ("killed", "stopped")
        if outcome.kind in ("timeout", "exit") and not lost:
            return f"rank {rank}: {outcome.kind} {outcome.name}"
        if outcome.kind == "result" and outcome.value != "right":
            return f"rank {rank}: {outcome.value}"
        if outcome.kind == "error" and program.fault in ("none", "slow"):
            return f"rank {rank}: a false alarm, {outcome.name}: {outcome.words}"
    return ""


def main(seconds: float, seed: int) -> int:
    """Run random programs and return how many ended wrong."""
    deadline, counts, wrong = time.monotonic() + seconds, Counter[str](), 0
    pools = {size: Pool(size, os.environ.get("DTENSOR_CHECK_RANKS", "strict"), fresh=True) for size in (3, 4)}
    while time.monotonic() < deadline:
        size = 3 + seed // 40 % 2
        program, pool = Random(seed, size), pools[size]
        if not pool.running:
            learned = pool.run_program(Random(seed, size), "learn", timeout_s=120.0)
            assert all(outcome.kind == "result" for outcome in learned), learned
        found = pool.run_program(program, timeout_s=12.0 if program.fault == "stopped" else 40.0)
        said = verdict(program, found)
        counts[program.fault] += 1
        counts.update(f"{outcome.kind} {outcome.name}".strip() for outcome in found)
        if said:
            wrong += 1
            print(f"seed {seed} ({size} ranks, {program.fault}, rank {program.odd}): {said}", flush=True)
        seed += 1
    for pool in pools.values():
        pool.close()
    print(f"{sum(counts[fault] for fault in {*FAULTS})} programs, {wrong} wrong; {dict(counts)}")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
