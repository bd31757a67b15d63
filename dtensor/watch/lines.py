"""The user's line: where in the program a collective was asked for."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<frozen", "<string>")
_OURS: dict[str, bool] = {}  # by file name, whether it is the library's or torch's


def is_library(filename: str) -> bool:
    """Whether a file is part of this library, or of torch."""
    found = _OURS.get(filename)
    if found is None:
        if len(_OURS) > 10_000:  # of functions that a program writes
            _OURS.clear()
        found = _OURS[filename] = filename.startswith(_LIBRARIES)
    return found


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, of the user's program."""
    known = _OURS
    while frame is not None and (known.get(name := frame.f_code.co_filename) or is_library(name)):
        frame = frame.f_back
    return frame


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
