"""Progress of long work on stderr: a tqdm bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

ItemT = TypeVar("ItemT")
_FIRST_WAIT, _NEXT_WAIT = 2.0, 5.0  # seconds until the first line, and between lines


def iterate_with_progress(items: Iterable[ItemT], total: int, what: str) -> Iterator[ItemT]:
    """Yield ``items``, and report on stderr how many of ``total`` are done. ``what`` names the work."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        yield from importlib.import_module("tqdm").tqdm(items, total=total, desc=what, leave=False, file=sys.stderr)
        return
    done = 0
    with report_periodically(lambda: f"{what}: {done} of {total}"):
        for item in items:
            yield item
            done += 1


@contextmanager
def report_periodically(what: Callable[[], str]) -> Iterator[None]:
    """Print ``what()`` and the elapsed time after 2 seconds and then every 5 seconds, until the block ends."""
    start, ended = time.monotonic(), threading.Event()

    def print_reports() -> None:
        """Print ``what()`` and the elapsed time at intervals, until the block has ended."""
        wait = _FIRST_WAIT
        while not ended.wait(wait):
            print(f"{what()}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            wait = _NEXT_WAIT

    thread = threading.Thread(target=print_reports, name="dtensor-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
