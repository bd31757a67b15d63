"""How far long work is, where somebody looks on: a bar of tqdm's on a terminal, nothing elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(things: Iterable[T], total: int, what: str = "") -> Iterator[T]:
    """``things``, one after the other; ``what`` stands before the bar."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield from things
        return
    bar = importlib.import_module("tqdm").tqdm(things, total=total, desc=what, leave=False, file=sys.stderr)
    yield from bar
