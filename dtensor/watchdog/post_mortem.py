"""What the ranks of a job did last, read from their pages: while they run, and after they were killed."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path

from .flight_recorder import DEPTH, WORDS, Entry, entry_in
from .host_state import ERROR, ERROR_LINE, FAILED, LEFT, PID, RUNNING, STATE, WAITING, WHERE, WORDS_OF_RANK, alive, boards
from .state_file import Page

_STATES = {RUNNING: "runs", WAITING: "waits", FAILED: "has failed", LEFT: "has left"}


def told(folder: Path | None = None, last: int = 20) -> str:
    """The last things that each rank of a job took down, oldest first, in words.

    Args:
        folder: the job's, ``dtensor-ranks-...`` in shared memory; default the newest of this host.
        last: how many of each rank, at most 4,096 of each kind.

    Raises:
        FileNotFoundError: no job has left anything.
    """
    if folder is None:
        folder = next(iter(boards()), None)
        if folder is None:
            raise FileNotFoundError("no job on this host has left records of its ranks in /dev/shm")
    said = [str(folder)]
    verdict = folder / "verdict"
    if verdict.exists():
        said.append(json.loads(verdict.read_text())["words"])
    for path in sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:])):
        rank = int(path.name[5:])
        said += [f"rank {rank} {_state(Page(path, WORDS_OF_RANK, ours=False))}"]
        entries = sorted(_entries(folder, rank), key=lambda each: each[1].time)[-last:]
        now = time.monotonic_ns()
        said += [f"  {(entry.time - now) / 1e9:9.2f} s  {kind} {entry.hash:016x}  {entry}" for kind, entry in entries]
    return "\n".join(said)


def _state(page: Page) -> str:
    words = page.words
    state = _STATES[words[STATE]] if alive(words[PID]) or words[STATE] in (FAILED, LEFT) else "was killed"
    where, error = page.text(words[WHERE]), page.text(words[ERROR])
    said = state + (f", at {where}" if where else "")
    if not error:
        return said
    _, name, what = json.loads(error)
    return f"{said}; its last error: {name}: {what} at {page.text(words[ERROR_LINE])}"


def _entries(folder: Path, rank: int) -> Iterator[tuple[str, Entry]]:
    """What a rank has taken down, with its group and number."""
    for path in (*folder.glob(f"chain-*-{rank}"), *folder.glob(f"operations-*-{rank}")):
        kind, key, _ = path.name.split("-")
        page = Page(path, WORDS, ours=False)
        ranks = ast.literal_eval((folder / f"chain-{key}").read_text()) if kind == "chain" else ()
        among = f"collective of {', '.join(map(str, ranks))}" if kind == "chain" else "operation"
        count = page.words[0]
        for number in range(max(1, count - DEPTH + 1), count + 1):
            entry = entry_in(page, number)
            if entry is not None:
                yield f"{among} #{number}", entry
