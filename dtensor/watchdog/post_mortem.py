"""Post-mortem: what the ranks of a job did last, read from their state files while they run or after they were killed."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path

from .flight_recorder import LOG_SLOTS, MAX_EVENTS, LoggedEvent, StateFile, read_event
from .host_state import (
    ERROR,
    ERROR_LINE,
    EXITED,
    FAILED,
    LOCATION,
    PID,
    RANK_SLOTS,
    RUNNING,
    STATE,
    WAITING,
    is_process_alive,
    list_folders,
)

_STATES = {RUNNING: "runs", WAITING: "waits", FAILED: "has failed", EXITED: "has ended"}


def format_rank_logs(folder: Path | None = None, last: int = 20) -> str:
    """Return the state and the last logged events of each rank of a job, as text, oldest first.

    Args:
        folder: the job's folder, ``dtensor-ranks-...`` in shared memory; default: the newest one of this host.
        last: number of events of each rank. A log has at most 4,096.

    Raises:
        FileNotFoundError: this host has no folder of a job.
    """
    if folder is None:
        folder = next(iter(list_folders()), None)
        if folder is None:
            raise FileNotFoundError("no job on this host has left state files of its ranks in /dev/shm")
    lines = [str(folder)]
    diagnosis = folder / "diagnosis"
    if diagnosis.exists():
        lines.append(json.loads(diagnosis.read_text())["words"])
    for path in sorted(folder.glob("rank-*"), key=lambda path: int(path.name[5:])):
        rank = int(path.name[5:])
        lines += [f"rank {rank} {_format_state(StateFile(path, RANK_SLOTS, writable=False))}"]
        events = sorted(_read_events(folder, rank), key=lambda each: each[1].time)[-last:]
        now = time.monotonic_ns()
        lines += [f"  {(event.time - now) / 1e9:9.2f} s  {kind} {event.hash:016x}  {event}" for kind, event in events]
    return "\n".join(lines)


def _format_state(file: StateFile) -> str:
    """Return as text what a rank does, its line of user code, and its last error."""
    slots = file.slots
    is_known = is_process_alive(slots[PID]) or slots[STATE] in (FAILED, EXITED)
    location, error = file.read_text(slots[LOCATION]), file.read_text(slots[ERROR])
    text = (_STATES[slots[STATE]] if is_known else "was killed") + (f", at {location}" if location else "")
    if not error:
        return text
    _, name, message = json.loads(error)
    return f"{text}; its last error: {name}: {message} at {file.read_text(slots[ERROR_LINE])}"


def _read_events(folder: Path, rank: int) -> Iterator[tuple[str, LoggedEvent]]:
    """Yield all events in the logs of a rank, each with its kind, group and number as text."""
    for path in (*folder.glob(f"log-*-{rank}"), *folder.glob(f"operations-*-{rank}")):
        kind, key, _ = path.name.split("-")
        file = StateFile(path, LOG_SLOTS, writable=False)
        ranks = ast.literal_eval((folder / f"log-{key}").read_text()) if kind == "log" else ()
        text = f"collective of {', '.join(map(str, ranks))}" if kind == "log" else "operation"
        count = file.slots[0]
        for number in range(max(1, count - MAX_EVENTS + 1), count + 1):
            event = read_event(file, number)
            if event is not None:
                yield f"{text} #{number}", event
