"""Progress of long work on stderr: a bar of tqdm on a terminal, else a line every few seconds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_FIRST, _NEXT = 2.0, 5.0  # seconds until the first line, and between lines


def progress(things: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield ``things`` and report how many of ``total`` are done; ``what`` names the work."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        yield from importlib.import_module("tqdm").tqdm(things, total=total, desc=what, leave=False, file=sys.stderr)
        return
    done = 0
    with reporting(lambda: f"{what}: {done} of {total}"):
        for thing in things:
            yield thing
            done += 1


@contextmanager
def reporting(what: Callable[[], str]) -> Iterator[None]:
    """Print ``what()`` and the time since the start, after 2 seconds and then every 5, until the block ends."""
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        wait = _FIRST
        while not ended.wait(wait):
            print(f"{what()}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            wait = _NEXT

    thread = threading.Thread(target=report, name="dtensor-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
