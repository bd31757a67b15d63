"""The user's line, where in the program a collective was asked for, in words; and where the main thread is."""

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

from ..base.caches import remembered
from ..base.user_frames import Place, is_library, users_frame

T = TypeVar("T")

_PLACE: Callable[[FrameType], tuple[CodeType, int]] = attrgetter("f_code", "f_lineno")


@remembered(10_000)
def line_of(filename: str, number: int) -> str:
    """``train.py:41  loss = h.sum(0)``."""
    return Place(filename, number).line


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


# --- another thread's frames ---------------------------------------------------------------------------------------------
def undisturbed(act: Callable[[], T]) -> T:
    """``act()``, a function of C: no other thread runs in it, and nothing is collected.

    In Python 3.11 an object that is made for a frame may set off a collection. A finalizer that waits lets the frame's thread
    run on, and the object is then one of a frame that is gone: the process crashes.
    """
    after = gc.enable if gc.isenabled() else gc.disable
    acts: tuple[Callable[[], Any], ...] = (gc.disable, act, after)
    try:
        found: T = list(map(call, acts))[1]  # one call of C from the first to the last
    except BaseException:
        after()
        raise
    return found


def main_frames() -> Iterator[Any]:
    """The frames of the main thread, the innermost first; to be asked for in an :func:`undisturbed` call."""
    get: Any = dict.get
    first = map(get, map(call, (sys._current_frames,)), (threading.main_thread().ident,))
    steps: Iterator[Any] = chain(first, repeat("f_back"))
    return takewhile(truth, accumulate(steps, getattr))


def main_places() -> list[tuple[CodeType, int]]:
    """The code and the line of each of them. None is held: what a frame holds ends when its thread is done with it."""
    return undisturbed(partial(list, map(_PLACE, main_frames())))


def in_places(places: list[tuple[CodeType, int]]) -> str:
    """The user's innermost line among them."""
    return next((line_of(code.co_filename, number) for code, number in places if not is_library(code.co_filename)), "")
