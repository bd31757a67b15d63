"""Source location: the line of the user's program that runs, as text, also for the main thread as another thread sees it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, truth
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from ..base.caches import memoize
from ..base.user_frames import SourceLine, find_user_frame, is_library_file

T = TypeVar("T")

_CODE_AND_LINE: Callable[[FrameType], tuple[CodeType, int]] = attrgetter("f_code", "f_lineno")


@memoize(10_000)
def format_line(filename: str, number: int) -> str:
    """Return file, line number and source text: ``train.py:41  loss = h.sum(0)``."""
    return SourceLine(filename, number).line


def current_line(depth: int = 1) -> str:
    """Return the line of the user's program that runs, as seen from the frame ``depth`` levels above this function."""
    return line_of_frame(sys._getframe(depth))


def line_of_frame(frame: FrameType | None) -> str:
    """Return the line of the innermost user frame that called ``frame``; empty if there is none."""
    user_frame = find_user_frame(frame)
    return "" if user_frame is None else format_line(user_frame.f_code.co_filename, user_frame.f_lineno)


def line_of_error(traceback: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback; empty if there is none."""
    line = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not is_library_file(filename):
            line = format_line(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


# --- frames of another thread --------------------------------------------------------------------------------------------
def run_uninterrupted(function: Callable[[], T]) -> T:
    """Return ``function()``, a function implemented in C, while no other thread runs Python code and nothing is collected.

    Python 3.11 creates a frame object on demand, which may start a garbage collection. A finalizer that waits lets the thread of
    that frame go on, so the new object refers to a frame that has ended, and the process crashes.
    """
    restore = gc.enable if gc.isenabled() else gc.disable
    steps: tuple[Callable[[], Any], ...] = (gc.disable, function, restore)
    try:
        result: T = list(map(call, steps))[1]  # a single C call runs all three steps
    except BaseException:
        restore()
        raise
    return result


def iterate_main_frames() -> Iterator[Any]:
    """Return an iterator over the frames of the main thread, innermost first; consume it inside :func:`run_uninterrupted`."""
    get: Any = dict.get
    innermost = map(get, map(call, (sys._current_frames,)), (threading.main_thread().ident,))
    steps: Iterator[Any] = chain(innermost, repeat("f_back"))
    return takewhile(truth, accumulate(steps, getattr))


def main_thread_locations() -> list[tuple[CodeType, int]]:
    """Return code object and line number of each frame of the main thread, innermost first.

    No frame is kept: a reference to a frame would keep its local variables alive.
    """
    return run_uninterrupted(partial(list, map(_CODE_AND_LINE, iterate_main_frames())))


def innermost_user_line(locations: list[tuple[CodeType, int]]) -> str:
    """Return the first of ``locations`` (innermost first) that is in user code, as text; empty if there is none."""
    return next((format_line(code.co_filename, line) for code, line in locations if not is_library_file(code.co_filename)), "")
