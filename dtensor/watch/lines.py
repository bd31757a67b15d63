"""The user's line, where in the program a collective was asked for, in words."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType, TracebackType

from ..base.callers import is_library, users_frame

_KNOWN: dict[tuple[str, int], str] = {}


def line_of(filename: str, number: int) -> str:
    """``train.py:41  loss = h.sum(0)``."""
    found = _KNOWN.get((filename, number))
    if found is None:
        if len(_KNOWN) > 10_000:
            _KNOWN.clear()
        source = linecache.getline(filename, number).strip()
        found = _KNOWN[filename, number] = f"{os.path.basename(filename)}:{number}" + (f"  {source}" if source else "")
    return found


def here(depth: int = 1) -> str:
    """The user's line that runs."""
    return at(sys._getframe(depth))


def at(frame: FrameType | None) -> str:
    """The user's line of a frame."""
    found = users_frame(frame)
    return "" if found is None else line_of(found.f_code.co_filename, found.f_lineno)


def of_error(traceback: TracebackType | None) -> str:
    """The user's innermost line that an error came through."""
    found = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not is_library(filename):
            found = line_of(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
